"""Settings of an SFT preparation, and the recipes of its shards: of sequences, and of packs."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal, Self, cast

import orjson
from pydantic import Field, JsonValue, field_validator, model_validator
from tokenmill.tasks.chat.loss import LossOn, LossPolicy
from tokenmill.tasks.chat.sequences import SplitTurns
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.strict import Seed
from tokenmill.tasks.tokenize.settings import Backend, SpecialTokens, TokenizerSource

from .algorithms import Packing
from .sampling import Sampling

Oversize = Literal["drop", "truncate", "error"]

AUTO = "auto"
"""The chat template that fits the tokenizer."""


LOSS_FIELDS = ("loss_on", "loss_reasoning", "loss_tool_calls", "loss_end_of_turn", "loss_empty_reasoning")
"""The settings that make a loss policy, in the order of its fields."""


def policy_of(loss: "LossSettings | SftRecipe") -> LossPolicy:
    """Return the loss policy that settings or a recipe describe."""
    return LossPolicy(*(getattr(loss, name) for name in LOSS_FIELDS))


class LossSettings(PreparationSettings, frozen=True):
    """Settings that choose the tokens to train on, and so to score."""

    loss_on: LossOn = Field(default="assistant_all", description="Which of the assistant's messages are trained on.")
    loss_reasoning: bool = Field(default=True, description="Train on reasoning.")
    loss_empty_reasoning: bool = Field(
        default=True, description="Train on empty reasoning, where the template writes it after its generation prompt."
    )
    loss_tool_calls: bool = Field(default=True, description="Train on tool calls.")
    loss_end_of_turn: bool = Field(default=True, description="Train on the token that ends a turn.")

    @property
    def policy(self) -> LossPolicy:
        """Which tokens are trained on."""
        return policy_of(self)


class SftSettings(LossSettings, frozen=True):
    """Settings of an SFT preparation."""

    tokenizer: TokenizerSource = Field(default=TokenizerSource(), description="Tokenizer of the conversations.")
    special_tokens_in_text: SpecialTokens = Field(
        default="literal", description="Control strings in text: encode as text or as control ids, or reject the row."
    )
    chat_template: str = Field(
        default=AUTO,
        min_length=1,
        description="nano3, lightning35, harmony, tokenizer (the model's own), a file, or the Jinja text itself. "
        "auto: harmony with Harmony's tokenizer, otherwise the tokenizer's own.",
    )
    allow_text_markers: bool = Field(
        default=False,
        description="Accept a template whose markers are plain text to the tokenizer, not control tokens.",
    )
    template_variables: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Variables for the template, for example enable_thinking; strftime_now returns date.",
    )
    split_turns: SplitTurns = Field(
        default="auto", description="One sequence per user turn where the template strips reasoning from history."
    )
    pack_size: int = Field(default=4096, ge=2, description="Maximum stored tokens per pack.")
    packing: Packing = Field(default="best_fit_decreasing", description="Algorithm that assigns sequences to packs.")
    on_oversize: Oversize = Field(default="drop", description="What to do with sequences longer than a pack.")
    pad_seq_to_mult: int = Field(
        default=1, ge=1, description="Pad sequences to a multiple plus one, for context parallelism (2 x CP)."
    )
    sampling: Sampling = Field(default="none", description="Apply weights by dropping (down) or repeating (up) packs.")
    seed: Seed = Field(default=42, description="Shuffle seed for packs and files.")

    @field_validator("template_variables", mode="before")
    @classmethod
    def _dates_as_text(cls, variables: object) -> object:
        """Convert dates back to text: YAML parses `date: 2026-03-01` as a date."""
        given = cast("dict[str, object]", variables) if isinstance(variables, dict) else {}
        dates = {name: value.isoformat() for name, value in given.items() if isinstance(value, date)}
        return {**given, **dates} if dates else variables

    @field_validator("template_variables")
    @classmethod
    def _is_json(cls, variables: dict[str, JsonValue]) -> dict[str, JsonValue]:
        try:
            orjson.dumps(variables)
        except TypeError as error:
            raise ValueError(f"not JSON: {error}") from error
        return variables

    @model_validator(mode="after")
    def _fits_a_sequence(self) -> Self:
        if self.pack_size <= self.pad_seq_to_mult:
            raise ValueError(
                f"pack_size={self.pack_size} is too small for sequences of {self.pad_seq_to_mult}·k + 1 tokens"
            )
        return self


@dataclass(frozen=True, slots=True)
class SftRecipe:
    """Every choice that can change a byte of stored sequences.

    `filters` are wanted values by field, `tokenizer` and `template` fingerprints of content; the holdout shares are 0 and the
    seed None if nothing is held out.
    """

    messages_field: str | None
    tools_field: str
    fields: Mapping[str, str]
    filters: Mapping[str, Any]
    tokenizer: str
    vocabulary_size: int
    backend: Backend
    special_tokens_in_text: SpecialTokens
    template: str
    template_variables: Mapping[str, Any]
    loss_on: LossOn
    loss_reasoning: bool
    loss_empty_reasoning: bool
    loss_tool_calls: bool
    loss_end_of_turn: bool
    split_turns: SplitTurns
    holdout_valid: float
    holdout_test: float
    holdout_seed: int | None


@dataclass(frozen=True, slots=True)
class PackRecipe:
    """Every choice that can change a byte of packs of the same sequences; `pad_id` is the id that pads them, or None."""

    pack_size: int
    packing: Packing
    oversize: Oversize
    pad_seq_to_mult: int
    pad_id: int | None
    seed: int

    @property
    def capacity(self) -> int:
        """Maximum tokens of a sequence that fits into a pack with its padding."""
        return (self.pack_size - 1) // self.pad_seq_to_mult * self.pad_seq_to_mult + 1
