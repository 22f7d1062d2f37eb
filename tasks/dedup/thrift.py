"""Thrift's compact protocol, in which the footers of Parquet files are written, without definitions of structs.

A struct is a dict of its fields by number, each with its type and value, in the order they are written. A list has the type of
its items. So what was read is written as the same bytes. A value takes 1 µs to read or write.
"""

from dataclasses import dataclass
from typing import Any

TRUE, FALSE, LONG = 1, 2, 6
"""Types. A flag in a struct is a type without a value, in a list a byte."""

MANY = 15
"""Stands for the length of a list of as many items or more; the length follows."""

Struct = dict[int, tuple[int, Any]]


def read_struct(data: bytes) -> Struct:
    """The struct that `data` begins with. Raises ValueError for what Parquet does not use."""
    return _Reader(data).struct()


@dataclass(slots=True)
class _Reader:
    data: bytes
    place: int = 0

    def struct(self) -> Struct:
        found: Struct = {}
        number = 0
        while head := self._byte():
            step, kind = divmod(head, 16)
            if not step:
                raise ValueError("a field of Thrift has a number that is not in footers of Parquet files")
            number += step
            found[number] = kind, self._value(kind)
        return found

    def _value(self, kind: int) -> Any:  # noqa: ANN401 - of any type
        match kind:
            case 1 | 2:
                return None
            case 3:
                return self._byte()
            case 4 | 5 | 6:
                number = self._number()
                return number >> 1 ^ -(number & 1)
            case 8:
                return self._bytes(self._number())
            case 9:
                return self._list()
            case 12:
                return self.struct()
            case _:
                raise ValueError(f"type {kind} of Thrift is not in footers of Parquet files")

    def _list(self) -> tuple[int, list[Any]]:
        head = self._byte()
        kind, count = head & 0xF, head >> 4
        count = self._number() if count == MANY else count
        return kind, [self._byte() if kind in {TRUE, FALSE} else self._value(kind) for _ in range(count)]

    def _number(self) -> int:
        found = shift = 0
        while (byte := self._byte()) & 0x80:
            found |= (byte & 0x7F) << shift
            shift += 7
        return found | byte << shift

    def _byte(self) -> int:
        self.place += 1
        return self.data[self.place - 1]

    def _bytes(self, count: int) -> bytes:
        self.place += count
        return self.data[self.place - count : self.place]


def written(struct: Struct) -> bytes:
    """A struct as bytes."""
    before, parts = 0, list[bytes]()
    for number, (kind, value) in struct.items():
        parts += [bytes([number - before << 4 | kind]), _written(kind, value)]
        before = number
    return b"".join([*parts, b"\0"])


def _written(kind: int, value: Any) -> bytes:  # noqa: ANN401 - of any type
    match kind:
        case 1 | 2:
            return b""
        case 3:
            return bytes([value])
        case 4 | 5 | 6:
            return _number(value << 1 ^ value >> 63)
        case 8:
            return _number(len(value)) + value
        case 9:
            kind, items = value
            head = (
                bytes([len(items) << 4 | kind])
                if len(items) < MANY
                else bytes([MANY << 4 | kind]) + _number(len(items))
            )
            return head + b"".join([bytes([item]) if kind in {TRUE, FALSE} else _written(kind, item) for item in items])
        case _:
            return written(value)


def _number(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:  # noqa: PLR2004 - seven bits
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
