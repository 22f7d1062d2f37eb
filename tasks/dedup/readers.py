"""Readers turn rows into documents; all later steps know only documents.

Exact duplicates compare the whole text, near-duplicates a view of it. The view of a plain text is the text. The view of a
Harmony conversation omits system and developer messages: thousands of rows share them, and they would make short conversations
look alike.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.harmony.grammar import bodies
from tokenmill.tasks.shards.build import FILTERED
from tokenmill.tasks.shards.store import read_vouched
from tokenmill.tasks.sources.exact_json import compact
from tokenmill.tasks.sources.files import Slice, field_path
from tokenmill.tasks.sources.formats import read_records, read_texts
from tokenmill.tasks.sources.row_filter import value_at

from .documents import batches, byte_counts
from .settings import NearOn
from .shingles import normalized

BOILERPLATE = {"system", "developer"}


@dataclass(frozen=True, slots=True)
class Signable:
    """Consecutive documents of a slice.

    `rows` int64 [n], ascending, are their rows in the slice, `sizes` int64 [n] the bytes of their texts, `texts` [n] the texts in
    normal form, `views` [n] the parts compared for near-duplicates and contamination, `qualities` float64 [n] their
    quality, NaN if unknown. `names` [n] and `prompts` [n] are None if documents have none. `left_out` counts rows that are not
    documents, by reason.
    """

    rows: np.ndarray
    sizes: np.ndarray
    texts: pa.LargeStringArray
    views: pa.LargeStringArray
    qualities: np.ndarray
    names: pa.LargeStringArray | None = None
    prompts: pa.LargeStringArray | None = None
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])


Reader = Callable[[Slice, Mapping[str, Any], NearOn], Iterator[Signable]]
"""Reads the documents of a slice, in order, in batches of a few megabytes."""


def read_text(part: Slice, options: Mapping[str, Any], near_on: NearOn) -> Iterator[Signable]:  # noqa: ARG001 - as any reader
    """Documents from the field `text_field`, named by `id_field` and with the prompt in `cap_by` if these are set; each
    costs a second read of the slice. Raises RunError if the source changed since the plan, and the errors of `read_texts`.
    """
    # Read first, because names belong to rows, and rows without a text aren't documents.
    names = _values(part, options["id_field"]) if options["id_field"] else None
    prompts = _values(part, options["cap_by"]) if options["cap_by"] else None
    for batch in read_texts(part, options["text_field"]):
        wanted, texts = pa.array(batch.rows), normalized(batch.texts)
        yield Signable(
            batch.rows,
            byte_counts(batch.texts),
            texts,
            texts,
            np.full(len(batch.rows), np.nan),
            None if names is None else names.take(wanted),
            None if prompts is None else prompts.take(wanted),
            Counter(row.reason for row in batch.bad)
            + Counter({"blank_line": len(batch.blank), FILTERED: batch.filtered}),
        )


def _values(part: Slice, name: str) -> pa.LargeStringArray:
    """The values of a field of each row, as text; null where absent."""
    found: list[pa.Array] = [pa.array([], pa.large_string())]
    path, first = field_path(name), 0
    for batch in read_records(part, [name]):
        values: list[str | None] = [None] * batch.consumed
        for row, record in zip(batch.rows.tolist(), batch.records, strict=True):
            value = value_at(record, path)
            values[row - first] = value if value is None or isinstance(value, str) else compact(value, str).decode()
        found.append(pa.array(values, pa.large_string()))
        first += batch.consumed
    return pa.concat_arrays(found)


def read_harmony(part: Slice, options: Mapping[str, Any], near_on: NearOn) -> Iterator[Signable]:  # noqa: ARG001 - as any reader
    """Normalized conversations, named by `row_id`; quality is how often the question was answered correctly.

    The file is read whole to check its hash, because signatures of damaged content would outlive its repair. So its texts are
    those that the grammar accepted. Raises RunError if the file is missing or damaged.
    """
    file = pq.ParquetFile(pa.BufferReader(read_vouched(part.file.uri)))
    fields, first = ["text", "row_id", "prompt_id", "meta_correctness_own"], 0
    for group in range(file.num_row_groups):
        table = file.read_row_group(group, fields, use_threads=False)
        columns = [table[name].combine_chunks().cast(pa.large_string()) for name in fields[:3]]
        qualities = table[fields[3]].cast(pa.float64()).fill_null(np.nan).to_numpy()
        for start, stop in batches(columns[0]):  # a row group may hold hundreds of megabytes
            texts, names, prompts = (column.slice(start, stop - start) for column in columns)
            rows, normal = np.arange(first + start, first + stop), normalized(texts)
            views = _views(texts, normal, near_on)
            yield Signable(rows, byte_counts(texts), normal, views, qualities[start:stop], names, prompts)
        first += table.num_rows


def _views(texts: pa.LargeStringArray, normal: pa.LargeStringArray, near_on: NearOn) -> pa.LargeStringArray:
    """Return the bodies to compare of texts, in normal form. Raises RunError for a text that isn't Harmony."""
    try:
        return _joined_bodies(normal, near_on)
    except ValueError:  # or a tag is gone, because its `>` and a body's first character, a solidus, are one in NFC
        try:
            return normalized(_joined_bodies(texts, near_on))
        except ValueError as error:
            raise RunError(f"a normalized row is not valid Harmony: {error}; rerun with force=true") from error


def _joined_bodies(texts: pa.LargeStringArray, near_on: NearOn) -> pa.LargeStringArray:
    """The bodies to compare of each text, without blanks at their ends, as one text."""
    views = [
        b" ".join(
            [
                said
                for author, body in bodies(text)
                if (author == "user" if near_on == "prompt" else author not in BOILERPLATE)
                and (said := body.strip(b" "))
            ]
        )
        for text in texts.cast(pa.large_binary()).to_pylist()
    ]
    return pa.array(views, pa.large_string())


READERS: Mapping[str, Reader] = {"text": read_text, "harmony": read_harmony}
