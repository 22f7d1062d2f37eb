"""The manifest: a JSON file that describes a preparation down to each shard.

It holds the blend, the settings, every shard with source, identity and counts, the totals, missing shards, skipped files, and
the size and hash of the other files in the output folder. Equal preparations have equal manifests, except `volatile`: times,
hosts, how much was reused, and the seal. Recipes are listed once and referred to by number, because a million shards share a
few.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
from tokenmill.tasks.blend.models import SPLITS
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.renamed import with_new_names
from tokenmill.tasks.seal import sealed, unsealed
from tokenmill.tasks.sources.files import Slice
from tokenmill.tasks.storage import join

from .plan import WHOLE, Finished
from .receipt import NOT_READ, unread
from .store import PACKS, PREFIX, Store, read_bytes

MANIFEST = "manifest.json"
BLEND = "blend.json"
FULL_VALIDATION, SEQUENCES = "blend.full-validation.json", "blend.sequences.json"
"""Beside the blend of a pretraining preparation, for options of Megatron-LM: see `PairLayout`."""

BLENDS = {BLEND, FULL_VALIDATION, SEQUENCES}
"""The files that name others by their places here."""

FAILED = "failed"
"""The `status` of a failed run's manifest, which is written if nothing was published before."""


SUMMED = ("rows", "documents", "tokens", "quarantined", "truncated", "source_bytes")
"""The counts that are summed over shards."""

Names = Mapping[str, Mapping[str, Sequence[str]]]
"""Published shard names, by place and split. A name is the path of a part's only file, or the prefix that its files
share. A shard published more than once has several.
"""


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """The manifest as sealed JSON."""
    return sealed(manifest)


def read_manifest(output_dir: str) -> dict[str, Any] | None:
    """The manifest of an output folder, or None.

    Raises InputError if it is damaged or not a manifest, and RunError if it is a failed run's.
    """
    manifest = _manifest(output_dir)
    if manifest is not None and manifest.get("status") == FAILED:
        raise RunError(f"{join(output_dir, MANIFEST)}: the run failed and didn't publish: {manifest['error']}")
    return manifest


def open_manifest(output_dir: str) -> dict[str, Any]:
    """The manifest of the published output in a folder.

    Raises InputError when it's missing, damaged or doesn't name a store, and RunError when the run failed.
    """
    manifest = read_manifest(output_dir)
    if manifest is None:
        raise InputError(f"{output_dir}: no {MANIFEST} here; point at the --output-dir of a preparation")
    if manifest["volatile"].get("store") is None:
        raise InputError(f"{output_dir}: a copy without its shards; use the folder that it was copied from")
    return manifest


def published_manifest(output_dir: str) -> dict[str, Any] | None:
    """The manifest of the publication in an output folder, or None. Raises InputError as `read_manifest` does."""
    manifest = _manifest(output_dir)
    return None if manifest is not None and manifest.get("status") == FAILED else manifest


def _manifest(output_dir: str) -> dict[str, Any] | None:
    place = join(output_dir, MANIFEST)
    data = read_bytes(place)
    if data is None:
        return None
    try:
        manifest = unsealed(data)
    except ValueError as error:
        raise InputError(f"{place}: {error}; prepare the data again") from error
    if "shards" not in manifest:
        raise InputError(f"{place}: not the manifest of a preparation; point at the --output-dir of one")
    return manifest | {name: with_new_names(manifest[name]) for name in ("blend", "settings") if name in manifest}


def shard_entries(finished: Sequence[Finished], published: Names) -> dict[str, Any]:
    """The manifest's `recipes` and `shards`; `published` maps a shard's place to its names in each split."""
    recipes: dict[bytes, Mapping[str, Any]] = {}
    numbers: dict[bytes, int] = {}
    entries: list[dict[str, Any]] = []
    for item in finished:
        recipe = {name: value for name, value in item.receipt.identity.items() if name not in {"source", "decided"}}
        canonical = orjson.dumps(recipe, option=orjson.OPT_SORT_KEYS)
        recipes.setdefault(canonical, recipe)
        number = numbers.setdefault(canonical, len(numbers))
        entries.append(_entry(item, number, published.get(item.shard.place, {})))
    return {"recipes": list(recipes.values()), "shards": entries}


def _entry(item: Finished, recipe: int, published: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    part, receipt = item.shard.part, item.receipt
    facts = {"facts": receipt.facts} if receipt.facts else {}
    files = {"files": [_file(member) for member in part.members]} if part.members else {}
    decided = {"decided": receipt.identity["decided"]} if "decided" in receipt.identity else {}
    return {
        "dataset": item.shard.dataset,
        "split": item.shard.split,
        "place": item.shard.place,
        "file": part.file.uri,
        "start": part.start,
        "stop": part.stop,
        **files,
        "key": item.key,
        "recipe": recipe,
        "source": receipt.identity["source"],
        **decided,
        "rows": receipt.rows_in,
        "documents": {name: count.documents for name, count in receipt.parts.items()},
        "tokens": {name: count.tokens for name, count in receipt.parts.items()},
        "drops": receipt.drops,
        "quarantined": receipt.quarantined,
        "truncated": receipt.truncated,
        **facts,
        "published": {split: list(names) for split, names in published.items()},
    }


def stored_entries(manifest: Mapping[str, Any]) -> Iterator[tuple[Store, Mapping[str, Any]]]:
    """The entries of shards and of those derived from them, each with its store.

    All are in the folder of the preparation's kind, except prefixes and packs.
    """
    for part in (manifest, manifest.get("derived", {"shards": []})):
        for entry in part["shards"]:
            kind = part["recipes"][entry["recipe"]]["kind"]
            folder = kind if kind in {PREFIX, PACKS} else manifest["type"]
            yield Store(manifest["volatile"].get("store", ""), folder), entry


def _file(part: Slice) -> dict[str, Any]:
    return {"file": part.file.uri, "start": part.start, "stop": part.stop, "content": part.content}


def entry_files(entry: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The slices of a manifest's shard: `file`, `start`, `stop` and `content` of each; one unless the shard is a bundle."""
    content = entry["source"]["content"]
    return entry.get("files") or [{**{name: entry[name] for name in ("file", "start", "stop")}, "content": content}]


def split_of(entry: Mapping[str, Any], part: str) -> str:
    """The published split of a part of a shard that a manifest lists."""
    if part != WHOLE:
        return part
    return entry["split"] if entry["split"] in SPLITS else "train"


def identities(manifest: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """The identity of every shard of a manifest, by place, as planned: without later decisions."""
    if manifest is None:
        return {}
    return {
        entry["place"]: {**manifest["recipes"][entry["recipe"]], "source": entry["source"]}
        for entry in manifest["shards"]
    }


def totals(finished: Sequence[Finished], last: Sequence[Finished] = ()) -> dict[str, Any]:
    """Rows, documents, tokens and drops in total and per dataset (`split/name`); documents and tokens per split; rows
    by what of them isn't read, for datasets that have any.

    `last` are shards made of all `finished` ones in a last round, which may drop more documents.
    """
    datasets: dict[str, Counter[str]] = {}
    drops: dict[str, Counter[str]] = {}
    splits: dict[str, Counter[str]] = {}
    not_read: dict[str, Counter[str]] = {}
    for item in finished:
        counts = datasets.setdefault(f"{item.shard.split}/{item.shard.dataset}", Counter())
        counts.update(rows=item.receipt.rows_in, documents=0, tokens=0, source_bytes=item.shard.part.size)
        if item.receipt.not_read:
            not_read.setdefault(f"{item.shard.split}/{item.shard.dataset}", Counter()).update(item.receipt.not_read)
    for item in [*finished, *last]:
        receipt, name = item.receipt, f"{item.shard.split}/{item.shard.dataset}"
        datasets[name].update(quarantined=receipt.quarantined, truncated=receipt.truncated)
        drops.setdefault(name, Counter()).update(receipt.drops)
    for item in last or finished:
        counts = datasets[f"{item.shard.split}/{item.shard.dataset}"]
        counts.update(documents=item.receipt.documents, tokens=item.receipt.tokens)
        for part, count in item.receipt.parts.items():
            splits.setdefault(item.split_of(part), Counter()).update(documents=count.documents, tokens=count.tokens)
    lost = {
        name: kept
        for name, counts in not_read.items()
        if (kept := unread(dict(sorted(counts.items())), datasets[name]["documents"]))
    }
    return {
        **{field: sum(counts[field] for counts in datasets.values()) for field in SUMMED},
        "dropped": dict(sum(drops.values(), Counter())),
        "datasets": {name: {**counts, "dropped": dict(drops[name])} for name, counts in datasets.items()},
        "splits": {name: dict(counts) for name, counts in splits.items()},
        **({NOT_READ: lost} if lost else {}),
    }
