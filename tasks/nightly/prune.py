"""Removing shards that nothing refers to any more, out of a store that preparations share.

A shard stays when a manifest that is to be kept names it, or names a shard that was made from it with what was decided
later. Everything else of the same kinds is unreferenced, and is removed once it is older than a time of grace. Kinds that
no kept manifest names are left alone: the rounds of a deduplication among them, which are named by none, and
without which the next one has to look at every document again.

Two things stand between a removal and a preparation under way. Nights hold the store's lock, and so does `prune`: they
take turns. A preparation by hand holds none. What it has built is not in any manifest yet, but it is young: hence the
grace, two days, which must be longer than the longest run. What it found built long ago, and unreferenced, it can lose.
Then it notices: publication asks for every receipt again, and those go first; on a local disk, a name for a file that is gone
cannot be made. The run fails before it replaces anything, and the same command builds the shard anew. On an object
store, between that look and the manifest, there are seconds in which nobody would notice but `verify`: run nothing else
there while you prune, or keep what it publishes.

Nothing but `STORE/<kind>/<key>/<file>` is ever removed, and no link is followed. A listing per kind says what there is;
a request per file, for those that are unreferenced, how old they are.
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
from tokenmill.tasks.shards.identity import KEY_CHARACTERS, shard_key
from tokenmill.tasks.shards.lock import locked
from tokenmill.tasks.shards.manifest import MANIFEST, identities, published_manifest
from tokenmill.tasks.shards.progress import say
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.storage import absolute, filesystem, is_local, join

from .versions import folders_in, is_link

GRACE_SECONDS = 2 * 24 * 3600.0
"""How old an unreferenced shard must be, so that it cannot be one of a run that has not published yet."""

KEY = re.compile(rf"[0-9a-f]{{{KEY_CHARACTERS}}}")

References = Mapping[str, set[str]]
"""Keys of shards by their kind."""


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard's folder: its kind and key, its files by name, and their bytes in all."""

    kind: str
    key: str
    names: Sequence[str]
    size: int


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What a store holds: how many shards are referenced, which are not, and how many of these are too young to go."""

    referenced: int
    removable: Sequence[StoredShard]
    young: int

    @property
    def size(self) -> int:
        """Bytes of what can be removed; on a local disk a name that is still published keeps its own."""
        return sum(shard.size for shard in self.removable)


@contextmanager
def alone_with(store: str) -> Generator[None]:
    """Hold a store against nights and prunings elsewhere, waiting for one under way; an object store has no locks."""
    if not is_local(store):
        yield
        return
    with locked(store, lambda holder: say(f"waiting for {holder}, which works with {store}")):
        yield


def prune(store: str, keep: Iterable[str], grace_seconds: float = GRACE_SECONDS) -> Leftovers:
    """Remove what the manifests of the output folders `keep` do not refer to; what was removed.

    Raises InputError as `leftovers` does, before anything is removed.
    """
    store = absolute(store)
    _require_store(store)
    with alone_with(store):
        found = leftovers(store, keep, grace_seconds)
        remove(store, found)
    return found


def leftovers(store: str, keep: Iterable[str], grace_seconds: float = GRACE_SECONDS) -> Leftovers:
    """What `prune` would remove.

    Raises InputError when there is no store, nothing to keep, an output without a manifest, or one of another store.
    """
    store = absolute(store)
    _require_store(store)
    kept = references(store, keep)
    young_from = time.time() - grace_seconds
    unreferenced = [shard for kind, keys in kept.items() for shard in _stored(store, kind) if shard.key not in keys]
    removable = [shard for shard in unreferenced if _youngest(store, shard) < young_from]
    return Leftovers(sum(map(len, kept.values())), removable, len(unreferenced) - len(removable))


def prune_record(found: Leftovers, store: str, keep: Iterable[str]) -> dict[str, Any]:
    """The record of what was removed, or would be, as every command prints one."""
    record = {
        "path": absolute(store),
        "type": "prune",
        "shards": len(found.removable),
        "bytes": found.size,
        "young": found.young,
        "referenced": found.referenced,
        "made_from": [{"type": "publication", "path": absolute(output_dir)} for output_dir in keep],
    }
    return {"prune": record}


def references(store: str, keep: Iterable[str]) -> References:
    """The shards that the manifests of output folders refer to."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for output_dir in map(absolute, keep):
        manifest = published_manifest(output_dir)
        if manifest is None:
            raise InputError(f"{output_dir}: no {MANIFEST} of a publication here; name folders that were published")
        if manifest["volatile"].get("store") != store:
            raise InputError(
                f"{output_dir}: its shards are in {manifest['volatile'].get('store')}, not in {store}; name the outputs "
                "of this store, all of them"
            )
        for kind, key in _named(manifest):
            found[kind].add(key)
    if not found:
        raise InputError(f"{store}: nothing to keep was named, and so every shard would go; name the outputs to keep")
    return found


def remove(store: str, found: Leftovers) -> None:
    """Remove shards, the receipt of each first: what is left of a removal that was cut short proves nothing."""
    for shard in found.removable:
        place = Store(store, shard.kind)
        place.withdraw(shard.key)
        system, path = filesystem(place.folder(shard.key))
        for name in shard.names:
            with suppress(FileNotFoundError):
                system.rm_file(f"{path}/{name}")
        if is_local(store):
            with suppress(OSError):  # somebody builds the shard again at this moment, or put a folder there
                system.rmdir(path)


def _require_store(store: str) -> None:
    system, path = filesystem(store)
    if not system.isdir(path):
        raise InputError(f"{store}: there is no store; check the path")


def _named(manifest: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Kind and key of every shard of a manifest, of those made from them, and of those they were decided about."""
    for part in (manifest, manifest.get("derived")):
        if part is None:
            continue
        for entry in part["shards"]:
            yield part["recipes"][entry["recipe"]]["kind"], entry["key"]
        for identity in identities(part).values():
            yield identity["kind"], shard_key(identity)


def _stored(store: str, kind: str) -> Iterable[StoredShard]:
    """The shards of a kind, with the files that stand in their folders."""
    within = join(store, kind)
    folders = {key for key in folders_in(within) if KEY.fullmatch(key) and not is_link(join(within, key))}
    system, path = filesystem(within)
    files: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for place, entry in cast("dict[str, dict[str, Any]]", system.find(path, detail=True)).items():
        key, _, name = place[len(path) :].strip("/").partition("/")
        if key in folders and name and "/" not in name:
            files[key][name] = entry["size"]
    return [StoredShard(kind, key, sorted(files[key]), sum(files[key].values())) for key in sorted(folders)]


def _youngest(store: str, shard: StoredShard) -> float:
    """When the youngest file of a shard was written, a Unix time; now for one that is gone by now."""
    system, path = filesystem(Store(store, shard.kind).folder(shard.key))
    places = [f"{path}/{name}" for name in shard.names] or ([path] if is_local(store) else [])
    try:
        times = [cast("datetime", system.modified(place)) for place in places]
    except FileNotFoundError:
        return time.time()
    moments = [moment if moment.tzinfo else moment.replace(tzinfo=UTC) for moment in times]
    return max((moment.timestamp() for moment in moments), default=time.time())
