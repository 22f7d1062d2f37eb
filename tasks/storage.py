"""Paths and URIs: local paths, s3://, gs://, abfs://, memory://, hf:// and art://; sources may also be http(s)://.

Any path argument may be `art://NAME`, `art://NAME:v3` or `art://NAME/file`, which refer to a registered name
(`tokenmill register`). fsspec opens everything else. Its file systems are cached per process and configured from the
environment (credentials, endpoints), never from blends or command lines.
"""

import os
import re
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem
from tokenmill.tasks.errors import InputError, pip_install
from tokenmill.tasks.seal import unsealed

ChangeDetection = Literal["hash", "mtime"]
"""How a change of a local file is noticed: by a hash of its content, or by its path, size and modification time."""

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure", "az": "azure"}

SCHEMES = frozenset({"art", "file", "hf", "http", "https", "memory", *EXTRAS})
WRITTEN = "a local path, s3://, gs://, abfs://, memory:// or hf://"

ONE_SLASH = re.compile(rf"(?i)({'|'.join([*SCHEMES, 'data', 'dbfs', 'ftp', 'hdfs', 'sftp'])}):/?(?!/)")
"""The beginning of a URI that lacks a slash, or of one that has none and cannot be read."""

ART = "art://"
VERSION = re.compile(r"v(\d+)\.json")

fsspec.register_implementation("s3", "tokenmill.tasks.s3.S3", clobber=True)
fsspec.register_implementation("s3a", "tokenmill.tasks.s3.S3", clobber=True)


def is_local(uri: str) -> bool:
    """Return whether `uri` is a path on this machine rather than a URL."""
    return "://" not in uri or uri.startswith("file://")


def is_web(uri: str) -> bool:
    """Return whether `uri` is of a web server, which can only be read from."""
    return uri.startswith(("http://", "https://"))


def plain(uri: str) -> str:
    """Return a local path without `file://`.

    Raises InputError for a file of a different host, and for a URI that lacks a slash, which would be a file of that name.
    """
    if found := ONE_SLASH.match(uri):
        scheme, rest = found[1].lower(), uri[found.end() :]
        slashes = "///" if scheme == "file" else "//"
        remedy = f"write {scheme}:{slashes}{rest[:80]}" if scheme in SCHEMES else f"use {WRITTEN}"
        raise InputError(
            f"{uri[:200]}: is neither a URI that can be read nor a path; {remedy}, or ./{uri[:80]} for a file"
        )
    if not uri.startswith("file://"):
        return uri
    path = uri.removeprefix("file://").removeprefix("localhost")
    if not path.startswith(("/", "~")):
        raise InputError(f"{uri}: a file:// address has the whole path; write file:///folder/file, or only the path")
    return path


def require_place(uri: str) -> str:
    """`uri` unchanged.

    Raises InputError if it is blank, which would mean the working directory, or begins with the `~` of a missing home
    folder, which would mean a folder with that name; and as `require_name` does.
    """
    if not uri.strip():
        raise InputError(f"{uri!r} is not a path; name a file, a folder or a URI")
    if os.path.expanduser(uri).startswith("~"):  # noqa: PTH111 - a URI, perhaps
        raise InputError(f"{uri!r}: home folder not found; write the whole path, or ./{uri} for a file of that name")
    return require_name(uri)


def require_name(uri: str) -> str:
    """Return `uri` unchanged. Raises InputError if it isn't UTF-8 (we store it in JSON), or contains a NUL."""
    try:
        uri.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{uri!r}: the name is not UTF-8; rename the file or the folder") from error
    if "\0" in uri:
        raise InputError(f"{uri!r}: no name can have a NUL character; correct the path")
    return uri


def absolute(uri: str) -> str:
    """Return an absolute local path without `file://`, or the URL without a trailing slash.

    Raises InputError as `require_place` and `located` do, also for the working directory's name.
    """
    require_place(uri)
    if uri.startswith(ART):
        return located(uri)
    if is_local(uri):
        return require_name(os.path.abspath(os.path.expanduser(plain(uri))))  # noqa: PTH100, PTH111 - `..` is resolved, links are kept
    scheme, separator, place = uri.partition("://")
    return scheme + separator + place.rstrip("/")


def join(base: str, *parts: str) -> str:
    """`base/part/…`, for local paths and URLs alike."""
    return "/".join([base.rstrip("/"), *parts])


def user_cache(*parts: str) -> str:
    """Return a path in the user's cache on this machine, or in the temporary folder if the cache cannot be written.

    Raises as `temporary_folder` does.
    """
    home = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")  # noqa: PTH111 - see `absolute`
    base = join(os.path.abspath(home), "tokenmill")  # noqa: PTH100
    place = join(base, *parts)
    return place if Path(place).exists() or is_writable(base) else join(temporary_folder(), *parts)


@cache
def is_writable(folder: str) -> bool:
    """Return whether files can be written in a local folder, which is created if missing; file modes aren't enough to decide it."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def temporary_folder() -> str:
    """Return the user's folder among the temporary files, the same for every process.

    Raises InputError if other users can write to it.
    """
    folder = Path(tempfile.gettempdir(), f"tokenmill-{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise InputError(
            f"{folder} is not a private folder of this user, and no other cache folder can be written; set XDG_CACHE_HOME "
            "and PREFECT_HOME to folders that can"
        )
    return str(folder)


def filesystem(uri: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of `uri` and the path within it.

    Raises InputError if the scheme is unknown or its extra is not installed.
    """
    if uri.startswith(ART):
        return filesystem(located(uri))
    if is_local(uri):
        return LocalFileSystem(), absolute(uri)
    scheme, _, place = uri.partition("://")
    if scheme not in SCHEMES and scheme not in fsspec.registry:  # which holds what a program has registered itself
        close = f"did you mean {scheme.lower()}://?" if scheme.lower() in SCHEMES else f"use {WRITTEN}"
        raise InputError(f"{uri[:200]}: unknown scheme {scheme[:40]!r}; {close}")
    if is_web(uri):
        raise InputError(f"{uri}: only source files are read from web servers; use {WRITTEN}")
    if scheme in EXTRAS and not place.partition("/")[0]:
        raise InputError(f"{uri}: doesn't name a bucket; write {scheme}://BUCKET/path")
    try:
        # huggingface_hub reads the address of its server only when it is imported.
        endpoint = os.environ.get("HF_ENDPOINT") if scheme == "hf" else None
        found = fsspec.url_to_fs(uri, **({"endpoint": endpoint} if endpoint else {}))
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        remedy = f"install it with: {pip_install(extra)}" if extra else str(error)
        raise InputError(f"{uri}: reading {scheme}:// needs a package that is not installed; {remedy}") from error
    except ValueError as error:
        raise InputError(f"{uri}: {error}; check the address and the environment of its credentials") from error
    return cast("tuple[AbstractFileSystem, str]", found)


def open_binary(uri: str) -> BinaryIO:
    """Open a file or object to read bytes. Errors as in `filesystem`, and FileNotFoundError."""
    system, path = filesystem(uri)
    return cast("BinaryIO", system.open(path, "rb"))


def registry() -> str:
    """Return the registry of names: TOKENMILL_ARTIFACTS (a folder or URI), by default a folder of the user."""
    return absolute(os.environ.get("TOKENMILL_ARTIFACTS") or "~/.tokenmill/artifacts")


def located(reference: str) -> str:
    """Return the path that `art://NAME[:VERSION][/PATH]` refers to; by default its latest version. Raises as `record_of` does."""
    rest = reference.removeprefix(ART).partition("/")[2]
    place = str(record_of(reference)["path"])
    return join(place, rest) if rest else place


def record_of(reference: str) -> Mapping[str, Any]:
    """Return the record of a registered name, with at least its `path`. Raises InputError if the name or version doesn't exist."""
    named = reference.removeprefix(ART).partition("/")[0]
    name, _, version = named.partition(":")
    if version in {"", "latest"}:
        version = f"v{max(versions(name), default=0)}"
    system, place = filesystem(join(registry(), name, f"{version}.json"))
    try:
        return unsealed(cast("bytes", system.cat_file(place)))
    except ValueError as error:
        raise InputError(
            f"{reference}: the record {join(registry(), name, version)}.json is damaged ({error}); register the folder "
            "again, which makes a new version"
        ) from error
    except FileNotFoundError as error:
        raise InputError(
            f"{reference}: nothing is registered as {named!r} in {registry()}; register it with: tokenmill register "
            f"{name} FOLDER, or set TOKENMILL_ARTIFACTS"
        ) from error


def versions(name: str) -> list[int]:
    """Return the registered versions of a name."""
    system, folder = filesystem(join(registry(), name))
    system.invalidate_cache(folder)
    try:
        listed = cast("list[str]", system.ls(folder, detail=False))
    except FileNotFoundError:
        return []
    found = (VERSION.fullmatch(path.rpartition("/")[2]) for path in listed)
    return [int(match[1]) for match in found if match]
