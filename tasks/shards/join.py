"""Join files into one without reading them, where the storage can do that.

A local disk copies in the kernel, and shares the blocks where the file system has reflinks (XFS, Btrfs); S3 copies parts of
objects itself (see `tasks.s3`). Other stores stream.
"""

import errno
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tokenmill.tasks.storage import absolute, filesystem, is_local, open_binary

from .publish import PART, Output, Publication, naming, new_local_file, noting, publish

NO_RANGE_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF}
"""`copy_file_range` does not work between these files, or not on this kernel."""


@dataclass(frozen=True, slots=True)
class Extent:
    """`size` bytes of the file at `uri`, from byte `start`."""

    uri: str
    start: int
    size: int


def join_files(sources: Iterable[str], target: str) -> Output:
    """Concatenate files into the file `target`. Errors as in `copy`."""
    with publish(target) as publication:
        for source in sources:
            with open_binary(source) as stream:
                shutil.copyfileobj(stream, publication, PART)
    return publication.output


def join_extents(extents: Sequence[Extent], target: str) -> None:
    """Concatenate extents into the file `target`, which is replaced.

    Errors as in `publish.copy`, and OSError for an extent that ends early.
    """
    if is_local(target) and all(is_local(extent.uri) for extent in extents):
        with new_local_file(absolute(target)) as descriptor:
            for extent in extents:
                _append_extent(descriptor, extent, target)
        return
    (system, path), scheme = filesystem(target), target.split("://", 1)[0]
    if scheme in {"s3", "s3a"} and all(filesystem(extent.uri)[0] == system for extent in extents):
        with noting(f"while joining {len(extents)} extents to {target}"):
            cast("Any", system).join(
                [(filesystem(extent.uri)[1], extent.start, extent.size) for extent in extents], path
            )
        return
    with publish(target) as publication:
        for extent in extents:
            _stream_extent(publication, extent)


def _append_extent(descriptor: int, extent: Extent, target: str) -> None:
    source = os.open(absolute(extent.uri), os.O_RDONLY)
    start, left = extent.start, extent.size
    try:
        while left:
            with naming(target):
                done = _copy_range(source, descriptor, left, start)
            if not done:
                raise OSError(errno.EIO, f"ends {left:,} bytes early", extent.uri)
            start, left = start + done, left - done
    finally:
        os.close(source)


def _copy_range(source: int, target: int, count: int, start: int) -> int:
    """Copy up to `count` bytes from `start` to the end of `target` in the kernel; returns how many, 0 at the end of the file."""
    try:
        return os.copy_file_range(source, target, count, start)
    except OSError as error:
        if error.errno not in NO_RANGE_COPY:
            raise
        return os.sendfile(target, source, start, count)


def _stream_extent(publication: Publication, extent: Extent) -> None:
    with open_binary(extent.uri) as stream:
        stream.seek(extent.start)
        left = extent.size
        while left:
            data = stream.read(min(PART, left))
            if not data:
                raise OSError(errno.EIO, f"ends {left:,} bytes early", extent.uri)
            publication.write(data)
            left -= len(data)
