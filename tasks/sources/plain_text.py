"""Plain text: a document is a whole file, or a line of it. The field that holds it is called `text`."""

from collections.abc import Iterator

import orjson

from .files import Refused, Row
from .json_lines import JsonLines, Pending, split_lines
from .json_rows import BYTE_ORDER_MARK, HEAD_BYTES, RowFormat

FIELD = "text"


class WholeText(RowFormat):
    """`.txt`. A file is one row."""

    name = "text"
    endings = (".txt",)
    rank = 2

    def split(self, content: Iterator[bytes]) -> Iterator[list[Row]]:
        """See RowFormat."""
        text = Pending()
        for block in content:
            text.add(block)
        yield [row_of(text.take())]


class TextLines(JsonLines):
    """`.txt` where `document_per` is `line`; plain files are cut as JSON Lines are."""

    name = "text_lines"
    endings = ()

    def split(self, content: Iterator[bytes]) -> Iterator[list[Row]]:
        """See RowFormat."""
        for lines in split_lines(content):
            yield [line if isinstance(line, Refused) else row_of(line.removesuffix(b"\r")) for line in lines]


def row_of(text: Row) -> Row:
    """A text as a JSON object; a blank or refused one as it is."""
    if isinstance(text, Refused) or not (text := text.removeprefix(BYTE_ORDER_MARK)) or text.isspace():
        return text
    try:
        return orjson.dumps({FIELD: text.decode()})
    except UnicodeDecodeError as error:
        return Refused("invalid_utf8", str(error), text[:HEAD_BYTES])
