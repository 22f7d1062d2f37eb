"""Remove unreferenced shards from a store that preparations share.

A shard is referenced if a kept manifest names it, or names a shard made from it by a later decision. Other shards of the same
kinds are removed once they are older than a grace period. Kinds that aren't in kept manifests are ignored. Among them are the
rounds of deduplication: without them the next deduplication would compare every document again.

Three things protect a preparation in progress. Nightly runs and `prune` both hold the store's lock, so they take turns. A manual
preparation does not hold it. Its new shards are in no manifest yet, but they are younger than the grace period of two days,
which must exceed the longest run. The only shards it can lose are old, unreferenced ones that it reuses. Publication then fails
before it replaces anything, because it checks every receipt again; the same command then rebuilds the shards. On a local disk
shards aren't removed between that check and the manifest (`shards.store.unpruned`). On an object store, which lacks locks, such a
removal is noticed only by `verify`: don't run other commands there while you prune, or keep their output.

Only `STORE/<kind>/<key>/<file>` is ever removed, and links are not followed. This costs a listing per kind, and a request per
unreferenced file for its age.
"""

import re
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.manifest import MANIFEST, identities, published_manifest, stored_entries
from tokenmill.tasks.shards.progress import say
from tokenmill.tasks.shards.receipt import KEY_CHARACTERS, shard_key
from tokenmill.tasks.shards.store import Store, locked, unpruned
from tokenmill.tasks.storage import absolute, filesystem, is_local, join

from .versions import folders_in, is_link

# The minimum age of an unreferenced shard to remove; runs that have not published yet must be younger.
GRACE_SECONDS = 2 * 24 * 3600.0

KEY = re.compile(rf"[0-9a-f]{{{KEY_CHARACTERS}}}")

References = Mapping[str, set[str]]  # keys of shards by kind


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard's folder: its kind and key, its files by name, and their total bytes."""

    kind: str
    key: str
    names: Sequence[str]
    size: int


@dataclass(frozen=True, slots=True)
class Leftovers:
    """A store's contents: the number of referenced shards, the unreferenced ones, and how many of those are too young."""

    referenced: int
    removable: Sequence[StoredShard]
    young: int

    @property
    def size(self) -> int:
        """Return the bytes that can be removed; a local file with a second published link remains on disk."""
        return sum(shard.size for shard in self.removable)


@contextmanager
def alone_with(store: str) -> Generator[None]:
    """Lock a store, so that only one nightly run or `prune` uses it; wait for the current holder. Object stores have no
    locks.
    """
    if not is_local(store):
        yield
        return
    with locked(store, lambda holder: say(f"waiting for {holder}, which is using {store}")):
        yield


def prune(store: str, keep: Iterable[str], grace_seconds: float = GRACE_SECONDS) -> Leftovers:
    """Remove the shards that the manifests of the output folders `keep` do not refer to; return the removed ones.

    Raises InputError as `leftovers` does, before anything is removed.
    """
    store = absolute(store)
    _require_store(store)
    with alone_with(store):
        return remove_leftovers(store, keep, grace_seconds)


def remove_leftovers(store: str, keep: Iterable[str], grace_seconds: float) -> Leftovers:
    """Remove what `leftovers` finds, and return it; requires the store's lock."""
    with unpruned(store, say, pruning=True):
        found = leftovers(store, keep, grace_seconds)
        remove(store, found)
    return found


def leftovers(store: str, keep: Iterable[str], grace_seconds: float = GRACE_SECONDS) -> Leftovers:
    """What `prune` would remove.

    Raises InputError for a missing store, for an empty `keep`, and for an output without a manifest or with a different store.
    """
    store = absolute(store)
    _require_store(store)
    kept = references(store, keep)
    young_from = time.time() - grace_seconds
    # Later stages last, as manifests list them: joined bytes go after the receipts of their shards.
    unreferenced = [shard for kind in kept for shard in _stored(store, kind) if shard.key not in kept[kind]]
    removable = [shard for shard in unreferenced if _youngest(store, shard) < young_from]
    return Leftovers(sum(map(len, kept.values())), removable, len(unreferenced) - len(removable))


def prune_record(found: Leftovers, store: str, keep: Iterable[str]) -> dict[str, Any]:
    """Return the JSON record of the shards that were or would be removed."""
    record = {
        "path": absolute(store), "type": "prune", "shards": len(found.removable), "bytes": found.size,
        "young": found.young, "referenced": found.referenced,
        "made_from": [{"type": "publication", "path": absolute(output_dir)} for output_dir in keep],
    }  # fmt: skip
    return {"prune": record}


def references(store: str, keep: Iterable[str]) -> References:
    """Return the shards that the manifests of output folders refer to."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for output_dir in map(absolute, keep):
        manifest = published_manifest(output_dir)
        if manifest is None:
            raise InputError(f"{output_dir}: no {MANIFEST} of a publication here; name folders that were published")
        if manifest["volatile"].get("store") != store:
            raise InputError(
                f"{output_dir}: its shards are in {manifest['volatile'].get('store')}, not in {store}; name only "
                "outputs of this store, and all of them"
            )
        for stored, entry in stored_entries(manifest):  # derived ones included
            found[stored.kind].add(entry["key"])
        # Shards as planned, too, without later decisions: the next run starts from them
        for identity in identities(manifest).values():
            found[manifest["type"]].add(shard_key(identity))
    if not found:
        raise InputError(
            f"{store}: no outputs to keep were named, so every shard would be removed; name the outputs to keep"
        )
    return found


def remove(store: str, found: Leftovers) -> None:
    """Remove shards, each receipt first, so that an interrupted removal never leaves a verified shard."""
    for shard in found.removable:
        place = Store(store, shard.kind)
        place.withdraw(shard.key)
        system, path = filesystem(place.folder(shard.key))
        for name in shard.names:
            with suppress(FileNotFoundError):
                system.rm_file(f"{path}/{name}")
        if is_local(store):
            with suppress(OSError):  # another run is rebuilding the shard, or the folder holds a subfolder
                system.rmdir(path)


def _require_store(store: str) -> None:
    system, path = filesystem(store)
    if not system.isdir(path):
        raise InputError(f"{store}: store not found; check the path")


def _stored(store: str, kind: str) -> Iterable[StoredShard]:
    """The shards of a kind, with the files in their folders."""
    within = join(store, kind)
    # Only names that are keys, so that nothing that others put there is removed
    folders = {key for key in folders_in(within) if KEY.fullmatch(key) and not is_link(join(within, key))}
    system, path = filesystem(within)
    files: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for place, entry in cast("dict[str, dict[str, Any]]", system.find(path, detail=True)).items():
        key, _, name = place[len(path) :].strip("/").partition("/")
        if key in folders and name and "/" not in name:
            files[key][name] = entry["size"]
    return [StoredShard(kind, key, sorted(files[key]), sum(files[key].values())) for key in sorted(folders)]


def _youngest(store: str, shard: StoredShard) -> float:
    """The modification time of a shard's youngest file, a Unix time; now if a file has just disappeared."""
    system, path = filesystem(Store(store, shard.kind).folder(shard.key))
    # An empty folder is as old as itself; object stores don't have any
    places = [f"{path}/{name}" for name in shard.names] or ([path] if is_local(store) else [])
    try:
        times = [cast("datetime", system.modified(place)) for place in places]
    except FileNotFoundError:
        return time.time()
    moments = [moment if moment.tzinfo else moment.replace(tzinfo=UTC) for moment in times]
    return max((moment.timestamp() for moment in moments), default=time.time())
