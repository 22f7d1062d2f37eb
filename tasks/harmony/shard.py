"""One Harmony shard: a slice of rows of any source becomes Parquet of strict Harmony text, a quarantine file, a receipt.

A row goes through the converter of its source, the composition, the renderer, and then back through the strict parser:
only a text that makes sense to it is written, and the reference's parser reads a share of the texts as well. Whatever cannot be converted
is a bad row with the name of the rule. Rows are written in groups as large as a batch of rows, a few megabytes.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from socket import gethostname
from typing import Any, BinaryIO, cast

import pyarrow.parquet as pq
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.shards.books import Books, OnBadRow
from tokenmill.tasks.shards.manifest import WHOLE
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.receipt import PartCount, Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.exact_json import compact
from tokenmill.tasks.sources.files import BadRow, RecordBatch
from tokenmill.tasks.sources.formats import read_records
from tokenmill.tasks.sources.json_rows import excerpt_of
from tokenmill.tasks.sources.selection import RowFilter
from xxhash import xxh3_64_intdigest

from . import grammar, semantics
from .card import licences_of
from .columns import SCHEMA, Place, row, table
from .compose import compose
from .converters import CONVERTERS, Converter
from .grammar import ParsedMessage, parse
from .inventory import bounded, coverage_of, fields_of, merged
from .quality import Quality, judge, no_opinion
from .render import cross_check, render
from .settings import HarmonyRecipe
from .tokens import token_counts
from .turns import Composed, Policy, Source

FILE = f"{WHOLE}.parquet"
CATALOG = "tools.json"

RULES = {**grammar.CODES, **semantics.CODES}
"""What each rule asks, by its code."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Normalizer:
    """Records of one source to rows; `recipe` says where they stand and what is decided."""

    recipe: HarmonyRecipe
    converter: Converter
    policy: Policy
    catalog: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """The tools of the rows so far, as JSON, by the id that rows name them with."""

    @classmethod
    def of(cls, recipe: HarmonyRecipe) -> "Normalizer":
        """The normalizer that a recipe asks for."""
        return cls(recipe, CONVERTERS[recipe.converter], Policy(**cast("dict[str, Any]", recipe.policy)))

    def row(self, record: Mapping[str, Any], number: int) -> tuple[list[ParsedMessage], Row] | Rejected:
        """The messages and the row of a record, its tokens not yet counted, or why there is none."""
        recipe = self.recipe
        found = self.converter(record, recipe.split)
        composed = found if isinstance(found, (Composed, Rejected)) else compose(found, self.policy)
        if isinstance(composed, Rejected):
            return composed
        text = render(composed.messages)
        parsed = parse(text)
        opinion = cross_check if self._is_checked(text) else no_opinion
        off = frozenset(recipe.rules_off)
        quality = judge(text, parsed, composed.declared, off, recipe.min_completion_chars, opinion)
        if not quality.quality_valid_harmony or not isinstance(parsed, list):
            return _invalid(quality)
        if not quality.quality_completion_nonempty:
            return Rejected("empty_completion", "the last message is no answer by the assistant on channel final")
        self._note_tools(found, composed)
        place = Place(recipe.dataset, recipe.split, recipe.file, number, recipe.blend_split)
        return parsed, row(place, text, parsed, quality, composed.facts, structured=recipe.messages_json)

    def _is_checked(self, text: str) -> bool:
        """Whether the reference reads this text as well: by a hash, so that it is the same rows wherever they stand."""
        return xxh3_64_intdigest(text.encode()) < self.recipe.cross_check * 2**64

    def _note_tools(self, found: Source | Composed | Rejected, composed: Composed) -> None:
        name = composed.facts.get("source_tools_id")
        if isinstance(found, Source) and name is not None and name not in self.catalog:
            self.catalog[name] = compact(found.tools)


def _invalid(quality: Quality) -> Rejected:
    """Which rule a text breaks, and how."""
    code = str(quality.quality_error_code)
    rule = RULES.get(code)
    reason = f"invalid_harmony_{code}_{rule}" if rule else f"invalid_harmony_{code}"
    where = f"character {quality.quality_error_offset} of the Harmony text"
    return Rejected(reason, f"{where}: {quality.error_detail}; fix the row, or turn rule {code} off with rules_off")


def normalize_shard(shard: PlannedShard, recipe: HarmonyRecipe, store: Store, on_bad_row: OnBadRow) -> Receipt:
    """Build one shard in its folder of the store and publish its receipt.

    Raises BadRowError when a row is bad and the policy is `fail`, RunError when the source changed since the plan,
    OSError from the storage. Nothing is proven by then, and the next attempt starts afresh.
    """
    started, cpu = time.time(), time.process_time()
    normalizer, chosen = Normalizer.of(recipe), RowFilter(recipe.filters)
    documents = tokens = 0
    licences: Counter[str] = Counter()
    fields: dict[str, Any] = {}
    coverage: dict[str, Any] = {}
    with ExitStack() as stack:
        books = Books(shard.part, store.folder(shard.key), stack, on_bad_row)
        writer: pq.ParquetWriter | None = None
        for batch in read_records(shard.part, ()):
            fields = merged(fields, fields_of(batch.records))
            rows = _take(batch, chosen, normalizer, books)
            if not rows:
                continue
            if writer is None:
                file = cast("BinaryIO", books.open(FILE))
                writer = stack.enter_context(pq.ParquetWriter(file, SCHEMA, compression="zstd"))
            written = table(rows)
            writer.write_table(written)
            documents += len(rows)
            tokens += sum(each["stats_token_len"] for each in rows)
            licences.update(licences_of(written))
            coverage = merged(coverage, coverage_of(written))
        if normalizer.catalog:
            books.open(CATALOG).write(catalog_bytes(normalizer.catalog))
    return store.issue(
        shard.identity,
        outputs=books.outputs,
        rows_in=books.rows_in,
        parts={WHOLE: PartCount(documents, tokens)} if documents else {},
        drops=books.drops,
        quarantined=books.quarantined,
        truncated=0,
        facts={
            "licences": dict(sorted(licences.items())),
            "fields": bounded(fields),
            "coverage": coverage,
        },
        volatile={
            "built_at": started, "seconds": time.time() - started, "cpu_seconds": time.process_time() - cpu,
            "host": gethostname(), "source": shard.part.file.uri, "source_bytes": shard.part.size,
        },
    )  # fmt: skip


def catalog_bytes(catalog: Mapping[str, bytes]) -> bytes:
    """A catalog of tools as one JSON object, by id."""
    return b"{" + b",\n".join(b'"%s":%s' % (name.encode(), catalog[name]) for name in sorted(catalog)) + b"}"


def _take(batch: RecordBatch, chosen: RowFilter, normalizer: Normalizer, books: Books) -> list[Row]:
    """The rows of one batch, keeping the books."""
    books.rows_in += batch.consumed
    books.drop("blank_line", batch.blank)
    bad, good = list(batch.bad), list[tuple[list[ParsedMessage], Row]]()
    for number, record in zip(batch.rows.tolist(), batch.records, strict=True):
        if not chosen.keeps(record):
            books.drop("filtered")
            continue
        found = normalizer.row(record, number)
        if isinstance(found, Rejected):
            bad.append(BadRow(number, found.reason, found.detail, excerpt_of(record)))
        else:
            good.append(found)
    books.set_aside(sorted(bad, key=lambda row: row.row))
    return _counted(good)


def _counted(good: Sequence[tuple[list[ParsedMessage], Row]]) -> list[Row]:
    """The rows with their tokens."""
    counts = token_counts([(row["text"], messages) for messages, row in good])
    return [
        {**row, "stats_token_len": int(whole), "stats_completion_tokens": int(completion)}
        for (_, row), whole, completion in zip(good, *counts, strict=True)
    ]
