"""What of a preparation goes to the hub: the files that its manifest vouches for, and nothing that is this machine's.

    data/… splits/… train/…   the shards under their published names, and the files beside them (README.md, tools/…)
    blend.json                the published one, its paths relative to itself: it can be read wherever it lies
    manifest.json             the published one without what is volatile, with size and hash of every file pushed

The folders of shards, receipts, temporary files and whatever else lies in the output folder stay here, and so does the
quarantine: it holds rows that were set aside, with their places on this machine. In the manifest, local files are named
without their folders. All of it is the same bytes for every push of the same preparation.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, cast

import orjson
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.shards.manifest import BLEND, MANIFEST, WHOLE, manifest_bytes, read_manifest
from tokenmill.tasks.shards.publication import MOST_SHOWN, QUARANTINE, described
from tokenmill.tasks.shards.publish import Output
from tokenmill.tasks.shards.store import Store, read_bytes, size_of
from tokenmill.tasks.shards.verify import THREADS, file_hash
from tokenmill.tasks.storage import absolute, is_local, join

AGAIN = "run the preparation again to mend it, then push"


@dataclass(frozen=True, slots=True)
class Parcel:
    """Files of an output folder, with paths relative to it, and the documents that are written for the repository."""

    output_dir: str
    kind: str
    files: Sequence[Output]
    documents: Mapping[str, bytes]

    @property
    def sizes(self) -> dict[str, int]:
        """The size in bytes of everything that is pushed, by its path; documents come last."""
        files = {file.path: file.size for file in self.files}
        return files | {name: len(content) for name, content in self.documents.items()}


def parcel_of(output_dir: str) -> Parcel:
    """What is pushed of a published preparation; every file is there and has the size that was recorded.

    Raises InputError when the folder does not hold a whole preparation, RunError when a file is missing or has another
    size.
    """
    output_dir = absolute(output_dir)
    if not is_local(output_dir):
        raise InputError(f"{output_dir}: only a local folder can be pushed; prepare the data with a local --output-dir")
    manifest = read_manifest(output_dir)
    if manifest is None:
        raise InputError(f"{output_dir}: no {MANIFEST} here; point at the --output-dir of a preparation")
    if manifest["missing"]:
        raise InputError(f"{output_dir}: {len(manifest['missing'])} planned shards are missing from it; {AGAIN}")
    recorded = _recorded(output_dir, manifest)
    _require(output_dir, recorded, _size_problem)
    _require(output_dir, [file for file in recorded if file.path == BLEND], _content_problem)
    blend = _relative_blend(output_dir)
    files = [file for file in recorded if file.path != BLEND and not file.path.startswith(f"{QUARANTINE}/")]
    public = {
        **_without_folders(manifest, _folders(output_dir, manifest)),
        "files": [asdict(file) for file in [*files, described(BLEND, blend)]],
        "volatile": {},
    }
    return Parcel(output_dir, manifest["type"], files, {BLEND: blend, MANIFEST: manifest_bytes(public)})


def require_unchanged(parcel: Parcel) -> None:
    """Read every file: raises RunError unless all hold what was recorded. It takes as long as the disk does."""
    _require(parcel.output_dir, parcel.files, _content_problem)


def _recorded(output_dir: str, manifest: Mapping[str, Any]) -> list[Output]:
    """Every published file with its path in the output folder, as its receipt or the manifest recorded it."""
    place = manifest["volatile"].get("store")
    if place is None:
        raise InputError(f"{output_dir}: its manifest names no store; push the folder that a preparation published in")
    entries = [*manifest["shards"], *manifest.get("derived", {}).get("shards", [])]
    receipts = Store(place, manifest["type"]).proven(entry["key"] for entry in entries)
    files: dict[str, Output] = {}
    for entry in entries:
        if entry["key"] not in receipts:
            raise RunError(f"{output_dir}: the shard of {entry['place']} has no valid receipt in {place}; {AGAIN}")
        for part, names in entry["published"].items():
            for name in names:
                if name.startswith("/") or not is_local(name):
                    raise InputError(f"{name}: lies outside of {output_dir}; prepare the data with a local store")
                files |= {file.path: file for file in _named(name, part, receipts[entry["key"]].outputs)}
    return [*files.values(), *(Output(**file) for file in manifest["files"])]


def _named(name: str, part: str, outputs: Sequence[Output]) -> Iterator[Output]:
    """The files that a published name stands for: it is the path of one, or the prefix of all files of its part."""
    own = [output for output in outputs if output.path.startswith(f"{part}.")]
    for output in own or [output for output in outputs if output.path.startswith(f"{WHOLE}.")]:
        ending = f".{output.path.partition('.')[2]}"
        yield Output(name if name.endswith(ending) else f"{name}{ending}", output.size, output.xxh3_128)


def _require(output_dir: str, files: Iterable[Output], problem_of: Callable[[str, Output], str | None]) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda file: problem_of(join(output_dir, file.path), file), files))
    problems = [problem for problem in found if problem]
    if problems:
        last = f"{output_dir}: {len(problems)} files are not what was published; {AGAIN}"
        raise RunError("\n".join([*problems[:MOST_SHOWN], last]))


def _size_problem(place: str, recorded: Output) -> str | None:
    size = size_of(place)
    if size is None:
        return f"{place}: missing"
    return None if size == recorded.size else f"{place}: {size:,} bytes, but {recorded.size:,} were published"


def _content_problem(place: str, recorded: Output) -> str | None:
    found = file_hash(place)
    return None if found == recorded.xxh3_128 else f"{place}: content changed (xxh3_128 {found})"


def _relative_blend(output_dir: str) -> bytes:
    """The blend with paths relative to the folder that it is in."""

    def relative(value: object) -> object:
        if isinstance(value, Mapping):
            return {name: relative(each) for name, each in cast("Mapping[str, object]", value).items()}
        if isinstance(value, list):
            return [relative(each) for each in cast("list[object]", value)]
        if isinstance(value, str) and value.startswith("/"):
            if not value.startswith(f"{output_dir}/"):
                raise InputError(f"{place}: {value} lies outside of this folder, which was moved perhaps; {AGAIN}")
            return value.removeprefix(f"{output_dir}/")
        return value

    place = join(output_dir, BLEND)
    return orjson.dumps(relative(orjson.loads(read_bytes(place) or b"")), option=orjson.OPT_INDENT_2)


def _folders(output_dir: str, manifest: Mapping[str, Any]) -> re.Pattern[str]:
    """The folders that the manifest may name: of the output, of its store, and of every local source file.

    They are found inside of longer texts too, but neither within a URL nor as the end of a longer path.
    """
    sources = {os.path.dirname(entry["file"]) for entry in manifest["shards"] if is_local(entry["file"])}  # noqa: PTH120 - a string
    folders = sorted({output_dir, manifest["volatile"]["store"], *sources} - {"", "/"}, key=len, reverse=True)
    return re.compile(rf"(?<![\w.-])(?<!:/)(?:{'|'.join(map(re.escape, folders))})/")


def _without_folders(value: Any, folders: re.Pattern[str]) -> Any:  # noqa: ANN401 - any JSON
    """JSON with local files named without their folders."""
    if isinstance(value, Mapping):
        named = cast("Mapping[str, Any]", value)
        return {name: _without_folders(each, folders) for name, each in named.items()}
    if isinstance(value, list):
        return [_without_folders(each, folders) for each in cast("list[Any]", value)]
    if not isinstance(value, str):
        return value
    text = folders.sub("", value)
    return text.rstrip("/").rpartition("/")[2] if text.startswith(("/", "~/", "file://")) else text
