"""Check reads against hashes of blocks, so that a step never trains on a changed bit.

    OUT/order/blocks/<content>.u64    the xxh3_64 of every block of a .bin or .idx file, uint64

`tokenmill order` with `block_hashes=true` hashes the blocks of each file and, in the same pass, the whole file, which must be as the
preparation recorded it. A training run checks .idx files, which locate documents, when it starts. A block of a .bin is
hashed each time a sample reads from it: about 3 microseconds each.
"""

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.score.nll import ranges
from tokenmill.tasks.shards.manifest import open_manifest, published_files, recorded_outputs
from tokenmill.tasks.shards.publish import Joined, publish_bytes
from tokenmill.tasks.shards.store import size_of
from tokenmill.tasks.storage import filesystem, is_local, join, open_binary
from xxhash import xxh3_64_intdigest, xxh3_128, xxh3_128_hexdigest

from .job import READ_SPLITS, TrainData, contents_of
from .samples import Pieces, parts_of

BLOCKS = "order/blocks"
BLOCK_BYTES = 1 << 16


def block_file(path: str, content: str) -> str:
    """Where the block hashes of a content are, for the data in `path`."""
    return join(path, BLOCKS, f"{xxh3_128_hexdigest(content.encode())}.u64")


def hash_blocks(place: str, recorded: Sequence[tuple[int, str]], target: str) -> None:
    """Write the block hashes of the file at `place`. Raises RunError unless its extents have the recorded sizes and hashes."""
    hashes, extents = list[int](), list[str]()
    extent, left = xxh3_128(), [size for size, _ in recorded]
    with open_binary(place) as stream:
        while chunk := stream.read(64 * BLOCK_BYTES):
            view = memoryview(chunk)
            hashes += [xxh3_64_intdigest(view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES)]
            while view and len(extents) < len(left):
                number = len(extents)
                taken = view[: left[number]]
                extent.update(taken)
                left[number], view = left[number] - len(taken), view[len(taken) :]
                if not left[number]:
                    extents.append(extent.hexdigest())
                    extent = xxh3_128()
    if extents != [digest for _, digest in recorded] or size_of(place) != sum(size for size, _ in recorded):
        raise RunError(
            f"{place}: its content is not the recorded one; find the damage with tokenmill verify, and prepare again"
        )
    publish_bytes(target, np.array(hashes, "<u8").tobytes())


@dataclass(frozen=True, slots=True)
class BlockChecks:
    """The .bin files of a split, by prefix."""

    names: Sequence[str]
    files: Sequence[memoryview]  # mapped
    hashes: Sequence[np.ndarray]  # uint64, of their blocks
    pointers: Sequence[np.ndarray]  # where documents begin in them, in bytes
    token_bytes: int

    def check(self, pieces: Pieces) -> None:
        """Raises InputError if a block that holds tokens of the pieces has changed."""
        for source in map(int, np.unique(pieces.source)):
            mine = pieces.source == source
            begin = self.pointers[source][pieces.document[mine]] + pieces.offset[mine] * self.token_bytes
            last = (begin + pieces.length[mine] * self.token_bytes - 1) // BLOCK_BYTES
            first = begin // BLOCK_BYTES
            blocks = np.unique(ranges(first, last - first + 1)).tolist()
            _check(self.names[source], self.files[source], self.hashes[source], blocks)


def _check(name: str, file: memoryview, hashes: np.ndarray, blocks: Iterable[int]) -> None:
    for block in blocks:
        begin = block * BLOCK_BYTES
        if xxh3_64_intdigest(file[begin : begin + BLOCK_BYTES]) != hashes[block]:
            raise InputError(
                f"{name}: changed between bytes {begin:,} and {begin + BLOCK_BYTES:,} since it was prepared; "
                "find out more with tokenmill verify, run the same preparation again, and resume this training run"
            )


def check_places_of_documents(data: TrainData) -> None:
    """Raise InputError for an .idx file that has changed, or without block hashes: it locates the documents."""
    require_block_hashes(data)
    for place, target in _hashed_files(data):
        if place.endswith(".idx"):
            hashes = np.fromfile(target, "<u8")
            _check(place, _mapped(place), hashes, range(len(hashes)))


def require_block_hashes(data: TrainData) -> None:
    """Raises InputError unless all blocks that a training run may read are hashed, and the data are in a local folder."""
    if not is_local(data.path):
        raise InputError(f"check_reads=true: {data.path} is read by ranges; only data in a local folder can be checked")
    missing = next((target for _, target in _hashed_files(data) if not Path(target).exists()), None)
    if missing:
        raise InputError(
            f"check_reads=true: {missing} is missing; write the hashes with: tokenmill order {data.path} block_hashes=true …"
        )


def block_checks(data: TrainData, split: str, samples: Any) -> BlockChecks:  # noqa: ANN401 - megatron-core has no types
    """Return the checks of a split that is read by megatron-core's dataset `samples`. Raises InputError without block hashes."""
    require_block_hashes(data)
    files = [f"{file}.bin" for source in data.of(split) for file in source.files]
    places = [block_file(data.path, content) for content in contents_of(data, split)]
    parts = parts_of(samples)
    return BlockChecks(
        names=files,
        files=[_mapped(file) for file in files],
        hashes=[np.fromfile(place, "<u8") for place in places],
        pointers=[part.dataset.index.sequence_pointers for part in parts],
        token_bytes=parts[0].dataset.index.dtype_size,
    )


def _mapped(place: str) -> memoryview:
    with Path(place).open("rb") as stream:
        return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))


def block_calls(data: TrainData) -> list[Mapping[str, Any]]:
    """Return the calls of `hash_blocks` for all files of `data` without block hashes."""
    manifest = open_manifest(data.path)
    recorded = {  # the size and xxh3_128 of every extent of each published file, by its place
        file.place: one.extents if isinstance(one := file.recorded, Joined) else [(one.size, one.xxh3_128)]
        for file in published_files(data.path, manifest, recorded_outputs(manifest))
    }
    return [
        {"place": place, "target": target, "recorded": recorded.get(place, [])}
        for place, target in _hashed_files(data)
        if not filesystem(target)[0].exists(filesystem(target)[1])
    ]


def _hashed_files(data: TrainData) -> Iterator[tuple[str, str]]:
    """The files that a training run reads, each with the place of its block hashes."""
    for split in READ_SPLITS:
        for source in data.of(split):
            for file, content in zip(source.files, source.contents, strict=True):
                yield f"{file}.bin", block_file(data.path, content)
                yield f"{file}.idx", block_file(data.path, f"{content}.idx")
