"""Verify a published preparation: hash every file, check the counts of every receipt, and compare both with the manifest.

Hashing (xxh3_128) runs at disk speed. A shard that fails loses its receipt, so the next run of the same preparation rebuilds
only that shard. Files in other format versions are not inspected: their hashes and counts are compared.

Workers check batches of shards, and only report: this process withdraws the receipts when all have answered.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain, groupby
from typing import TypeVar

from tokenmill.tasks.runtime import in_threads
from tokenmill.tasks.storage import absolute, is_local

from .executor import RunAll, run_here
from .fates import fate_problems
from .manifest import (
    THREADS,
    PublishedFile,
    changed_extents,
    content_problem,
    counts_of,
    extent_hash,
    extent_problem,
    open_manifest,
    problems_in,
    published_files,
    recorded_outputs,
    stored_entries,
)
from .publish import Extent, Joined, Output
from .receipt import RECEIPT, InvalidReceiptError, Receipt, outputs_of
from .records import Manifest, ShardEntry
from .store import Store, read_bytes, remove_file, size_of

Inspect = Callable[[Store, Receipt], list[str] | None]
"""Check a shard's files in their own format; returns the problems as sentences, None for a format that it can't judge."""

FindJoined = Callable[[], Mapping[str, Extent]]
"""Find the outputs that are in prefixes: see `Store.joined`."""

FindWorkers = Callable[[int], RunAll | None]
"""Find the workers that check so many bytes; None for this process."""

Shard = tuple[Store, ShardEntry, frozenset[str]]
"""The store of a shard, its entry in the manifest, and the names of its outputs that are in published prefixes."""

OPEN_BYTES = 1_000_000
"""Bytes that are read while the files of a shard are opened."""

WORKER_THREADS = 2
"""Shards that a worker, which has one core, checks at once: some kinds hold a whole one in memory."""

BATCH_BYTES = 256_000_000
MOST_BATCHES = 10_000
"""A task on Dask costs a millisecond, so larger outputs have larger batches."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Verification:
    """Numbers of checked files and shards, and every problem found; each problem names a file.

    `unchecked` lists parts that could not be compared here, and why; it isn't a problem of the data.
    """

    shards: int
    files: int
    size: int
    problems: list[str]
    withdrawn: list[str]
    unchecked: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Checked:
    """The findings in one shard: `damaged` are the keys of damaged shards, `remove` the files to remove so that the next run
    builds them again; `unjudged` is its format if that wasn't inspected.
    """

    key: str
    files: int
    size: int
    problems: list[str]
    damaged: Sequence[str] = ()
    remove: Sequence[str] = ()
    outputs: list[Output] | None = None
    unjudged: str | None = None


def verify(output_dir: str, inspect: Inspect, find_workers: FindWorkers = lambda _: None) -> Verification:
    """Verify a published preparation and withdraw the receipts of damaged shards.

    Raises InputError if the manifest is missing or damaged, or doesn't name a store, and RunError if the workers fail.
    """
    output_dir = absolute(output_dir)
    manifest = open_manifest(output_dir)
    shards, sizes = _shards(manifest)
    run_all = find_workers(sum(sizes))
    common = {"inspect": inspect, "threads": WORKER_THREADS if run_all else THREADS}
    calls = [{"shards": batch, **common} for batch in _batches(shards, sizes, run_all)]
    checked = list(chain.from_iterable((run_all or run_here)("verify-shards", check_shards, calls)))
    # Most published names are links to files that were just read, so only copies are read here.
    published = published_files(output_dir, manifest, {shard.key: shard.outputs for shard in checked})
    problems = [problem for shard in checked for problem in shard.problems]
    copies = [file for file in published if not _was_read(file)]
    batches = _batches(copies, [file.recorded.size for file in copies], run_all)
    calls = [{"files": batch, "check": content_problem} for batch in batches]
    problems += chain.from_iterable((run_all or run_here)("verify-copies", problems_in, calls))
    problems += [f"{place}: planned, but missing from this partial output" for place in manifest["missing"]]
    # Only now: while others were checked, these receipts located bytes.
    for place in {place for shard in checked for place in shard.remove}:
        remove_file(place)
    files, size = sum(shard.files for shard in checked), sum(shard.size for shard in checked)
    withdrawn = list(dict.fromkeys(key for shard in checked for key in shard.damaged))
    formats = Counter(shard.unjudged for shard in checked if shard.unjudged)
    maker = manifest["volatile"].get("versions", {}).get("tokenmill", "a different version")
    unchecked = [
        f"{name} ({count:,} of {len(checked):,} shards), made by tokenmill {maker}; hashes and counts agree"
        for name, count in formats.items()
    ]
    return Verification(len(checked), files, size, problems, withdrawn, unchecked)


def _shards(manifest: Manifest) -> tuple[list[Shard], list[int]]:
    """Return the shards of an output, each once, and the cost of each in bytes; outputs in a prefix count with the prefix."""
    entries = {entry["key"]: (store, entry) for store, entry in stored_entries(manifest)}
    joined: defaultdict[str, set[str]] = defaultdict(set)
    for _, entry in entries.values():
        for name in entry["source"].get("members", ()):
            key, _, path = name.partition("/")
            joined[key].add(path)
    outputs = recorded_outputs(manifest)
    shards = [(store, entry, frozenset(joined.get(key, ()))) for key, (store, entry) in entries.items()]
    sizes = [
        OPEN_BYTES + sum(output.size for output in outputs[entry["key"]] or () if output.path not in members)
        for _, entry, members in shards
    ]
    return shards, sizes


def _batches(items: Sequence[Item], sizes: Sequence[int], run_all: RunAll | None) -> list[list[Item]]:
    """The items, in order, in batches for workers; a single one for this process."""
    most = max(BATCH_BYTES, sum(sizes) // MOST_BATCHES) if run_all else sum(sizes) + 1
    numbered = zip(accumulate(sizes), items, strict=True)
    return [[item for _, item in batch] for _, batch in groupby(numbered, lambda each: each[0] // most)]


def check_shards(shards: Sequence[Shard], inspect: Inspect, threads: int) -> list[_Checked]:
    """Check shards in so many threads."""
    joined = cache(shards[0][0].joined)  # reads the receipts of all prefixes
    return list(in_threads(lambda shard: _check_shard(*shard, joined, inspect), shards, threads))


def _check_shard(
    store: Store, entry: ShardEntry, members: Collection[str], joined: FindJoined, inspect: Inspect
) -> _Checked:
    """Check one shard; its outputs among `members` of published prefixes are checked there.

    The receipts of members whose bytes changed in a joined file are withdrawn.
    """
    key = entry["key"]
    place = store.path(key, RECEIPT)
    data = read_bytes(place)
    if data is None:
        return _Checked(key, 0, 0, [f"{place}: missing (shard of {entry['place']})"])
    try:
        receipt = Receipt.load(data)
    except InvalidReceiptError as error:
        return _Checked(key, 1, 0, [f"{place}: {error}"], [key], [place])
    outputs = [
        output for output in receipt.outputs
        if output.path not in members or size_of(store.path(key, output.path)) is not None
    ]  # fmt: skip
    problems: list[str] = []
    changed: list[str] = []
    own: list[Output] = []
    for output in outputs:
        file = store.path(key, output.path)
        if isinstance(output, Joined) and size_of(file) == output.size:
            for number in changed_extents(file, output):
                changed.append(receipt.identity["source"]["members"][number].partition("/")[0])
                problems.append(f"{extent_problem(file, output, number)} (shard {changed[-1]})")
        elif problem := _output_problem(store, key, output, joined):
            problems.append(problem)
            own.append(output)
    problems += [
        f"{place}: doesn't list a file for its part {part!r}"
        for part, count in receipt.parts.items()
        if count.documents and not outputs_of(part, receipt.outputs)
    ]
    found = [] if problems else inspect(store, receipt)
    unjudged = (
        None if found is not None else f"format {receipt.identity['format_version']} of {receipt.identity['kind']}"
    )
    problems += found or []
    problems += [] if problems else fate_problems(store, receipt)
    problems += [
        f"{place}: {name} are {found!r}, but the manifest records {entry.get(name, {})!r}"
        for name, found in {**counts_of(receipt), "facts": receipt.facts}.items()
        if found != entry.get(name, {})
    ]
    size = sum(output.size for output in outputs)
    damaged, remove = ([key], [place]) if problems else ([], [])
    if "members" in receipt.identity["source"]:
        # A joined shard keeps its receipt, because only that locates the bytes of its other members; it is joined again without a file.
        others = [output for output in outputs if not isinstance(output, Joined)]
        again = others if found or any(output in own for output in others) else []
        shards = Store(store.place, receipt.identity["recipe"]["shards"])
        remove = [shards.path(member, RECEIPT) for member in changed] + [store.path(key, each.path) for each in again]
        damaged = [*changed, *([key] if found or own else [])]
    return _Checked(key, 1 + len(outputs), size, problems, damaged, remove, receipt.outputs, unjudged)


def _output_problem(store: Store, key: str, output: Output, joined: FindJoined) -> str | None:
    """Return the problem with a shard's output, in its folder or in a prefix that a different preparation published."""
    place = store.path(key, output.path)
    problem = content_problem(place, output, RECEIPT)
    if problem is None or size_of(place) is not None:
        return problem
    extent = joined().get(f"{key}/{output.path}")
    if extent is None:
        return problem
    changed = extent_hash(extent) != output.xxh3_128
    return f"{extent.uri}: content changed in the bytes of shard {key}" if changed else None


def _was_read(file: PublishedFile) -> bool:
    """Whether a published name is the shard's own file or a link to it, which was hashed with its shard."""
    if file.original is None or file.place == file.original:
        return file.original is not None
    if not is_local(file.place) or not is_local(file.original):
        return False
    both_exist = size_of(file.place) is not None and size_of(file.original) is not None
    return both_exist and os.path.samefile(file.place, file.original)  # noqa: PTH121
