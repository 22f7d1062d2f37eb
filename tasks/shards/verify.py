"""Verify a published preparation: hash every file, check the counts of every receipt, and compare both with the manifest.

Hashing (xxh3_128) runs at disk speed. A shard that fails loses its receipt, so the next run of the same preparation rebuilds
only that shard.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.tasks.storage import is_local
from tokenmill.tasks.threads import in_threads

from .publish import Output
from .published import (
    THREADS,
    PublishedFile,
    content_problem,
    outputs_of,
    problems_in,
    published_files,
    read_publication,
)
from .receipt import RECEIPT, InvalidReceiptError, Receipt
from .store import Store, read_bytes, size_of

Inspect = Callable[[Store, Receipt], list[str]]
"""Check a shard's files in their own format; returns the problems as sentences."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Numbers of checked files and shards, and every problem found; each problem names a file."""

    shards: int
    files: int
    size: int
    problems: list[str]
    withdrawn: list[str]


@dataclass(frozen=True, slots=True)
class _Checked:
    key: str
    files: int
    size: int
    problems: list[str]
    damaged: bool
    outputs: list[Output] | None = None


def verify(output_dir: str, inspect: Inspect) -> Verification:
    """Verify a published preparation and withdraw the receipts of damaged shards.

    Raises InputError if the manifest is missing or damaged, or names no store.
    """
    publication = read_publication(output_dir)
    store = publication.store
    entries = list({entry["key"]: entry for entry in publication.entries}.values())
    checked = list(in_threads(lambda entry: _check_shard(store, entry, inspect), entries, THREADS))
    withdrawn = [shard.key for shard in checked if shard.damaged]
    for key in withdrawn:
        store.withdraw(key)
    published = published_files(publication, {shard.key: shard.outputs for shard in checked})
    problems = [problem for shard in checked for problem in shard.problems]
    problems += problems_in((file for file in published if not _was_read(file)), content_problem)
    problems += [f"{place}: planned, but missing from this partial output" for place in publication.manifest["missing"]]
    files, size = sum(shard.files for shard in checked), sum(shard.size for shard in checked)
    return Verification(len(checked), files, size, problems, withdrawn)


def _check_shard(store: Store, entry: Mapping[str, Any], inspect: Inspect) -> _Checked:
    key = entry["key"]
    place = store.path(key, RECEIPT)
    data = read_bytes(place)
    if data is None:
        return _Checked(key, 0, 0, [f"{place}: missing (shard of {entry['place']})"], damaged=False)
    try:
        receipt = Receipt.load(data)
    except InvalidReceiptError as error:
        return _Checked(key, 1, 0, [f"{place}: {error}"], damaged=True)
    found = (content_problem(store.path(key, output.path), output, RECEIPT) for output in receipt.outputs)
    problems = [problem for problem in found if problem]
    problems += [
        f"{place}: lists no file for its part {part!r}"
        for part, count in receipt.parts.items()
        if count.documents and not outputs_of(part, receipt.outputs)
    ]
    problems = problems or inspect(store, receipt)
    problems += _count_problems(place, entry, receipt)
    size = sum(output.size for output in receipt.outputs)
    return _Checked(key, 1 + len(receipt.outputs), size, problems, bool(problems), receipt.outputs)


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
