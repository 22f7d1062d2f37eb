"""Candidates: the texts to embed, and columns for interpreting the results.

Rows are chosen by a predicate and a hash of their id before any text is parsed, so the choice does not depend on files, order
or other rows. Rows that are invalid Harmony or have an empty view are dropped and counted.

A conversation of ten messages takes 0.1 milliseconds, half of it parsing.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pyarrow as pa
from tokenmill.tasks.blend.predicates import Predicate
from tokenmill.tasks.dedup.documents import content
from tokenmill.tasks.dedup.kernel import collapse
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


Read = Callable[[int], list[ParsedMessage] | Fault]
"""The messages of a row in a table, by its number; candidates and the survey share one, so that each text is parsed once."""


def reader(table: pa.Table) -> Read:
    """Parses the text of a row when it is first asked for."""
    texts = table.column("text").to_pylist()
    return cache(lambda row: parse(texts[row]))


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
    read: Read | None = None,
) -> Candidates:
    """Return the candidates among the rows of `table`, which has `id` and `text`. `known` names columns that rows may have.

    Raises InputError for a predicate that does not fit the columns.
    """
    wanted = required(table, require, known)  # by columns and ids alone, before any text is parsed
    kept = wanted[sampled(table.column("id").take(pa.array(wanted)).to_pylist(), sample)]
    drops = Counter(not_required=table.num_rows - len(wanted), not_sampled=len(wanted) - len(kept))
    drops, read = +drops, read or reader(table)  # + leaves out reasons without rows
    texts: list[str] = []
    rows: list[int] = []
    for row in kept.tolist():  # only now is a text parsed
        messages = read(row)
        shown = "" if isinstance(messages, Fault) else view_of(messages, view)
        if shown:
            rows.append(row)
            texts.append(shown)
        else:
            drops[f"invalid_harmony:{messages.code}" if isinstance(messages, Fault) else "empty_view"] += 1
    found = table.drop_columns("text").take(pa.array(rows, pa.int64()))
    shown_texts = pa.array(texts, pa.large_string())
    characters, bounds = collapse(*content(shown_texts))  # words are what single blanks separate now
    words = np.diff(np.searchsorted(np.flatnonzero(characters == ord(" ")), bounds)) + (np.diff(bounds) > 0)
    carried = [
        found[each.name].cast(each.type) if each.name in found.column_names else pa.nulls(len(rows), each.type)
        for each in CARRIED
    ]
    columns = [found["id"].cast(pa.string()), shown_texts, pa.array(words, pa.int32()), *carried]
    return Candidates(pa.table(columns, schema=SCHEMA), drops)


def required(table: pa.Table, require: Predicate, known: Collection[str]) -> np.ndarray:
    """Return the numbers of the rows that meet a predicate, int64. Raises as `candidates`."""
    return np.flatnonzero(masks(table, [expression(require, table.schema, known)])[0])


def sampled(ids: Sequence[str | None], sample: Sample) -> np.ndarray:
    """Which of `ids` are in the sample, bool [ids]: by the first 32 bits of the SHA-1 of the lower-case id."""
    if sample.keep == sample.modulus:  # all, without a hash for each
        return np.ones(len(ids), np.bool_)
    digests = (hashlib.sha1((each or "").lower().encode(), usedforsecurity=False).digest() for each in ids)
    numbers = (int.from_bytes(digest[:4], "big") for digest in digests)
    return np.fromiter((number % sample.modulus < sample.keep for number in numbers), np.bool_, len(ids))
