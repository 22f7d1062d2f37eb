"""From what a blend names to the files that hold its rows: a file, a folder, a glob, a prefix of a bucket, a hub data set.

One listing per source, never a request per file: a bucket prefix of 100,000 objects is 100 pages, a hub data set one
answer, a folder of 100,000 local files 1.3 s. The listing already carries sizes and checksums, so nothing is read,
except the first bytes of `.json` files (`formats`). Order is by URI: the same files always give the same plan.

Folders, prefixes and globs are searched recursively for names we can read; the rest is counted, by ending, and an error
only if nothing is left. A file that is named outright must be one we can read. Hidden files and folders (`.git`, `.cache`)
and what is no regular file are skipped and counted too.
`subset` and `split` choose among what was found (`selection`); a file that is named outright is taken as it is.
"""

import difflib
import errno
import os
import re
import stat
import sys
from collections import Counter, deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from glob import has_magic
from pathlib import Path
from typing import Any, cast

from fsspec.spec import AbstractFileSystem
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.storage import absolute, filesystem, is_local

from .files import Compression, Format, Found, SourceFile
from .formats import ENDINGS, describe, sniff
from .planned import stored_version
from .selection import choose, data_names, glob_pattern, kinds_skipped, shortened

COMMIT = re.compile(r"@[0-9a-f]{40}/")
"""What stands between a repository of the hub and a path inside it."""

REFUSED = frozenset({errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG})
"""What a person can do something about; any other error of a disk may pass."""

SPECIAL = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

UNAUTHORIZED = 401
CLIENT_ERRORS = {
    "botocore.exceptions": ("NoCredentialsError", "PartialCredentialsError", "ParamValidationError"),
    "google.auth.exceptions": ("DefaultCredentialsError",),
    "gcsfs.retry": ("HttpError",),
}


def discover(source: DataSource) -> list[SourceFile]:
    """The files of `source`, as `find` has them."""
    return find(source).files


def find(source: DataSource) -> Found:
    """Every file of `source`, sorted by URI, and how many lie beside them unread. Empty files are kept, with size 0.

    A local file carries `modified_ns`, any other `version`, where its store gives one. A symbolic link to a folder is
    followed, and a folder that can be reached twice is read once, as is a file and a link to it beside it. Raises InputError
    when there is nothing to read.
    """
    if source.path.startswith("hf://"):
        from .hub import hub_files  # the hub's client takes 0.15 s to import

        found = hub_files(source)
    elif source.revision is not None:
        raise InputError(
            f"{source.path}: 'revision' {source.revision!r} means something for hf:// paths only; remove it"
        )
    elif is_local(source.path):
        found = _local_files(source)
    else:
        found = _stored_files(source)
    with ThreadPoolExecutor(max_workers=8) as pool:
        sniffed = [*pool.map(sniff, [file for file in found.files if file.format == "json"])]
    files = [*sniffed, *(file for file in found.files if file.format != "json")]
    return Found(sorted(files, key=lambda file: file.uri), dict(sorted(found.skipped.items())))


def _local_files(source: DataSource) -> Found:
    path = Path(absolute(source.path))
    try:
        if path.is_file():
            return Found([_local_file(path)], {})
        folder, names, special = _local_names(path)
        chosen = _named_once(folder, choose(data_names(names, source.path), source))
        skipped = kinds_skipped(names, source.subset) + Counter("no regular file" for _ in special)
        return Found([_local_file(folder / name) for name in chosen], skipped)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        reason = (
            "is a link that leads back to itself" if error.errno == errno.ELOOP else f"cannot be read: {error.strerror}"
        )
        raise InputError(f"{error.filename}: {reason}; fix or remove it, or name another path") from error


def _named_once(folder: Path, names: list[str]) -> list[str]:
    """The names without links to files that are among them: a file is read once, whatever else it is called."""
    links = {name for name in names if (folder / name).is_symlink()}
    if not links:
        return names
    real = {_inode(folder / name) for name in names if name not in links}
    return [name for name in names if name not in links or _inode(folder / name) not in real]


def _inode(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _local_file(path: Path) -> SourceFile:
    status = path.stat()
    kind = _kind(str(path))
    return SourceFile(str(path), status.st_size, *kind, modified_ns=status.st_mtime_ns, changed_ns=status.st_ctime_ns)


def _local_names(path: Path) -> tuple[Path, list[str], list[str]]:
    """A folder, the files below it that `path`, a folder or a glob, names, and what is no regular file among them."""
    if path.is_dir():
        return path, *_below(path)
    folder, pattern = divided(str(path))
    if not pattern or not Path(folder).is_dir():
        raise InputError(_why_no_file(path))
    matches = glob_pattern(pattern).match
    depth = sys.maxsize if "**" in pattern else pattern.count("/") + 1
    names, special = _below(Path(folder), depth)
    return Path(folder), [*filter(matches, names)], [*filter(matches, special)]


def _why_no_file(path: Path) -> str:
    """Why there is neither a file nor a folder at `path`, and what to do."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            return f"{path}: is a link to {path.readlink()}, which does not exist; fix the link, or name another path"
        return f"{path} does not exist; {_nearest_there(path)}"
    except NotADirectoryError:
        return f"{path} does not exist; {_nearest_there(path)}"
    kind = next((name for is_kind, name in SPECIAL if is_kind(mode)), "no regular file")
    return f"{path}: is {kind}, and sources are read more than once; write what it gives to a file and name that"


def _below(root: Path, depth: int = sys.maxsize) -> tuple[list[str], list[str]]:
    """Files at most `depth` components below `root`, as relative names, and likewise pipes, sockets and devices.

    Hidden folders are named and not entered. Links to folders are followed last and no folder is entered twice, so circles
    end and real names win.
    """
    names: list[str] = []
    special: list[str] = []
    entered: set[tuple[int, int]] = set()
    folders = deque([""])
    while folders:
        folder = folders.popleft()
        status = (root / folder).stat()
        if (status.st_dev, status.st_ino) in entered:
            continue
        entered.add((status.st_dev, status.st_ino))
        with os.scandir(root / folder) as entries:
            there = sorted(entries, key=lambda entry: entry.name)
        for entry in there:
            name = f"{folder}{entry.name}"
            if entry.name[0] == "." or entry.is_file() or (entry.is_symlink() and not entry.is_dir()):
                names.append(name)
            elif not entry.is_dir():
                special.append(name)
            elif name.count("/") + 1 < depth:
                (folders.append if entry.is_symlink() else folders.appendleft)(f"{name}/")
    return names, special


def name_within(path: str, uri: str) -> str:
    """What a file is called in the data set at `path`: its path below the folder that is named there, or inside its
    repository, so that no two files of a data set are called the same. A file that is named itself is called by its name.
    """
    folder = f"{divided(path)[0].rstrip('/')}/"
    if uri.startswith(folder):
        return uri.removeprefix(folder)
    commit = COMMIT.search(uri)
    return uri[commit.end() :] if commit else uri.rpartition("/")[2]


def divided(path: str) -> tuple[str, str]:
    """The part of a glob before its first wildcard component, and the rest; the rest is empty when it is no glob."""
    parts = path.split("/")
    first = next((index for index, part in enumerate(parts) if has_magic(part)), len(parts))
    return "/".join(parts[:first]), "/".join(parts[first:])


def _nearest_there(path: Path) -> str:
    """What there is instead of the missing `path`."""
    parent = next(folder for folder in path.parents if folder.is_dir())
    missing = path.relative_to(parent).parts[0]
    there = sorted(entry.name for entry in parent.iterdir())
    close = difflib.get_close_matches(missing, there, n=1)
    if close:
        return f"did you mean {parent / close[0]}?"
    return f"{parent} holds {shortened(there)}" if there else f"{parent} is empty"


def _stored_files(source: DataSource) -> Found:
    place = absolute(source.path)
    scheme = place.split("://", 1)[0]
    store, path = filesystem(place)
    with _explained(place):
        listed = _listing(store, path)
    if set(listed) == {path}:
        return Found([_stored_file(scheme, path, listed[path])], {})
    folder = divided(path)[0].rstrip("/") + "/"
    relative = {name.removeprefix(folder): name for name in listed}
    chosen = choose(data_names(relative, source.path), source)
    files = [_stored_file(scheme, relative[name], listed[relative[name]]) for name in chosen]
    return Found(files, kinds_skipped(relative, source.subset))


def _listing(store: AbstractFileSystem, path: str) -> dict[str, dict[str, Any]]:
    """The objects at, below or, for a glob, matching `path`: what the store says of each, by its name.

    Objects that only mark a folder, whose names end with a slash, are left out.
    """
    # Stores remember listings; a plan made of an old one would miss what arrived since.
    store.invalidate_cache()
    if has_magic(path):
        glob_pattern(path)
        listed = store.glob(path, detail=True)
    else:
        listed = store.find(path, detail=True)
    entries = {name: entry or store.info(name) for name, entry in cast("dict[str, dict[str, Any]]", listed).items()}
    return {name: entry for name, entry in entries.items() if entry["type"] == "file" and not name.endswith("/")}


def _stored_file(scheme: str, name: str, entry: dict[str, Any]) -> SourceFile:
    uri = f"{scheme}://{name.lstrip('/')}"
    return SourceFile(uri, int(entry["size"]), *_kind(uri), version=stored_version(entry))


def _kind(name: str) -> tuple[Format, Compression | None]:
    kind = describe(name)
    if kind is None:
        raise InputError(f"{name}: files of this type cannot be read; supported are {', '.join(ENDINGS)}")
    return kind


@contextmanager
def _explained(place: str) -> Generator[None]:
    """Turns a store's refusal into an InputError with a remedy; transient errors pass, for whoever retries."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"{place}: there is no such bucket or path; check the spelling and the region") from error
    except (OSError, *_client_errors()) as error:
        if not _is_refusal(error):
            raise
        remedy = "check the name of the bucket, and the credentials in the environment"
        raise InputError(f"{place}: access was refused ({error}); {remedy}") from error


def _client_errors() -> tuple[type[Exception], ...]:
    """The errors of the cloud clients; those that are not loaded have raised nothing."""
    loaded = [(sys.modules[module], names) for module, names in CLIENT_ERRORS.items() if module in sys.modules]
    return tuple(getattr(module, name) for module, names in loaded for name in names)


def _is_refusal(error: Exception) -> bool:
    """Whether a store said no to who is asking, rather than that it cannot answer now."""
    if isinstance(error, OSError):
        # gcsfs has no type of its own for a 403.
        return isinstance(error, PermissionError) or str(error).startswith("Forbidden")
    return getattr(error, "code", UNAUTHORIZED) == UNAUTHORIZED
