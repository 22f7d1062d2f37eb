r"""A JSON array of objects, read element by element in bounded memory.

The ends of elements are found without parsing: in each block, escapes are blanked (`\\` first, then `\"`), so that a string
ends at the next quote, and one regular expression skips strings and stops at brackets and commas; those at depth one end an
element. Its possessive quantifier keeps an unmatched quote from being retried at every earlier quote. Each element is then
parsed separately: a balanced but malformed element is one bad row, and reading continues. If the array is not closed, or is
followed by anything else, the number of lost rows is unknown, so the file counts as damaged.

Reading cannot start in the middle of an array, so a file is one slice, and finding the ends takes time: about 250 MB/s from
file to Arrow text on one core, where JSON Lines runs at 670. Keep large data as JSON Lines.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from .files import Row, SourceFile
from .json_lines import JsonLines, Pending
from .json_rows import BYTE_ORDER_MARK, BrokenContentError, RowFormat
from .opening import blocks, open_source, text_blocks

TOKEN = re.compile(rb'"[^"]*+("?)|[\[\]{},]')
QUOTE, COMMA, OPEN_ARRAY, CLOSE_ARRAY, OPEN_OBJECT, CLOSE_OBJECT = b'",[]{}'
WHITE_SPACE = b" \t\n\r"

Marked = tuple[bytes, list[int]]
"""A block, and the places in it of the array's opening bracket, its commas, and its closing bracket."""


REMEDY = "fetch or write the file again, as one array or as JSON Lines"


class JsonArray(RowFormat):
    """`.json`. A file is an array if its first byte is `[` (after white space and a byte order mark), else JSON Lines."""

    name = "json"
    endings = (".json",)

    def sniff(self, file: SourceFile) -> SourceFile:
        """Return the file with its true format; reads at most 1 MiB. Raises SourceCorrupt if it is not compressed as named."""
        head = b""
        if file.size:
            with open_source(file, cache="none") as stream:
                content = _without_mark(text_blocks(file, blocks(file, stream)))
                head = next((text for block in content if (text := block.lstrip())), b"")
        return file if head.startswith(b"[") else replace(file, format=JsonLines.name)

    def split(self, content: Iterator[bytes]) -> Iterator[list[Row]]:
        return split_elements(_without_mark(content))


def _without_mark(content: Iterator[bytes]) -> Iterator[bytes]:
    yield next(content, b"").removeprefix(BYTE_ORDER_MARK)
    yield from content


def split_elements(blocks: Iterator[bytes]) -> Iterator[list[Row]]:
    """Yield the elements of an array in consecutive blocks: for each block, a list of the elements that end in it.

    The first byte that is not white space must be the `[` of the array. Raises BrokenContentError.
    """
    pending = Pending()
    closed = several = False
    for block, marks in _marked(blocks):  # an element may go on over several blocks
        found: list[Row] = []
        begun = 0
        for mark in marks:
            _extend(pending, block[begun:mark])
            closed = block[mark] == CLOSE_ARRAY
            several = several or block[mark] == COMMA
            if pending.size:
                found.append(pending.take())
            elif several:  # `[]` has no element, and `[1,]` lacks one
                found.append(pending.refuse("malformed_json", "an element is missing next to a comma"))
            begun = mark + 1
        _extend(pending, block[begun:])
        if found:
            yield found
    if not closed:
        raise BrokenContentError(
            f"ends inside its array, without the closing ']'; {pending.size:,} bytes are left over; {REMEDY}"
        )
    if pending.size:
        raise BrokenContentError(f"continues after the ']' of its array, for {pending.size:,} bytes; {REMEDY}")


def _extend(pending: Pending, piece: bytes) -> None:
    """Add to an element, without white space at its beginning."""
    pending.add(piece if pending.size else piece.lstrip(WHITE_SPACE))


def _marked(blocks: Iterator[bytes]) -> Iterator[Marked]:
    """The blocks with their marks; a block never ends between a backslash and the character it escapes."""
    depth = 0
    in_string = closed = False
    held = b""
    for piece in blocks:
        block = held + piece
        blanked = block.replace(rb"\\", b"__").replace(rb"\"", b"__")
        held = block[-1:] if blanked.endswith(b"\\") else b""
        block = block[: len(block) - len(held)]
        begin = blanked.find(b'"') + 1 if in_string else 0  # where the string of the block before ends
        if closed or (in_string and not begin):  # nothing but the rest of a string, or what follows the array
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
        # A quote without an end is the last token: it takes the rest of the block.
        in_string = token is not None and token[1] == b""
        yield block, marks
    if held:
        yield held, []
