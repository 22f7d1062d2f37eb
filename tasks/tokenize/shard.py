"""Build a pretraining shard: `.bin/.idx` pairs, the fates of rows, quarantined rows and a receipt from a slice of source rows.

Batches of about a megabyte remain in the processor's cache from parser to encoder to writer. Memory does not grow with the
shard, beyond 4 bytes of `.idx` per document and a byte per row.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute
from tokenmill.tasks.shards.build import ShardBuilder, building
from tokenmill.tasks.shards.plan import PARTS, PlannedShard
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import BadRow, TextBatch
from tokenmill.tasks.sources.formats import read_texts

from .binidx import BinIdxWriter, token_dtype
from .documents import WHOLE, assemble, assign_parts, runs
from .encoders import Encoder, Tokens
from .fim import COUNTED, FACT, FimEncoder
from .settings import PretrainRecipe

TRAIN = PARTS.index("train")


@dataclass
class _Writer:
    """Encodes texts into the `.bin/.idx` pairs of a shard."""

    builder: ShardBuilder
    recipe: PretrainRecipe
    encoder: Encoder
    fim: FimEncoder | None
    pairs: dict[str, BinIdxWriter] = field(default_factory=dict[str, BinIdxWriter])
    by_reference: int = 0
    rearranged: Counter[str] = field(default_factory=Counter[str])

    def write(self, batch: TextBatch) -> None:
        """Write the texts of a batch."""
        texts = batch.texts
        if not len(texts):
            return
        parts = assign_parts(texts, self.recipe) if self.recipe.holds_out else None
        encoded = self._encoded(texts, parts)
        self.by_reference += encoded.by_reference
        documents = assemble(encoded, self.recipe)
        self.builder.truncated += documents.truncated
        self.builder.drop("empty_document", np.delete(batch.rows, documents.kept))
        rows = batch.rows[documents.kept]
        if parts is None:
            self._append(WHOLE, documents.tokens, documents.lengths, rows)
            return
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(documents.lengths)])
        for part, first, last in runs(parts[documents.kept]):
            tokens = documents.tokens[ends[first] : ends[last]]
            self._append(PARTS[part], tokens, documents.lengths[first:last], rows[first:last])

    def _encoded(self, texts: pa.LargeStringArray, parts: np.ndarray | None) -> Tokens:
        """The ids of texts; held-out ones are never rearranged, so that losses on them can be compared."""
        if self.fim is None:
            return self.encoder.encode(texts)
        filled = self.fim.encode(texts, np.ones(len(texts), np.bool_) if parts is None else parts == TRAIN)
        self.rearranged.update(filled.counts)
        return filled.tokens

    def _append(self, part: str, tokens: np.ndarray, lengths: np.ndarray, rows: np.ndarray) -> None:
        if part not in self.pairs:
            dtype = token_dtype(self.recipe.vocabulary_size)
            self.pairs[part] = BinIdxWriter(self.builder.open(f"{part}.bin"), dtype)
        self.pairs[part].append(tokens, lengths)
        self.builder.keep(part, rows, len(tokens))


def tokenize_shard(
    shard: PlannedShard,
    recipe: PretrainRecipe,
    encoder: Encoder,
    special_tokens: Sequence[str],
    store: Store,
    on_bad_row: OnBadRow,
    fim: FimEncoder | None = None,
) -> Receipt:
    """Build a pretraining shard; `fim` rearranges some of its documents.

    Raises BadRowError for a bad row if the policy is `fail`, RunError if the source changed since the plan, OSError from
    the storage.
    """
    with building(shard, store, on_bad_row) as builder:
        writer = _Writer(builder, recipe, encoder, fim)
        for batch in read_texts(shard.part, recipe.text_field):
            rejected, accepted = _without_special(batch, recipe, special_tokens)
            builder.count(batch, rejected)
            writer.write(_long_enough(accepted, recipe, builder))
        for part, pair in writer.pairs.items():
            builder.open(f"{part}.idx").write(pair.index())
        builder.write_fates()
        builder.volatile["documents_by_reference"] = writer.by_reference
        if fim is not None:
            builder.facts[FACT] = {name: writer.rearranged[name] for name in COUNTED}
    return builder.receipt


def _long_enough(batch: TextBatch, recipe: PretrainRecipe, builder: ShardBuilder) -> TextBatch:
    if recipe.min_doc_chars is None:
        return batch
    lengths = compute.call_function("utf8_length", [batch.texts]).to_numpy(zero_copy_only=False)
    long = lengths >= recipe.min_doc_chars
    builder.drop("too_short", batch.rows[~long])
    return _chosen(batch, long)


def _chosen(batch: TextBatch, mask: np.ndarray) -> TextBatch:
    """The texts where `mask` is true, with their rows."""
    return replace(batch, texts=batch.texts.filter(pa.array(mask)), rows=batch.rows[mask])


def _without_special(
    batch: TextBatch, recipe: PretrainRecipe, special_tokens: Sequence[str]
) -> tuple[list[BadRow], TextBatch]:
    """The rows whose text contains a control string, if such rows are rejected, and the batch without them."""
    if recipe.special_tokens_in_text != "reject" or not special_tokens:
        return [], batch
    any_of_them = compute.MatchSubstringOptions("|".join(map(re.escape, special_tokens)))
    matches = compute.call_function("match_substring_regex", [batch.texts], any_of_them)
    found = matches.to_numpy(zero_copy_only=False)
    reason, detail = "special_token_in_text", "the text contains a control string"
    rejected = [
        BadRow(int(batch.rows[place]), reason, detail, _excerpt(batch.texts[place]))
        for place in np.flatnonzero(found).tolist()
    ]
    return rejected, _chosen(batch, ~found)


def _excerpt(text: Any) -> str:  # noqa: ANN401 - an Arrow scalar
    return text.as_py()[:200].encode("unicode_escape").decode("ascii")
