"""One pretraining shard: a slice of source rows becomes `.bin/.idx` pairs, a quarantine file, and a receipt.

Rows are read in batches of about a megabyte, which stay in the processor's cache from parser to encoder to writer;
memory does not grow with the shard (beyond 4 bytes of `.idx` per document). The receipt is written last, so a shard
either is proven or will be built again.
"""

import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from socket import gethostname
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute
from tokenmill.tasks.shards.books import Books, OnBadRow
from tokenmill.tasks.shards.holdout import PARTS
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.receipt import PartCount, Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import BadRow, TextBatch
from tokenmill.tasks.sources.formats import read_texts

from .binidx import BinIdxWriter, token_dtype
from .documents import WHOLE, assemble, assign_parts, runs
from .encoders import Encoder
from .settings import PretrainRecipe


@dataclass
class _ShardWriter:
    """The `.bin/.idx` pairs of a shard beside its books."""

    books: Books
    recipe: PretrainRecipe
    pairs: dict[str, BinIdxWriter] = field(default_factory=dict[str, BinIdxWriter])
    truncated: int = 0
    by_reference: int = 0

    def append(self, part: str, tokens: np.ndarray, lengths: np.ndarray) -> None:
        if part not in self.pairs:
            dtype = token_dtype(self.recipe.vocabulary_size)
            self.pairs[part] = BinIdxWriter(self.books.open(f"{part}.bin"), dtype)
        self.pairs[part].append(tokens, lengths)


def tokenize_shard(
    shard: PlannedShard,
    recipe: PretrainRecipe,
    encoder: Encoder,
    special_tokens: Sequence[str],
    store: Store,
    on_bad_row: OnBadRow,
) -> Receipt:
    """Build one shard in its folder of the store and publish its receipt.

    Raises BadRowError when a row is bad and the policy is `fail`, RunError when the source changed since the plan,
    OSError from the storage. Nothing is proven by then, and the next attempt starts afresh.
    """
    started = time.time()
    cpu = time.process_time()
    with ExitStack() as stack:
        books = Books(shard.part, store.folder(shard.key), stack, on_bad_row)
        writer = _ShardWriter(books, recipe)
        for batch in read_texts(shard.part, recipe.text_field):
            _take(batch, recipe, encoder, special_tokens, writer)
    outputs = books.outputs
    for part, pair in writer.pairs.items():
        outputs.append(publish_bytes(f"{books.folder}/{part}.idx", pair.index()))
    return store.issue(
        shard.identity,
        outputs=outputs,
        rows_in=books.rows_in,
        parts={part: PartCount(pair.documents, pair.tokens) for part, pair in writer.pairs.items()},
        drops=books.drops,
        quarantined=books.quarantined,
        truncated=writer.truncated,
        volatile={
            "built_at": started, "seconds": time.time() - started, "cpu_seconds": time.process_time() - cpu,
            "host": gethostname(), "source": shard.part.file.uri, "source_bytes": shard.part.size,
            "documents_by_reference": writer.by_reference,
        },
    )  # fmt: skip


def _take(
    batch: TextBatch, recipe: PretrainRecipe, encoder: Encoder, special_tokens: Sequence[str], writer: _ShardWriter
) -> None:
    """Encode and write one batch of rows, keeping the books."""
    books = writer.books
    books.rows_in += batch.consumed
    books.drop("blank_line", batch.blank)
    bad, texts = batch.bad, batch.texts
    if recipe.special_tokens_in_text == "reject":
        rejected, texts = _reject_special(batch, special_tokens)
        bad = sorted([*bad, *rejected], key=lambda row: row.row)
    books.set_aside(bad)
    texts = _long_enough(texts, recipe, books)
    if len(texts):
        _write(texts, recipe, encoder, writer)


def _write(texts: pa.LargeStringArray, recipe: PretrainRecipe, encoder: Encoder, writer: _ShardWriter) -> None:
    encoded = encoder.encode(texts)
    writer.by_reference += encoded.by_reference
    documents = assemble(encoded, recipe)
    writer.truncated += documents.truncated
    empty = len(texts) - len(documents.kept)
    if empty:
        writer.books.drop("empty_document", empty)
        texts = texts.take(pa.array(documents.kept))
    if not recipe.holds_out:
        writer.append(WHOLE, documents.tokens, documents.lengths)
        return
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(documents.lengths)])
    for part, first, last in runs(assign_parts(texts, recipe)):
        writer.append(PARTS[part], documents.tokens[ends[first] : ends[last]], documents.lengths[first:last])


def _long_enough(texts: pa.LargeStringArray, recipe: PretrainRecipe, books: Books) -> pa.LargeStringArray:
    if recipe.min_doc_chars is None:
        return texts
    lengths = compute.call_function("utf8_length", [texts])
    kept = texts.filter(compute.call_function("greater_equal", [lengths, pa.scalar(recipe.min_doc_chars)]))
    books.drop("too_short", len(texts) - len(kept))
    return kept


def _reject_special(batch: TextBatch, special_tokens: Sequence[str]) -> tuple[list[BadRow], pa.LargeStringArray]:
    """The rows whose text contains a control string, and the texts of the others."""
    if not special_tokens:
        return [], batch.texts
    any_of_them = compute.MatchSubstringOptions("|".join(map(re.escape, special_tokens)))
    matches = compute.call_function("match_substring_regex", [batch.texts], any_of_them)
    found = matches.to_numpy(zero_copy_only=False)
    rejected = [
        BadRow(
            int(batch.rows[place]),
            "special_token_in_text",
            "the text contains a control string",
            _excerpt(batch.texts[place]),
        )
        for place in np.flatnonzero(found).tolist()
    ]
    return rejected, batch.texts.filter(pa.array(~found))


def _excerpt(text: Any) -> str:  # noqa: ANN401 - an Arrow scalar
    return text.as_py()[:200].encode("unicode_escape").decode("ascii")
