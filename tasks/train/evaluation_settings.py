"""What a person can choose about an evaluation."""

from pydantic import Field
from tokenmill.tasks.score.batches import TOKEN_BUDGET
from tokenmill.tasks.strict import Seed, Strict

from .held_out import HeldOut
from .settings import Device, Precision


class EvaluateSettings(Strict, frozen=True):
    """Everything a person can choose about an evaluation."""

    split: HeldOut = Field(default="valid", description="Which held-out documents.")
    max_tokens: int | None = Field(
        default=1_000_000, ge=1, description="Whole documents of about so many tokens of each source; null for all."
    )
    prompts: list[str] = Field(
        default=[], description="Texts to be continued; beginnings of held-out documents by default."
    )
    documents: int = Field(default=2, ge=0, description="Of each source, beginnings that are continued.")
    prompt_tokens: int = Field(
        default=32, ge=1, description="Of such a beginning; of a conversation it is all before the first answer."
    )
    new_tokens: int = Field(default=32, ge=1, description="A continuation has so many at most.")
    device: Device | None = Field(default=None, description="The GPU where there is one, else the CPU.")
    precision: Precision | None = Field(default=None, description="bfloat16 on CUDA and float32 on a CPU by default.")
    token_budget: int = Field(default=TOKEN_BUDGET, ge=1, description="Padded tokens per batch of the model.")
    seed: Seed = Field(default=42, description="Of the choice of documents that are continued.")
