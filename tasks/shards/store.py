"""The store of shards: `STORE/<kind>/<key>/`, one folder per shard, its receipt written last.

Any number of preparations and workers may share a store: two that build the same shard write the same bytes, each file replaced
atomically. A shard is proven if its receipt is valid and every output has the recorded size; `verify` also hashes them.

Tokens are not kept twice. Prefixes, in `STORE/prefix/<key>/`, are files joined from outputs of shards, whose own files are then
removed. The receipt of a prefix lists its members, so it locates their bytes. All of them are read when an output is not
in its shard's folder: one file per 32 GB of tokens.
"""

import errno
import fcntl
import itertools
import os
import shlex
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
from pydantic import TypeAdapter
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.runtime import in_threads
from tokenmill.tasks.seal import sealed, unsealed
from tokenmill.tasks.storage import absolute, filesystem, is_local, join, user_cache
from xxhash import xxh3_128_hexdigest

from .publish import Extent, Joined, Output, publish_bytes
from .receipt import RECEIPT, Identity, InvalidReceiptError, PartCount, Receipt, shard_key

THREADS = 16
"""Receipts read at a time: on an object store each costs a round trip of about 30 ms."""

PREFIX = "prefix"
"""The stage whose shards are joined from outputs of other shards, which are removed then."""

LISTED = 1_000
"""With this many keys or more, list folders before reading receipts: one page of an object store's listing."""


@dataclass(frozen=True, slots=True)
class Store:
    """The shards of one kind in one store."""

    place: str
    kind: str
    built_with: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)
    """What builds its shards in this run, for their receipts."""

    def folder(self, key: str) -> str:
        return join(self.place, self.kind, key)

    def path(self, key: str, name: str) -> str:
        return join(self.folder(key), name)

    def receipt(self, key: str) -> Receipt | None:
        """Return the shard's receipt if it proves the shard, else None. Raises errors of the storage."""
        return self.proven([key]).get(key)

    def read_receipt(self, key: str) -> Receipt | None:
        """Return the shard's receipt, or None if it is missing or invalid. Its outputs may be gone."""
        try:
            receipt = Receipt.load(read_bytes(self.path(key, RECEIPT)) or b"")
        except InvalidReceiptError:
            return None
        return receipt if receipt.key == key else None

    def issue(
        self,
        identity: Identity,
        *,
        outputs: Iterable[Output],
        rows_in: int,
        parts: Mapping[str, PartCount],
        drops: Mapping[str, int],
        quarantined: int = 0,
        truncated: int = 0,
        facts: Mapping[str, Any] | None = None,
        volatile: Mapping[str, Any] | None = None,
    ) -> Receipt:
        """Write the receipt of a shard whose outputs are all published, and return it; `facts` must be plain JSON.

        Raises InvalidReceiptError if a row is unaccounted for.
        """
        key = shard_key(identity)
        # Paths are relative to the shard's folder, so that a store can be moved.
        inside = [replace(output, path=output.path.removeprefix(f"{self.folder(key)}/")) for output in outputs]
        receipt = Receipt(
            key=key,
            identity=dict(identity),
            outputs=sorted(inside, key=lambda output: output.path),
            rows_in=rows_in,
            parts=dict(sorted(parts.items())),
            drops=dict(sorted(drops.items())),
            quarantined=quarantined,
            truncated=truncated,
            facts=dict(facts or {}),
            volatile={**(volatile or {}), **({"built_with": dict(self.built_with)} if self.built_with else {})},
        )
        publish_bytes(self.path(receipt.key, RECEIPT), receipt.dump())
        return receipt

    def proven(self, keys: Iterable[str]) -> dict[str, Receipt]:
        """Return the receipts of the proven shards among `keys`."""

        def read(key: str) -> tuple[Receipt, list[Output]] | None:
            if receipt := self.read_receipt(key):
                return receipt, [each for each in receipt.outputs if size_of(self.path(key, each.path)) != each.size]
            return None

        found = [each for each in in_threads(read, list(dict.fromkeys(keys)), THREADS) if each is not None]
        # Outputs that aren't in their folders may have been joined; only then all prefixes are read.
        joined = self.joined() if any(absent for _, absent in found) else {}
        sizes = {name: extent.size for name, extent in joined.items()}
        return {
            receipt.key: receipt
            for receipt, absent in found
            if all(sizes.get(f"{receipt.key}/{output.path}") == output.size for output in absent)
        }

    def locate(self, key: str, name: str) -> Extent | None:
        """Return the place of a file in a shard: in its folder, or in a prefix; None if it is missing."""
        place = self.path(key, name)
        size = size_of(place)
        return self.joined().get(f"{key}/{name}") if size is None else Extent(place, 0, size)

    def joined(self) -> dict[str, Extent]:
        """Where prefixes hold outputs of shards of this kind, by `<key>/<path>`."""
        prefixes = Store(self.place, PREFIX)
        receipts = in_threads(prefixes.read_receipt, prefixes.keys(), THREADS)
        return {name: extent for receipt in receipts if receipt for name, extent in prefixes.extents(receipt)}

    def extents(self, receipt: Receipt) -> list[tuple[str, Extent]]:
        """Return the name (`<key>/<path>`) and place of each member of a prefix; none if its file is missing or has the wrong size."""
        (file,) = (output for output in receipt.outputs if isinstance(output, Joined))
        place = self.path(receipt.key, file.path)
        if size_of(place) != file.size:
            return []
        sizes = [size for size, _ in file.extents]
        names = receipt.identity["source"]["members"]
        return [
            (name, Extent(place, start, size))
            for name, start, size in zip(names, itertools.accumulate(sizes[:-1], initial=0), sizes, strict=True)
        ]

    def begun(self, keys: Iterable[str]) -> list[str]:
        """Return the keys that have a folder here; all of them if they are few, because reading each is cheaper than a listing.

        On a network file system a listing may be stale: it may lack a shard that is already built, never the reverse.
        """
        unique = list(dict.fromkeys(keys))
        if len(unique) < LISTED:
            return unique
        there = set(self.keys())
        return [key for key in unique if key in there]

    def there(self, keys: Iterable[str]) -> list[str]:
        """Return the keys of shards that are still here: with a receipt on a disk, with a folder on an object store."""
        # Listing 100,000 folders on an object store takes 100 requests, asking for each 100,000.
        if is_local(self.place):
            return [key for key in keys if os.path.lexists(absolute(self.path(key, RECEIPT)))]
        listed = set(self.keys())
        return [key for key in keys if key in listed]

    def keys(self) -> list[str]:
        system, path = filesystem(join(self.place, self.kind))
        system.invalidate_cache(path)  # fsspec keeps listings, and other processes add shards
        try:
            folders = cast("list[str]", system.ls(path, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []
        # Object stores list folders with a slash at the end.
        return sorted(folder.rstrip("/").rpartition("/")[2] for folder in folders)

    def read(self, receipt: Receipt, name: str) -> bytes:
        """Return the content of a file in a shard, checked against its receipt.

        Raises RunError, and withdraws the receipt, if the file has changed; and if its format doesn't have such a file.
        """
        place = self.path(receipt.key, name)
        recorded = next((output for output in receipt.outputs if output.path == name), None)
        if recorded is None:
            identity = receipt.identity
            raise RunError(
                f"{place}: format {identity['format_version']} of {identity['kind']} doesn't have this file; prepare the data again "
                "with this version of tokenmill"
            )
        data = read_bytes(place)
        if data is None or xxh3_128_hexdigest(data) != recorded.xxh3_128:
            self.withdraw(receipt.key)
            raise RunError(
                f"{place}: {'missing' if data is None else 'damaged'} since it was built; its receipt is withdrawn, so "
                "run the same command again to rebuild it"
            )
        return data

    def withdraw(self, key: str) -> None:
        """Remove the receipt of a damaged shard, so that the next run rebuilds it."""
        remove_file(self.path(key, RECEIPT))


@contextmanager
def unpruned(store: str, tell: Callable[[str], object], *, pruning: bool = False) -> Generator[None]:
    """Keep pruning away from a local store while its proven shards are being published; or, to prune, keep these publications away.

    Publications share the lock. It is the prefix folder's, because a nightly run holds the store's own all night.
    """
    if not is_local(store):
        yield
        return
    doing = "publishing from" if pruning else "pruning"
    with locked(
        join(store, PREFIX), lambda holder: tell(f"waiting for {holder}, which is {doing} {store}"), shared=not pruning
    ):
        yield


def read_vouched(uri: str) -> bytes:
    """Return the content of a file in a store by path, checked as in `Store.read`.

    Raises RunError if its shard is not proven, or the file has changed.
    """
    place, kind, key, name = uri.rsplit("/", 3)
    store = Store(place, kind)
    receipt = store.receipt(key)
    if receipt is None:
        raise RunError(f"{uri}: the shard is missing; run the same command again to build it")
    return store.read(receipt, name)


def read_bytes(uri: str) -> bytes | None:
    """Return the content of a small file, or None if it does not exist."""
    system, path = filesystem(uri)
    try:
        return cast("bytes", system.cat_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def size_of(uri: str) -> int | None:
    """Return the size of a file in bytes, or None if it does not exist."""
    system, path = filesystem(uri)
    try:
        return cast("int", system.info(path)["size"])
    except (FileNotFoundError, NotADirectoryError):
        return None


def remove_file(uri: str) -> None:
    """Remove a file, if it exists."""
    system, path = filesystem(uri)
    with suppress(FileNotFoundError):
        system.rm_file(path)


Result = TypeVar("Result")


def remembered(place: str, kind: type[Result], compute: Callable[[], Result]) -> Result:
    """Return the result of `compute()`, cached at `place` in a sealed file; `kind` is its type, which must have a JSON form.

    It can decide which ids a text gets, so a damaged or edited one is computed again. If `place` cannot be written, it is
    computed every time.
    """
    found = recalled(place, kind)
    if found is not None:
        return found
    result = compute()
    with suppress(OSError):
        answer = TypeAdapter[Any](kind).dump_python(result, mode="json")
        publish_bytes(place, sealed({"answer": answer, "volatile": {}}))
    return result


def recalled(place: str, kind: type[Result]) -> Result | None:
    """Return the result that is cached at `place`, or None."""
    with suppress(OSError, ValueError, KeyError):
        return TypeAdapter[Any](kind).validate_python(unsealed(read_bytes(place) or b"")["answer"])
    return None


UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EBADF}
"""Errors of file systems without folder locks; NFS gives EBADF."""

LOCKS = Path("/proc/locks")
FLOW_RUN = "PREFECT__FLOW_RUN_ID"
LONGEST_COMMAND = 100

Tell = Callable[[str], object]

Inode = tuple[int, int]
"""A folder's device and inode number."""

_held: ContextVar[frozenset[Inode]] = ContextVar("_held", default=frozenset())
"""The folders that this run has locked, so that it does not wait for itself."""


@contextmanager
def turn_in(output_dir: str, tell: Tell) -> Generator[None]:
    """Lock an output folder for this run, waiting for the current holder. Errors as in `locked`.

    For a folder of an object store, runs of one user on one machine lock a folder in the user's cache.
    """
    place = absolute(output_dir)
    folder = place if is_local(place) else user_cache("outputs", xxh3_128_hexdigest(place.encode()))
    with locked(folder, lambda holder: tell(f"waiting for {holder}, which is using {place}")):
        yield


@contextmanager
def locked(folder: str, tell: Tell = lambda _: None, *, shared: bool = False) -> Generator[None]:
    """Hold the exclusive lock of a local folder, which is created if missing; or one that others hold too, if they share it.

    The lock is the kernel's (`flock` on the folder itself): it doesn't leave a file, and is released when its holder ends, even if killed.
    On file systems without locks (some network mounts) runs don't wait; every file is still replaced atomically. Announces the current holder, and waits for it. Raises InputError if the folder cannot be created.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"{folder}: cannot be used as a folder ({error.strerror}); choose a different one") from error
    try:
        status = os.fstat(descriptor)
        inode, held = (status.st_dev, status.st_ino), _held.get()
        if inode not in held:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                tell(_holder(inode))
                fcntl.flock(descriptor, kind)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
        token = _held.set(held | {inode})
        try:
            yield
        finally:
            _held.reset(token)
    finally:
        os.close(descriptor)


def _holder(inode: Inode) -> str:
    """A description of a lock's holder, as far as this machine knows.

    Lines of /proc/locks: `1: FLOCK ADVISORY WRITE <process> <major>:<minor>:<inode> 0 EOF` (proc_locks(5)).
    """
    device, number = inode
    place = f"{os.major(device):02x}:{os.minor(device):02x}:{number}"
    with suppress(OSError):
        locks = map(str.split, LOCKS.read_text().splitlines())
        process = next((fields[4] for fields in locks if fields[1] == "FLOCK" and fields[5] == place), None)
        if process is None:
            return "a different run"
        try:
            found = psutil.Process(int(process))
            run, command = found.environ().get(FLOW_RUN), shlex.join(found.cmdline())
        except psutil.Error:  # it belongs to a different user, or has just ended
            return f"process {process}"
        return f"flow run {run} (process {process})" if run else f"process {process} ({command[:LONGEST_COMMAND]})"
    return "a different run"
