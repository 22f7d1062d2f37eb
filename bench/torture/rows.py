r"""Rows of JSON, most of them odd, through whole preparations.

Every preparation reads one file of random rows: texts in every spelling that JSON has, rows of the wrong type, numbers
and nesting at their limits, half surrogate pairs, bytes that are not UTF-8, blanks, byte order marks, and rows with some
bytes changed. The file is plain, compressed or an array, and is cut into slices of random size.

The judge is the standard library's `json`: the published tokens spell exactly the texts that it finds, in order, and the
quarantine names exactly the other rows, with its reasons. Read as records, the rows have the values that it finds.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.sources.discovery import discover
from tokenmill.tasks.sources.formats import read_records
from tokenmill.tasks.sources.slices import cut

from bench.torture.conservation import assert_conserved
from bench.torture.processes import each
from tests.peers.strict_json import judged, parsed
from tests.preparing import compressed

COUNT = 200_000

ROWS = 1_000
"""Rows of a file."""

NAMES = (
    *("rows.jsonl", "rows.jsonl", "rows.ndjson", "rows.jsonl.gz", "rows.jsonl.zst", "rows.json"),
    *("array.json", "array.json.gz", "array.json.zst"),
)
SHARD_SIZES = (1_000, 30_000, 1 << 30)
FIELDS = ("text", "content.text", "content.content.text")

ODD = [
    b"", b" ", b"\r", b"\t \r", b"\xef\xbb\xbf", b"\x0b\x0c", b"\x85", "\u2028".encode(), b"null", b"[]", b"{}", b"0",
    b'"text"', b"true", b"NaN", b"{", b"}", b"[{", b'{"text"', b'{"text":', b'{"text": "', b'{"text": "a"',
    b'{"text": "a"} {"text": "b"}', b'{"text": "a"}{"text": "b"}', b'{"text": "a"},', b'{"text": "a",}',
    b"{'text': 'a'}", b'{text: "a"}', b'{"text": "a" /* b */}', b'// {"text": "a"}', b'{"text": "a", "text": "last"}',
    b'{"text": "a", "text": null}', b'{"te\\u0078t": "escaped key"}', b'{"text": "raw \x00"}', b'{"text": "tab\t"}',
    b'{"text": "\\x41"}', b'{"text": "\\u12"}', b'{"text": "\\u00e9\\/\\b\\f"}', b'{"text": "\\ud800"}',
    b'{"text": "\\udc00\\ud800"}', b'{"text": "\\ud83d\\ude00"}', b'{"text": "\\\\ud800"}', b'{"text": "\xed\xa0\x80"}',
    b'{"text": "\xc0\xaf"}', b'{"text": "\xf5\x80\x80\x80"}', b'{"text": "\xe2\x82"}', b'{"text": "a\xff"}',
    b'{"a": "\\ud800", "text": "b"}', b'{"a": "\xff", "text": "b"}', b'{"text": "a"}\x00', b'\x1e{"text": "a"}',
    b'\xff\xfe{\x00"\x00', '{"text": “a”}'.encode(), '{"text": "\uff41"}'.encode(), b'{"\xef\xbb\xbftext": "a"}',
    b'\xef\xbb\xbf\xef\xbb\xbf{"text": "a"}', b'{"text": "\xef\xbb\xbfa"}', b"\xa0{}", b'{"": {"text": "a"}}',
]  # fmt: skip
NUMBERS = [
    "0", "-0", "-0.0", "1E5", "1e-400", "1e308", "1e309", "-1e999", "1.", ".5", "+1", "01", "0x1", "1_000", "--1", "1e",
    "9007199254740993", "18446744073709551615", "18446744073709551616", "-9223372036854775809", "1" * 40, "1" * 308,
    "1" * 400, "0." + "3" * 60, "NaN", "Infinity", "-Infinity", "nan", "\u0661",
]  # fmt: skip
CHARACTERS = ["abcdefghij", ' "\\/{}[],:\'', "\n\r\t\b\f\x00\x1f\x7f", "éßñ\u0301\u200d", "漢字かなกခ", "😀🏽\U000e0041\U0010ffff", "\ufeff\u2028\ufffd\ufffe"]  # fmt: skip
DAMAGE = [b"", b'"', b"\\", b"}", b"{", b"[", b"]", b",", b":", b"\xff", b"\xc3", b"\x00", b"1e9", b"\\u", b"\\ud83d", b" ", b"\xef\xbb\xbf"]  # fmt: skip


def run(count: int, seed: int) -> str:
    """Prepare `count` rows, and at least one file of them. Raises AssertionError with the seed of the first wrong file."""
    files = -(-count // ROWS)
    rows = sum(each(prepare_rows, [f"{seed}-{number}" for number in range(files)]))
    return f"{rows:,} rows in {files:,} files: each is a document or has its reason"


def prepare_rows(seed: str) -> int:
    """Prepare the file of a seed, and read it as records; how many rows it has."""
    source = random.Random(seed)
    name, text_field = source.choice(NAMES), source.choice(FIELDS)
    rows = list(islice(_rows(source, name, text_field.split(".")), ROWS))
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(compressed(name, _joined(name, rows)))
        try:
            verdicts = [judged(row, text_field.split(".")) for row in rows]
            assert_conserved(path, verdicts, text_field, source.choice(SHARD_SIZES))
            assert _records(path, source.choice(SHARD_SIZES)) == [
                *filter(lambda row: row is not None, map(_object, rows))
            ]
        except Exception as error:
            raise AssertionError(f"rows of seed {seed!r} ({name})") from error
    return len(rows)


def _joined(name: str, rows: Sequence[bytes]) -> bytes:
    if name.startswith("array"):
        return b"[" + b",\n".join(rows) + b"]\n"
    return b"".join(row + b"\n" for row in rows)


def _rows(source: random.Random, name: str, path: Sequence[str]) -> Iterator[bytes]:
    """Rows that can stand in a file of that name, without end."""
    while True:
        row = _row(source, path).replace(b"\n", b" ")
        if name.startswith("rows") or _stands_in_array(row):
            yield row


def _stands_in_array(row: bytes) -> bool:
    """Whether a row has an end that shows in an array: it may hold anything but brackets and quotes without partners."""
    try:
        json.loads(row.decode(errors="replace"))
    except (ValueError, RecursionError):
        return False
    return True


def _records(path: Path, shard_size: int) -> list[Any]:
    [file] = discover(DataSource(name="rows", path=str(path)))
    parts = cut(file, shard_size, ())
    return [record for part in parts for batch in read_records(part, ["text"]) for record in batch.records]


def _object(row: bytes) -> dict[str, Any] | None:
    try:
        value = parsed(row.removeprefix(b"\xef\xbb\xbf"))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _row(source: random.Random, path: Sequence[str]) -> bytes:
    row = source.choice(KINDS)(source, path)
    # A row that is wrong twice has the reason that the parser meets first: not a question for two parsers.
    return b"{" if judged(row) in ("malformed_json", "number_out_of_range") and rb"\ud" in row.lower() else row


def _good(source: random.Random, path: Sequence[str]) -> bytes:
    value: Any = _text(source)
    for key in reversed(path):
        fields = [(key, value), *((_text(source)[:3], _value(source, 3)) for _ in range(source.randint(0, 3)))]
        source.shuffle(fields)
        value = dict(fields) | {key: value}
    return _written(source, value)


def _value_of_any_type(source: random.Random, path: Sequence[str]) -> bytes:
    value = _value(source, 3)
    for key in reversed(path[source.randint(0, len(path)) :]):
        value = {key: value}
    return _written(source, value)


def _number(source: random.Random, path: Sequence[str]) -> bytes:
    number = source.choice(NUMBERS).encode()
    return _good(source, path)[:-1].rstrip(b" }\r") + b', "number": ' + number + b"}" * len(path)


def _deep(source: random.Random, path: Sequence[str]) -> bytes:
    depth = source.choice([1, 10, 200])
    opening, closing = source.choice([(b"[", b"]"), (b'{"text":', b"}")])
    return b'{"deep": ' + opening * depth + b"0" + closing * depth + b', "text": "a"}'


def _odd(source: random.Random, path: Sequence[str]) -> bytes:
    return source.choice(ODD)


def _damaged(source: random.Random, path: Sequence[str]) -> bytes:
    row = bytearray(source.choice([_good, _good, _value_of_any_type, _odd])(source, path))
    for _ in range(source.randint(1, 3)):
        place = source.randint(0, len(row))
        row[place : place + source.randint(0, 3)] = source.choice(DAMAGE)
    return bytes(row)


def _flipped(source: random.Random, path: Sequence[str]) -> bytes:
    row = bytearray(_good(source, path))
    row[source.randrange(len(row))] ^= 1 << source.randrange(8)
    return bytes(row)


def _truncated(source: random.Random, path: Sequence[str]) -> bytes:
    row = _good(source, path)
    return row[: source.randint(0, len(row))]


KINDS: tuple[Callable[[random.Random, Sequence[str]], bytes], ...] = (
    *(_good, _good, _good, _value_of_any_type, _number, _deep, _odd, _damaged, _flipped, _truncated),
)


def _text(source: random.Random) -> str:
    alphabet = source.choice(CHARACTERS) + source.choice(CHARACTERS)
    return "".join(source.choices(alphabet, k=source.choice([0, 1, 5, 40, 40, 200])))


def _value(source: random.Random, depth: int) -> Any:
    kind = source.randrange(8 if depth else 6)
    if kind < 6:
        return [None, True, source.getrandbits(70) - 2**69, source.gauss(0, 1e9), _text(source), ""][kind]
    if kind == 6:
        return [_value(source, depth - 1) for _ in range(source.randint(0, 3))]
    return {
        source.choice(["text", "content", "", "id"]): _value(source, depth - 1) for _ in range(source.randint(0, 3))
    }


def _written(source: random.Random, value: object) -> bytes:
    """A value with one of the spellings that JSON has for it."""
    separators = source.choice([None, (",", ":"), (" ,\t", " :\r ")])
    row = json.dumps(value, ensure_ascii=source.random() < 0.5, separators=separators).encode()
    return source.choice([b"", b"", b" ", b"\xef\xbb\xbf"]) + row + source.choice([b"", b"", b"\r", b" \t"])
