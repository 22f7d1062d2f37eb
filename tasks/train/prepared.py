"""Prepared data as training sees it: the files in blend.json, and the manifest's record of each.

Only files in a manifest are trained on. It records the tokenizer, the size of every file and the missing shards, and reveals an
edited blend.json. A blend.json without a manifest is rejected, because it could mix tokenizers.

The content of a preparation is identified by a digest of each split's list, in order, with weights: it depends on
neither place nor time, unlike the manifest's seal. Reading a manifest of 100,000 shards takes 1 s and doesn't open token files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import orjson
from tokenmill.tasks.blend.models import SPLITS, Split
from tokenmill.tasks.dataset.parts import LEADING
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.shards.kind import TRAINABLE
from tokenmill.tasks.shards.kinds import KINDS, preparation
from tokenmill.tasks.shards.manifest import BLEND, MANIFEST, derived_entries, join_published, read_manifest
from tokenmill.tasks.shards.plan import WHOLE
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import absolute, is_local, join
from tokenmill.tasks.strict import parse
from tokenmill.tasks.tokenize.load import find_vocabulary, pinned
from tokenmill.tasks.tokenize.settings import TokenizerSource
from tokenmill.tasks.tokenize.vocabulary import Vocabulary
from xxhash import xxh3_128_hexdigest

from .job import Kind, TrainData, TrainPhase, TrainSource

NOT_FOUND_HERE = (
    "a relative path starts at the folder where the preparation ran: train in that folder, or prepare with an absolute path "
    "that every training machine can read"
)


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A name in blend.json, and its record in the manifest."""

    split: Split
    path: str  # prefix of a .bin/.idx pair, or a Parquet file
    weight: float
    dataset: str
    key: str  # of its shard
    part: str  # of that shard
    documents: int | None = None  # None for packs
    tokens: int | None = None  # None for packs
    held: int | None = None  # tokens of a .bin of which a phase reads a part
    phase: int = 0  # number of the phase
    packs: int | None = None  # rows, None for pairs


def prepared_data(path: str) -> TrainData:
    """Read the preparation in `path`, an output folder of `tokenmill pretrain` or `tokenmill sft`.

    Raises InputError when it cannot be trained on, or when its tokenizer is needed and not found.
    """
    path = absolute(path)
    manifest = prepared_manifest(path)
    listed, settings = listed_files(path, manifest), manifest["settings"]
    grouped: dict[tuple[Split, str, int], list[ListedFile]] = {}
    for file in listed:
        grouped.setdefault((file.split, file.dataset, file.phase), []).append(file)
    is_packed = preparation(manifest["type"]).tokens == "packs"
    sampled = manifest["sampling"]["splits"] if is_packed else {}
    sources = [
        TrainSource(
            dataset=dataset, split=split, files=[file.path for file in files], weights=[file.weight for file in files],
            tokens=sampled[split][dataset]["tokens"] if is_packed else sum(file.tokens or 0 for file in files),
            rows=sum(file.packs or 0 for file in files) if is_packed else None,
            contents=[f"{file.key} {file.part}" for file in files],
            sizes=[] if is_packed else [file.tokens or 0 for file in files], phase=phase,
        )
        for (split, dataset, phase), files in grouped.items()
    ]  # fmt: skip
    known = {name: settings["tokenizer"][name] for name in TokenizerSource.model_fields}
    if Path(known["model"]).expanduser().exists():
        known["model"] = absolute(known["model"])
    tokenizer = pinned(parse(TokenizerSource, known, "tokenizer"), manifest["tokenizer"].get("commit"))
    data = TrainData(
        path=path, kind=cast("Kind", manifest["type"]), made_from=content_digest(listed), tokenizer=tokenizer.model_dump(),
        fingerprint=manifest["tokenizer"]["fingerprint"], vocabulary_size=manifest["tokenizer"]["vocabulary_size"],
        eos=next((each["recipe"].get("eos") for each in manifest["recipes"]), None), sources=sources,
        pack_size=settings["pack_size"] if is_packed else None,
        pad_seq_to_mult=settings["pad_seq_to_mult"] if is_packed else None,
        phases=[TrainPhase(name=each["name"], tokens=sum(each["drawn"].values())) for each in _phases(manifest)],
    )  # fmt: skip
    return data if data.eos is not None else data.model_copy(update={"eos": vocabulary_of(data).eos})


def prepared_manifest(path: str) -> Manifest:
    """Return the manifest of data to train on.

    Raises InputError when it is missing, damaged or from a failed run, and for other types of data.
    """
    try:
        manifest = read_manifest(path)
    except RunError as error:
        raise InputError(f"{error}; fix this, and prepare the data again before training on it") from error
    if manifest is None:
        blend_alone = read_bytes(join(path, BLEND)) is not None
        raise InputError(
            f"{path}: {f'{BLEND} has no {MANIFEST} next to it' if blend_alone else f'no {MANIFEST} here'}; "
            "train on the --output-dir of tokenmill pretrain or tokenmill sft"
        )
    kind = manifest["type"]
    if kind not in KINDS or preparation(kind).tokens is None:
        advice = preparation(kind).training_advice.format(path=path) if kind in KINDS else TRAINABLE
        raise InputError(f"{path}: holds {kind} data, which cannot be trained on directly; {advice}")
    return manifest


def listed_files(path: str, manifest: Manifest) -> list[ListedFile]:
    """Every name in blend.json, split by split, in order. `path` is the absolute output folder.

    Raises InputError when blend.json was changed or was made in a different folder.
    """
    place, recorded = join(path, BLEND), {file["path"]: file["xxh3_128"] for file in manifest["files"]}
    content = read_bytes(place)
    if content is None or xxh3_128_hexdigest(content) != recorded[BLEND]:
        raise InputError(
            f"{place}: {'missing' if content is None else 'changed since it was published'}; change weights and datasets in "
            "the input blend and run the preparation again, which reuses unchanged shards"
        )
    listed: list[ListedFile] = []
    for number, pair in ((n, pair) for n, phase in enumerate(_phases(manifest)) for pair in phase["pairs"]):
        first, documents = pair["first"], pair["documents"]
        part = pair["part"] if pair["path"] == pair["of"] else f"{pair['part']} {first}:{first + documents}"
        listed.append(ListedFile(
            "train", join_published(path, pair["path"]), pair["drawn"], pair["dataset"], pair["key"], part, documents,
            pair["tokens"], pair["held"], number,
        ))  # fmt: skip
    blend, entries = orjson.loads(content), [*manifest["shards"], *derived_entries(manifest)]
    published = {  # shards, prefixes and packs by split and name, as blend.json spells it
        (split, name if name.startswith("/") or not is_local(name) else join(path, name)): entry
        for entry in entries
        for split, names in entry["published"].items()
        for name in names
    }
    # A file with the leading packs of a shard isn't published under the shard; its name has the shard's key.
    by_key = {(entry["dataset"], entry["key"][:8]): entry for entry in entries}
    cut = (LEADING.fullmatch(join(path, file["path"])) for file in manifest["files"])
    published |= {(found["split"], found[0]): by_key[found["dataset"], found["key"]] for found in cut if found}
    for split in SPLITS[1:] if listed else SPLITS:  # phases list the train split themselves
        words: list[str] = blend[split] or []
        for weight, name in zip(words[::2], words[1::2], strict=True):
            entry = published.get((split, name))
            if entry is None:
                raise InputError(
                    f"{place}: {name} is not in this folder, which was moved or copied since it was prepared; "
                    "train where it was, or run the same preparation again with this --output-dir"
                )
            part, leading = split if split in entry["tokens"] else WHOLE, LEADING.fullmatch(name)
            file = ListedFile(split, name, float(weight), entry["dataset"], entry["key"], part)
            if not name.endswith(".parquet"):
                file = replace(file, documents=entry["documents"][part], tokens=entry["tokens"][part])
            elif leading is None:
                file = replace(file, packs=entry["facts"][part]["packs"])
            else:
                file = replace(file, part=f"{part}, leading", packs=int(leading["packs"]))
            listed.append(file)
    return listed


def _phases(manifest: Manifest) -> list[Mapping[str, Any]]:
    """The phases that training follows; none for a budget without a total."""
    return [phase for phase in manifest.get("phases", []) if "pairs" in phase]


def content_digest(listed: Sequence[ListedFile]) -> str:
    """`xxh3_128:…` of the listed files, in order, with weights; the keys of shards represent their bytes."""
    content = [
        (file.split, file.weight, file.dataset, file.key, file.part, file.packs, *([file.phase] if file.phase else []))
        for file in listed
    ]
    return f"xxh3_128:{xxh3_128_hexdigest(orjson.dumps(content))}"


def vocabulary_of(data: TrainData) -> Vocabulary:
    """Return the vocabulary of the preparation. Raises InputError when it is missing or has changed."""
    try:
        vocabulary = find_vocabulary(parse(TokenizerSource, data.tokenizer, "tokenizer"))
    except InputError as error:
        raise InputError(
            f"{data.path}: was prepared with a tokenizer that is not found here: {error}; {NOT_FOUND_HERE}"
        ) from error
    if vocabulary.fingerprint != data.fingerprint:
        raise InputError(
            f"{data.path}: was prepared with the tokenizer {data.tokenizer['model']!r} of content {data.fingerprint}, which "
            f"is now {vocabulary.fingerprint}; restore its files, or prepare the data again"
        )
    return vocabulary
