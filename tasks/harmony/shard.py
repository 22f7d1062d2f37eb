"""Build a Harmony shard: Parquet of strict Harmony text, quarantined rows and a receipt from a slice of any source.

A row passes through its source's converter, the composition, the renderer and the strict parser; the reference also parses a
share of the texts. A row that cannot be converted is a bad row, whose reason is the name of the rule. Each batch of rows is a
row group of a few megabytes.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import numpy as np
import pyarrow as pa
from tokenmill.tasks.shards.build import building
from tokenmill.tasks.shards.manifest import WHOLE
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.exact_json import compact
from tokenmill.tasks.sources.files import RecordBatch, Rejected
from tokenmill.tasks.sources.selection import RowFilter
from tokenmill.tasks.tokenize.encoders import Encoder
from tokenmill.tasks.tokenize.exact import exact_encoder
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource
from xxhash import xxh3_64_intdigest

from . import grammar, semantics
from .columns import SCHEMA, Place, row, table
from .compose import compose
from .converters import CONVERTERS, Converter
from .grammar import ParsedMessage, parse
from .inventory import bounded, coverage_of, fields_of, licences_of, merged
from .message import Composed, Policy, Source
from .render import cross_check, render
from .semantics import Quality, judge
from .settings import HarmonyRecipe
from .vocabulary import VOCABULARY

FILE = f"{WHOLE}.parquet"
CATALOG = "tools.json"

RULES = {**grammar.CODES, **semantics.CODES}
"""Names of rules by code."""

Row = dict[str, Any]
Parsed = tuple[list[ParsedMessage], Row]
"""The messages of a text, and its row without token counts."""


@dataclass(frozen=True, slots=True)
class Normalizer:
    """Turns records of one source into rows; `catalog` collects their tools as JSON by id."""

    recipe: HarmonyRecipe
    converter: Converter
    policy: Policy
    catalog: dict[str, bytes] = field(default_factory=dict[str, bytes])

    @classmethod
    def of(cls, recipe: HarmonyRecipe) -> "Normalizer":
        """The normalizer of a recipe."""
        return cls(recipe, CONVERTERS[recipe.converter], Policy(**cast("dict[str, Any]", recipe.policy)))

    def row(self, record: Mapping[str, Any], number: int) -> Parsed | Rejected:
        """The row of a record."""
        recipe = self.recipe
        found = self.converter(record, recipe.split)
        composed = found if isinstance(found, (Composed, Rejected)) else compose(found, self.policy)
        if isinstance(composed, Rejected):
            return composed
        text = render(composed.messages)
        parsed = parse(text)
        second_parser = cross_check if self._is_checked(text) else None
        off = frozenset(recipe.rules_off)
        quality = judge(text, parsed, composed.declared, off, recipe.min_completion_chars, second_parser)
        if not quality.quality_valid_harmony or not isinstance(parsed, list):
            return _invalid(quality)
        if not quality.quality_completion_nonempty:
            return Rejected("empty_completion", "the last message is no answer by the assistant on channel final")
        tools_id = composed.facts.get("source_tools_id")
        if isinstance(found, Source) and tools_id is not None and tools_id not in self.catalog:
            self.catalog[tools_id] = compact(found.tools)
        place = Place(recipe.dataset, recipe.split, recipe.file, number, recipe.blend_split)
        return parsed, row(place, text, parsed, quality, composed.facts, structured=recipe.messages_json)

    def _is_checked(self, text: str) -> bool:
        """Whether the reference parses this text too; a hash decides, so that the choice does not depend on other rows."""
        return xxh3_64_intdigest(text.encode()) < self.recipe.cross_check * 2**64


def _invalid(quality: Quality) -> Rejected:
    """The rejection for the rule that a text breaks."""
    code = str(quality.quality_error_code)
    rule = RULES.get(code)
    reason = f"invalid_harmony_{code}_{rule}" if rule else f"invalid_harmony_{code}"
    where = f"character {quality.quality_error_offset} of the Harmony text"
    return Rejected(reason, f"{where}: {quality.error_detail}; fix the row, or turn rule {code} off with rules_off")


def normalize_shard(shard: PlannedShard, recipe: HarmonyRecipe, store: Store, on_bad_row: OnBadRow) -> Receipt:
    """Build a Harmony shard.

    Raises BadRowError for a bad row if the policy is `fail`, RunError if the source changed since the plan, OSError from
    the storage.
    """
    normalizer, licences = Normalizer.of(recipe), Counter[str]()
    fields: dict[str, Any] = {}
    coverage: dict[str, Any] = {}

    def read(batch: RecordBatch, index: int) -> Parsed | Rejected:
        return normalizer.row(batch.records[index], int(batch.rows[index]))

    with building(shard, store, on_bad_row) as builder:
        for batch, found in builder.records((), RowFilter(recipe.filters), read):
            fields = merged(fields, fields_of(batch.records))
            rows = _counted(found.values())
            if rows:
                written = table(rows)
                builder.table(FILE, SCHEMA).write_table(written)
                builder.keep(WHOLE, len(rows), sum(each["stats_token_len"] for each in rows))
                licences.update(licences_of(written))
                coverage = merged(coverage, coverage_of(written))
        if normalizer.catalog:
            builder.open(CATALOG).write(catalog_bytes(normalizer.catalog))
        builder.facts = {
            "licences": dict(sorted(licences.items())), "fields": bounded(fields), "coverage": coverage
        }  # fmt: skip
    return builder.receipt


def catalog_bytes(catalog: Mapping[str, bytes]) -> bytes:
    """A catalog of tools as one JSON object, by id."""
    return b"{" + b",\n".join(b'"%s":%s' % (name.encode(), catalog[name]) for name in sorted(catalog)) + b"}"


def _counted(found: Collection[Parsed]) -> list[Row]:
    """The rows with their token counts."""
    counts = token_counts([(row["text"], messages) for messages, row in found])
    return [
        {**row, "stats_token_len": int(whole), "stats_completion_tokens": int(completion)}
        for (_, row), whole, completion in zip(found, *counts, strict=True)
    ]


@cache
def harmony_encoder() -> Encoder:
    """The encoder of Harmony text with its control tokens."""
    return exact_encoder(find_vocabulary(TokenizerSource(model=VOCABULARY)), "gigatoken", literal=False)


def token_counts(conversations: Sequence[tuple[str, Sequence[ParsedMessage]]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each text, and of its messages by the assistant with headers and ends; both int64 [conversations].

    Messages are encoded one by one, which equals encoding the whole, because each begins with a control token. One call of
    the encoder per batch runs at 150 MB/s; the reference takes 0.2 ms per KB.
    """
    messages = [message for _, found in conversations for message in found]
    texts = [text[message.start : message.end] for text, found in conversations for message in found]
    owners = np.repeat(np.arange(len(conversations)), [len(found) for _, found in conversations])
    lengths = harmony_encoder().encode(pa.array(texts, pa.large_string())).lengths
    spoken = lengths * np.asarray([message.author == "assistant" for message in messages], np.int64)
    whole, completion = (np.bincount(owners, each, len(conversations)) for each in (lengths, spoken))
    return whole.astype(np.int64), completion.astype(np.int64)
