"""Verify a published preparation: hash every file, check the counts of every receipt, and compare both with the manifest.

Hashing (xxh3_128) runs at disk speed. A shard that fails loses its receipt, so the next run of the same preparation rebuilds
only that shard. The files of other format versions are not inspected: their hashes and counts are compared.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenmill.tasks.storage import is_local
from tokenmill.tasks.threads import in_threads

from .join import Extent
from .publish import Joined, Output
from .published import (
    THREADS,
    PublishedFile,
    changed_extents,
    content_problem,
    extent_hash,
    extent_problem,
    outputs_of,
    problems_in,
    published_files,
    read_publication,
    size_problem,
)
from .receipt import RECEIPT, InvalidReceiptError, Receipt
from .store import Store, read_bytes, remove_file, size_of

Inspect = Callable[[Store, Receipt], list[str] | None]
"""Check a shard's files in their own format; returns the problems as sentences, None for a format that it can't judge."""

FindJoined = Callable[[], Mapping[str, Extent]]
"""Find the outputs that are in prefixes: see `Store.joined`."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Numbers of checked files and shards, and every problem found; each problem names a file.

    `unchecked` says what could not be compared here, and why; it is no problem of the data.
    """

    shards: int
    files: int
    size: int
    problems: list[str]
    withdrawn: list[str]
    unchecked: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Checked:
    """What was found in one shard: `damaged` are the keys of damaged shards, `remove` the files to remove so that the next run
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


def verify(output_dir: str, inspect: Inspect) -> Verification:
    """Verify a published preparation and withdraw the receipts of damaged shards.

    Raises InputError if the manifest is missing or damaged, or names no store.
    """
    publication = read_publication(output_dir)
    entries = list({entry["key"]: (store, entry) for store, entry in publication.entries}.values())
    members = frozenset(name for _, entry in entries for name in entry["source"].get("members", ()))
    joined = cache(publication.store.joined)  # reads the receipts of all prefixes
    checked = list(in_threads(lambda each: _check_shard(*each, members, joined, inspect), entries, THREADS))
    for place in {place for shard in checked for place in shard.remove}:
        remove_file(place)
    published = published_files(publication, {shard.key: shard.outputs for shard in checked})
    problems = [problem for shard in checked for problem in shard.problems]
    problems += problems_in((file for file in published if not _was_read(file)), content_problem)
    problems += [f"{place}: planned, but missing from this partial output" for place in publication.manifest["missing"]]
    files, size = sum(shard.files for shard in checked), sum(shard.size for shard in checked)
    withdrawn = list(dict.fromkeys(key for shard in checked for key in shard.damaged))
    formats = Counter(shard.unjudged for shard in checked if shard.unjudged)
    maker = publication.manifest["volatile"].get("versions", {}).get("tokenmill", "another version")
    unchecked = [
        f"{name} ({count:,} of {len(checked):,} shards), made by tokenmill {maker}; hashes and counts agree"
        for name, count in formats.items()
    ]
    return Verification(len(checked), files, size, problems, withdrawn, unchecked)


def _check_shard(
    store: Store, entry: Mapping[str, Any], members: Collection[str], joined: FindJoined, inspect: Inspect
) -> _Checked:
    """Check one shard; its outputs among `members` of published prefixes are checked there."""
    key = entry["key"]
    place = store.path(key, RECEIPT)
    data = read_bytes(place)
    if data is None:
        return _Checked(key, 0, 0, [f"{place}: missing (shard of {entry['place']})"])
    try:
        receipt = Receipt.load(data)
    except InvalidReceiptError as error:
        return _Checked(key, 1, 0, [f"{place}: {error}"], [key], [place])
    if "members" in receipt.identity["source"]:
        return _check_prefix(store, entry, receipt, inspect)
    outputs = [
        output for output in receipt.outputs
        if f"{key}/{output.path}" not in members or size_of(store.path(key, output.path)) is not None
    ]  # fmt: skip
    problems = [problem for output in outputs if (problem := _output_problem(store, key, output, joined))]
    problems += [
        f"{place}: lists no file for its part {part!r}"
        for part, count in receipt.parts.items()
        if count.documents and not outputs_of(part, receipt.outputs)
    ]
    found = [] if problems else inspect(store, receipt)
    problems += found or []
    problems += _count_problems(place, entry, receipt)
    size = sum(output.size for output in outputs)
    damaged, remove = ([key], [place]) if problems else ([], [])
    return _Checked(key, 1 + len(outputs), size, problems, damaged, remove, receipt.outputs, _format(receipt, found))


def _output_problem(store: Store, key: str, output: Output, joined: FindJoined) -> str | None:
    """The problem with an output of a shard, in its folder or in a prefix that another preparation published."""
    place = store.path(key, output.path)
    extent = joined().get(f"{key}/{output.path}") if size_of(place) is None else None
    if extent is None:
        return content_problem(place, output, RECEIPT)
    changed = extent_hash(extent) != output.xxh3_128
    return f"{extent.uri}: content changed in the bytes of shard {key}" if changed else None


def _check_prefix(store: Store, entry: Mapping[str, Any], receipt: Receipt, inspect: Inspect) -> _Checked:
    """Check a prefix, and withdraw the receipts of members whose bytes changed.

    A prefix keeps its own receipt, because only that says where the bytes of its other members are. Its other files are removed
    if they are damaged, so that it is joined again.
    """
    key, place = receipt.key, store.path(receipt.key, RECEIPT)
    (joined,) = (output for output in receipt.outputs if isinstance(output, Joined))
    file = store.path(key, joined.path)
    missing = size_problem(file, joined, RECEIPT)
    changed = [] if missing else changed_extents(file, joined)
    members = [receipt.identity["source"]["members"][number].partition("/")[0] for number in changed]
    others = [output for output in receipt.outputs if output is not joined]
    found = [
        problem for output in others if (problem := content_problem(store.path(key, output.path), output, RECEIPT))
    ]
    inspected = [] if found or missing or changed else inspect(store, receipt)
    found += inspected or []
    problems = [
        *([missing] if missing else []),
        *(f"{extent_problem(file, joined, number)} (shard {of})" for number, of in zip(changed, members, strict=True)),
        *found,
        *_count_problems(place, entry, receipt),
    ]
    shards = Store(store.place, receipt.identity["recipe"]["shards"])
    remove = [shards.path(member, RECEIPT) for member in members]
    remove += [store.path(key, output.path) for output in others if found]
    size = sum(output.size for output in receipt.outputs)
    own = [key] if found or missing else []
    damaged = [*members, *own]
    return _Checked(
        key, 1 + len(receipt.outputs), size, problems, damaged, remove, receipt.outputs, _format(receipt, inspected)
    )


def _format(receipt: Receipt, inspected: Sequence[str] | None) -> str | None:
    """The format of a shard that could not be inspected."""
    kind, version = receipt.identity["kind"], receipt.identity["format_version"]
    return f"format {version} of {kind}" if inspected is None else None


def _count_problems(place: str, entry: Mapping[str, Any], receipt: Receipt) -> list[str]:
    """The manifest must record the same counts for a shard as its receipt."""
    counts = {
        "rows": receipt.rows_in,
        "documents": {name: count.documents for name, count in receipt.parts.items()},
        "tokens": {name: count.tokens for name, count in receipt.parts.items()},
        "drops": receipt.drops,
        "quarantined": receipt.quarantined,
        "truncated": receipt.truncated,
        "facts": receipt.facts,
    }
    return [
        f"{place}: {name} are {found!r}, but the manifest says {entry.get(name, {})!r}"
        for name, found in counts.items()
        if found != entry.get(name, {})
    ]


def _was_read(file: PublishedFile) -> bool:
    """Whether a published name is the shard's own file or a link to it, which was hashed with its shard."""
    if file.original is None or file.place == file.original:
        return file.original is not None
    if not is_local(file.place) or not is_local(file.original):
        return False
    both_exist = size_of(file.place) is not None and size_of(file.original) is not None
    return both_exist and os.path.samefile(file.place, file.original)  # noqa: PTH121
