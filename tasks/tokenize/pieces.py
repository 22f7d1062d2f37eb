"""SentencePiece models with the added tokens of their folder.

`tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json` beside a `.model` name tokens that it lacks, or make its
symbols special. In a model, a symbol is matched in text if its type is `user_defined`, and never if it is `control`. So the folder's
tokens become pieces of one type or the other. A model is a Protocol Buffers message, in which a repeated field may continue
anywhere and the last value of any other field counts: pieces are added behind the model, types behind the piece.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence

CONTROL, USER_DEFINED = 3, 4
"""Types of pieces (sentencepiece_model.proto)."""

PIECES, NAME, SCORE, TYPE = 1, 1, 2, 3
"""Numbers of fields, of the model and of a piece."""

VARINT, EIGHT_BYTES, COUNTED, FOUR_BYTES = 0, 1, 2, 5
"""How values are written (Protocol Buffers encoding)."""


def with_pieces(model: bytes, kinds: Mapping[str, int], added: Sequence[tuple[str, int]]) -> bytes:
    """The model whose pieces named in `kinds` have these types, with more pieces of the types in `added` at the end.

    Raises ValueError for what is no model.
    """
    parts: list[bytes] = []
    for field, start, content, end in _fields(model):
        piece = _described(model[content:end]) if field == PIECES else {}
        kind = kinds.get(piece.get(NAME, b"").decode())
        if kind is None or piece.get(TYPE) == bytes([kind]):
            parts.append(model[start:end])
        else:
            parts.append(_counted(PIECES, model[content:end] + _typed(kind)))
    new = (
        _counted(
            PIECES,
            _counted(NAME, name.encode()) + bytes([SCORE << 3 | FOUR_BYTES]) + struct.pack("<f", 0) + _typed(kind),
        )
        for name, kind in added
    )
    return b"".join([*parts, *new])


def _fields(message: bytes) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message: number, beginning, beginning of its content, and end."""
    place = 0
    while place < len(message):
        start = place
        key, place = _varint(message, place)
        size = {EIGHT_BYTES: 8, FOUR_BYTES: 4}.get(key & 7, 0)
        content = place
        if key & 7 == VARINT:
            _, place = _varint(message, place)
        elif key & 7 == COUNTED:
            size, content = _varint(message, place)
            place = content
        elif not size:
            raise ValueError("isn't a SentencePiece model")
        place += size
        yield key >> 3, start, content, place


def _described(piece: bytes) -> dict[int, bytes]:
    return {field: piece[content:end] for field, _, content, end in _fields(piece)}


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while message[place] & 0x80:
        value |= (message[place] & 0x7F) << shift
        place, shift = place + 1, shift + 7
    return value | message[place] << shift, place + 1


def _counted(field: int, content: bytes) -> bytes:
    size = len(content)
    written = bytearray([field << 3 | COUNTED])
    while size > 0x7F:  # noqa: PLR2004 - seven bits to a byte
        written.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*written, size]) + content


def _typed(kind: int) -> bytes:
    return bytes([TYPE << 3 | VARINT, kind])
