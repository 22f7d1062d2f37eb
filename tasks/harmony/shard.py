"""Build a Harmony shard: Parquet of strict Harmony text, the fates of rows, quarantined rows and a receipt from a slice of any source.

A row passes through its source's converter, the composition, the renderer and the strict parser; the reference also parses a
share of the texts. A row that cannot be converted is a bad row, whose reason is the name of the rule. Rows become columns and a
row group when their texts hold GROUP_CHARACTERS: 51 columns cost 4 ms per row group, as much as a megabyte of text does.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.chat.conversation import RejectionError, rejecting, required
from tokenmill.tasks.chat.shapes import given_of
from tokenmill.tasks.shards.build import ShardBuilder, building
from tokenmill.tasks.shards.plan import WHOLE, PlannedShard
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.exact_json import compact
from tokenmill.tasks.sources.files import RecordBatch, Rejected
from tokenmill.tasks.storage import filesystem
from xxhash import xxh3_64_intdigest

from . import grammar, semantics
from .columns import KEPT, SCHEMA, Place, row, table
from .compose import compose
from .converters import CONVERTERS, UNNAMED, Converter, Names
from .grammar import Fault, parse
from .inventory import bounded, coverage_of, fields_of, licences_of, merged
from .message import Composed, Policy, Source
from .render import cross_check
from .semantics import ValidText, accepted, judged
from .settings import HarmonyRecipe
from .vocabulary import harmony_encoder

FILE = f"{WHOLE}.parquet"
CATALOG = "tools.json"

RULES = {**grammar.CODES, **semantics.CODES}  # rule names by code

CHECKED_CHARACTERS = 1000
"""Of rows with more characters, fewer are sampled for the reference, so that a sample costs the same at any length."""

GROUP_CHARACTERS = 8 << 20  # a row group ends after this many characters, or up to a batch later

Row = dict[str, Any]
Accepted = tuple[ValidText, Row]  # a text in its parts, and its row without token counts


@dataclass(frozen=True, slots=True)
class Normalizer:
    """Turns records from one source into rows; `catalog` collects their tools as JSON by id, `unread` counts
    rows by what isn't read of them.
    """

    recipe: HarmonyRecipe
    converter: Converter
    policy: Policy
    off: frozenset[str]
    catalog: dict[str, bytes] = field(default_factory=dict[str, bytes])
    unread: Counter[str] = field(default_factory=Counter[str])
    names: Names = UNNAMED

    @classmethod
    def of(cls, recipe: HarmonyRecipe) -> "Normalizer":
        """Return the normalizer of a recipe."""
        policy = Policy(**cast("dict[str, Any]", recipe.policy))
        names = Names(recipe.messages_field, recipe.tools_field, given_of(recipe.fields))
        return cls(recipe, CONVERTERS[recipe.converter], policy, frozenset(recipe.rules_off), names=names)

    @rejecting
    def row(self, record: Mapping[str, Any], number: int) -> Accepted:
        """Return the row of a record."""
        recipe = self.recipe
        found = required(self.converter(record, recipe.split, self.names))
        composed = found if isinstance(found, Composed) else required(compose(found, self.policy))
        valid = self._valid(composed)
        if isinstance(found, Source):
            self.unread.update(name for name in found.unread if name not in KEPT)
        # Not a field of the row, but text of it that isn't read.
        if composed.facts.get("meta_dropped_thoughts"):
            self.unread["reasoning of earlier turns"] += 1
        tools_id = composed.facts.get("source_tools_id")
        # Many rows offer the same tools; each list is written once.
        if isinstance(found, Source) and tools_id is not None and tools_id not in self.catalog:
            self.catalog[tools_id] = compact(found.tools)
        place = Place(recipe.dataset, recipe.split, recipe.file, number, recipe.blend_split)
        return valid, row(place, valid, composed.facts, composed.messages if recipe.messages_json else None)

    def _valid(self, composed: Composed) -> ValidText:
        """The text of a conversation. Sampled texts, and those that are not accepted at once, are parsed."""
        least = self.recipe.min_completion_chars
        valid = accepted(composed, self.off, least)
        if valid is not None and not self._is_sampled(valid.text):
            return valid
        valid, quality = judged(
            composed, self.off, least, lambda *text: cross_check(*text) if self._is_sampled(text[0]) else None
        )
        if valid is None:
            code = str(quality.quality_error_code)
            rule = RULES.get(code)
            reason = f"invalid_harmony_{code}_{rule}" if rule else f"invalid_harmony_{code}"
            where = f"character {quality.quality_error_offset} of the Harmony text"
            remedy = f"fix the row, or turn rule {code} off with disabled_rules"
            raise RejectionError(reason, f"{where}: {quality.error_detail}; {remedy}")
        if not quality.quality_completion_nonempty:
            detail = "the last message is neither an answer on channel final nor a call"
            raise RejectionError("empty_completion", detail)
        return valid

    def _is_sampled(self, text: str) -> bool:
        """Whether the reference parses this text too; a hash decides, so that the choice does not depend on other rows."""
        share = self.recipe.cross_check
        if 0 < share < 1:
            # The reference takes time per character.
            share *= min(1, CHECKED_CHARACTERS / len(text))
        return xxh3_64_intdigest(text.encode()) < share * 2**64


def normalize_shard(shard: PlannedShard, recipe: HarmonyRecipe, store: Store, on_bad_row: OnBadRow) -> Receipt:
    """Build a Harmony shard.

    Raises BadRowError for a bad row if the policy is `fail`, RunError if the source changed since the plan, OSError from
    the storage.
    """
    normalizer, fields = Normalizer.of(recipe), dict[str, Any]()

    def read(batch: RecordBatch, index: int) -> Accepted | Rejected:
        return normalizer.row(batch.records[index], int(batch.rows[index]))

    with building(shard, store, on_bad_row) as builder:
        written = _Written(builder)
        for batch, found in builder.records((), read):
            fields = merged(fields, fields_of(batch.records))
            written.add(found.values())
            builder.fates.keep(WHOLE, batch.rows[[*found]])
        written.end_group()
        builder.write_fates()
        if normalizer.catalog:
            builder.open(CATALOG).write(catalog_bytes(normalizer.catalog))
        builder.facts = {
            "licences": dict(sorted(written.licences.items())), "fields": bounded(fields), "coverage": written.coverage
        }  # fmt: skip
        builder.unread = normalizer.unread
    return builder.receipt


@dataclass(slots=True)
class _Written:
    """Writes rows as row groups, and counts their content; `waiting` are the rows of the next one."""

    builder: ShardBuilder
    licences: Counter[str] = field(default_factory=Counter[str])
    coverage: dict[str, Any] = field(default_factory=dict[str, Any])
    waiting: list[Accepted] = field(default_factory=list[Accepted])
    characters: int = 0

    def add(self, found: Collection[Accepted]) -> None:
        """Add the rows of a batch."""
        self.waiting += found
        self.characters += sum(len(valid.text) for valid, _ in found)
        if self.characters >= GROUP_CHARACTERS:
            self.end_group()

    def end_group(self) -> None:
        """Write the waiting rows, if there are any."""
        if not self.waiting:
            return
        counts = token_counts([text for text, _ in self.waiting])
        rows = [made for _, made in self.waiting]
        for made, whole, completion in zip(rows, *(each.tolist() for each in counts), strict=True):
            made["stats_token_len"], made["stats_completion_tokens"] = whole, completion
        self.waiting, self.characters = [], 0
        written = table(rows)
        self.builder.table(FILE, SCHEMA).write_table(written)
        self.builder.keep(WHOLE, len(rows), sum(each["stats_token_len"] for each in rows))
        self.licences.update(licences_of(written))
        self.coverage = merged(self.coverage, coverage_of(written))


def catalog_bytes(catalog: Mapping[str, bytes]) -> bytes:
    """Return a catalog of tools as one JSON object, by id."""
    return b"{" + b",\n".join(b'"%s":%s' % (name.encode(), catalog[name]) for name in sorted(catalog)) + b"}"


def token_counts(texts: Sequence[ValidText]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each text, and of its messages by the assistant with openings and ends; both int64 [texts].

    No token crosses a control token, so openings and bodies are encoded apart, each distinct one once, and an end is one
    token. One call of the encoder per batch runs at 250 MB/s; the reference takes 0.2 ms per KB.
    """
    # A number for each distinct piece, in the order of their first occurrence.
    numbers: defaultdict[str, int] = defaultdict(count().__next__)
    pieces = [
        numbers[piece] for text in texts for pair in zip(text.openings, text.bodies, strict=True) for piece in pair
    ]
    lengths = harmony_encoder().encode(pa.array(list(numbers), pa.large_string())).lengths
    of_messages = lengths[np.array(pieces, np.int64)].reshape(-1, 2).sum(axis=1) + 1
    owners = np.repeat(np.arange(len(texts)), [len(text.bodies) for text in texts])
    spoken = of_messages * np.array([by for text in texts for by in text.spoken], np.int64)
    whole, completion = (np.bincount(owners, each, len(texts)) for each in (of_messages, spoken))
    return whole.astype(np.int64), completion.astype(np.int64)


BATCH_ROWS = 256  # rows to parse at a time when a shard is verified


def inspect_harmony_shard(store: Store, receipt: Receipt) -> list[str]:
    """Report problems beyond sizes and hashes: columns, texts that aren't strict Harmony, and counts against the receipt."""
    if not receipt.parts:
        return []
    place = store.path(receipt.key, FILE)
    try:
        return [f"{place}: {problem}" for problem in _problems_of(place, receipt.documents, receipt.tokens)]
    except (pa.ArrowException, OSError) as error:
        return [f"{place}: cannot be read as Parquet: {error}"]


def _problems_of(place: str, documents: int, tokens: int) -> list[str]:
    system, path = filesystem(place)
    rows = counted = 0
    with cast("BinaryIO", system.open(path, "rb")) as stream:
        file = pq.ParquetFile(stream)
        if not file.schema_arrow.equals(SCHEMA):
            return [f"its columns are {file.schema_arrow.names}, not the columns of normalized rows"]
        # Texts are read in small batches, because a row group has megabytes.
        for batch in file.iter_batches(BATCH_ROWS, columns=["text", "stats_token_len"], use_threads=False):
            for text, length in zip(batch["text"].to_pylist(), batch["stats_token_len"].to_pylist(), strict=True):
                found = parse(text)
                if isinstance(found, Fault):
                    return [f"row {rows:,} is not valid Harmony: {found.code} at character {found.offset}"]
                rows, counted = rows + 1, counted + length
    agrees = (rows, counted) == (documents, tokens)
    return (
        []
        if agrees
        else [f"holds {rows:,} rows and {counted:,} tokens, its receipt records {documents:,} and {tokens:,}"]
    )
