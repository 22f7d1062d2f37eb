"""Settings of a Harmony normalization, and the recipe of its shards."""

from dataclasses import asdict, dataclass
from typing import Self

from pydantic import Field, model_validator
from tokenmill.tasks.blend.models import Value
from tokenmill.tasks.renamed import LEAVES
from tokenmill.tasks.shards.settings import PreparationSettings

from .converters import ProofTask
from .message import Effort, ParallelCalls, Policy, SpecialStrings, Thoughts, Trailing

DEFAULT = Policy()


class HarmonySettings(PreparationSettings, frozen=True):
    """Settings of a Harmony normalization."""

    effort: Effort = Field(default=DEFAULT.effort, description="Reasoning effort of rows without one in the source.")
    keep_reasoning: Thoughts = Field(
        default=DEFAULT.thoughts, description="Keep all reasoning, or only that after the last user message."
    )
    parallel_calls: ParallelCalls = Field(
        default=DEFAULT.parallel_calls, description="How to write parallel calls, which Harmony does not have."
    )
    special_strings: SpecialStrings = Field(
        default=DEFAULT.special_strings, description="Control strings in data: reject the row, or break them up."
    )
    trailing: Trailing = Field(
        default=DEFAULT.trailing, description="Messages after the assistant's last one: drop them, or reject the row."
    )
    proofs: ProofTask = Field(default="proof", description="What to train on in rows with proofs.")
    disabled_rules: list[str] = Field(default=[], description="Codes of rules that rows may break, for example S15.")
    min_completion_chars: int = Field(default=1, ge=0, description="Answers with fewer characters count as empty.")
    cross_check: float = Field(
        default=0.02,
        ge=0,
        le=1,
        description="Share of rows, sampled by a hash, that the official parser checks too; less of rows over 1,000 characters.",
    )
    messages_json: bool = Field(default=False, description="Also write the messages of each row as JSON.")

    @model_validator(mode="after")
    def _holds_nothing_out(self) -> Self:
        if "holdout" in self.model_fields_set:
            raise ValueError("holdout does not apply, because rows keep the splits of their sources; remove it")
        return self


@dataclass(frozen=True, slots=True)
class HarmonyRecipe:
    """Every choice that can change a byte of a shard.

    `dataset`, `split` and `file` are columns; `file` is a path within the dataset; for a slice after the first, it ends in the
    offset at which row numbers start. `blend_split` is None in a flat blend. `policy` is the composition policy.
    """

    dataset: str
    blend_split: str | None
    split: str
    file: str
    converter: str
    messages_field: str | None
    tools_field: str
    fields: dict[str, str]
    filters: dict[str, list[Value]]
    policy: dict[str, str]
    rules_off: list[str]
    min_completion_chars: int
    cross_check: float
    messages_json: bool
    template_version: str


def policy_of(settings: HarmonySettings) -> Policy:
    """Return the composition policy of the settings."""
    chosen = {name: getattr(settings, LEAVES.get(name, name)) for name in asdict(DEFAULT)}
    return Policy(**chosen)
