"""The versions of a blend: a folder each, and a small file that names the latest.

    OUT/2026-11-21/     versions, each complete: blend.json, manifest.json and links to the shards' files
    OUT/2026-11-22/
    OUT/2026-11-22.2/   the second of that day
    OUT/latest.json     {"pretrain": {"path": "OUT/2026-11-22.2", "version": …, "reasons": […], "made_from": […], …}}

On object stores, which lack locks, a version also has `claim`, which names its run. Two overlapping runs each make their
own version, and `latest.json` names the later one.

`latest.json` is the artifact record of the preparation, so that it can be piped into the next command. It is replaced last and
atomically: a reader finds the latest version or the one before, never a part. Dates are UTC. Versions only increase: if a clock
is set back, the day of the last version continues. Versions share shards, so each costs its new shards and some links; RL also
writes one joined file per split.
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
    """The latest version: its name, its folder, and digests of the files that its settings name."""

    version: str
    path: str
    named_files: Mapping[str, str]


def latest(output_dir: str) -> Latest | None:
    """Return the latest version of a blend, or None before the first. Raises InputError if the file is damaged.

    The first versions of tokenmill wrote it without a seal; `named_files` was the last field then.
    """
    place = join(output_dir, LATEST)
    data = read_bytes(place)
    if data is None:
        return None
    try:
        ((kind, record),) = orjson.loads(data).items()
        if _sealed_record(kind, record) != data and [*record][-1:] != ["named_files"]:
            raise ValueError("its content does not match its seal")  # noqa: TRY301 - handled below
        return Latest(record["version"], join(output_dir, record["version"]), record["named_files"])
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise InputError(
            f"{place}: does not name a version; remove it, and the next run publishes a new one"
        ) from error


def follow(output_dir: str, record: Mapping[str, Any], **extra: object) -> None:
    """Make the version of `record` the latest; `extra` adds fields to the record."""
    ((kind, fields),) = record.items()
    publish_bytes(join(output_dir, LATEST), _sealed_record(kind, {**fields, **extra}))


def _sealed_record(kind: str, fields: Mapping[str, Any]) -> bytes:
    """The record with its seal inside, so that commands can still read it from a pipe."""
    lasting = {name: value for name, value in fields.items() if name != "volatile"}
    seal = orjson.loads(sealed({kind: lasting, "volatile": {}}))["volatile"]
    return orjson.dumps({kind: {**lasting, "volatile": seal}}, option=orjson.OPT_INDENT_2)


def lineage(output_dir: str) -> list[str]:
    """Return the complete versions of a blend, oldest first."""
    return [name for name in _version_folders(output_dir) if size_of(join(output_dir, name, BLEND)) is not None]


def next_version(existing: Iterable[str], now: float) -> str:
    """Return the name after all `existing` ones: the day of `now` (a Unix time), or the next number of the last day."""
    today = datetime.fromtimestamp(now, UTC).date().isoformat()
    day, number = max(map(order, existing), default=("", 0))
    if today > day:
        return today
    return f"{day}.{number + 1}"


def order(version: str) -> tuple[str, int]:
    """Return the sort key of a version: day and number."""
    found = cast("re.Match[str]", VERSION.fullmatch(version))
    return found[1], int(found[2] or 1)


def claim(output_dir: str, version: str, now: float) -> str:
    """Claim `version`, or the next free one, so that no other run writes to its folder.

    On a local disk nothing is claimed, because runs hold the lock of the shared store.
    """
    if is_local(output_dir):
        return version
    place, night = join(output_dir, version, CLAIM), secrets.token_bytes(16)
    try:
        publish_new(place, night)
    except FileExistsError:  # another run claimed it, or this one did and the store's answer was lost
        if read_bytes(place) != night:
            return claim(output_dir, next_version([version], now), now)
    return version


def remedy_for(output_dir: str) -> str:
    """Return how to repair a damaged version or other output."""
    folder, _, name = absolute(output_dir).rpartition("/")
    if VERSION.fullmatch(name) is None or size_of(join(folder, LATEST)) is None:
        return "run the preparation again to repair them"
    return "remove this folder, and the next nightly run prepares this blend again"


def prune_versions(output_dir: str, keep: int, pinned: Collection[str] = (), young_from: float = math.inf) -> list[str]:
    """Remove old versions and the remains of killed and failed runs; return their names.

    Keeps the latest version, the `keep` newest complete versions up to it, the newest later one (its run may be in progress, or
    failed after publishing), the `pinned` folders, and versions claimed since `young_from`, a Unix time. Only folders named like
    versions are removed, never shards.
    """
    newest = latest(output_dir)
    if newest is None:
        return []
    reached = order(newest.version)
    # A folder that is a link belongs to someone else
    folders = [name for name in _version_folders(output_dir) if not is_link(join(output_dir, name))]
    before = [name for name in lineage(output_dir) if order(name) <= reached][-keep:]
    after = [name for name in folders if order(name) > reached][-1:]  # in progress, or failed after publishing
    kept = {*before, *after, newest.version}
    removed = [name for name in folders if name not in kept and join(output_dir, name) not in pinned]
    removed = [name for name in removed if not _claimed_since(young_from, join(output_dir, name))]
    for name in removed:
        system, path = filesystem(join(output_dir, name))
        with suppress(FileNotFoundError):  # blend.json first, so that an interrupted removal doesn't leave a version
            system.rm_file(f"{path}/{BLEND}")
        with suppress(FileNotFoundError):  # object stores may list empty folders for a while
            system.rm(path, recursive=True)
    return removed


def _claimed_since(moment: float, folder: str) -> bool:
    """Whether an unpublished version may be in progress."""
    if is_local(folder) or size_of(join(folder, BLEND)) is not None:
        return False
    system, path = filesystem(join(folder, CLAIM))
    try:
        return cast("datetime", system.modified(path)).timestamp() >= moment
    except FileNotFoundError:
        return False


def _version_folders(output_dir: str) -> list[str]:
    """Folders named like versions, in order, complete or not."""
    return sorted((name for name in folders_in(output_dir) if VERSION.fullmatch(name)), key=order)


def folders_in(place: str) -> list[str]:
    """Return the subfolder names, and names that link to folders, in a folder; empty if it does not exist."""
    system, path = filesystem(place)
    system.invalidate_cache()  # other runs add and remove folders
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
    """Return whether a folder is a link to a different one; its content is never removed."""
    return is_local(place) and Path(place).is_symlink()
