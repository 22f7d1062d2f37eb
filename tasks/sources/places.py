"""Where files of the hub are stored: what one process has asked for is sent with the shards, so that workers needn't ask again."""

from collections.abc import Iterable, Iterator

from .files import Slice, SourceFile

PLACES: dict[str, str] = {}
"""The address at which the hub stores a large file, signed for some time, by the URI of the file."""

MOST_PLACES = 4_096
"""Some 4 MB of addresses."""


def files_of(parts: Iterable[Slice]) -> Iterator[SourceFile]:
    """The files of slices, and of the members of bundles."""
    return (each.file for part in parts for each in part.members or [part])


def places_of(part: Slice) -> dict[str, str]:
    """The places of the files of a slice, those that are known."""
    return {file.uri: PLACES[file.uri] for file in files_of([part]) if file.uri in PLACES}
