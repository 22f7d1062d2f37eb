"""Candidates: the texts to embed, and columns for interpreting the results.

Rows are chosen by a predicate and a hash of their id before any text is parsed, so the choice does not depend on files, order
or other rows. Rows that are invalid Harmony or have an empty view are dropped and counted.

A conversation of ten messages takes 0.1 milliseconds, half of it parsing.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from tokenmill.tasks.blend.predicates import Predicate
from tokenmill.tasks.harmony.grammar import Fault, ParsedMessage, parse
from tokenmill.tasks.sources.arrow_predicates import expression, masks

from .signature import View, view_of

CARRIED = pa.schema(
    {
        "row_id": pa.string(), "dataset": pa.string(), "split": pa.string(), "loss_mode": pa.string(), "meta_domain": pa.string(),
        "meta_difficulty_bin": pa.string(), "meta_correctness": pa.float64(), "quality_has_tool": pa.bool_(),
        "quality_valid_tool_schema": pa.bool_(),
    }
)  # fmt: skip
"""Columns that candidates keep; null if a file lacks them."""

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field("embed_text", pa.large_string()),
        pa.field("stats_embed_word_count", pa.int32()),
        *CARRIED,
    ]
)


Read = Callable[[str | None], list[ParsedMessage] | Fault]
"""Parses Harmony text; candidates and the survey of the same rows share one that remembers."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Keeps rows whose hash modulo `modulus` is below `keep`, about `keep` of `modulus` rows."""

    modulus: int = 1
    keep: int = 1


@dataclass(frozen=True, slots=True)
class Candidates:
    """`rows` of SCHEMA in table order, and the number of dropped rows by reason."""

    rows: pa.Table
    drops: Counter[str]


def candidates(
    table: pa.Table,
    view: View,
    require: Predicate,
    sample: Sample,
    known: Collection[str] = (),
    read: Read = parse,
) -> Candidates:
    """The candidates among the rows of `table`, which has `id` and `text`. `known` names columns that rows may have.

    Raises InputError for a predicate that does not fit the columns.
    """
    wanted = masks(table, [expression(require, table.schema, known)])[0]
    kept = wanted.copy()
    kept[wanted] = sampled(table.column("id").filter(pa.array(wanted)).to_pylist(), sample)
    drops = Counter(not_required=int((~wanted).sum()), not_sampled=int((wanted & ~kept).sum()))
    return _shown(table.filter(pa.array(kept)), view, +drops, read)


def sampled(ids: Sequence[str | None], sample: Sample) -> np.ndarray:
    """Which of `ids` are in the sample, bool [ids]: by the first 32 bits of the SHA-1 of the lower-case id."""
    if sample.keep == sample.modulus:
        return np.ones(len(ids), np.bool_)
    digests = (hashlib.sha1((each or "").lower().encode(), usedforsecurity=False).digest() for each in ids)
    numbers = (int.from_bytes(digest[:4], "big") for digest in digests)
    return np.fromiter((number % sample.modulus < sample.keep for number in numbers), np.bool_, len(ids))


def _shown(table: pa.Table, view: View, drops: Counter[str], read: Read) -> Candidates:
    texts: list[str] = []
    rows: list[int] = []
    for row, text in enumerate(table.column("text").to_pylist()):
        messages = read(text)
        shown = "" if isinstance(messages, Fault) else view_of(messages, view)
        if shown:
            rows.append(row)
            texts.append(shown)
        else:
            drops[f"invalid_harmony:{messages.code}" if isinstance(messages, Fault) else "empty_view"] += 1
    return Candidates(_rows(table.take(pa.array(rows, pa.int64())), texts), drops)


def _rows(table: pa.Table, texts: Sequence[str]) -> pa.Table:
    columns = {
        "id": table.column("id").cast(pa.string()),
        "embed_text": pa.array(texts, pa.large_string()),
        "stats_embed_word_count": pa.array([len(text.split()) for text in texts], pa.int32()),
    }
    return pa.table([*columns.values(), *(_carried(table, each) for each in CARRIED)], schema=SCHEMA)


def _carried(table: pa.Table, column: pa.Field) -> pa.ChunkedArray | pa.Array:
    if column.name in table.schema.names:
        return table.column(column.name).cast(column.type)
    return pa.nulls(table.num_rows, column.type)
