"""Megatron's `.bin/.idx`: the concatenated tokens of all documents, and an index of their offsets.

The `.bin` holds token ids only. The `.idx` is a 34-byte header, then for every document its length (int32, tokens) and its
offset in the `.bin` (int64, bytes), then the document boundaries (int64), all little-endian, as in
`megatron.core.datasets.indexed_dataset`. Here every document is one sequence, as GPT training expects, so the boundaries
are 0, 1, …, S and the offsets follow from the lengths. The writer keeps 4 bytes per document in memory and computes the
other 16 at the end; the reader checks every byte of an index against the lengths.

Megatron cannot map an empty file, so shards without tokens are omitted of blends.
"""

import io
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES = {4: np.dtype("<i4"), 8: np.dtype("<u2")}
"""The dtype codes that Megatron's own preprocessing writes."""

UINT16_VOCABULARY = 65_500
BOUNDARIES = 1 << 17
"""Document boundaries written at a time: 1 MB."""

LONGEST_DOCUMENT = int(np.iinfo(np.int32).max)

HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, number of sequences S, number of document boundaries (documents + 1)."""


class BinIdxError(ValueError):
    """An index that is damaged or from a different writer; names the field, the expected value, and the value found."""

    def __init__(self, field: str, expected: object, found: object) -> None:
        super().__init__(
            f"{field}: expected {expected}, found {found}; the file is damaged or does not have one "
            "sequence per document: remove the shard and prepare it again"
        )


class Stream(Protocol):
    """A destination of tokens, such as a publication."""

    def write(self, buffer: memoryview, /) -> object: ...


def token_dtype(vocabulary_size: int) -> np.dtype[np.integer]:
    """uint16 for a vocabulary below 65,500 ids, else int32: the rule of Megatron's `DType.optimal_dtype`."""
    return DTYPES[8] if vocabulary_size < UINT16_VOCABULARY else DTYPES[4]


class BinIdxWriter:
    """Streams documents into a `.bin` and keeps their lengths, 4 bytes each, for the `.idx`."""

    def __init__(self, stream: Stream, dtype: np.dtype[np.integer]) -> None:
        _dtype_code(dtype)
        self._stream = stream
        self._dtype = dtype
        self._lengths = bytearray()
        self.tokens = 0

    @property
    def documents(self) -> int:
        return len(self._lengths) // 4

    def append(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Add consecutive documents: their ids end to end ([tokens], of the writer's dtype) and their lengths ([documents], integers).

        Raises ValueError, before writing, for ids with a different dtype (a cast would wrap large ids silently), for lengths
        that do not add up, and for a document of more than 2**31 - 1 tokens.
        """
        if tokens.dtype != self._dtype or tokens.ndim != 1:
            raise ValueError(
                f"tokens: expected one dimension of {self._dtype}, found {tokens.ndim} of {tokens.dtype}; check the "
                "largest id and convert before appending"
            )
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
            raise ValueError(f"lengths: expected one dimension of integers, found {lengths.ndim} of {lengths.dtype}")
        for bad in lengths[(lengths < 0) | (lengths > LONGEST_DOCUMENT)][:1]:
            raise ValueError(
                f"lengths: expected 0 to {LONGEST_DOCUMENT} tokens in a document, found {bad}; set max_doc_tokens to cut "
                "longer documents"
            )
        checked = np.ascontiguousarray(lengths, "<i4")
        total = int(checked.sum(dtype=np.int64))  # the sum of a shard doesn't fit in 32 bits
        if total != len(tokens):
            raise ValueError(f"lengths: expected a sum of {len(tokens)}, the number of tokens, found {total}")
        self._stream.write(np.ascontiguousarray(tokens).data)  # the buffer itself: no copy of gigabytes
        self._lengths += checked.data
        self.tokens += total

    def index(self) -> bytes:
        """Return the content of the `.idx`, 20 bytes per document."""
        return index(np.frombuffer(self._lengths, "<i4"), self._dtype)


def index(lengths: np.ndarray, dtype: np.dtype[np.integer]) -> bytes:
    """Return the content of an `.idx` for documents of these lengths ([documents], int32, tokens) and ids of `dtype`."""
    content = io.BytesIO()
    write_index(content.write, lambda: [lengths], len(lengths), dtype)
    return content.getvalue()


def write_index(
    write: Callable[[memoryview], object],
    pieces: Callable[[], Iterable[np.ndarray]],
    documents: int,
    dtype: np.dtype[np.integer],
    start: int = 0,
) -> None:
    """Write the `.idx` of documents whose lengths ([…], int32, tokens) arrive in pieces; one is in memory at a time.

    The first document begins at token `start` of the `.bin`. `pieces` is called twice, because lengths and offsets are in separate arrays.
    """
    write(memoryview(HEADER.pack(MAGIC, VERSION, _dtype_code(dtype), documents, documents + 1)))
    for lengths in pieces():
        write(lengths.data)
    end = start * dtype.itemsize
    for lengths in pieces():
        write((end + _places(lengths, dtype)).data)
        end += int(lengths.sum(dtype=np.int64)) * dtype.itemsize
    for first in range(0, documents + 1, BOUNDARIES):
        write(np.arange(first, min(first + BOUNDARIES, documents + 1), dtype="<i8").data)


@dataclass(frozen=True, slots=True)
class Index:
    """The content of an `.idx`: the dtype of the ids and the length of every document ([documents], int32, tokens)."""

    dtype: np.dtype[np.integer]
    lengths: np.ndarray

    @property
    def documents(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))


def read_index(content: bytes, bin_size: int) -> Index:
    """Return the index in `content`, the whole of an `.idx` whose `.bin` has `bin_size` bytes.

    Raises BinIdxError for any changed byte, except int32 in place of uint16 for zero tokens.
    """
    if len(content) < HEADER.size:
        raise BinIdxError("size in bytes", f"at least {HEADER.size}", len(content))
    magic, version, code, documents, boundaries_held = HEADER.unpack_from(content)
    _expect("magic", MAGIC, magic)
    _expect("version", VERSION, version)
    if code not in DTYPES:
        raise BinIdxError("dtype code", "4 (int32) or 8 (uint16)", code)
    _expect("number of document boundaries", documents + 1, boundaries_held)
    _expect("size in bytes", HEADER.size + 12 * documents + 8 * boundaries_held, len(content))
    # The size is right, so these arrays are within the content. Nothing is copied.
    dtype = DTYPES[code]
    lengths = np.frombuffer(content, "<i4", documents, HEADER.size)
    starts = np.frombuffer(content, "<i8", documents, HEADER.size + 4 * documents)
    boundaries = np.frombuffer(content, "<i8", documents + 1, HEADER.size + 12 * documents)
    _expect_equal("length of sequence", np.maximum(lengths, 0), lengths)
    _expect_equal("place of sequence", _places(lengths, dtype), starts)
    _expect_equal("document boundary", np.arange(documents + 1), boundaries)
    found = Index(dtype, lengths)
    _expect("size of the .bin in bytes", found.tokens * dtype.itemsize, bin_size)
    return found


def _expect(field: str, expected: object, found: object) -> None:
    if found != expected:
        raise BinIdxError(field, expected, found)


def _expect_equal(field: str, expected: np.ndarray, found: np.ndarray) -> None:
    wrong = np.flatnonzero(expected != found)
    if len(wrong):
        first = int(wrong[0])
        raise BinIdxError(f"{field} {first}", int(expected[first]), int(found[first]))


def _dtype_code(dtype: np.dtype[np.integer]) -> int:
    for code, known in DTYPES.items():
        if dtype == known:
            return code
    raise ValueError(f"dtype: expected int32 or uint16, found {dtype}; use token_dtype(vocabulary_size)")


def _places(lengths: np.ndarray, dtype: np.dtype[np.integer]) -> np.ndarray:
    """The offset of each document in the `.bin`, in bytes ([documents], int64)."""
    starts = np.zeros(len(lengths), "<i8")
    np.cumsum(lengths[:-1], out=starts[1:])
    starts *= dtype.itemsize
    return starts
