"""What was prepared, as training sees it: the files of blend.json, and what the manifest says of each.

Only what a manifest vouches for is trained on: it knows the tokenizer, how much every file holds and whether something is
missing, and tells a blend.json that was edited from the one that was published. A blend.json made by hand is refused, for
a run of weeks is no place to find out that two tokenizers were mixed.

A preparation is known by its content here, wherever it lies and whenever it was made: a digest of what each split lists,
in order, with weights. The manifest's own seal would not do, as it covers times. Reading a manifest of 100,000 shards
takes 1 s; no file of tokens is opened.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
from tokenmill.tasks.blend.models import SPLITS, Split
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.pack.formats import find_template
from tokenmill.tasks.pack.settings import SftSettings
from tokenmill.tasks.shards.manifest import BLEND, MANIFEST, WHOLE, read_manifest
from tokenmill.tasks.shards.preparation import preparation
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import absolute, is_local, join
from tokenmill.tasks.strict import parse
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource
from tokenmill.tasks.tokenize.vocabulary import Vocabulary
from xxhash import xxh3_128_hexdigest

from .job import Source, TrainData

FROM_ELSEWHERE = (
    "a relative path is one from the folder that the preparation was started in: start training there as well, or prepare "
    "with an absolute path that every machine which trains can read"
)
"""What to do when a file that was prepared with is not found."""

LEADING = re.compile(
    r".+/(?P<split>\w+)/\d{6,}__(?P<dataset>.+)__(?P<key>[0-9a-f]{8})__\d+_leading_(?P<packs>\d+)\.parquet"
)
"""The name of a file that holds the leading packs of a shard alone, which the manifest lists among its files."""


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A name of blend.json, and what the manifest knows of it.

    `path` is the prefix of a .bin/.idx pair, or a Parquet file, `key` that of the shard and `part` what it is of it.
    `documents` and `tokens` are those of the pair, None for packs; `packs` are the rows, None for pairs.
    """

    split: Split
    path: str
    weight: float
    dataset: str
    key: str
    part: str
    documents: int | None = None
    tokens: int | None = None
    packs: int | None = None


def prepared_data(path: str) -> TrainData:
    """The preparation in `path`, the output folder of `tokenmill pretrain` or `tokenmill sft`, local or in a store.

    Raises InputError when there is none that can be trained on, or when its tokenizer is needed and not found.
    """
    path = absolute(path)
    manifest = prepared_manifest(path)
    listed = listed_files(path, manifest)
    tokenizer = _tokenizer(manifest)
    is_packed = preparation(manifest["type"]).tokens == "packs"
    return TrainData(
        path=path,
        kind=manifest["type"],
        made_from=content_digest(listed),
        tokenizer=tokenizer.model_dump(),
        fingerprint=manifest["tokenizer"]["fingerprint"],
        vocabulary_size=manifest["tokenizer"]["vocabulary_size"],
        eos=_eos(path, manifest, tokenizer),
        sources=_sources(listed, manifest),
        pack_size=manifest["settings"]["pack_size"] if is_packed else None,
        pad_seq_to_mult=manifest["settings"]["pad_seq_to_mult"] if is_packed else None,
    )


def tokenizer_is_here(data: TrainData) -> None:
    """Raises InputError unless what is exported with a trained model is found: the tokenizer that was prepared with, and
    for packs the chat template.
    """
    vocabulary = _vocabulary(data.path, parse(TokenizerSource, data.tokenizer, "tokenizer"), data.fingerprint)
    if data.kind != "sft":
        return
    settings = parse(SftSettings, prepared_manifest(data.path)["settings"], data.path)
    try:
        find_template(settings, vocabulary)
    except InputError as error:
        raise InputError(
            f"{data.path}: was prepared with a chat template that is not found here: {error}; {FROM_ELSEWHERE}"
        ) from error


def prepared_manifest(path: str) -> dict[str, Any]:
    """The manifest of what is to be trained on.

    Raises InputError when there is none, when it is damaged or that of a failed run, and for other kinds of data.
    """
    try:
        manifest = read_manifest(path)
    except RunError as error:
        raise InputError(f"{error}; mend that and prepare the data again before training on it") from error
    if manifest is None:
        alone = read_bytes(join(path, BLEND)) is not None
        raise InputError(
            f"{path}: {f'{BLEND} has no {MANIFEST} beside it that vouches for it' if alone else f'no {MANIFEST} here'}; "
            "train on the --output-dir of tokenmill pretrain or tokenmill sft"
        )
    kind = manifest["type"]
    if preparation(kind).tokens is None:
        advice = preparation(kind).training_advice.format(path=path)
        raise InputError(f"{path}: holds {kind} data, which is not trained on as it is; {advice}")
    return manifest


def listed_files(path: str, manifest: Mapping[str, Any]) -> list[ListedFile]:
    """Every name of blend.json, split by split, in its order. `path` is the absolute output folder.

    Raises InputError when blend.json is not the one that was published with the manifest, or was made elsewhere.
    """
    blend: dict[str, list[str] | None] = orjson.loads(_vouched_blend(path, manifest))
    published = _published(path, manifest)
    listed: list[ListedFile] = []
    for split in SPLITS:
        entries = blend[split] or []
        for weight, name in zip(entries[::2], entries[1::2], strict=True):
            entry = published.get((split, name))
            if entry is None:
                raise InputError(
                    f"{join(path, BLEND)}: {name} is not of this folder, which was moved or copied since it was prepared; "
                    "train where it was, or run the same preparation again with this --output-dir"
                )
            listed.append(_listed(split, name, float(weight), entry))
    return listed


def _vouched_blend(path: str, manifest: Mapping[str, Any]) -> bytes:
    place, recorded = join(path, BLEND), {file["path"]: file["xxh3_128"] for file in manifest["files"]}
    data = read_bytes(place)
    if data is None or xxh3_128_hexdigest(data) != recorded[BLEND]:
        raise InputError(
            f"{place}: {'missing' if data is None else 'not the one that was published'}; change weights and data sets in "
            "the blend that was prepared, and run the preparation again: shards that stay are not built anew"
        )
    return data


def _published(path: str, manifest: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """The shards by split and name, as blend.json spells it."""
    named = {
        (split, name if name.startswith("/") or not is_local(name) else join(path, name)): entry
        for entry in manifest["shards"]
        for split, names in entry["published"].items()
        for name in names
    }
    shards = {(entry["dataset"], entry["key"][:8]): entry for entry in manifest["shards"]}
    cut = (LEADING.fullmatch(join(path, file["path"])) for file in manifest["files"])
    return named | {(found["split"], found[0]): shards[found["dataset"], found["key"]] for found in cut if found}


def _listed(split: Split, name: str, weight: float, entry: Mapping[str, Any]) -> ListedFile:
    part = split if split in entry["tokens"] else WHOLE
    file = ListedFile(split, name, weight, entry["dataset"], entry["key"], part)
    if not name.endswith(".parquet"):
        return replace(file, documents=entry["documents"][part], tokens=entry["tokens"][part])
    leading = LEADING.fullmatch(name)
    if leading is None:
        return replace(file, packs=entry["facts"][part]["packs"])
    return replace(file, part=f"{part}, leading", packs=int(leading["packs"]))


def content_digest(listed: Sequence[ListedFile]) -> str:
    """`xxh3_128:…` of what is listed: shards by their keys, which stand for their bytes, with
    split, weight, data set and order.
    """
    content = [(file.split, file.weight, file.dataset, file.key, file.part, file.packs) for file in listed]
    return f"xxh3_128:{xxh3_128_hexdigest(orjson.dumps(content))}"


def _sources(listed: Sequence[ListedFile], manifest: Mapping[str, Any]) -> list[Source]:
    grouped: dict[tuple[Split, str], list[ListedFile]] = {}
    for file in listed:
        grouped.setdefault((file.split, file.dataset), []).append(file)
    return [_source(files, manifest) for files in grouped.values()]


def _source(files: Sequence[ListedFile], manifest: Mapping[str, Any]) -> Source:
    split, dataset = files[0].split, files[0].dataset
    is_packed = preparation(manifest["type"]).tokens == "packs"
    return Source(
        dataset=dataset,
        split=split,
        files=[file.path for file in files],
        weights=[file.weight for file in files],
        tokens=manifest["sampling"]["splits"][split][dataset]["tokens"]
        if is_packed
        else sum(file.tokens or 0 for file in files),
        rows=sum(file.packs or 0 for file in files) if is_packed else None,
    )


def _tokenizer(manifest: Mapping[str, Any]) -> TokenizerSource:
    """The tokenizer that was prepared with; one that lies here is named by its absolute path."""
    settings = manifest["settings"]["tokenizer"]
    known = {name: settings[name] for name in TokenizerSource.model_fields}
    if Path(known["model"]).expanduser().exists():
        known["model"] = absolute(known["model"])
    return parse(TokenizerSource, known, "tokenizer")


def _eos(path: str, manifest: Mapping[str, Any], tokenizer: TokenizerSource) -> int | None:
    """The id that ends a document: the one that was added to each, else what the tokenizer says."""
    added = next((each["recipe"].get("eos") for each in manifest["recipes"]), None)
    if added is not None:
        return added
    return _vocabulary(path, tokenizer, manifest["tokenizer"]["fingerprint"]).eos


def _vocabulary(path: str, tokenizer: TokenizerSource, fingerprint: str) -> Vocabulary:
    """What `path` was prepared with."""
    try:
        vocabulary = find_vocabulary(tokenizer)
    except InputError as error:
        raise InputError(
            f"{path}: was prepared with a tokenizer that is not found here: {error}; {FROM_ELSEWHERE}"
        ) from error
    if vocabulary.fingerprint != fingerprint:
        raise InputError(
            f"{path}: was prepared with the tokenizer {tokenizer.model!r} of content {fingerprint}, and that is "
            f"{vocabulary.fingerprint} by now; put back the files it was, or prepare the data again"
        )
    return vocabulary
