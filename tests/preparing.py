"""A whole preparation in this process, without Prefect or Dask: what tests of its parts and guarantees stand on."""

import gzip
import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.building import build_shards, prepare_here

prepare = partial(prepare_here, "pretrain")


def build_pending(planned):
    """Build every pending shard in plan order; a record of each."""
    return build_shards("pretrain", planned, planned.plan.pending)


def write_rows(path, rows):
    """A JSON Lines file; rows that are bytes are written as they are."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def write_lines(path, texts):
    """A JSON Lines file of `{"text": …}` rows; bytes are written as they are."""
    return write_rows(path, [text if isinstance(text, bytes) else {"text": text} for text in texts])


def old(path):
    """The file, last modified long ago."""
    os.utime(path, (1_000_000_000, 1_000_000_000))
    return path


def in_two_files(folder, rows):
    """A folder with a.jsonl, of the first forty rows, and b.jsonl, of the others; both last modified long ago."""
    old(write_rows(folder / "a.jsonl", rows[:40]))
    old(write_rows(folder / "b.jsonl", rows[40:]))
    return folder


def of_two_files(folder, **fields):
    """Both files as datasets of their own; `fields` are those of both."""
    flat = blend_of(folder / "a.jsonl", folder / "b.jsonl")
    return {"datasets": [{**source, **fields} for source in flat["datasets"]]}


def pending(planned):
    """The shards to build: the name of the file of each, and where it begins."""
    return [(Path(shard.part.file.uri).name, shard.part.start) for shard in planned.plan.pending]


def compressed(name, content):
    """The content as a file of that name holds it."""
    if name.endswith(".gz"):
        return gzip.compress(content)
    return pa.compress(content, "zstd", asbytes=True) if name.endswith(".zst") else content


def write_texts(path, texts, group=11):
    """Rows of text in a file of the format and compression that its name says; Parquet in groups of so many."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=group)
    elif ".json" in path.suffixes:
        rows = json.dumps([{"text": text} for text in texts], indent=1)
        path.write_bytes(compressed(path.name, rows.encode()))
    else:
        write_lines(path, texts)
        path.write_bytes(compressed(path.name, path.read_bytes()))
    return path


def blend_of(*paths, **weights):
    """A flat blend of files, named after their stems; weights by name, 1.0 otherwise."""
    sources = [{"name": Path(path).name.split(".")[0], "path": str(path)} for path in paths]
    return {"datasets": [{**source, "weight": weights.get(source["name"], 1.0)} for source in sources]}


def prefixes_of(output, split="train"):
    """The paths of the published prefixes of a split, without ending, in order."""
    manifest = json.loads((Path(output) / "manifest.json").read_bytes())
    entries = manifest.get("derived", {}).get("shards", [])
    return [Path(output) / name for entry in entries for name in entry["published"].get(split, [])]


def ids_of_documents(output, split="train"):
    """The ids of each document of a published split, as lists in order, read by NumPy alone."""
    documents = []
    for prefix in prefixes_of(output, split):
        idx = Path(f"{prefix}.idx").read_bytes()
        lengths = np.frombuffer(idx, "<i4", int.from_bytes(idx[18:26], "little"), 34)
        tokens = np.fromfile(f"{prefix}.bin", {4: "<i4", 8: "<u2"}[idx[17]])
        assert len(tokens) == lengths.sum()
        documents += [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]
    return documents


def documents_of(output, tokenizer, split="train"):
    """The texts of a published split in order."""
    return tokenizer.decode_batch([ids[:-1] for ids in ids_of_documents(output, split)], skip_special_tokens=False)


def quarantined(output, name="some"):
    """The bad rows of a dataset that were set aside, in order."""
    return [json.loads(line) for line in (Path(output) / "quarantine" / f"{name}.jsonl").read_bytes().splitlines()]


REPORTED = {"report.html", "README.md", "croissant.json", "training-summary.md"}


def tree(folder):
    """Every published and stored file with its content, except where it lies and what is declared volatile.

    The index of source hashes and the verdicts of the gate are memories and no results: they are not here. Nor are the page
    and the cards at the top of an output, which a run writes after it has published (see tests/report/test_page.py).
    """
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        if path.parent == Path(folder) and path.name in REPORTED:
            continue
        if path.is_file() and path.name != "index.json" and path.parent.name != "gates":
            content = path.read_bytes()
            if path.name.startswith("blend."):
                content = content.replace(str(folder).encode(), b"OUT")
            if path.name in {"receipt.json", "manifest.json"}:
                fields = json.loads(content)
                fields.pop("volatile")
                if path.name == "manifest.json":  # blend.json holds absolute paths
                    fields["files"] = [file for file in fields["files"] if not file["path"].startswith("blend.")]
                    whole = {name: fields[name] for name in fields.keys() & {"train", "val", "test"}}
                    fields |= {name: path.replace(str(folder), "OUT") for name, path in whole.items()}
                content = json.dumps(fields, sort_keys=True).encode()
            found[str(path.relative_to(folder))] = content
    return found
