"""Planning a pretraining preparation: blend and settings in, every shard with its identity out. No Prefect, no Dask.

Beyond what any plan reads, the exactness gate takes a sample of each data set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tokenmill.tasks.blend.models import Blend, DataSource
from tokenmill.tasks.shards.plan import Plan
from tokenmill.tasks.shards.planning import holdout_of, places, plan_shards, require_no
from tokenmill.tasks.sources.files import Slice
from tokenmill.tasks.sources.parquet import require_text

from .gate import Verdict, judge, texts_of
from .load import load_vocabulary
from .settings import PretrainRecipe, PretrainSettings
from .vocabulary import Vocabulary

KIND = "pretrain"
FORMAT_VERSION = 2
"""Raised whenever the same recipe and source would give other bytes than before."""


@dataclass(frozen=True)
class PretrainPlan:
    """The plan, the settings it was made with, and what the gate said of each data set (by `split/name`)."""

    blend: Blend
    settings: PretrainSettings
    output_dir: str
    plan: Plan
    verdicts: Mapping[str, Verdict]
    vocabulary: Vocabulary = field(repr=False)


def plan_pretrain(blend: Blend, settings: PretrainSettings, output_dir: str | None) -> PretrainPlan:
    """Plan `blend` for `output_dir`; without one, nothing counts as built and hashes are remembered per user.

    Raises InputError for anything that a person must mend first.
    """
    output_dir, store = places(blend, settings, output_dir, KIND)
    vocabulary = load_vocabulary(settings.tokenizer)
    verdicts: dict[str, Verdict] = {}

    def recipes(source: DataSource, split: str, slices: Sequence[Slice]) -> list[PretrainRecipe]:
        require_no(source, ["used_in", "filters", "converter", "transforms"], "pretraining")
        literal = settings.special_tokens_in_text != "allow"
        texts, field_name = partial(texts_of, source.text_field), source.text_field
        verdict = judge(vocabulary, slices, texts, field_name, store.place, literal=literal)
        verdicts[f"{split}/{source.name}"] = verdict
        return [_recipe(source, split, settings, vocabulary, verdict)] * len(slices)

    plan = plan_shards(
        blend, settings, store, FORMAT_VERSION, lambda source: [source.text_field], require_text, recipes
    )
    return PretrainPlan(blend, settings, output_dir, plan, verdicts, vocabulary)


def _recipe(
    source: DataSource, split: str, settings: PretrainSettings, vocabulary: Vocabulary, verdict: Verdict
) -> PretrainRecipe:
    holdout = holdout_of(settings, split)
    return PretrainRecipe(
        text_field=source.text_field,
        tokenizer=vocabulary.fingerprint,
        vocabulary_size=vocabulary.size,
        backend=verdict.backend,
        bos=vocabulary.bos if settings.tokenizer.add_bos else None,
        eos=vocabulary.eos if settings.tokenizer.add_eos else None,
        special_tokens_in_text=settings.special_tokens_in_text,
        min_doc_chars=settings.min_doc_chars,
        max_doc_tokens=settings.max_doc_tokens,
        holdout_valid=holdout.valid if holdout else 0.0,
        holdout_test=holdout.test if holdout else 0.0,
        holdout_seed=holdout.seed if holdout else None,
    )
