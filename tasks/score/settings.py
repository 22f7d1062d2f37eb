"""What a person can choose about scores, and what of it makes a shard's recipe."""

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator
from tokenmill.tasks.blend.models import Value
from tokenmill.tasks.harmony.training import HARMONY
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.strict import Size
from tokenmill.tasks.tokenize.settings import TokenizerSource

from .batches import TOKEN_BUDGET
from .embed import MAX_TOKENS, Pooling
from .engines import OWN_PROCESSES, EmbedEngine, NllEngine
from .weights import Precision

Device = Literal["cpu", "cuda"]
LossMode = Literal["assistant_all", "assistant_all_eot", "assistant_full", "assistant_last", "final_only"]

SHARD_BYTES = 16_000_000
"""A killed run loses a slice at most; under a model of 8 billion weights one of this size takes a GPU some minutes."""


class ScoreSettings(PreparationSettings, frozen=True):
    """The choices that all scores have."""

    model_revision: str | None = Field(
        default=None, min_length=1, description="Commit, tag or branch of a hub id; pin a commit."
    )
    token_budget: int = Field(
        default=TOKEN_BUDGET, ge=1, description="Padded tokens per batch; for transformers and vllm."
    )
    precision: Precision | None = Field(
        default=None, description="For transformers; by default bfloat16 on CUDA and float32 on a CPU."
    )
    device: Device | None = Field(default=None, description="The GPUs where there are any, else the CPU.")
    shard_size: Size = Field(default=SHARD_BYTES, description="Source bytes per shard, for example 16MB.")

    @model_validator(mode="after")
    def _holds_nothing_out(self) -> Self:
        if "holdout" in self.model_fields_set:
            raise ValueError("holdout means nothing here, because every row is scored; leave it out")
        return self


class NllSettings(ScoreSettings, frozen=True):
    """Everything a person can choose about the NLL of completions."""

    model: str = Field(min_length=1, description="Hub id or folder of a causal language model.")
    engine: NllEngine = Field(default="transformers", description="What runs the model.")
    loss_mode: LossMode = Field(default="assistant_all_eot", description="Which tokens are scored.")
    max_length: int | None = Field(default=None, ge=2, description="Tokens of a sequence that are read.")
    chat_template: str = Field(
        default=HARMONY, min_length=1, description="harmony, tokenizer (the model's own), nano3, a file, or Jinja text."
    )
    tokenizer: TokenizerSource | None = Field(default=None, description="The model's own by default.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _require_heeded(self, self.engine)
        if self.chat_template == HARMONY and self.tokenizer is not None:
            raise ValueError("chat_template=harmony has a tokenizer of its own; leave tokenizer out")
        return self


class EmbedSettings(ScoreSettings, frozen=True):
    """Everything a person can choose about embeddings."""

    model: str | None = Field(default=None, min_length=1, description="Hub id or folder of a model; hash needs none.")
    engine: EmbedEngine = Field(default="hash", description="What makes vectors of texts.")
    pooling: Pooling | None = Field(default=None, description="How tokens become one vector; the model's card says.")
    dimensions: int | None = Field(default=None, ge=1, description="Numbers per vector; all by default, 256 for hash.")
    max_tokens: int = Field(default=MAX_TOKENS, ge=2, description="Tokens of a text that are read.")
    field: str = Field(
        default="embed_text", min_length=1, description="Field that is embedded; the text where there is none such."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _require_heeded(self, self.engine)
        if (self.engine == "hash") == (self.model is not None):
            raise ValueError(
                f"engine={self.engine} {'takes no' if self.model else 'needs a'} model; the other engines but hash do, hash not"
            )
        if (self.engine == "transformers") == (self.pooling is None):
            raise ValueError(
                "pooling is for engine=transformers, which needs it: last or mean, as the model's card says"
            )
        return self


def _require_heeded(settings: ScoreSettings, engine: NllEngine | EmbedEngine) -> None:
    """Raises ValueError for a choice that `engine` would pass over."""
    if settings.precision is not None and engine != "transformers":
        raise ValueError(f"precision is for engine=transformers; leave it out, because {engine} decides it by itself")
    if settings.device == "cuda" and engine == "hash":
        raise ValueError(
            "device=cuda is not for engine=hash, which runs on a CPU; leave it out, or choose another engine"
        )
    if settings.device == "cpu" and engine in OWN_PROCESSES:
        raise ValueError(
            f"device=cpu is not for engine={engine}, which runs on GPUs; leave it out, or choose another engine"
        )


@dataclass(frozen=True, slots=True)
class NllRecipe:
    """Every choice that can change a byte of a shard of NLL, and nothing else.

    `dataset` and `split` stand for rows that do not say theirs. `weights` is the digest of the model's files; `tokenizer`
    is the fingerprint of its tokenizer's, None for Harmony, as `messages_field` and `tools_field` mean nothing there.
    """

    dataset: str
    split: str | None
    filters: dict[str, list[Value]]
    text_field: str
    messages_field: str | None
    tools_field: str | None
    template: str
    tokenizer: str | None
    loss_mode: LossMode
    max_length: int | None
    engine: NllEngine
    model: str
    model_revision: str
    weights: str
    token_budget: int
    precision: Precision | None
    device: Device


@dataclass(frozen=True, slots=True)
class EmbedRecipe:
    """Every choice that can change a byte of a shard of embeddings, and nothing else.

    `fields` are those that a text is looked for in, in this order. What an engine does not ask for is None.
    """

    dataset: str
    split: str | None
    filters: dict[str, list[Value]]
    fields: list[str]
    engine: EmbedEngine
    model: str | None
    model_revision: str | None
    weights: str | None
    pooling: Pooling | None
    dimensions: int | None
    max_tokens: int | None
    token_budget: int | None
    precision: Precision | None
    device: Device
