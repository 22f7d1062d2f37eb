"""What is read and what is written must lie apart.

Folders, prefixes and globs are searched for files again on every run. Outputs below a source would be its data the next
time, and sources below an output folder may be replaced or removed by what is published there. Both are refused before
anything is written. Hidden folders and folders that a glob does not reach are never searched, so outputs may lie there.

Links to folders are followed as discovery follows them. The price is one listing of each local folder without a `stat`
of its files.
"""

import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from fsspec.spec import AbstractFileSystem
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.storage import absolute, filesystem, is_local

from .discovery import divided
from .selection import glob_pattern

ANY_DEPTH = "**"

Real = tuple[AbstractFileSystem, str]
"""A place without links: its file system and the path in it."""


def require_apart(name: str, source: str, written: Mapping[str, str], published: str | None = None) -> None:
    """Raises InputError where searching `source` would find what is written, or where it lies in the folder `published`.

    `name` is what messages call the source; `written` maps names of the folders that are written to their places.
    """
    outputs = {what: _real(folder) for what, folder in written.items()}
    replaced = None if published is None else _real(published)
    for place, pattern, real in _searched(source):
        for what, folder in outputs.items():
            below = _below(real, folder)
            if below is not None and _may_match(pattern, f"{place}/{below}"):
                raise InputError(
                    f"{name}: {source} is searched for files and {what} {written[what]} lies in it, so the next run would "
                    f"read what this one writes; choose a folder outside of {source}"
                )
        if replaced is not None and _below(replaced, real) is not None:
            raise InputError(
                f"{name}: {source} lies in the output folder {published}, where publishing replaces and removes files; "
                "choose another output folder"
            )


def _real(place: str) -> Real:
    system, path = filesystem(place)
    return system, os.path.realpath(path) if is_local(place) else path


def _searched(source: str) -> Iterator[tuple[str, str, Real]]:
    """The folder or file that is named and every link to a folder that is followed from there: its path below that
    folder, the pattern of the paths that are taken, and its real place.
    """
    if source.startswith("hf://"):  # nothing is written there
        return
    source = absolute(source)
    system, path = filesystem(source)
    folder, pattern = (path, "") if is_local(source) and Path(path).exists() else divided(path)
    pattern = pattern or ANY_DEPTH
    if not is_local(source):
        yield "", pattern, (system, folder.rstrip("/"))
        return
    for place, real in _entered(folder, pattern):
        yield place, pattern, (system, real)


def _entered(root: str, pattern: str) -> Iterator[tuple[str, str]]:
    """`root` and the links to folders that are followed below it, each once: the path below `root`, and the real one."""
    waiting, entered = deque([""]), set[str]()
    while waiting:
        place = waiting.popleft()
        real = os.path.realpath(Path(root, place))
        if real in entered:
            continue
        entered.add(real)
        yield place, real
        for folder, names, _ in os.walk(real):
            within = Path(place, os.path.relpath(folder, real))
            names[:] = [name for name in names if _may_match(pattern, str(within / name))]
            waiting += [str(within / name) for name in names if Path(folder, name).is_symlink()]


def _below(folder: Real, place: Real) -> str | None:
    """The path of `place` below `folder`, empty for the folder itself; None where it lies elsewhere."""
    outer, inner = folder[1].rstrip("/") + "/", place[1].rstrip("/") + "/"
    return inner.removeprefix(outer) if folder[0] == place[0] and inner.startswith(outer) else None


def _may_match(pattern: str, folder: str) -> bool:
    """Whether a search with `pattern` may take a file somewhere below `folder`, a path below the one that is searched."""
    names, parts = [name for name in folder.split("/") if name not in {"", "."}], pattern.split("/")
    if any(name.startswith(".") for name in names):
        return False
    for number, name in enumerate(names):
        if number == len(parts):
            return False
        if parts[number] == ANY_DEPTH:
            return True
        if not glob_pattern(parts[number]).match(name):
            return False
    return len(parts) > len(names)
