r"""A JSON array of objects, read element by element in bounded memory.

The ends of elements are found without parsing: in each block escapes are blanked (`\\` first, then `\"`), so that a
string ends at the next quote, and one regular expression steps over strings and stops at brackets and commas; those
of the array itself, at depth one, end elements. Its possessive quantifier keeps a quote without a partner from being
tried again at every quote before it. Each element is then parsed by itself: one that is balanced but wrong is one bad
row and the rest goes on. Where the array is not closed, or something follows it, nobody knows how many rows are lost: the
file is damaged, as compressed content that ends too early is.

An array cannot be entered in the middle, so a file is one unit of work, and finding the ends costs time: about 250 MB/s
from file to Arrow text on one core, where JSON Lines runs at 670. Large data is better kept as JSON Lines.
"""

import re
from collections.abc import Iterator

from .json_lines import Pending
from .json_rows import Row

TOKEN = re.compile(rb'"[^"]*+("?)|[\[\]{},]')
QUOTE, COMMA, OPEN_ARRAY, CLOSE_ARRAY, OPEN_OBJECT, CLOSE_OBJECT = b'",[]{}'
WHITE_SPACE = b" \t\n\r"

Marked = tuple[bytes, list[int]]
"""A block, and where in it the array begins, its elements are parted by commas, and it ends."""


class BrokenArray(ValueError):  # noqa: N818 - it names what is found
    """An array of which some rows cannot even be counted."""


def split_elements(blocks: Iterator[bytes]) -> Iterator[list[Row]]:
    """The elements of the array that consecutive blocks spell, in lists of those that each block completes.

    The first byte that is not white space must be the `[` of the array. Raises BrokenArray.
    """
    pending = Pending()
    closed = several = False
    for block, marks in _marked(blocks):
        found: list[Row] = []
        begun = 0
        for mark in marks:
            _extend(pending, block[begun:mark])
            closed = block[mark] == CLOSE_ARRAY
            several = several or block[mark] == COMMA
            if pending.size:
                found.append(pending.take())
            elif several:
                found.append(pending.refuse("malformed_json", "an element is missing: nothing stands beside a comma"))
            begun = mark + 1
        _extend(pending, block[begun:])
        if found:
            yield found
    if not closed:
        raise BrokenArray(f"ends inside its array, without the closing ']'; {pending.size:,} bytes are left over")
    if pending.size:
        raise BrokenArray(f"goes on behind the ']' of its array, for {pending.size:,} bytes")


def _extend(pending: Pending, piece: bytes) -> None:
    """Add to an element, which does not begin with white space."""
    pending.add(piece if pending.size else piece.lstrip(WHITE_SPACE))


def _marked(blocks: Iterator[bytes]) -> Iterator[Marked]:
    """The blocks with their marks; a block never ends between a backslash and what it escapes."""
    depth = 0
    in_string = closed = False
    held = b""
    for piece in blocks:
        block = held + piece
        blanked = block.replace(rb"\\", b"__").replace(rb"\"", b"__")
        held = block[-1:] if blanked.endswith(b"\\") else b""
        block = block[: len(block) - len(held)]
        begin = blanked.find(b'"') + 1 if in_string else 0
        if closed or (in_string and not begin):
            yield block, []
            continue
        token = None
        marks: list[int] = []
        for token in TOKEN.finditer(blanked, begin, len(block)):
            mark = blanked[token.start()]
            if mark == QUOTE:
                continue
            if depth == 0 or (depth == 1 and mark in (COMMA, CLOSE_ARRAY)):
                marks.append(token.start())
            if mark in (OPEN_ARRAY, OPEN_OBJECT):
                depth += 1
            elif mark == CLOSE_ARRAY and depth == 1:
                closed = True
                break
            elif mark != COMMA and depth > 1:
                depth -= 1
        in_string = token is not None and token[1] == b""
        yield block, marks
    if held:
        yield held, []
