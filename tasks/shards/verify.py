"""Verification: is everything that the manifest promises there, whole, and accounted for?

Every file is read and hashed again (xxh3_128 runs at disk speed), every receipt's books are added up again, and the
published names, blend.json and the quarantine are compared with the manifest. A shard that fails loses its receipt: a
receipt is a proof, and this one has turned out false. The next run of the same preparation then builds that shard, and
only it.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import xxhash
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.storage import absolute, filesystem, is_local, join

from .manifest import MANIFEST, WHOLE, read_manifest
from .publish import Output
from .receipt import RECEIPT, InvalidReceiptError, Receipt
from .store import Store, read_bytes, size_of

CHUNK_BYTES = 4 << 20
THREADS = min(16, (os.cpu_count() or 1) * 2)

Inspect = Callable[[Store, Receipt], list[str]]
"""Checks what only the shard's own room understands (its file format); returns problems in words."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What was checked, and every problem found, each naming a file."""

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

    Raises InputError when there is no manifest, or it is damaged itself.
    """
    output_dir = absolute(output_dir)
    manifest = read_manifest(output_dir)
    if manifest is None:
        raise InputError(f"{output_dir}: no {MANIFEST} here; point at the --output-dir of a preparation")
    if "store" not in manifest["volatile"]:
        raise InputError(f"{output_dir}: a copy without its shards; verify the folder that it was copied from")
    store = Store(manifest["volatile"]["store"], manifest["type"])
    entries: dict[str, Mapping[str, Any]] = {entry["key"]: entry for entry in _entries(manifest)}
    with ThreadPoolExecutor(THREADS) as pool:
        checked = list(pool.map(lambda entry: _check_shard(store, entry, inspect), entries.values()))
    withdrawn = [shard.key for shard in checked if shard.damaged]
    for key in withdrawn:
        store.withdraw(key)
    problems = [problem for shard in checked for problem in shard.problems]
    problems += _check_published(output_dir, manifest, store, {shard.key: shard.outputs for shard in checked})
    problems += [f"{place}: planned, but missing from this partial output" for place in manifest["missing"]]
    return Verification(
        len(checked), sum(shard.files for shard in checked), sum(shard.size for shard in checked), problems, withdrawn
    )


def _entries(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The shards of a preparation, and those that were made from them."""
    return [*manifest["shards"], *manifest.get("derived", {}).get("shards", [])]


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
    problems = [
        problem for output in receipt.outputs for problem in _check_file(store.path(key, output.path), output, RECEIPT)
    ]
    problems += [
        f"{place}: lists no file of its part {part!r}"
        for part, count in receipt.parts.items()
        if count.documents and not _outputs_of(part, receipt.outputs)
    ]
    problems = problems or inspect(store, receipt)
    problems += _check_books(place, entry, receipt)
    size = sum(output.size for output in receipt.outputs)
    return _Checked(key, 1 + len(receipt.outputs), size, problems, bool(problems), receipt.outputs)


def _outputs_of(part: str, outputs: Iterable[Output]) -> list[Output]:
    return [output for output in outputs if output.path.partition(".")[0] == part]


def _check_file(place: str, recorded: Output, witness: str) -> Iterable[str]:
    """A file must have the size and the hash that its witness recorded."""
    size = size_of(place)
    if size is None:
        yield f"{place}: missing"
    elif size != recorded.size:
        yield f"{place}: {size:,} bytes, but {witness} says {recorded.size:,}"
    elif (found := file_hash(place)) != recorded.xxh3_128:
        yield f"{place}: content changed (xxh3_128 is {found}, {witness} says {recorded.xxh3_128})"


def file_hash(place: str) -> str:
    """The xxh3_128 of a file, read in chunks."""
    hasher = xxhash.xxh3_128()
    system, path = filesystem(place)
    with cast("BinaryIO", system.open(path, "rb")) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


def _check_books(place: str, entry: Mapping[str, Any], receipt: Receipt) -> list[str]:
    """The manifest's books for a shard must be its receipt's."""
    books = {
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
        for name, found in books.items()
        if found != entry.get(name, {})
    ]


def _check_published(
    output_dir: str, manifest: Mapping[str, Any], store: Store, outputs: Mapping[str, list[Output] | None]
) -> list[str]:
    """The published names must be the shards' own files; blend.json and the other files, what was published.

    The names of a shard without a readable receipt can be held against nothing, and that it has none is known by now.
    """
    checks = [(join(output_dir, file["path"]), Output(**file), MANIFEST) for file in manifest["files"]]
    for entry in _entries(manifest):
        recorded = outputs[entry["key"]] or []
        for split, names in entry["published"].items():
            own = _outputs_of(split, recorded) or _outputs_of(WHOLE, recorded)
            for name in names:
                place = name if name.startswith(("/", store.place)) else join(output_dir, name)
                checks += [
                    (each, output, RECEIPT)
                    for each, output in _named(place, own)
                    if not _is_same_file(each, store.path(entry["key"], output.path))
                ]
    with ThreadPoolExecutor(THREADS) as pool:
        return [problem for found in pool.map(lambda check: list(_check_file(*check)), checks) for problem in found]


def _named(name: str, outputs: list[Output]) -> list[tuple[str, Output]]:
    """The files that a name stands for: it is the path of one output, or the prefix of all of them."""
    endings = [f".{output.path.partition('.')[2]}" for output in outputs]
    whole = [(name, output) for output, ending in zip(outputs, endings, strict=True) if name.endswith(ending)]
    return whole or [(f"{name}{ending}", output) for output, ending in zip(outputs, endings, strict=True)]


def _is_same_file(name: str, original: str) -> bool:
    """Whether both are one file, perhaps under two names: it was read already."""
    if name == original:
        return True
    both_here = is_local(name) and is_local(original) and size_of(name) is not None and size_of(original) is not None
    return both_here and os.path.samefile(name, original)  # noqa: PTH121
