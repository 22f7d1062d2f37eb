import io
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from tokenmill.tasks.tokenize.binidx import BinIdxError, BinIdxWriter, index, read_index, token_dtype, write_index

from tests.examples import max_examples

UINT16, INT32 = np.dtype(np.uint16), np.dtype(np.int32)


@st.composite
def batches(draw, least=0):
    """A dtype, and batches of documents: each a list of id arrays."""
    dtype = draw(st.sampled_from([UINT16, INT32]))
    ids = st.integers(0, np.iinfo(dtype).max)
    document = st.lists(ids, min_size=1, max_size=9).map(lambda values: np.array(values, dtype))
    return dtype, draw(st.lists(st.lists(document, max_size=6), max_size=4).filter(lambda b: sum(map(len, b)) >= least))


def written(dtype, documents_of_batches):
    """The `.bin` and `.idx` that the writer makes of the batches."""
    stream = io.BytesIO()
    writer = BinIdxWriter(stream, dtype)
    for documents in documents_of_batches:
        lengths = np.array([len(document) for document in documents], np.int64)
        writer.append(np.concatenate([np.zeros(0, dtype), *documents]), lengths)
    documents = [document for documents in documents_of_batches for document in documents]
    assert (writer.documents, writer.tokens) == (len(documents), sum(map(len, documents)))
    return stream.getvalue(), writer.index()


@given(batches())
def test_bytes_match_megatrons_builder(example):
    dtype, documents_of_batches = example
    content, idx = written(dtype, documents_of_batches)
    with tempfile.TemporaryDirectory() as directory:
        prefix = f"{directory}/reference"
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype.type)
        for documents in documents_of_batches:
            for document in documents:
                builder.add_item(torch.from_numpy(document.astype(np.int64)))
                builder.end_document()
        builder.finalize(f"{prefix}.idx")
        assert content == Path(f"{prefix}.bin").read_bytes()
        assert idx == Path(f"{prefix}.idx").read_bytes()
    lengths = [len(document) for documents in documents_of_batches for document in documents]
    found = read_index(idx, len(content))
    assert (found.dtype, found.documents, found.tokens) == (dtype, len(lengths), sum(lengths))
    assert found.lengths.tolist() == lengths


@pytest.mark.parametrize("size", [1, 65_499, 65_500, 65_536, 201_088])
def test_the_dtype_is_the_one_megatron_takes(size):
    assert token_dtype(size) == DType.optimal_dtype(size)


def test_places_go_beyond_two_gigabytes():
    lengths = np.array([2**31 - 1, 2**31 - 1, 1, 5], np.int32)
    content = index(lengths, INT32)
    places = struct.unpack_from("<4q", content, 34 + 4 * 4)
    assert places == (0, 4 * (2**31 - 1), 8 * (2**31 - 1), 8 * (2**31 - 1) + 4)
    assert read_index(content, 4 * (2**32 + 4)).tokens == 2**32 + 4


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        (np.zeros(3, np.int64), [3], "tokens: expected one dimension of uint16, found 1 of int64"),
        (np.zeros((1, 3), np.uint16), [3], "found 2 of uint16"),
        (np.zeros(3, np.uint16), [1, 1], "expected a sum of 3, the number of tokens, found 2"),
        (np.zeros(3, np.uint16), [4, -1], "found -1; set max_doc_tokens"),
        (np.zeros(3, np.uint16), [2**31], "found 2147483648; set max_doc_tokens"),
        (np.zeros(3, np.uint16), [[3]], "lengths: expected one dimension of integers, found 2 of int64"),
        (np.zeros(3, np.uint16), [3.0], "lengths: expected one dimension of integers, found 1 of float64"),
    ],
)
def test_unrepresentable_data_is_rejected_before_writing(tokens, lengths, message):
    stream = io.BytesIO()
    writer = BinIdxWriter(stream, UINT16)
    with pytest.raises(ValueError, match=message):
        writer.append(tokens, np.array(lengths))
    assert (stream.getvalue(), writer.documents, writer.tokens) == (b"", 0, 0)


def test_unsupported_dtype_is_rejected():
    with pytest.raises(ValueError, match="found uint32; use token_dtype"):
        BinIdxWriter(io.BytesIO(), np.dtype(np.uint32))


@max_examples(400)
@given(example=batches(least=1), position=st.integers(0), flip=st.integers(1, 255))
def test_any_changed_byte_is_found(example, position, flip):
    content, idx = written(*example)
    damaged = bytearray(idx)
    damaged[position % len(idx)] ^= flip
    with pytest.raises(BinIdxError):
        read_index(bytes(damaged), len(content))


@given(example=batches(), size=st.integers(0), extra=st.binary(max_size=20))
def test_any_other_size_is_found(example, size, extra):
    content, idx = written(*example)
    damaged = idx[: size % (len(idx) + 1)] + extra
    assume(damaged != idx)
    with pytest.raises(BinIdxError):
        read_index(damaged, len(content))
    with pytest.raises(BinIdxError, match=r"size of the \.bin in bytes: expected"):
        read_index(idx, len(content) + 1)


THREE = index(np.array([5, 1, 7], np.int32), UINT16)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, b"X", "magic: expected b'MMIDIDX\\\\x00\\\\x00', found b'XMIDIDX"),
        (9, b"\2", "version: expected 1, found 2"),
        (17, b"\3", r"dtype code: expected 4 \(int32\) or 8 \(uint16\), found 3"),
        (18, b"\2", "number of document boundaries: expected 3, found 4"),
        (26, b"\5", "number of document boundaries: expected 4, found 5"),
        (34, b"\6", "place of sequence 1: expected 12, found 10"),
        (37, b"\x80", "length of sequence 0: expected 0, found -2147483643"),
        (46, b"\1", "place of sequence 0: expected 0, found 1"),
        (54, b"\x0b", "place of sequence 1: expected 10, found 11"),
        (70, b"\1", "document boundary 0: expected 0, found 1"),
        (94, b"\4", "document boundary 3: expected 3, found 4"),
        (42, b"\x08", r"size of the \.bin in bytes: expected 28, found 26"),
    ],
)
def test_damage_is_named_by_field(position, value, message):
    damaged = THREE[:position] + value + THREE[position + 1 :]
    with pytest.raises(BinIdxError, match=f"^{message}"):
        read_index(damaged, 26)


@given(st.lists(st.lists(st.integers(0, 50), max_size=20), max_size=6), st.integers(1, 9))
def test_index_in_pieces_matches_the_whole(pieces, at_a_time):
    arrays, dtype, stream = [np.array(piece, "<i4") for piece in pieces], np.dtype("<u2"), io.BytesIO()
    whole = np.concatenate([np.zeros(0, "<i4"), *arrays])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tokenmill.tasks.tokenize.binidx.BOUNDARIES", at_a_time)
        write_index(stream.write, lambda: arrays, len(whole), dtype)
    assert read_index(stream.getvalue(), 2 * int(whole.sum())).lengths.tolist() == whole.tolist()
