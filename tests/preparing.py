"""A whole preparation in this process, without Prefect or Dask: what tests of its parts and guarantees stand on."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.building import build_shards, prepare_here


def prepare(blend, output_dir, **settings):
    """Plan, build every pending shard in plan order, publish; returns the plan and the manifest."""
    return prepare_here("pretrain", blend, output_dir, **settings)


def build_pending(planned):
    """Build every pending shard in plan order; a record of each."""
    return build_shards("pretrain", planned, planned.plan.pending)


def write_lines(path, rows):
    """A JSON Lines file of `{"text": …}` rows; bytes are written as they are."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, bytes) else json.dumps({"text": row}, ensure_ascii=False).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


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


def documents_of(output, tokenizer, split="train"):
    """The texts of a published split in order, and their lengths in tokens, read by NumPy alone."""
    texts = []
    for prefix in prefixes_of(output, split):
        idx = Path(f"{prefix}.idx").read_bytes()
        lengths = np.frombuffer(idx, "<i4", int.from_bytes(idx[18:26], "little"), 34)
        pieces = np.split(np.fromfile(f"{prefix}.bin", "<u2"), np.cumsum(lengths)[:-1])
        texts += tokenizer.decode_batch([piece[:-1].tolist() for piece in pieces], skip_special_tokens=False)
    return texts


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
