"""Planning an SFT preparation: blend and settings in, every shard with its identity out. No Prefect, no Dask.

Beyond what any plan reads, the template and the tokenizer pass their self-check (`tasks.chat.check`, for Harmony
`tasks.harmony.check`), and the exactness gate takes a sample of the text of each data set.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson
from tokenmill.tasks.blend.models import Blend, DataSource
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.chat.loss import LossPolicy
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.plan import Plan
from tokenmill.tasks.shards.planning import holdout_of, places, plan_shards, require_no
from tokenmill.tasks.sources.files import Slice
from tokenmill.tasks.sources.formats import read_records
from tokenmill.tasks.sources.parquet import require_any
from tokenmill.tasks.sources.selection import row_filter
from tokenmill.tasks.tokenize.gate import Verdict, judge
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.vocabulary import Vocabulary

from .formats import CheckedFormat, Rows, Template, checked_format
from .settings import SftRecipe, SftSettings

KIND = "sft"
FORMAT_VERSION = 4
"""Raised whenever the same recipe and source would give other bytes than before."""


@dataclass(frozen=True)
class SftPlan:
    """The plan, the settings it was made with, the template after its self-check, and what the gate said of each data
    set (by `split/name`).
    """

    blend: Blend
    settings: SftSettings
    output_dir: str
    plan: Plan
    verdicts: Mapping[str, Verdict]
    checked: CheckedFormat = field(repr=False)
    vocabulary: Vocabulary = field(repr=False)

    @property
    def template(self) -> Template:
        """The chat template."""
        return self.checked.format.template


def plan_sft(blend: Blend, settings: SftSettings, output_dir: str | None) -> SftPlan:
    """Plan `blend` for `output_dir`; without one, nothing counts as built and hashes are remembered per user.

    Raises InputError for anything that a person must mend first: a template whose masks cannot be trusted, too.
    """
    output_dir, store = places(blend, settings, output_dir, KIND)
    vocabulary = find_vocabulary(settings.tokenizer)
    checked = checked_format(settings, vocabulary, policy(settings), store.place)
    chat, controls = checked.format, frozenset(checked.format.controls.ids)
    guarded = vocabulary.guarding(controls)
    verdicts: dict[str, Verdict] = {}

    def rows_of(source: DataSource) -> Rows[Any]:
        return chat.rows(source.messages_field, source.tools_field)

    def fields(source: DataSource) -> list[str]:
        return [*rows_of(source).fields, *row_filter(source).fields]

    def recipes(source: DataSource, split: str, slices: Sequence[Slice]) -> list[SftRecipe]:
        require_no(source, ["converter", "transforms"], "SFT")
        rows, literal = rows_of(source), settings.special_tokens_in_text != "allow"
        which = orjson.dumps([rows.fields, sorted(controls)])
        texts = partial(_texts, rows, fields(source))
        verdict = judge(guarded, slices, texts, which.decode(), store.place, literal=literal)
        verdicts[f"{split}/{source.name}"] = verdict
        return [_recipe(source, split, settings, vocabulary, chat.template, verdict)] * len(slices)

    plan = plan_shards(blend, settings, store, FORMAT_VERSION, fields, require_any, recipes)
    return SftPlan(blend, settings, output_dir, plan, verdicts, checked, vocabulary)


def policy(settings: SftSettings) -> LossPolicy:
    """What is trained on."""
    return LossPolicy(
        settings.loss_on,
        settings.loss_reasoning,
        settings.loss_tool_calls,
        settings.loss_end_of_turn,
        settings.loss_empty_reasoning,
    )


def _texts(rows: Rows[Any], fields: Sequence[str], part: Slice) -> Iterator[str]:
    """The texts of the conversations of a slice."""
    for batch in read_records(part, fields):
        for record in batch.records:
            found = rows.read(record)
            if not isinstance(found, Rejected):
                yield from rows.texts(found)


def _recipe(
    source: DataSource,
    split: str,
    settings: SftSettings,
    vocabulary: Vocabulary,
    template: Template,
    verdict: Verdict,
) -> SftRecipe:
    holdout = holdout_of(settings, split)
    return SftRecipe(
        messages_field=source.messages_field,
        tools_field=source.tools_field,
        filters=row_filter(source).wanted,
        tokenizer=vocabulary.fingerprint,
        vocabulary_size=vocabulary.size,
        backend=verdict.backend,
        special_tokens_in_text=settings.special_tokens_in_text,
        template=template.digest,
        template_variables=template.variables,
        loss_on=settings.loss_on,
        loss_reasoning=settings.loss_reasoning,
        loss_empty_reasoning=settings.loss_empty_reasoning,
        loss_tool_calls=settings.loss_tool_calls,
        loss_end_of_turn=settings.loss_end_of_turn,
        split_turns=settings.split_turns,
        pack_size=settings.pack_size,
        packing=settings.packing,
        oversize=settings.oversize,
        pad_seq_to_mult=settings.pad_seq_to_mult,
        pad_id=_pad_id(settings, vocabulary),
        seed=settings.seed,
        holdout_valid=holdout.valid if holdout else 0.0,
        holdout_test=holdout.test if holdout else 0.0,
        holdout_seed=holdout.seed if holdout else None,
    )


def _pad_id(settings: SftSettings, vocabulary: Vocabulary) -> int | None:
    if settings.pad_seq_to_mult == 1:
        return None
    if vocabulary.eos is None:
        raise InputError(
            f"pad_seq_to_mult={settings.pad_seq_to_mult}: sequences are padded with EOS, and {settings.tokenizer.model!r} "
            "does not say which token that is; name it as eos_token in a tokenizer_config.json beside it"
        )
    return vocabulary.eos


def template_record(template: Template) -> dict[str, Any]:
    """A template as plain JSON, for workers."""
    return {"source": template.source, "variables": template.variables}
