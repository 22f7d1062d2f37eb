"""Find the files of a dataset: a file, a folder, a glob, a bucket prefix or a hub dataset.

One listing per source, never a request per file: a bucket prefix of 100,000 objects takes 100 pages, a hub dataset one answer,
a folder of 100,000 local files 1.3 s. Listings include sizes and checksums, so nothing is read except the first bytes of
`.json` files. Files are sorted by URI, so the same files always give the same plan.

Folders, prefixes and globs are searched recursively for files in known formats; other files, hidden files and folders (`.git`,
`.cache`), pipes and devices are skipped and counted. `subset` and `split` select among the files found (`selection`). A path to
a file selects that file, which must be of a known format.

Every run searches again, so outputs must not be inside a source, or the next run would read them. Nor may a source be inside an
output folder, where publishing replaces files. `require_no_overlap` rejects both.
"""

import errno
import os
import re
import stat
import sys
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from glob import has_magic
from pathlib import Path
from typing import Any, cast

from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem
from tokenmill.tasks.blend.load import HUB_HOSTS
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.errors import InputError, closest
from tokenmill.tasks.runtime import in_threads
from tokenmill.tasks.storage import absolute, filesystem, is_local, is_web, require_name

from .files import Compression, Found, InputWarning, SourceFile
from .formats import describe, format_of, is_hidden, supported
from .integrity import stored_version
from .json_lines import TextLines, WholeText
from .selection import glob_pattern, select, shortened

COMMIT = re.compile(r"@[0-9a-f]{40}/")
"""The part of a hub URI between the repository and the path inside it."""

SNAPSHOT = re.compile(r"(?P<repository>.*/(?:datasets|models|spaces)--[^/]+)/snapshots/(?P<commit>[^/]+)/")
"""A file in the hub's cache."""

REFUSED = frozenset({errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG})
"""Errors that the user can fix; other errors of a disk may be transient."""

SPECIAL = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

UNAUTHORIZED = 401
SNIFFING_THREADS = 8

CLIENT_ERRORS = (
    ("botocore.exceptions", "NoCredentialsError"),
    ("botocore.exceptions", "PartialCredentialsError"),
    ("botocore.exceptions", "ParamValidationError"),
    ("google.auth.exceptions", "DefaultCredentialsError"),
    ("gcsfs.retry", "HttpError"),
)


def discover(source: DataSource, wanted: str | None = None) -> list[SourceFile]:
    """Return the files of `source`. Arguments and errors as of `find`."""
    return find(source, wanted).files


def find(source: DataSource, wanted: str | None = None) -> Found:
    """Return the files of `source`, sorted by URI, and how many others were skipped. Empty files are kept, with size 0.

    `wanted` is the split to take of a hub dataset with several if `source` names none; None takes all.

    A local file has `modified_ns`, any other file `version`, if its store gives one. Links to folders are followed; a folder or
    file that can be reached in several ways is read once. Raises InputError if every file is excluded.
    """
    if source.path.startswith("hf://"):
        from .hub import hub_files  # the hub's client takes 0.15 s to import

        found = hub_files(source, wanted)
    elif source.revision is not None:
        raise InputError(f"{source.path}: 'revision' {source.revision!r} applies to hf:// paths only; remove it")
    elif is_web(source.path):
        from .web import offered  # its client takes as long

        names, size, version = offered(source.path)
        kind = _kind(next(filter(describe, names), source.path))
        found = Found([SourceFile(source.path, size, *kind, version=version)], {})
    elif is_local(source.path):
        found = _local_files(source)
    else:
        found = _stored_files(source)
    files = sorted(
        in_threads(lambda file: format_of(file).sniff(file), found.files, SNIFFING_THREADS), key=lambda file: file.uri
    )
    if source.document_per == "line":
        files = [replace(file, format=TextLines.name) if file.format == WholeText.name else file for file in files]
    return Found(files, dict(sorted(found.skipped.items())), found.warnings)


def _local_files(source: DataSource) -> Found:
    path = Path(absolute(source.path))
    with _without_refusals():
        if path.is_file():
            return Found([_local_file(path)], {})
        folder, pattern = path, ""
        if not path.is_dir():
            folder, pattern = Path(divided(str(path))[0]), divided(str(path))[1]
            if not pattern or not folder.is_dir():
                raise InputError(_why_no_file(path))
        names, special = _listed(folder, pattern)
        if pattern:
            matches = glob_pattern(pattern).match
            names, special = [*filter(matches, names)], [*filter(matches, special)]
        links = {name for name in names if (folder / name).is_symlink()}
        # In a cache of the hub, names of known formats are links to blobs, whose own names have no ending.
        if blobs := {os.path.realpath(folder / name) for name in links if describe(name)}:
            names = [name for name in names if describe(name) or os.path.realpath(folder / name) not in blobs]
        names, older = _of_one_snapshot(folder, names)
        chosen, skipped, warnings = select(names, source, lambda name: _size(folder / name))
        # A file that several names lead to, such as in two revisions, is read once, by its own name if possible.
        if links:
            first: dict[str, str] = {}
            for name in sorted(chosen, key=links.__contains__):
                first.setdefault(os.path.realpath(folder / name), name)
            chosen = [*first.values()]
        files = [_local_file(folder / name) for name in chosen]
        skipped += Counter({"no regular file": len(special), "older snapshot": len(older)})
        # An older snapshot shares the blobs of files that haven't changed, so only the others aren't read.
        read = {os.path.realpath(folder / name) for name in names} if older else set[str]()
        lost = [name for name in older if describe(name) and os.path.realpath(folder / name) not in read]
        if lost:
            what = f"in snapshots that refs/main doesn't name, such as {lost[0]}"
            size = sum(_size(folder / name) for name in lost)
            warnings.append(InputWarning("unread_files", what, len(lost), size))
        return Found(files, skipped, warnings)


@contextmanager
def _without_refusals() -> Generator[None]:
    """Turn an error of a disk that the user can fix into an InputError; others may be transient."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        loops = error.errno == errno.ELOOP
        reason = "is a link that leads back to itself" if loops else f"cannot be read: {error.strerror}"
        raise InputError(f"{error.filename}: {reason}; fix or remove it, or name a different path") from error


def _of_one_snapshot(folder: Path, names: list[str]) -> tuple[list[str], list[str]]:
    """The names, of each repository in a cache of the hub only those in the snapshot that `refs/main` names; and the others.

    Raises InputError if a repository has several snapshots, and `refs/main` names none of them.
    """
    commits: dict[str, dict[str, list[str]]] = {}
    for name in names:
        if found := SNAPSHOT.match(str(folder / name)):
            commits.setdefault(found["repository"], {}).setdefault(found["commit"], []).append(name)
    older: set[str] = set()
    for repository, snapshots in commits.items():
        if len(snapshots) == 1:
            continue
        main = Path(repository, "refs", "main")
        current = main.read_text("utf-8").strip() if main.is_file() else ""
        if current not in snapshots:
            raise InputError(
                f"{repository}: contains {len(snapshots)} versions of one dataset ({shortened(sorted(snapshots))}), and refs/main "
                "doesn't name one of them; name a version's folder in snapshots/"
            )
        # Other snapshots are earlier downloads: reading them would read most rows twice.
        older.update(name for commit, listed in snapshots.items() if commit != current for name in listed)
    return [name for name in names if name not in older], sorted(older)


def _size(path: Path) -> int:
    """The bytes of a file; none for a link to nowhere."""
    return path.stat().st_size if path.exists() else 0


def _local_file(path: Path) -> SourceFile:
    status = path.stat()
    kind = _kind(require_name(str(path)))
    return SourceFile(str(path), status.st_size, *kind, modified_ns=status.st_mtime_ns, changed_ns=status.st_ctime_ns)


def _why_no_file(path: Path) -> str:
    """The reason why `path` is neither a file nor a folder, and the remedy."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            target = path.readlink()
            return f"{path}: is a link to {target}, which does not exist; fix the link, or name a different path"
        return f"{path} does not exist; {_nearest_there(path)}"
    kind = next((name for is_kind, name in SPECIAL if is_kind(mode)), "not a regular file")
    return f"{path}: is {kind}, and sources are read more than once; write its output to a file and name that"


def _walked(root: Path, pattern: str) -> Iterator[tuple[str, bool, list[os.DirEntry[str]]]]:
    """The folders that a search of `root` enters: the path below it with a slash, whether it is a link, and the entries.

    Links to folders are followed last and no folder is entered twice, so cycles end and real names win.
    """
    entered: set[tuple[int, int]] = set()
    folders = deque([("", False)])
    while folders:
        folder, is_link = folders.popleft()
        status = (root / folder).stat()
        if (status.st_dev, status.st_ino) in entered:
            continue
        entered.add((status.st_dev, status.st_ino))
        with os.scandir(root / folder) as entries:
            there = sorted(entries, key=lambda entry: entry.name)
        yield folder, is_link, there
        for entry in there:
            name = f"{folder}{entry.name}"
            # Real folders go to the front of the queue, so that their names win over those of links.
            if entry.is_dir() and _may_match(pattern, name):
                (folders.append if entry.is_symlink() else folders.appendleft)((f"{name}/", entry.is_symlink()))


def _listed(root: Path, pattern: str = "") -> tuple[list[str], list[str]]:
    """Relative paths of the files below `root`, and of the pipes, sockets and devices.

    Hidden folders that `pattern` doesn't name are listed but not entered.
    """
    names: list[str] = []
    special: list[str] = []
    for folder, _, there in _walked(root, pattern or ANY_DEPTH):
        for entry in there:
            # A link to nowhere is listed too, so that reading it is an error and not silence.
            if is_hidden(entry.name, pattern) or entry.is_file() or (entry.is_symlink() and not entry.is_dir()):
                names.append(f"{folder}{entry.name}")
            elif not entry.is_dir():
                special.append(f"{folder}{entry.name}")
    return names, special


def name_within(path: str, uri: str) -> str:
    """Return the name of a file in the dataset at `path`, unique in it: its path below the folder of `path` or in its repository.

    If `path` is the file itself, its base name.
    """
    folder = f"{divided(path)[0].rstrip('/')}/"
    if uri.startswith(folder):
        return uri.removeprefix(folder)
    # A hub URI has the commit where the dataset's path has the branch, or nothing.
    commit = COMMIT.search(uri)
    return uri[commit.end() :] if commit else uri.rpartition("/")[2]


def divided(path: str) -> tuple[str, str]:
    """Return a glob's components before the first with a wildcard, and the rest; without a wildcard, the rest is empty."""
    parts = path.split("/")
    first = next((index for index, part in enumerate(parts) if has_magic(part)), len(parts))
    return "/".join(parts[:first]), "/".join(parts[first:])


def _nearest_there(path: Path) -> str:
    """Existing paths similar to the missing `path`."""
    parent = next(folder for folder in path.parents if folder.is_dir())
    missing, *below = path.relative_to(parent).parts
    there = sorted(entry.name for entry in parent.iterdir())
    if close := closest(missing, there):
        return f"did you mean {parent / close}?"
    # `org/name` and a page's address without its scheme are the Hub's, and look like paths.
    held = f"{parent} holds {shortened(there)}" if there else f"{parent} is empty"
    if missing in HUB_HOSTS:
        return f"for a page of the Hub write https://{'/'.join([missing, *below])} ({held})"
    is_name = len(below) == 1 + (missing == "datasets") and not describe(path.name)
    return f"for a dataset of the Hub write hf://{'/'.join([missing, *below])} ({held})" if is_name else held


def _stored_files(source: DataSource) -> Found:
    place = absolute(source.path)
    store, path = filesystem(place)
    try:
        # fsspec caches listings; a plan from a stale listing would miss new objects.
        store.invalidate_cache()
        if has_magic(path):
            glob_pattern(path)  # a mistake in it is named before the store is asked
            entries = store.glob(path, detail=True)
        else:
            entries = store.find(path, detail=True)
        if not isinstance(entries, dict):  # adlfs lists the names alone where the path is a file
            entries = dict.fromkeys(entries)
        found = {name: entry or store.info(name) for name, entry in cast("dict[str, dict[str, Any]]", entries).items()}
    except FileNotFoundError as error:
        raise InputError(f"{place}: bucket or path not found; check the spelling and the region") from error
    except (OSError, *_client_errors()) as error:
        # gcsfs doesn't have an exception type for a 403; Google's clients have a code only if a server answered.
        refused = isinstance(error, PermissionError) or str(error).startswith("Forbidden")
        if not (refused if isinstance(error, OSError) else getattr(error, "code", UNAUTHORIZED) == UNAUTHORIZED):
            raise  # a transient error, after which the run is tried again
        remedy = "check the bucket name and the credentials in the environment"
        raise InputError(f"{place}: access denied ({error}); {remedy}") from error
    # Names that end with a slash are markers of folders.
    listed = {name: entry for name, entry in found.items() if entry["type"] == "file" and not name.endswith("/")}
    if set(listed) == {path}:  # the path is an object itself
        return Found([_stored_file(place, path, listed[path])], {})
    folder = divided(path)[0].rstrip("/") + "/"
    relative = {name.removeprefix(folder): name for name in listed}
    chosen, skipped, warnings = select([*relative], source, lambda name: int(listed[relative[name]]["size"]))
    files = [_stored_file(place, relative[name], listed[relative[name]]) for name in chosen]
    return Found(files, skipped, warnings)


def _stored_file(place: str, name: str, entry: dict[str, Any]) -> SourceFile:
    """The object `name`, as its store lists it, found at `place`."""
    scheme, _, rest = place.partition("://")
    authority, name = rest.partition("/")[0], name.lstrip("/")
    if "@" in authority:  # abfs://container@account/…, where names are listed without the account
        name = f"{authority}/{name.partition('/')[2]}"
    uri = f"{scheme}://{name}"
    return SourceFile(uri, int(entry["size"]), *_kind(uri), version=stored_version(entry))


def _kind(name: str) -> tuple[str, Compression | None]:
    kind = describe(name)
    if kind is None:
        raise InputError(f"{name}: files of this type cannot be read; supported are {supported()}")
    return kind


def _client_errors() -> Iterator[type[Exception]]:
    """The error types of the cloud clients that are imported; the others cannot have raised anything."""
    return (getattr(sys.modules[module], name) for module, name in CLIENT_ERRORS if module in sys.modules)


ANY_DEPTH = "**"

Location = tuple[AbstractFileSystem, str]
"""A file system and a path in it, without symbolic links."""


def require_no_overlap(name: str, source: str, written: Mapping[str, str], published: str | None = None) -> None:
    """Raises InputError if a search of `source` would find an output folder, or if `source` is inside `published`.

    `name` is the source's name in messages; `written` maps output folders to their paths. Hidden folders and folders
    that a glob does not match are never searched, so outputs may be there. Lists every local folder once.
    """
    places = {what: filesystem(folder) for what, folder in [*written.items(), ("", published)] if folder is not None}
    outputs = {
        what: (system, os.path.realpath(path) if isinstance(system, LocalFileSystem) else path)
        for what, (system, path) in places.items()
    }
    replaced = outputs.pop("", None)
    if source.startswith("hf://") or is_web(source):  # nothing is written there
        return
    system, path = filesystem(absolute(source))
    is_here = is_local(absolute(source))
    root, pattern = (path, "") if is_here and Path(path).exists() else divided(path)
    pattern = pattern or ANY_DEPTH
    searched: list[tuple[str, Location]] = [("", (system, os.path.realpath(root) if is_here else root.rstrip("/")))]
    if is_here and Path(root).is_dir():  # an output may lie where a link leads
        with _without_refusals():
            links = [folder for folder, is_link, _ in _walked(Path(root), pattern) if is_link]
        searched += [(folder, (system, os.path.realpath(Path(root, folder)))) for folder in links]
    for place, location in searched:
        for what, folder in outputs.items():
            below = _below(location, folder)
            if below is not None and _may_match(pattern, f"{place}/{below}"):
                raise InputError(
                    f"{name}: {source} is searched for files and contains {what} {written[what]}, so the next run "
                    f"would read this run's output; choose a folder outside {source}"
                )
        if replaced is not None and _below(replaced, location) is not None:
            raise InputError(
                f"{name}: {source} is inside the output folder {published}, where publishing replaces and removes files; "
                "choose a different output folder"
            )


def _below(folder: Location, place: Location) -> str | None:
    """The path of `place` below `folder`, empty for the folder itself; None if it is elsewhere."""
    outer, inner = folder[1].rstrip("/") + "/", place[1].rstrip("/") + "/"
    return inner.removeprefix(outer) if folder[0] == place[0] and inner.startswith(outer) else None


def _may_match(pattern: str, folder: str) -> bool:
    """Whether a search with `pattern` may find a file below `folder`, a path relative to the searched folder."""
    names, parts = [name for name in folder.split("/") if name not in {"", "."}], pattern.split("/")
    if any(is_hidden(name, pattern) for name in names):
        return False
    for number, name in enumerate(names):
        if number == len(parts):  # the folder is deeper than any match
            return False
        if parts[number] == ANY_DEPTH:
            return True
        if not glob_pattern(parts[number]).match(name):
            return False
    return len(parts) > len(names)  # something is left of the pattern for the file's own name
