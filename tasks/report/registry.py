"""Names for outputs. A name has numbered versions, each with its location and its inputs.

    ROOT/NAME/v1.json, v2.json …   one record per version, never overwritten; the highest number is the latest

Nothing is copied: a record points at a folder, and `art://NAME:v2` works in place of a folder. A record also holds a digest
of the folder's content. So a new preparation in the same folder is a new version, and lineage shows which content has been
replaced. ROOT is TOKENMILL_ARTIFACTS, on a disk or object store that all users of the names can reach. Lineage follows inputs
through other names, from a model back to its datasets, and through preparations that published the inputs of others.
"""

import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree
from tokenmill.tasks.artifact import Artifact, MadeFrom
from tokenmill.tasks.blend.models import listed_sources
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.seal import sealed, unsealed
from tokenmill.tasks.shards.manifest import read_manifest, stored_entries
from tokenmill.tasks.shards.publish import publish_new
from tokenmill.tasks.shards.store import locked, read_bytes, size_of
from tokenmill.tasks.storage import ART, absolute, is_local, join, located, record_of, registry, versions
from tokenmill.tasks.train.prepared import content_digest, listed_files, prepared_manifest
from xxhash import xxh3_128_hexdigest

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")

# Files that describe a folder without a manifest. They are sealed, unlike data files of the same name.
RECORDS = ("training.json", "results.json")

MOST_BYTES = 64_000_000  # larger files with such a name are data
DEEPEST = 20


@dataclass(frozen=True, slots=True)
class Registered:
    """A version of a name."""

    name: str
    version: str
    artifact: Artifact

    @property
    def reference(self) -> str:
        return f"{ART}{self.name}:{self.version}"


def register(name: str, artifact: Artifact) -> Registered:
    """Register `artifact` as the next version of a name, unless the latest version points at the same content.

    Raises InputError for a name that cannot be one part of a path.
    """
    if not NAME.fullmatch(name):
        raise InputError(
            f"{name!r}: a name is letters, digits, '.', '_' and '-', at most 128, and begins with a letter or digit"
        )
    folder = join(registry(), name)
    with locked(folder) if is_local(folder) else nullcontext():
        return _registered(name, folder, artifact)


def _registered(name: str, folder: str, artifact: Artifact) -> Registered:
    newest = max(versions(name), default=0)
    record = (_record_at(join(folder, f"v{newest}.json")) if newest else None) or {}
    if {field: value for field, value in record.items() if field != "volatile"} == artifact.model_dump():
        return Registered(name, f"v{newest}", artifact)
    version = f"v{newest + 1}"
    registered_at = datetime.now(UTC).isoformat(timespec="seconds")
    record = {**artifact.model_dump(), "volatile": {"registered_at": registered_at}}
    try:
        publish_new(join(folder, f"{version}.json"), sealed(record))
    except FileExistsError:  # another run registered it, or this one did and the store's answer was lost
        return _registered(name, folder, artifact)
    return Registered(name, version, artifact)


def artifact_in(place: str) -> Artifact:
    """Return the artifact in a folder: a preparation, a training run, or results. Raises InputError for anything else."""
    folder = absolute(place)
    for name in RECORDS:
        record = _record_at(join(folder, name))
        if record is None:
            continue
        used = record["made_from"]
        if record["type"] == "results":  # a model and data, which the record names, and their digests
            model = MadeFrom(type="model", path=record["model"].removesuffix("/model"), digest=used["model"])
            sources = [model, MadeFrom(type="data", path=record["data"], digest=used["data"])]
        else:
            sources = [MadeFrom(**source) for source in used]
        return Artifact(path=folder, type=record["type"], made_from=sources, digest=_digest(record))
    manifest = read_manifest(folder)
    if manifest is None:
        raise InputError(
            f"{place}: not a tokenmill output folder: no prepared data, training run or results here; point at the output folder of a command"
        )
    paths = dict.fromkeys(source["path"] for split in listed_sources(manifest["blend"]).values() for source in split)
    made_from = [MadeFrom(type="data", path=path) for path in paths]
    return Artifact(path=folder, type=manifest["type"], made_from=made_from, digest=_digest(manifest))


def _record_at(place: str) -> Mapping[str, Any] | None:
    size = size_of(place)  # a data file of this name may be too large to read
    if size is None or size > MOST_BYTES:
        return None
    try:
        return unsealed(read_bytes(place) or b"")
    except ValueError:
        return None


def _digest(record: Mapping[str, Any]) -> str:
    """A digest of a record without its volatile parts."""
    lasting = {name: value for name, value in record.items() if name != "volatile"}
    return f"xxh3_128:{xxh3_128_hexdigest(orjson.dumps(lasting, option=orjson.OPT_SORT_KEYS))}"


def lineage(place: str) -> dict[str, Any]:
    """Return an artifact with its inputs, nested. Raises InputError as `artifact_in` does.

    `changed` marks content that was replaced since it was registered or used.
    """
    artifact = artifact_in(place)
    registered = record_of(place) if place.startswith(ART) else None
    changed = registered is not None and registered["path"] == artifact.path and registered["digest"] != artifact.digest
    return _traced(artifact, DEEPEST, changed=changed)


def _traced(artifact: Artifact, deeper: int, *, changed: bool) -> dict[str, Any]:
    sources: list[dict[str, Any]] = []
    for source in artifact.made_from:
        found = _known(source) if deeper else None  # records may name each other in a circle
        if found:
            sources.append(_traced(found, deeper - 1, changed=_has_changed(source)))
        else:
            sources.append({"type": source.type, "path": source.path, "made_from": []})
    mark = {"changed": True} if changed else {}
    return {"type": artifact.type, "path": artifact.path, **mark, "made_from": sources}


def _has_changed(source: MadeFrom) -> bool:
    """Whether a preparation has been replaced since it was used."""
    if source.digest is None or source.type == "model":
        return False
    try:
        path = absolute(source.path)
        return content_digest(listed_files(path, prepared_manifest(path))) != source.digest
    except InputError:
        return True


def _known(source: MadeFrom) -> Artifact | None:
    """The inputs of a source, if it records them."""
    # A glob may match the files of many preparations
    if source.type == "data" and any(character in source.path for character in "*?["):
        return None
    path = located(source.path) if source.path.startswith(ART) else source.path
    try:
        return artifact_in(publisher(path) or path)
    except (InputError, RunError, OSError):
        return None


def publisher(place: str) -> str | None:
    """Return the output folder of the preparation that published a local file or folder; None for any other."""
    if not is_local(place):
        return None
    path = Path(absolute(place))
    for folder in path.parents:
        try:
            manifest = read_manifest(str(folder))
        except (InputError, RunError, OSError):  # another program's manifest.json, or a folder that may not be read
            continue
        inside = path.relative_to(folder).as_posix()
        listed = (
            names
            for _, entry in (stored_entries(manifest) if manifest else ())
            for names in entry["published"].values()
        )
        if any(name == inside or name.startswith(f"{inside}/") for name in chain.from_iterable(listed)):
            return str(folder)
    return None


def print_lineage(found: Mapping[str, Any], console: Console) -> None:
    """Print a lineage as a tree."""
    console.print(_tree(found))


def _tree(found: Mapping[str, Any]) -> Tree:
    changed = " [red](changed since)[/]" if "changed" in found else ""
    tree = Tree(f"[bold]{escape(found['type'])}[/] {escape(found['path'])}{changed}")
    tree.children = [_tree(source) for source in found["made_from"]]
    return tree
