"""Settings for scoring, and the recipes made from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from tokenmill.tasks.blend.models import Value
from tokenmill.tasks.chat.loss import LossPolicy
from tokenmill.tasks.harmony.training import HARMONY
from tokenmill.tasks.pack.settings import LossSettings
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.strict import Size
from tokenmill.tasks.tokenize.settings import TokenizerSource

from . import TOKEN_BUDGET

NllEngine = Literal["transformers", "server"]
EmbedEngine = Literal["hash", "transformers", "server"]
Device = Literal["cpu", "cuda"]
Precision = Literal["bfloat16", "float32"]  # the type of weights and hidden states

Pooling = Literal["last", "mean"]  # the pooling of a text's token vectors: the last token's, or the mean

# Source bytes per shard, the most that a killed run loses: some minutes of a GPU with a model of 8 billion weights.
SHARD_BYTES = 16_000_000

MAX_TOKENS = 1024  # default maximum number of tokens read per text

# Settings that an engine would ignore, and therefore rejects.
IGNORED: dict[str, tuple[str, ...]] = {
    "hash": ("precision", "server", "concurrency"),
    "transformers": ("server", "concurrency"),
    "server": ("precision", "device", "token_budget"),
}


class ScoreSettings(PreparationSettings, frozen=True):
    """The settings shared by both scores."""

    model_revision: str | None = Field(
        default=None,
        min_length=1,
        description="Commit, tag or branch of a Hub id; pin a commit. For engine=server the revision that the server runs.",
    )
    server: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s/@?#]+(/[^\s@?#]*)?$",
        description="Base URL of a vLLM or SGLang server, for engine=server; its key is read from TOKENMILL_SERVER_KEY.",
    )
    concurrency: int = Field(default=16, ge=1, description="Requests in flight per worker, for engine=server.")
    token_budget: int = Field(
        default=TOKEN_BUDGET, ge=1, description="Padded tokens per batch, for engine=transformers."
    )
    precision: Precision | None = Field(
        default=None, description="For engine=transformers; by default bfloat16 on CUDA and float32 on a CPU."
    )
    device: Device | None = Field(default=None, description="By default GPUs if there are any, else the CPU.")
    shard_size: Size = Field(default=SHARD_BYTES, description="Source bytes per shard, for example 16MB.")

    @model_validator(mode="after")
    def _holds_nothing_out(self) -> Self:
        if "holdout" in self.model_fields_set:
            raise ValueError("holdout does not apply, because every row is scored; remove it")
        return self

    def _require_used(self, engine: NllEngine | EmbedEngine) -> None:
        """Raise ValueError for a setting that `engine` ignores, and for a missing one that it needs."""
        fields: dict[str, Any] = type(self).model_fields
        for name in IGNORED[engine]:
            if getattr(self, name) != fields[name].default:
                raise ValueError(f"{name} does not apply to engine={engine}; remove it, or choose a different engine")
        if engine == "hash" and self.device == "cuda":
            raise ValueError("engine=hash runs on a CPU; remove device=cuda, or choose a different engine")
        if engine == "server" and self.server is None:
            raise ValueError("engine=server needs server, its base URL, for example server=http://localhost:8000")


class NllSettings(ScoreSettings, LossSettings, frozen=True):
    """The settings of the NLL of completions."""

    model: str = Field(
        min_length=1,
        description="Hub id or folder of a causal language model; for engine=server the name that the server lists.",
    )
    engine: NllEngine = Field(default="transformers", description="Engine that runs the model.")
    max_length: int | None = Field(default=None, ge=2, description="Maximum tokens read per sequence.")
    chat_template: str = Field(
        default=HARMONY,
        min_length=1,
        description="harmony, tokenizer (the model's own), nano3, lightning35, a file, or Jinja text.",
    )
    tokenizer: TokenizerSource | None = Field(default=None, description="By default the model's own.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self._require_used(self.engine)
        if self.chat_template == HARMONY and self.tokenizer is not None:
            raise ValueError("chat_template=harmony uses Harmony's tokenizer; remove tokenizer")
        return self


class EmbedSettings(ScoreSettings, frozen=True):
    """The embedding settings."""

    model: str | None = Field(
        default=None,
        min_length=1,
        description="Hub id or folder of a model. For engine=server, its name in the server's list. None for hash.",
    )
    engine: EmbedEngine = Field(default="hash", description="Engine that computes the vectors.")
    pooling: Pooling | None = Field(
        default=None, description="How to pool token vectors, for engine=transformers; see the model card."
    )
    dimensions: int | None = Field(default=None, ge=1, description="Numbers per vector; default: all, 256 for hash.")
    max_tokens: int = Field(default=MAX_TOKENS, ge=2, description="Maximum tokens read per text.")
    field: str = Field(
        default="embed_text", min_length=1, description="Field to embed; rows without it use their text."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self._require_used(self.engine)
        if (self.engine == "hash") == (self.model is not None):
            raise ValueError(
                f"engine={self.engine} {'takes no' if self.model else 'needs a'} model; only engine=hash works without one"
            )
        if (self.engine == "transformers") == (self.pooling is None):
            raise ValueError(
                "engine=transformers needs pooling, last or mean as in the model card; other engines don't take it"
            )
        return self


@dataclass(frozen=True, slots=True)
class NllRecipe:
    """Every choice that can change a byte of a shard of NLL, and nothing else."""

    dataset: str  # of rows that don't name one, as is the split
    split: str | None
    filters: dict[str, list[Value]]
    text_field: str
    messages_field: str | None  # None for Harmony, as are the next two
    tools_field: str | None
    fields: dict[str, str] | None
    template: str
    tokenizer: str | None  # its fingerprint, None for Harmony
    loss: dict[str, Any]  # the fields of `policy`
    max_length: int | None
    engine: NllEngine
    model: str
    model_revision: str | None
    weights: str | None  # digest of the model's files, None for a server
    token_budget: int | None
    precision: Precision | None
    device: Device  # computes the shards

    @property
    def policy(self) -> LossPolicy:
        return LossPolicy(**self.loss)


@dataclass(frozen=True, slots=True)
class EmbedRecipe:
    """Every choice that can change a byte of a shard of embeddings, and nothing else. A choice that the engine lacks is None."""

    dataset: str
    split: str | None
    filters: dict[str, list[Value]]
    fields: list[str]  # those that may hold the text, in order
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


@dataclass(frozen=True)
class ModelLocation:
    """The location of inputs that a recipe identifies by content."""

    model: str | None = None
    model_revision: str | None = None
    tokenizer: Mapping[str, Any] | None = None  # plain JSON, as is the template
    template: Mapping[str, Any] | None = None
    server: str | None = None
    concurrency: int = 1
