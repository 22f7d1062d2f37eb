"""The manifest: a JSON file that describes a preparation down to each shard.

It holds the blend, the settings, every shard with source, identity and counts, the totals, missing shards, skipped files, and
the size and hash of the other files in the output folder. Equal preparations have equal manifests, except `volatile`: times,
hosts, how much was reused, and the seal. Recipes are listed once and referred to by number, because a million shards share a
few.
"""

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import orjson
import xxhash
from tokenmill.tasks.blend.models import SPLITS
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.renamed import with_new_names
from tokenmill.tasks.runtime import in_threads
from tokenmill.tasks.seal import unsealed
from tokenmill.tasks.storage import filesystem, join

from .plan import WHOLE, Finished
from .publish import Extent, Joined, Output, output_of
from .receipt import NOT_READ, RECEIPT, ROWS_BY_FILE, Receipt, outputs_of, unread
from .records import Manifest, ShardEntry, ShardList, SliceRecord, Totals
from .store import Store, read_bytes, size_of

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


def read_manifest(output_dir: str) -> Manifest | None:
    """Return the manifest of an output folder, or None.

    Raises InputError if it is damaged or not a manifest, and RunError if it is a failed run's.
    """
    manifest = _manifest(output_dir)
    if manifest is not None and manifest.get("status") == FAILED:
        raise RunError(f"{join(output_dir, MANIFEST)}: the run failed and didn't publish: {manifest['error']}")
    return manifest


def open_manifest(output_dir: str) -> Manifest:
    """Return the manifest of the published output in a folder.

    Raises InputError when it's missing, damaged or doesn't name a store, and RunError when the run failed.
    """
    manifest = read_manifest(output_dir)
    if manifest is None:
        raise InputError(f"{output_dir}: no {MANIFEST} here; point at the --output-dir of a preparation")
    if manifest["volatile"].get("store") is None:
        raise InputError(f"{output_dir}: a copy without its shards; use the folder that it was copied from")
    return manifest


def published_manifest(output_dir: str) -> Manifest | None:
    """Return the manifest of the publication in an output folder, or None. Raises InputError as `read_manifest` does."""
    manifest = _manifest(output_dir)
    return None if manifest is not None and manifest.get("status") == FAILED else manifest


def _manifest(output_dir: str) -> Manifest | None:
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
    # An earlier version may have written it.
    renamed = {name: with_new_names(manifest[name]) for name in ("blend", "settings") if name in manifest}
    return cast("Manifest", manifest | renamed)


def shard_entries(finished: Sequence[Finished], published: Names) -> ShardList:
    """Return the manifest's `recipes` and `shards`; `published` maps a shard's place to its names in each split."""
    recipes: dict[bytes, Mapping[str, Any]] = {}
    numbers: dict[bytes, int] = {}
    entries: list[ShardEntry] = []
    for item in finished:
        recipe = {name: value for name, value in item.receipt.identity.items() if name not in {"source", "decided"}}
        # Shards of a dataset share a recipe: a million of them list it once.
        canonical = orjson.dumps(recipe, option=orjson.OPT_SORT_KEYS)
        recipes.setdefault(canonical, recipe)
        number = numbers.setdefault(canonical, len(numbers))
        part, receipt = item.shard.part, item.receipt
        files = [
            {"file": each.file.uri, "start": each.start, "stop": each.stop, "content": each.content}
            for each in part.members
        ]
        entry = {
            "dataset": item.shard.dataset,
            "split": item.shard.split,
            "place": item.shard.place,
            "file": part.file.uri,
            "start": part.start,
            "stop": part.stop,
            **({"files": files} if files else {}),
            "key": item.key,
            "recipe": number,
            "source": receipt.identity["source"],
            **({"decided": receipt.identity["decided"]} if "decided" in receipt.identity else {}),
            **counts_of(receipt),
            "published": {split: [*names] for split, names in published.get(item.shard.place, {}).items()},
        }
        entries.append(cast("ShardEntry", entry))
    return {"recipes": list(recipes.values()), "shards": entries}


def counts_of(receipt: Receipt) -> dict[str, Any]:
    """Return the counts of a shard, as its entry in a manifest has them."""
    return {
        "rows": receipt.rows_in,
        "documents": {name: count.documents for name, count in receipt.parts.items()},
        "tokens": {name: count.tokens for name, count in receipt.parts.items()},
        "drops": receipt.drops,
        "quarantined": receipt.quarantined,
        "truncated": receipt.truncated,
        **({"facts": receipt.facts} if receipt.facts else {}),
    }


def derived_entries(manifest: Manifest) -> Sequence[ShardEntry]:
    """Return the entries of shards that are made of shards; empty for a kind with one stage."""
    return manifest["derived"]["shards"] if "derived" in manifest else ()


def stored_entries(manifest: Manifest) -> Iterator[tuple[Store, ShardEntry]]:
    """Yield the entries of shards, then of those derived from them in later stages, each with its store."""
    own = manifest["type"]
    for part in (manifest, manifest["derived"]) if "derived" in manifest else (manifest,):
        for entry in part["shards"]:
            kind = part["recipes"][entry["recipe"]]["kind"]
            # A later stage may share the folder of the first one: shards of `harmony-selection` are in that of `harmony`.
            folder = own if kind.startswith(f"{own}-") else kind
            yield Store(manifest["volatile"].get("store", ""), folder), entry


def entry_files(entry: ShardEntry) -> Sequence[SliceRecord]:
    """Return the slices of a manifest's shard: `file`, `start`, `stop` and `content` of each; one unless the shard is a bundle."""
    whole: SliceRecord = {
        "file": entry["file"], "start": entry["start"], "stop": entry["stop"], "content": entry["source"]["content"],
    }  # fmt: skip
    return entry.get("files") or [whole]


def split_of(entry: ShardEntry, part: str) -> str:
    """Return the published split of a part in a shard that a manifest lists."""
    if part != WHOLE:
        return part
    return entry["split"] if entry["split"] in SPLITS else "train"


def identities(manifest: Manifest | None) -> dict[str, dict[str, Any]]:
    """Return the identity of every shard of a manifest, by place, as planned: without later decisions."""
    if manifest is None:
        return {}
    return {
        entry["place"]: {**manifest["recipes"][entry["recipe"]], "source": entry["source"]}
        for entry in manifest["shards"]
    }


def totals(finished: Sequence[Finished], last: Sequence[Finished] = ()) -> Totals:
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
    # Documents and tokens are what the last stage left of them.
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
    found = {
        **{field: sum(counts[field] for counts in datasets.values()) for field in SUMMED},
        "dropped": dict(sum(drops.values(), Counter())),
        "datasets": {name: {**counts, "dropped": dict(drops[name])} for name, counts in datasets.items()},
        "splits": {name: dict(counts) for name, counts in splits.items()},
        **({NOT_READ: lost} if lost else {}),
    }
    return cast("Totals", found)


@dataclass(frozen=True, slots=True)
class Origin:
    """Consecutive rows of a shard: the `rows` rows of the slice `[start, stop)` of a file.

    `before` counts the rows of the file before the slice. It is None after a missing slice: slices are missing from a partial
    output, and after a row longer than a slice.
    """

    file: str
    start: int
    stop: int
    rows: int
    before: int | None


def origins_of(finished: Iterable[Finished]) -> list[list[Origin]]:
    """Return the origins of the rows in each shard; the shards are in plan order.

    A shard numbers its rows from 0; a line of a file also counts the rows of the slices before, whose number their receipts hold.
    """
    return _origins(
        [
            (item.dataset, part.file.uri, part.start, part.stop, rows)
            for part, rows in zip(item.shard.part.members or [item.shard.part], item.receipt.rows_by_file, strict=True)
        ]
        for item in finished
    )


def origins_in(entries: Iterable[ShardEntry]) -> list[list[Origin]]:
    """Return the origins of the rows in each shard of a manifest."""
    return _origins(
        [
            ((entry["split"], entry["dataset"]), file["file"], file["start"], file["stop"], rows)
            for file, rows in zip(
                entry_files(entry), entry.get("facts", {}).get(ROWS_BY_FILE, [entry["rows"]]), strict=True
            )
        ]
        for entry in entries
    )


def _origins(shards: Iterable[Iterable[tuple[tuple[str, str], str, int, int, int]]]) -> list[list[Origin]]:
    """Each slice is its dataset, file, start, stop and rows."""
    ends: dict[tuple[tuple[str, str], str], tuple[int, int | None]] = {}
    found: list[list[Origin]] = []
    for slices in shards:
        found.append([])
        for dataset, file, start, stop, rows in slices:
            end, count = ends.get((dataset, file), (0, 0))
            before = count if end == start else None
            ends[dataset, file] = stop, None if before is None else before + rows
            found[-1].append(Origin(file, start, stop, rows, before))
    return found


def origin_of(origins: Sequence[Origin], row: int) -> tuple[Origin, int]:
    """Return the origin of a row in a shard, and the number of the row in its slice."""
    starts = list(accumulate((origin.rows for origin in origins[:-1]), initial=0))
    number = bisect_right(starts, row) - 1
    return origins[number], row - starts[number]


CHUNK_BYTES = 4 << 20
THREADS = min(16, (os.cpu_count() or 1) * 2)


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A published file at `place`; `recorded` are its size and xxh3_128, as listed in the file `listed_in`.

    `name` is its absolute name in blend.json: its path, or a prefix shared with other files. `original` is the shard's own
    file, None for a file that the manifest lists itself.
    """

    name: str
    place: str
    recorded: Output
    listed_in: str
    original: str | None = None


def published_files(
    output_dir: str, manifest: Manifest, outputs: Mapping[str, Sequence[Output] | None]
) -> Iterator[PublishedFile]:
    """Yield every published file. `outputs` belong to each shard's receipt by key, None for a shard without one."""
    for store, entry in stored_entries(manifest):
        for part, names in entry["published"].items():
            recorded = outputs_of(part, outputs[entry["key"]] or []) or outputs_of(WHOLE, outputs[entry["key"]] or [])
            for full in (join_published(output_dir, name) for name in names):
                # The name of one file has that output's ending; that of a pair, the beginning of both, has none.
                endings = {f".{output.path.partition('.')[2]}": output for output in recorded}
                whole = {ending: output for ending, output in endings.items() if full.endswith(ending)}
                for ending, output in (whole or endings).items():
                    original = store.path(entry["key"], output.path)
                    yield PublishedFile(full, full if whole else f"{full}{ending}", output, RECEIPT, original)
    for file in manifest["files"]:
        place = join(output_dir, file["path"])
        yield PublishedFile(place, place, output_of(file), MANIFEST)


def join_published(output_dir: str, name: str) -> str:
    """Return the place of a name in a manifest: below the output folder, unless it is in the store of an object storage."""
    return name if name.startswith("/") or "://" in name else join(output_dir, name)


def recorded_outputs(manifest: Manifest) -> dict[str, Sequence[Output] | None]:
    """Return the outputs in the receipt of each published shard, by key; None without a valid receipt."""
    unique = {entry["key"]: store for store, entry in stored_entries(manifest)}
    receipts = in_threads(lambda item: item[1].read_receipt(item[0]), list(unique.items()), THREADS)
    return {key: receipt and receipt.outputs for key, receipt in zip(unique, receipts, strict=True)}


def problems_in(files: Iterable[PublishedFile], check: Callable[[str, Output, str], str | None]) -> list[str]:
    """Return the problems that `check` finds in the files, in their order. Several files are checked at a time."""
    found = in_threads(lambda file: check(file.place, file.recorded, file.listed_in), list(files), THREADS)
    return [problem for problem in found if problem]


def size_problem(place: str, recorded: Output, listed_in: str) -> str | None:
    """Return the problem with a file's size, or None if it is as recorded."""
    size = size_of(place)
    if size is None:
        return f"{place}: missing"
    return None if size == recorded.size else f"{place}: {size:,} bytes, but {listed_in} records {recorded.size:,}"


def content_problem(place: str, recorded: Output, listed_in: str) -> str | None:
    """Return the problem with a file's size or hash, or None if both are as recorded. Reads the whole file."""
    problem = size_problem(place, recorded, listed_in)
    if problem:
        return problem
    if isinstance(recorded, Joined):
        return next((extent_problem(place, recorded, number) for number in changed_extents(place, recorded)), None)
    found = extent_hash(Extent(place, 0, recorded.size))
    if found == recorded.xxh3_128:
        return None
    return f"{place}: content changed (xxh3_128 is {found}, {listed_in} records {recorded.xxh3_128})"


def changed_extents(place: str, recorded: Joined) -> list[int]:
    """Return the numbers of the extents in a file whose content changed. Reads the whole file, several extents at a time."""
    starts = accumulate((size for size, _ in recorded.extents[:-1]), initial=0)
    extents = [Extent(place, start, size) for start, (size, _) in zip(starts, recorded.extents, strict=True)]
    hashes = list(in_threads(extent_hash, extents, THREADS))
    return [
        number
        for number, (found, (_, wanted)) in enumerate(zip(hashes, recorded.extents, strict=True))
        if found != wanted
    ]


def extent_problem(place: str, recorded: Joined, number: int) -> str:
    """Return the sentence for an extent whose content changed."""
    start = sum(size for size, _ in recorded.extents[:number])
    return f"{place}: content changed in bytes {start:,} to {start + recorded.extents[number][0]:,}"


def file_hash(place: str) -> str:
    """Return the xxh3_128 of a file, read in chunks."""
    system, path = filesystem(place)
    return extent_hash(Extent(place, 0, cast("int", system.info(path)["size"])))


def extent_hash(extent: Extent) -> str:
    """Return the xxh3_128 of part of a file, read in chunks; of what there is, if the file ends early."""
    hasher = xxhash.xxh3_128()
    system, path = filesystem(extent.uri)
    stop = extent.start + extent.size
    for start in range(extent.start, stop, CHUNK_BYTES):
        # By range, because opening an object costs a request for its size, which is known.
        hasher.update(cast("bytes", system.cat_file(path, start=start, end=min(start + CHUNK_BYTES, stop))))
    return hasher.hexdigest()
