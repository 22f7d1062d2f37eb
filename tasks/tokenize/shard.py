"""Build a pretraining shard: `.bin/.idx` pairs, the fates of rows, quarantined rows and a receipt from a slice of source rows.

Batches of about a megabyte remain in the processor's cache from parser to encoder to writer. Memory does not grow with the
shard, beyond 4 bytes of `.idx` per document and a byte per row.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from pyarrow import compute
from tokenmill.tasks.shards.build import ShardBuilder, building
from tokenmill.tasks.shards.plan import PARTS, WHOLE, PlannedShard
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import BadRow, TextBatch
from tokenmill.tasks.sources.formats import read_texts

from .binidx import BinIdxWriter, token_dtype
from .documents import assemble, assign_parts, runs
from .encoders import Encoder
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
        if self.fim is None:
            encoded = self.encoder.encode(texts)
        else:
            # Held-out documents are never rearranged, so that losses on them can be compared.
            filled = self.fim.encode(texts, np.ones(len(texts), np.bool_) if parts is None else parts == TRAIN)
            self.rearranged.update(filled.counts)
            encoded = filled.tokens
        self.by_reference += encoded.by_reference
        documents = assemble(encoded, self.recipe)
        self.builder.truncated += documents.truncated
        self.builder.drop("empty_document", np.delete(batch.rows, documents.kept))
        rows = batch.rows[documents.kept]
        if parts is None:
            self._append(WHOLE, documents.tokens, documents.lengths, rows)
            return
        # Neighbors in the same part are written in one call, without a copy.
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(documents.lengths)])
        for part, first, last in runs(parts[documents.kept]):
            tokens = documents.tokens[ends[first] : ends[last]]
            self._append(PARTS[part], tokens, documents.lengths[first:last], rows[first:last])

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
        rejecting = recipe.special_tokens_in_text == "reject" and bool(special_tokens)
        controls = compute.MatchSubstringOptions("|".join(map(re.escape, special_tokens)))
        for batch in read_texts(shard.part, recipe.text_field):
            rejected: list[BadRow] = []
            accepted = batch
            if rejecting:
                matches = compute.call_function("match_substring_regex", [batch.texts], controls)
                found = matches.to_numpy(zero_copy_only=False)
                for place in np.flatnonzero(found).tolist():
                    begin = batch.texts[place].as_py()[:200].encode("unicode_escape").decode("ascii")
                    why = "the text contains a control string"
                    rejected.append(BadRow(int(batch.rows[place]), "special_token_in_text", why, begin))
                accepted = _chosen(batch, ~found)
            builder.count(batch, rejected)
            if recipe.min_doc_chars is not None:
                lengths = compute.call_function("utf8_length", [accepted.texts]).to_numpy(zero_copy_only=False)
                long = lengths >= recipe.min_doc_chars
                builder.drop("too_short", accepted.rows[~long])
                accepted = _chosen(accepted, long)
            writer.write(accepted)
        # Indices are written last, because lengths are known only then.
        for part, pair in writer.pairs.items():
            builder.open(f"{part}.idx").write(pair.index())
        builder.write_fates()
        builder.volatile["documents_by_reference"] = writer.by_reference
        if fim is not None:
            builder.facts[FACT] = {name: writer.rearranged[name] for name in COUNTED}
    return builder.receipt


def _chosen(batch: TextBatch, mask: np.ndarray) -> TextBatch:
    """The texts where `mask` is true, with their rows."""
    return replace(batch, texts=batch.texts.filter(pa.array(mask)), rows=batch.rows[mask])
