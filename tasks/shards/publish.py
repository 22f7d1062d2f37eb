"""The one way to write a file: atomically.

A reader of a published path finds the old content or the new one, never a part of either, even after a kill, a full disk or a
power cut. On a local disk the bytes go to a hidden temporary beside the target and are synced; an atomic rename follows, and
the directory is synced. On S3 and GCS one PUT or one completed multipart upload does the same. The sync costs time: on ext4 on
a virtual SSD a small file takes 0.75 ms instead of 0.25 ms, 256 MB take 0.16 s instead of 0.06 s. Bytes are hashed (xxh3_128,
28 GB/s) as they pass, so no file is read again for its hash; a write of 2 kB costs 1.3 µs.

A killed writer leaves its temporary. Writers lock theirs, and `sweep` removes unlocked ones. A multipart upload is pending,
invisible to readers, if its writer is killed or the store's answer to its start is lost; the bucket's lifecycle rule removes
it.
"""

# Locks and syncs need descriptors, and names are strings because they may be URLs: hence `os`, not `pathlib`.
# ruff: noqa: PTH102, PTH104, PTH105, PTH108, PTH110, PTH112, PTH118, PTH120, PTH121, PTH208

import errno
import fcntl
import io
import os
import re
import secrets
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import orjson
import xxhash
from fsspec.spec import AbstractBufferedFile
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.runtime import in_threads
from tokenmill.tasks.storage import absolute, filesystem, is_local, open_binary

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PART = 1 << 18
"""Small writes are gathered into parts of this many bytes; larger buffers are passed on without a copy."""

ATOMIC = {"s3", "s3a", "gs", "gcs"}
"""Schemes whose objects appear only when their upload is completed."""

COPYING = {*ATOMIC, "memory"}
"""Schemes whose stores copy an object themselves, atomically."""

ATTEMPTS = 5
"""How often a folder is made that pruning removes again."""

COPIES = 16
"""Concurrent requests to copy an object."""

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")

NO_LOCK = {errno.EWOULDBLOCK, errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}
"""A different process holds the lock, or the file system has none (NFS without a lock daemon, Lustre without `flock`)."""

NO_LINK = {errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK}
"""A different device, a file system without hard links, or a file with the maximum number of links."""

Put = Callable[[memoryview], object]


@dataclass(frozen=True, slots=True)
class Output:
    """A published file: its place (as the caller named it), its size in bytes, and its xxh3_128 in hexadecimal."""

    path: str
    size: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class Joined(Output):
    """A file joined from other files without being read: `extents` are the size and xxh3_128 of each, in order.

    Its own xxh3_128 is the hash of the list of extents, as JSON.
    """

    extents: list[tuple[int, str]]

    @classmethod
    def of(cls, path: str, files: Iterable[Output]) -> "Joined":
        """Return the file at `path` that holds `files`, one after the other."""
        extents = [(file.size, file.xxh3_128) for file in files]
        digest = xxhash.xxh3_128_hexdigest(orjson.dumps(extents))
        return cls(path, sum(size for size, _ in extents), digest, extents)


def output_of(record: Mapping[str, Any]) -> Output:
    """Return the output of a record by `dataclasses.asdict`, also after a round trip through JSON."""
    fields = dict(record)
    extents = fields.pop("extents", None)
    return (
        Output(**fields) if extents is None else Joined(**fields, extents=[(size, digest) for size, digest in extents])
    )


class Publication(io.BufferedIOBase):
    """The writable binary stream of a file being published; made and ended by `publish`.

    `output` is set once the `with` block of `publish` has ended without an error; before, the file does not exist.
    """

    output: Output

    def __init__(self, put: Put) -> None:
        super().__init__()
        self.size = 0
        self._put = put
        self._gathered = bytearray()
        self._hash = xxhash.xxh3_128()

    def writable(self) -> bool:
        return True

    def write(self, buffer: "ReadableBuffer", /) -> int:
        """Append `buffer`, any C-contiguous buffer (bytes, memoryview, NumPy array), and return its number of bytes.

        Raises ValueError once the publication has ended, TypeError for a buffer that is not contiguous, OSError as `publish`
        does.
        """
        if self.closed:
            raise ValueError("write after the publication has ended; write inside the with block of publish()")
        view = memoryview(buffer)
        if view.nbytes == 0:
            return 0
        # As bytes, so that lengths and slices count bytes.
        view = view.cast("B")
        if len(self._gathered) + len(view) > PART:
            self.drain()
        if len(view) >= PART:
            self._pass_on(view)
        else:
            self._gathered += view
        self.size += len(view)
        return len(view)

    def drain(self) -> None:
        """Pass on the gathered bytes."""
        gathered, self._gathered = self._gathered, bytearray()
        if gathered:
            self._pass_on(memoryview(gathered))

    def xxh3_128(self) -> str:
        """Return the hash, in hexadecimal, of everything drained so far."""
        return self._hash.hexdigest()

    def _pass_on(self, view: memoryview) -> None:
        self._hash.update(view)
        self._put(view)


@contextmanager
def publish(uri: str) -> Generator[Publication]:
    """A stream whose bytes become the file `uri` when the `with` block ends without an error; creates directories as needed.

    After an error `uri` isn't created, existing content is kept, and the temporary or pending upload is removed. Raises
    OSError with `uri` as its `filename` if the disk is full, fails or denies it; the file is then unchanged, unless only the last
    directory sync failed. Raises InputError for a store that cannot publish atomically.
    """
    with _sink(uri) as put, Publication(put) as publication:
        yield publication
        publication.drain()
    publication.output = Output(uri, publication.size, publication.xxh3_128())


def publish_bytes(uri: str, data: bytes) -> Output:
    """Publish `data` as the file `uri`; errors as in `publish`."""
    with publish(uri) as publication:
        publication.write(data)
    return publication.output


def publish_new(uri: str, data: bytes) -> None:
    """Publish `data` as the file `uri` unless it exists. A store decides that in one step, a disk under its folder's lock.

    Raises FileExistsError if it exists, and errors as in `publish`. A store that ignores `If-None-Match`, as some S3-compatible
    ones do, replaces the file.
    """
    if not is_local(uri) and uri.split("://", 1)[0] in COPYING:
        system, path = filesystem(uri)
        with naming(uri):
            system.pipe_file(path, data, mode="create")
        return
    if os.path.lexists(absolute(uri)):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), uri)
    publish_bytes(uri, data)


def open_log(path: str) -> io.FileIO:
    """Open a local file to append to, unbuffered; the folder is created if missing. Raises OSError.

    The exception to atomic writes: users follow a log while it grows, and need its last line after a crash.
    """
    target = absolute(path)
    _make_directory(os.path.dirname(target))
    return io.FileIO(target, "ab")


def link(source: str, target: str) -> None:
    """Atomically link the local file `source` as `target`; copy it if a hard link is impossible.

    Replaces `target`, unless it already is the same file. Raises OSError with `target` as its `filename`, or
    FileNotFoundError if there is no `source`.
    """
    _give_name(source, target)
    _sync_names([target])


def place_files(pairs: Sequence[tuple[str, str]]) -> None:
    """Copy every source to its target, by `link` where both are local, otherwise by `copy`, in threads.

    A directory is synced once, after its last name: a sync takes at least 0.5 ms, and 100,000 shards have 200,000 names. Names
    left by a killed run are synced with the others. Errors as in `link` and `copy`.
    """
    local = [pair for pair in pairs if all(map(is_local, pair))]
    for source, target in local:
        _give_name(source, target)
    _sync_names([target for _, target in local])
    remote = [pair for pair in pairs if not all(map(is_local, pair))]
    for _ in in_threads(lambda pair: copy(*pair), remote, COPIES):
        pass


def _give_name(source: str, target: str) -> None:
    """Link or copy the local file `source` to `target`, unless that already is the same file."""
    source, target = absolute(source), absolute(target)
    if os.path.exists(target) and os.path.samefile(source, target):
        return
    descriptor = os.open(source, os.O_RDONLY)
    try:
        # The temporary name shares the source's inode: this lock keeps `sweep` away from it.
        _lock(descriptor, fcntl.LOCK_SH)
        if not _linked(source, target):
            with open(descriptor, "rb", closefd=False) as stream, publish(target) as publication:
                shutil.copyfileobj(stream, publication, PART)
    finally:
        _release(descriptor)


def _sync_names(targets: Iterable[str]) -> None:
    """Sync the directories of `targets`, so that these names survive a power cut."""
    for directory, target in {os.path.dirname(absolute(target)): target for target in targets}.items():
        with naming(target):
            _sync_directory(directory)


def copy(source: str, target: str) -> None:
    """Atomically copy the file `source` to `target`, on any storage.

    Within one object store the store copies; otherwise the bytes are streamed. Replaces `target`. Errors as in `publish`, and
    FileNotFoundError if there is no `source`.
    """
    (origin, source_path), (system, target_path) = filesystem(source), filesystem(target)
    if target.split("://", 1)[0] in COPYING and origin == system:
        with noting(f"while copying {source} to {target}"):
            system.cp_file(source_path, target_path)
        return
    with cast("BinaryIO", origin.open(source_path, "rb")) as stream, publish(target) as publication:
        shutil.copyfileobj(stream, publication, PART)


@contextmanager
def publish_folder(folder: str) -> Generator[str]:
    """A temporary local folder that takes the name `folder` when the `with` block ends without an error.

    For libraries that write their own files (checkpoints, models). Replaces a folder with that name, which does not exist
    between the two renames. After an error it is unchanged. Raises OSError as `publish` does.
    """
    target = absolute(folder)
    directory, temporary, former = os.path.dirname(target), _temporary_name(target), _temporary_name(target)
    with naming(target):
        _make_directory(directory)
        os.mkdir(temporary)
    try:
        yield temporary
        with naming(target):
            for place, _, names in os.walk(temporary):
                for name in names:
                    descriptor = os.open(os.path.join(place, name), os.O_RDONLY)
                    try:
                        os.fsync(descriptor)
                    finally:
                        os.close(descriptor)
                _sync_directory(place)
            with suppress(FileNotFoundError):
                os.rename(target, former)
            try:
                os.rename(temporary, target)
            except OSError:
                with suppress(FileNotFoundError):
                    os.rename(former, target)
                raise
            _sync_directory(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def sweep_folders(directory: str) -> list[str]:
    """Remove the temporary folders left by killed writers in a local directory, and return their paths.

    Folders cannot be locked, so the caller must have `directory` to itself.
    """
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    paths = [os.path.join(directory, name) for name in names if TEMPORARY.fullmatch(name)]
    folders = [path for path in paths if os.path.isdir(path)]
    for folder in folders:
        shutil.rmtree(folder)
    return folders


def sweep(directory: str) -> list[str]:
    """Remove the temporaries of killed writers in a local directory (not below it), and return their paths.

    The lock distinguishes an orphan from a file being written, so sweeping while others publish is safe. Without locks, or if
    a different user's file may not be opened, it isn't removed. A missing directory is empty. Raises OSError.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    paths = [os.path.join(directory, name) for name in sorted(names) if TEMPORARY.fullmatch(name)]
    return [path for path in paths if _remove_orphan(path)]


@contextmanager
def _sink(uri: str) -> Generator[Put]:
    """What takes the bytes of the file `uri`, which appears at the end of the block, or not at all."""
    scheme = "file" if is_local(uri) else uri.split("://", 1)[0]
    if scheme == "file":
        target = absolute(uri)

        def put(part: memoryview) -> None:
            with naming(target):
                while part:
                    part = part[os.write(descriptor, part) :]

        with new_local_file(target) as descriptor:
            yield put
    elif scheme == "memory":  # it shows every byte as it is written, so gather first and store at once
        system, path = filesystem(uri)
        content = bytearray()
        yield content.extend
        system.pipe_file(path, bytes(content))
    elif scheme in ATOMIC:
        with _stored_object(uri) as put_part:
            yield put_part
    else:
        raise InputError(f"{uri}: {scheme}:// cannot publish a file atomically; write to a local path, s3:// or gs://")


@contextmanager
def new_local_file(target: str) -> Generator[int]:
    """A new file, open for writing, that takes the name `target` when the block ends without an error."""
    directory = os.path.dirname(target)
    with naming(target):
        temporary, descriptor = _open_temporary(target)
    try:
        yield descriptor
        with naming(target):
            os.fsync(descriptor)
            os.replace(temporary, target)
            _sync_directory(directory)
    except BaseException:
        # The caller must get the first error; `sweep` removes a leftover temporary.
        with suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        _release(descriptor)


@contextmanager
def _stored_object(uri: str) -> Generator[Put]:
    with naming(uri):
        system, path = filesystem(uri)
        stream = cast("AbstractBufferedFile", system.open(path, "wb"))
    try:
        yield naming(uri)(stream.write)
        with naming(uri):
            stream.close()  # sends the one PUT, or the last part and the completion
    except BaseException:
        stream.closed = True  # otherwise its finalizer would send the rest
        with suppress(OSError):  # as for a local file; readers do not see a pending upload
            stream.discard()
        raise


@contextmanager
def noting(note: str) -> Generator[None]:
    """Add a note to an OSError of the block."""
    try:
        yield
    except OSError as error:
        error.add_note(note)
        raise


@contextmanager
def naming(target: str) -> Generator[None]:
    """Set an OSError's filename to the file the caller asked for, instead of a temporary or nothing."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # some stores raise only a message, which Python would not print with a file name
            error.add_note(f"while publishing {target}")
            raise
        error.filename = target
        del error.filename2  # None would be printed
        raise


def _open_temporary(target: str) -> tuple[str, int]:
    """A new file beside `target`, opened and locked: its name and its descriptor."""
    missing = 0
    while True:
        temporary = _temporary_name(target)
        _make_directory(os.path.dirname(target))
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileNotFoundError:  # pruning may remove a folder that is still empty
            missing += 1
            if missing == ATTEMPTS:
                raise
            continue
        _lock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return temporary, descriptor
        os.close(descriptor)  # a sweep between creation and lock has removed the name


def _temporary_name(target: str) -> str:
    directory, name = os.path.split(target)
    return os.path.join(directory, f".{name}.{secrets.token_hex(8)}.tmp")


def _lock(descriptor: int, kind: int) -> bool:
    """Lock the open file; False if it is locked (`LOCK_NB`) or the file system lacks locks."""
    try:
        fcntl.flock(descriptor, kind)
    except OSError as error:
        if error.errno not in NO_LOCK:
            raise
        return False
    return True


def _release(descriptor: int) -> None:
    # After closing alone, a child forked meanwhile would still hold the lock. Without locks this does nothing.
    _lock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _remove_orphan(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except (FileNotFoundError, PermissionError):
        return False
    try:
        if not _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return False
        os.unlink(path)
    except FileNotFoundError:  # its writer published it after the listing
        return False
    finally:
        _release(descriptor)
    return True


def _linked(source: str, target: str) -> bool:
    temporary = _temporary_name(target)
    directory = os.path.dirname(target)
    with naming(target):
        _make_directory(directory)
        try:
            os.link(source, temporary)
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
            return False
        try:
            os.replace(temporary, target)
        finally:
            # If another process has linked the same inode to `target` meanwhile, the rename does nothing and leaves both names.
            with suppress(FileNotFoundError):
                os.unlink(temporary)
    return True


def _make_directory(path: str) -> None:
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    _make_directory(parent)
    with suppress(FileExistsError):
        os.mkdir(path)
    _sync_directory(parent)


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    """Concatenate extents into the file `target`, which is replaced, without reading them where the storage can do that.

    A local disk copies in the kernel, and shares the blocks where the file system has reflinks (XFS, Btrfs); S3 copies parts of
    objects itself (see `tasks.s3`). Other stores stream.

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
            with open_binary(extent.uri) as stream:
                stream.seek(extent.start)
                left = extent.size
                while left:
                    data = stream.read(min(PART, left))
                    if not data:
                        raise OSError(errno.EIO, f"ends {left:,} bytes early", extent.uri)
                    publication.write(data)
                    left -= len(data)


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
