"""The published files of a preparation: every name in its manifest, matched with the receipt of the file.

`verify`, `push` and the checks before training use this module.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, BinaryIO, cast

import xxhash
from tokenmill.tasks.storage import filesystem, join
from tokenmill.tasks.threads import in_threads

from .join import Extent
from .manifest import MANIFEST, stored_entries
from .plan import WHOLE
from .publish import Joined, Output, output_of
from .receipt import RECEIPT
from .store import Store, size_of

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
    output_dir: str, manifest: Mapping[str, Any], outputs: Mapping[str, Sequence[Output] | None]
) -> Iterator[PublishedFile]:
    """Yield every published file. `outputs` belong to each shard's receipt by key, None for a shard without one."""
    for store, entry in stored_entries(manifest):
        for part, names in entry["published"].items():
            recorded = outputs_of(part, outputs[entry["key"]] or []) or outputs_of(WHOLE, outputs[entry["key"]] or [])
            for name in names:
                yield from _files(output_dir, store, entry["key"], name, recorded)
    for file in manifest["files"]:
        place = join(output_dir, file["path"])
        yield PublishedFile(place, place, output_of(file), MANIFEST)


def join_published(output_dir: str, name: str) -> str:
    """Return the place of a name in a manifest: below the output folder, unless it is in the store of an object storage."""
    return name if name.startswith("/") or "://" in name else join(output_dir, name)


def outputs_of(part: str, outputs: Iterable[Output]) -> list[Output]:
    """The outputs of a part of a shard: `train.bin` and `train.idx` of `train`."""
    return [output for output in outputs if output.path.partition(".")[0] == part]


def _files(output_dir: str, store: Store, key: str, name: str, outputs: Sequence[Output]) -> Iterator[PublishedFile]:
    """The files of a published name: the one output with its extension, otherwise all that begin with it."""
    full = join_published(output_dir, name)
    endings = {f".{output.path.partition('.')[2]}": output for output in outputs}
    whole = {ending: output for ending, output in endings.items() if full.endswith(ending)}
    for ending, output in (whole or endings).items():
        original = store.path(key, output.path)
        yield PublishedFile(full, full if whole else f"{full}{ending}", output, RECEIPT, original)


def recorded_outputs(manifest: Mapping[str, Any]) -> dict[str, Sequence[Output] | None]:
    """Return the outputs in the receipt of each published shard, by key; None without a valid receipt."""
    unique = {entry["key"]: store for store, entry in stored_entries(manifest)}
    receipts = in_threads(lambda item: item[1].read_receipt(item[0]), list(unique.items()), THREADS)
    return {key: receipt and receipt.outputs for key, receipt in zip(unique, receipts, strict=True)}


def problems_in(files: Iterable[PublishedFile], check: Callable[[str, Output, str], str | None]) -> list[str]:
    """The problems that `check` finds in the files, in their order. Several files are checked at a time."""
    found = in_threads(lambda file: check(file.place, file.recorded, file.listed_in), list(files), THREADS)
    return [problem for problem in found if problem]


def size_problem(place: str, recorded: Output, listed_in: str) -> str | None:
    """The problem with a file's size, or None if it is as recorded."""
    size = size_of(place)
    if size is None:
        return f"{place}: missing"
    return None if size == recorded.size else f"{place}: {size:,} bytes, but {listed_in} records {recorded.size:,}"


def content_problem(place: str, recorded: Output, listed_in: str) -> str | None:
    """The problem with a file's size or hash, or None if both are as recorded. Reads the whole file."""
    problem = size_problem(place, recorded, listed_in)
    if problem:
        return problem
    if isinstance(recorded, Joined):
        return next((extent_problem(place, recorded, number) for number in changed_extents(place, recorded)), None)
    found = file_hash(place)
    if found == recorded.xxh3_128:
        return None
    return f"{place}: content changed (xxh3_128 is {found}, {listed_in} records {recorded.xxh3_128})"


def changed_extents(place: str, recorded: Joined) -> list[int]:
    """The numbers of the extents of a file whose content changed. Reads the whole file, several extents at a time."""
    starts = accumulate((size for size, _ in recorded.extents[:-1]), initial=0)
    extents = [Extent(place, start, size) for start, (size, _) in zip(starts, recorded.extents, strict=True)]
    hashes = list(in_threads(extent_hash, extents, THREADS))
    return [
        number
        for number, (found, (_, wanted)) in enumerate(zip(hashes, recorded.extents, strict=True))
        if found != wanted
    ]


def extent_problem(place: str, recorded: Joined, number: int) -> str:
    """The sentence for an extent whose content changed."""
    start = sum(size for size, _ in recorded.extents[:number])
    return f"{place}: content changed in bytes {start:,} to {start + recorded.extents[number][0]:,}"


def file_hash(place: str) -> str:
    """The xxh3_128 of a file, read in chunks."""
    system, path = filesystem(place)
    return extent_hash(Extent(place, 0, cast("int", system.info(path)["size"])))


def extent_hash(extent: Extent) -> str:
    """The xxh3_128 of part of a file, read in chunks; of what there is, if the file ends early."""
    hasher = xxhash.xxh3_128()
    system, path = filesystem(extent.uri)
    left = extent.size
    with cast("BinaryIO", system.open(path, "rb")) as stream:
        stream.seek(extent.start)
        while left and (chunk := stream.read(min(CHUNK_BYTES, left))):
            hasher.update(chunk)
            left -= len(chunk)
    return hasher.hexdigest()
