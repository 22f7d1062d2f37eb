"""Files with other columns, held against those that Arrow writes with these columns."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenmill.tasks.dedup.parquet_columns import with_columns
from tokenmill.tasks.dedup.thrift import read_struct, written

KINDS = {
    "text": (pa.string(), st.text() | st.sampled_from(["once", "x" * 9000])),
    "words": (pa.list_(pa.string()), st.lists(st.text(max_size=3), max_size=3)),
    "count": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "share": (pa.float64(), st.floats()),
    "flag": (pa.bool_(), st.booleans()),
    "pair": (pa.struct({"a": pa.int64(), "b": pa.string()}), st.fixed_dictionaries({"a": st.none(), "b": st.text()})),
}
"""Types of columns, and their values."""

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=3)


def file_of(groups):
    """A file with a row group for each table."""
    out = pa.BufferOutputStream()
    with pq.ParquetWriter(out, groups[0].schema, compression="zstd") as writer:
        for group in groups:
            writer.write_table(group)
    return out.getvalue().to_pybytes()


@st.composite
def tables(draw):
    """The row groups of a file of up to 40 columns, those of other columns for it, and what is expected of both."""
    kinds = draw(st.lists(st.sampled_from([*KINDS]), min_size=1, max_size=40))
    new = draw(st.lists(st.booleans(), min_size=len(kinds), max_size=len(kinds)).filter(any))
    schema = pa.schema([(f"{kind} {number}", KINDS[kind][0]) for number, kind in enumerate(kinds)])
    groups, others, wanted = [], [], []
    for size in draw(SIZES):
        columns = [[draw(st.none() | KINDS[kind][1])] * size for kind in kinds]
        fresh = [pa.array([draw(st.none() | KINDS[kind][1])] * size, KINDS[kind][0]) for kind in kinds]
        groups.append(pa.table([pa.array(*each) for each in zip(columns, schema.types, strict=True)], schema))
        chosen = [number for number, is_new in enumerate(new) if is_new]
        others.append(pa.table([fresh[number] for number in chosen], pa.schema([schema.field(n) for n in chosen])))
        kept = zip(new, fresh, groups[-1].columns, strict=True)
        wanted.append(pa.table([one if is_new else other for is_new, one, other in kept], schema))
    return groups, others, wanted


LONG = pa.table({"text": [f"{number} " * 300 for number in range(4000)], "flag": [None] * 4000})
MARKED = LONG.set_column(1, "flag", [[True, False] * 2000])


@given(tables())
@example(([LONG.cast(MARKED.schema)] * 2, [MARKED.select(["flag"])] * 2, [MARKED] * 2))
def test_the_file_is_the_one_that_arrow_writes(some):
    groups, others, wanted = some
    file = b"".join(with_columns(file_of(groups), file_of(others)))
    assert file == file_of(wanted)
    assert pq.read_table(pa.BufferReader(file)).num_rows == sum(map(len, wanted))


def test_other_numbers_of_row_groups_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        list(with_columns(file_of([MARKED, MARKED]), file_of([MARKED])))


NUMBERS = st.integers(-(2**63), 2**63 - 1)
VALUES = st.recursive(
    st.tuples(st.sampled_from([4, 5, 6]), NUMBERS)
    | st.tuples(st.just(8), st.binary(max_size=200))
    | st.tuples(st.just(3), st.integers(0, 255))
    | st.tuples(st.sampled_from([1, 2]), st.none())
    | st.tuples(st.just(9), st.tuples(st.just(6), st.lists(NUMBERS, max_size=40)))
    | st.tuples(st.just(9), st.tuples(st.just(1), st.lists(st.sampled_from([1, 2]), max_size=20))),
    lambda inner: (
        st.lists(inner, max_size=15).map(lambda items: (12, dict(enumerate(items, 1))))
        | st.lists(inner, max_size=15).map(lambda items: (9, (12, [{2: item, 17: item} for item in items])))
    ),
)


@given(st.lists(VALUES, max_size=15))
def test_a_struct_is_read_as_it_was_written(values):
    struct = {15 * number + 1: value for number, value in enumerate(values)}
    assert read_struct(written(struct) + b"more") == struct


@pytest.mark.parametrize("struct", [b"\x1b\x00\x00", b"\x06\x20\x02\x00"], ids=["a map", "a far field"])
def test_what_footers_lack_is_refused(struct):
    with pytest.raises(ValueError, match="not in footers"):
        read_struct(struct)
