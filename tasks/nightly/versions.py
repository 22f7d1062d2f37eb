"""The lineage of a blend: a folder per version, and a small file that says which one is the latest.

    OUT/2026-11-21/     versions, each whole by itself: blend.json, manifest.json and names for the shards' files
    OUT/2026-11-22/
    OUT/2026-11-22.2/   the second of that day
    OUT/latest.json     {"pretrain": {"path": "OUT/2026-11-22.2", "version": …, "reasons": […], "made_from": […], …}}

On object stores, which have no locks, a version also holds `claim`, which says what night it is of: of nights that
overlap, each makes a version of its own, and readers are led to the later one.

`latest.json` is the record that the command of this kind prints, so that it can be piped into the next one. It is
replaced last and in one step, on object stores as on disks: who follows it finds the last version or the one before,
never a part. Dates are those of UTC. Versions only go up: should a clock go back, the day of the last version is
continued. A version shares its shards with all others, so that it costs new shards and names; RL joins its rows
into files of their own, which cost what they hold.
"""

import math
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import orjson
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.seal import sealed
from tokenmill.tasks.shards.manifest import BLEND
from tokenmill.tasks.shards.publish import publish_bytes, publish_new
from tokenmill.tasks.shards.store import read_bytes, size_of
from tokenmill.tasks.storage import absolute, filesystem, is_local, join

LATEST = "latest.json"
CLAIM = "claim"
VERSION = re.compile(r"(\d{4}-\d{2}-\d{2})(?:\.([1-9]\d*))?")


@dataclass(frozen=True, slots=True)
class Latest:
    """The version that readers are led to: its name, its folder, and digests of the files that its settings name."""

    version: str
    path: str
    named_files: Mapping[str, str]


def latest(output_dir: str) -> Latest | None:
    """What the latest version of a blend is, or None before the first. Raises InputError when the file does not say."""
    place = join(output_dir, LATEST)
    data = read_bytes(place)
    if data is None:
        return None
    try:
        ((kind, record),) = orjson.loads(data).items()
        if _sealed_record(kind, record) != data:
            raise ValueError("its content does not fit its seal")  # noqa: TRY301 - one of the ways to be damaged
        return Latest(record["version"], join(output_dir, record["version"]), record["named_files"])
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise InputError(f"{place}: does not name a version; remove it, and the next run publishes one anew") from error


def follow(output_dir: str, record: Mapping[str, Any], **said: object) -> None:
    """Lead readers to the version that `record` is of: the record of a preparation, and what else is `said` of it."""
    ((kind, fields),) = record.items()
    publish_bytes(join(output_dir, LATEST), _sealed_record(kind, {**fields, **said}))


def _sealed_record(kind: str, fields: Mapping[str, Any]) -> bytes:
    """The record of a kind, sealed within, so that it still is one that commands read from a pipe."""
    lasting = {name: value for name, value in fields.items() if name != "volatile"}
    seal = orjson.loads(sealed({kind: lasting, "volatile": {}}))["volatile"]
    return orjson.dumps({kind: {**lasting, "volatile": seal}}, option=orjson.OPT_INDENT_2)


def lineage(output_dir: str) -> list[str]:
    """The versions of a blend that were published whole, oldest first."""
    return [name for name in _version_folders(output_dir) if size_of(join(output_dir, name, BLEND)) is not None]


def next_version(existing: Iterable[str], now: float) -> str:
    """A name after all `existing` ones: the day of `now`, a Unix time, or the last day that there is."""
    today = datetime.fromtimestamp(now, UTC).date().isoformat()
    day, number = max(map(order, existing), default=("", 0))
    if today > day:
        return today
    return f"{day}.{number + 1}"


def order(version: str) -> tuple[str, int]:
    """What versions are sorted by: day and number."""
    found = cast("re.Match[str]", VERSION.fullmatch(version))
    return found[1], int(found[2] or 1)


def claim(output_dir: str, version: str, now: float) -> str:
    """Take a version for the night that asks, so that no other writes into its folder; `version`, or the next that is free.

    On a disk there is nothing to take, because nights hold the lock of the store they share.
    """
    if is_local(output_dir):
        return version
    place, night = join(output_dir, version, CLAIM), secrets.token_bytes(16)
    try:
        publish_new(place, night)
    except FileExistsError:  # another night's, or ours where the store's answer was lost
        if read_bytes(place) != night:
            return claim(output_dir, next_version([version], now), now)
    return version


def remedy_for(output_dir: str) -> str:
    """What mends a preparation that is damaged, a version or any other."""
    folder, _, name = absolute(output_dir).rpartition("/")
    if VERSION.fullmatch(name) is None or size_of(join(folder, LATEST)) is None:
        return "run the preparation again to mend them"
    return "remove this folder, and the next night prepares this blend again"


def prune_versions(output_dir: str, keep: int, stay: Collection[str] = (), young_from: float = math.inf) -> list[str]:
    """Remove versions that readers are no longer led to, and what killed and failed runs left; their names.

    The latest stays, and of those up to it the `keep` newest that were published whole. Later ones are of runs that failed
    after they had published, or are on their way: the newest stays. So do folders that `stay`, and versions claimed since
    `young_from`, a Unix time. Shards are not touched, nor anything but folders that are called like versions; each loses its
    blend.json first: what is left of a removal that was cut short counts as none.
    """
    newest = latest(output_dir)
    if newest is None:
        return []
    reached = order(newest.version)
    folders = [name for name in _version_folders(output_dir) if not is_link(join(output_dir, name))]
    before = [name for name in lineage(output_dir) if order(name) <= reached][-keep:]
    after = [name for name in folders if order(name) > reached][-1:]
    kept = {*before, *after, newest.version}
    gone = [name for name in folders if name not in kept and join(output_dir, name) not in stay]
    gone = [name for name in gone if not _claimed_since(young_from, join(output_dir, name))]
    for name in gone:
        _remove(join(output_dir, name))
    return gone


def _claimed_since(moment: float, folder: str) -> bool:
    """Whether a version that is not published yet may be on its way."""
    if is_local(folder) or size_of(join(folder, BLEND)) is not None:
        return False
    system, path = filesystem(join(folder, CLAIM))
    try:
        return cast("datetime", system.modified(path)).timestamp() >= moment
    except FileNotFoundError:
        return False


def _remove(folder: str) -> None:
    system, path = filesystem(folder)
    with suppress(FileNotFoundError):
        system.rm_file(f"{path}/{BLEND}")
    with suppress(FileNotFoundError):  # object stores may list folders for a while of which nothing is left
        system.rm(path, recursive=True)


def _version_folders(output_dir: str) -> list[str]:
    """Folders that are called like versions, in order, whole or not."""
    return sorted((name for name in folders_in(output_dir) if VERSION.fullmatch(name)), key=order)


def folders_in(place: str) -> list[str]:
    """The names of the folders in a folder, and of links to folders; none where there is no such folder."""
    system, path = filesystem(place)
    system.invalidate_cache()
    try:
        entries = cast("list[dict[str, Any]]", system.ls(path, detail=True))
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [
        entry
        for entry in entries
        if entry["type"] == "directory" or (entry.get("islink") and system.isdir(entry["name"]))
    ]
    return sorted(str(entry["name"]).rstrip("/").rpartition("/")[2] for entry in found)


def is_link(place: str) -> bool:
    """Whether a folder is a link to another: what it holds is counted, and never removed."""
    return is_local(place) and Path(place).is_symlink()
