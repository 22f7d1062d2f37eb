"""Where files of the hub are stored: what one process has asked for is sent with the shards, so that workers needn't ask again."""

from collections.abc import Iterable, Iterator

from .files import Slice, SourceFile

PLACES: dict[str, str] = {}
"""The address at which the hub stores a large file, signed for some time, by the URI of the file."""

MOST_PLACES = 4_096
"""Some 4 MB of addresses."""

DIGEST = 64
"""Digits of the SHA-256 that is the version of a large file; a small one has the id of a blob of git."""


def files_of(parts: Iterable[Slice]) -> Iterator[SourceFile]:
    """The files of slices, and of the members of bundles."""
    return (each.file for part in parts for each in part.members or [part])


def places_of(part: Slice) -> dict[str, str]:
    """The places of the files of a slice, those that are known."""
    return {file.uri: PLACES[file.uri] for file in files_of([part]) if file.uri in PLACES}


def find_places(parts: Iterable[Slice]) -> None:
    """Ask the hub once for each large file of slices that other processes will read. Raises RunError as reading does."""
    files = {file.uri: file for file in files_of(parts) if file.uri.startswith("hf://")}
    new = [file for file in files.values() if file.uri not in PLACES and len(file.version or "") == DIGEST]
    if new and len(new) + len(PLACES) <= MOST_PLACES:
        from .hub_requests import locate  # noqa: PLC0415 - the hub's client takes 0.15 s to import

        locate(new)
