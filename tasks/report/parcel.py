"""What `tokenmill push` uploads: the files that a preparation's manifest lists, without any local paths.

    data/… splits/… train/…   the shards under their published names, and files beside them (tools/…)
    README.md …               the cards of the run (`cards`), made again from what is published
    blend.json                the published one, with paths relative to itself
    manifest.json             the published one without its volatile part, plus the size and hash of every pushed file

Everything else in the output folder stays here: receipts, temporary files, and the quarantine, which holds rejected rows with
their local paths. The manifest names local files without their folders. Every push of the same preparation uploads the same
bytes, but for the day in croissant.json.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

import orjson
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.seal import unsealed
from tokenmill.tasks.shards.manifest import BLEND, BLENDS, MANIFEST, manifest_bytes, stored_entries
from tokenmill.tasks.shards.publication import MOST_SHOWN, QUARANTINE, described
from tokenmill.tasks.shards.publish import Output
from tokenmill.tasks.shards.published import (
    PublishedFile,
    content_problem,
    problems_in,
    published_files,
    recorded_outputs,
    size_problem,
)
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import absolute, is_local, join

from .cards import CARD, cards
from .measured import Measured, measured

RELATIVE = re.compile(r"\.{1,2}/.+|(?:[\w.-]+/){2,}[\w.-]*")
"""What can only be a path: relative to here, or with several slashes."""

AGAIN = "run the preparation again to repair it, then push"


@dataclass(frozen=True, slots=True)
class Parcel:
    """What to push: published files, with their paths in the output folder, and documents generated for the hub."""

    output_dir: str
    kind: str
    files: Sequence[PublishedFile]
    documents: Mapping[str, bytes]

    @property
    def sizes(self) -> dict[str, int]:
        """The size in bytes of everything to push, by path. Documents come last."""
        files = {file.recorded.path: file.recorded.size for file in self.files}
        return files | {name: len(content) for name, content in self.documents.items()}


def parcel_of(output_dir: str) -> Parcel:
    """Collect the files of a published preparation, and check that each has its recorded size.

    Raises InputError unless the folder holds a complete preparation, and RunError when a file is missing or has another size.
    """
    output_dir = absolute(output_dir)
    if not is_local(output_dir):
        raise InputError(f"{output_dir}: only a local folder can be pushed; prepare the data with a local --output-dir")
    data = measured(output_dir)
    manifest = data.manifest
    if manifest["missing"]:
        raise InputError(f"{output_dir}: {len(manifest['missing'])} planned shards are missing from it; {AGAIN}")
    files = _recorded(data)
    _require(output_dir, files, size_problem)
    _require(output_dir, [file for file in files if file.recorded.path == BLEND], content_problem)
    pushed = [file for file in files if file.recorded.path.partition("/")[0] not in {*BLENDS, QUARANTINE}]
    documents = {**cards(data), BLEND: _relative_blend(output_dir)}
    made = [described(name, content) for name, content in documents.items()]
    # Match the folders that the manifest may name: the output, its store, and those of local source files
    sources = {os.path.dirname(file) for file in data.source_files if is_local(file)}  # noqa: PTH120 - a string
    known = {data.path, data.store.place, *sources} - {"", "/"}
    folders = sorted(known, key=len, reverse=True)
    public = _changed(
        manifest,
        partial(_without_folders, folders=re.compile(rf"(?<![\w.-])(?<!:/)(?:{'|'.join(map(re.escape, folders))})/")),
    )
    public |= {
        "settings": _changed(public["settings"], _without_path),
        "files": [asdict(file) for file in [*(file.recorded for file in pushed), *made]],
        "volatile": {},
    }
    return Parcel(output_dir, manifest["type"], pushed, {**documents, MANIFEST: manifest_bytes(public)})


def without_card(parcel: Parcel) -> Parcel:
    """The parcel without its generated dataset card, which its manifest no longer lists."""
    manifest = unsealed(parcel.documents[MANIFEST])
    listed = [file for file in manifest["files"] if file["path"] != CARD]
    documents = {name: content for name, content in parcel.documents.items() if name != CARD}
    return replace(parcel, documents={**documents, MANIFEST: manifest_bytes({**manifest, "files": listed})})


def require_unchanged(parcel: Parcel) -> None:
    """Hash every file of the parcel. Raises RunError if one changed since publication."""
    _require(parcel.output_dir, parcel.files, content_problem)


def _recorded(data: Measured) -> list[PublishedFile]:
    """Every published file, once.

    Raises RunError for a shard without a valid receipt, InputError for a file outside the output.
    """
    outputs = recorded_outputs(data.manifest)
    for store, entry in stored_entries(data.manifest):
        if outputs[entry["key"]] is None:
            raise RunError(
                f"{data.path}: the shard of {entry['place']} doesn't have a valid receipt in {store.place}; {AGAIN}"
            )
    published = published_files(data.path, data.manifest, outputs)
    files = {file.place: _inside(data.path, file) for file in published}
    return list(files.values())


def _inside(output_dir: str, file: PublishedFile) -> PublishedFile:
    """A file recorded with its path in the output folder. Raises InputError for a file outside it."""
    path = file.place.removeprefix(f"{output_dir}/")
    if path == file.place:
        raise InputError(f"{file.place}: is outside {output_dir}; prepare the data with a local store")
    return replace(file, recorded=replace(file.recorded, path=path))


def _require(output_dir: str, files: Iterable[PublishedFile], check: Callable[[str, Output, str], str | None]) -> None:
    problems = problems_in(files, check)
    if problems:
        last = f"{output_dir}: {len(problems)} files differ from the publication; {AGAIN}"
        raise RunError("\n".join([*problems[:MOST_SHOWN], last]))


def _relative_blend(output_dir: str) -> bytes:
    def relative(value: object) -> object:
        if isinstance(value, Mapping):
            return {name: relative(each) for name, each in cast("Mapping[str, object]", value).items()}
        if isinstance(value, list):
            return [relative(each) for each in cast("list[object]", value)]
        if isinstance(value, str) and value.startswith("/"):
            if not value.startswith(f"{output_dir}/"):
                raise InputError(f"{place}: {value} is outside this folder, which may have been moved; {AGAIN}")
            return value.removeprefix(f"{output_dir}/")
        return value

    place = join(output_dir, BLEND)
    return orjson.dumps(relative(orjson.loads(read_bytes(place) or b"")), option=orjson.OPT_INDENT_2)


def _changed(value: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401 - any JSON
    if isinstance(value, Mapping):
        named = cast("Mapping[str, Any]", value)
        return {name: _changed(each, change) for name, each in named.items()}
    if isinstance(value, list):
        return [_changed(each, change) for each in cast("list[Any]", value)]
    return change(value) if isinstance(value, str) else value


def _without_folders(text: str, folders: re.Pattern[str]) -> str:
    """Strip the folders of local files from a text."""
    text = folders.sub("", text)
    return _name(text) if text.startswith(("/", "~/", "file://")) else text


def _without_path(text: str) -> str:
    """The name of a file or folder instead of its relative path; a hub id has one slash and names nothing here."""
    return _name(text) if RELATIVE.fullmatch(text) or os.path.exists(text) else text  # noqa: PTH110 - often too long for a path


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
