"""The store of shards: `STORE/<kind>/<key>/`, one folder per shard, its receipt written last.

Any number of preparations and workers may share a store: two that build the same shard write the same bytes, each file replaced
atomically. A shard is proven if its receipt is valid and every output has the recorded size; `verify` also hashes them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from tokenmill.tasks.errors import RunError
from tokenmill.tasks.storage import filesystem, join
from tokenmill.tasks.threads import in_threads
from xxhash import xxh3_128_hexdigest

from .identity import Identity, shard_key
from .publish import Output, publish_bytes
from .receipt import RECEIPT, InvalidReceiptError, PartCount, Receipt

THREADS = 16
"""Receipts read at a time: on an object store each costs a round trip of some 30 ms."""

LISTED = 1_000
"""With this many keys or more, list folders before reading receipts: one page of an object store's listing."""


@dataclass(frozen=True, slots=True)
class Store:
    """The shards of one kind in one store."""

    place: str
    kind: str

    def folder(self, key: str) -> str:
        """The folder of a shard."""
        return join(self.place, self.kind, key)

    def path(self, key: str, name: str) -> str:
        """The path of a file of a shard."""
        return join(self.folder(key), name)

    def receipt(self, key: str) -> Receipt | None:
        """The shard's receipt if it proves the shard, else None. Raises errors of the storage."""
        data = read_bytes(self.path(key, RECEIPT))
        if data is None:
            return None
        try:
            receipt = Receipt.load(data)
        except InvalidReceiptError:
            return None
        whole = receipt.key == key and all(
            size_of(self.path(key, output.path)) == output.size for output in receipt.outputs
        )
        return receipt if whole else None

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
            volatile=dict(volatile or {}),
        )
        publish_bytes(self.path(receipt.key, RECEIPT), receipt.dump())
        return receipt

    def proven(self, keys: Iterable[str]) -> dict[str, Receipt]:
        """The receipts of the proven shards among `keys`."""
        unique = list(dict.fromkeys(keys))
        receipts = zip(unique, in_threads(self.receipt, unique, THREADS), strict=True)
        return {key: receipt for key, receipt in receipts if receipt is not None}

    def begun(self, keys: Iterable[str]) -> list[str]:
        """The keys that have a folder here; all of them if they are few, because reading each is cheaper than a listing.

        On a network file system a listing may be stale: it may lack a shard that is already built, never the reverse.
        """
        unique = list(dict.fromkeys(keys))
        if len(unique) < LISTED:
            return unique
        system, path = filesystem(join(self.place, self.kind))
        system.invalidate_cache(path)
        try:
            folders = cast("list[str]", system.ls(path, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []
        there = {folder.rstrip("/").rpartition("/")[2] for folder in folders}
        return [key for key in unique if key in there]

    def read(self, receipt: Receipt, name: str) -> bytes:
        """The content of a file of a shard, checked against its receipt.

        Raises RunError, and withdraws the receipt, if the file has changed.
        """
        (recorded,) = (output for output in receipt.outputs if output.path == name)
        place = self.path(receipt.key, name)
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
        system, path = filesystem(self.path(key, RECEIPT))
        if system.exists(path):
            system.rm_file(path)


def read_vouched(uri: str) -> bytes:
    """The content of a file of a store by path, checked as in `Store.read`.

    Raises RunError if its shard is not proven, or the file has changed.
    """
    place, kind, key, name = uri.rsplit("/", 3)
    store = Store(place, kind)
    receipt = store.receipt(key)
    if receipt is None:
        raise RunError(f"{uri}: the shard is missing; run the same command again to build it")
    return store.read(receipt, name)


def read_bytes(uri: str) -> bytes | None:
    """The content of a small file, or None if it does not exist."""
    system, path = filesystem(uri)
    try:
        return cast("bytes", system.cat_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def size_of(uri: str) -> int | None:
    """The size of a file in bytes, or None if it does not exist."""
    system, path = filesystem(uri)
    try:
        return cast("int", system.info(path)["size"])
    except (FileNotFoundError, NotADirectoryError):
        return None
