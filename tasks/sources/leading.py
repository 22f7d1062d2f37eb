"""Where a sample ends: the leading rows of what a slice holds, and nothing read beyond them."""

from collections.abc import Iterator
from typing import Protocol, Self, TypeVar


class Rows(Protocol):
    """Consecutive rows: a list of them, or an Arrow record batch."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> Self: ...


Piece = TypeVar("Piece", bound=Rows)


def leading(pieces: Iterator[Piece], rows: int | None) -> Iterator[Piece]:
    """The first `rows` rows of consecutive pieces, the last one cut there; all of them for None."""
    if rows is None:
        yield from pieces
        return
    while rows > 0 and (piece := next(pieces, None)) is not None:
        yield piece[:rows]
        rows -= len(piece)
