"""The settings for training and evaluation. `configs/tiny.yaml` and `configs/small.yaml` are complete examples."""

from typing import Literal, Self

from pydantic import Field, model_validator
from tokenmill.tasks.blend.models import Split
from tokenmill.tasks.score import TOKEN_BUDGET
from tokenmill.tasks.shards.settings import ClusterSettings
from tokenmill.tasks.strict import Place, Seed, Strict

Launcher = Literal["local", "slurm", "kubernetes", "megatron-lm", "megatron-bridge", "nemo-rl"]
Precision = Literal["bfloat16", "float32"]
Device = Literal["cpu", "cuda"]
Decay = Literal["cosine", "linear", "constant"]
HeldOut = Literal["valid", "test"]

# Settings that a resumed training may change. These exclude steps, which set the learning rate, and the device, which
# sets the precision.
RUNTIME_SETTINGS = {
    *("launcher", "nodes", "processes", "retries", "check_reads", "skip_list"),
    *("checkpoint_every", "keep_checkpoints", "validate_every", "validation_batches", "max_epochs"),
}


class ModelSettings(Strict, frozen=True):
    """The shape of a Llama-like model: RMSNorm, rotary positions, SwiGLU, grouped-query attention."""

    layers: int = Field(default=2, ge=1, description="Transformer layers.")
    hidden: int = Field(default=64, ge=2, description="Width of the residual stream.")
    heads: int = Field(default=4, ge=1, description="Query heads.")
    key_value_heads: int = Field(default=2, ge=1, description="Key and value heads.")
    feed_forward: int = Field(default=176, ge=1, description="Width of the feed-forward layers.")
    rope_base: float = Field(default=10_000.0, gt=0, description="Base of the rotary positions.")
    norm_epsilon: float = Field(default=1e-5, gt=0, description="Epsilon of RMSNorm.")
    tied_embeddings: bool = Field(default=False, description="Input and output layer share one matrix.")
    vocabulary_multiple: int = Field(default=128, ge=1, description="The vocabulary is padded to a multiple of this.")

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise ValueError(f"hidden={self.hidden} must be an even multiple of heads={self.heads}")
        if self.heads % self.key_value_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of key_value_heads={self.key_value_heads}")
        return self

    def vocabulary(self, size: int) -> int:
        """Rows of the embedding for a vocabulary of `size` tokens."""
        return -(-size // self.vocabulary_multiple) * self.vocabulary_multiple


class ParallelSettings(Strict, frozen=True):
    """How a model is split over processes; the remaining processes form data-parallel replicas."""

    tensor: int = Field(default=1, ge=1, description="Processes that share each matrix.")
    pipeline: int = Field(default=1, ge=1, description="Processes that share the layers.")
    context: int = Field(default=1, ge=1, description="Processes that share each sequence.")
    sequence: bool = Field(default=False, description="Split norms by sequence over the processes of `tensor`.")


class OptimizerSettings(Strict, frozen=True):
    """AdamW with warm-up and decay."""

    learning_rate: float = Field(default=3e-3, gt=0, description="Peak learning rate, at the end of warm-up.")
    minimum_learning_rate: float = Field(default=3e-4, ge=0, description="Learning rate at the last step.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear growth.")
    decay: Decay = Field(default="cosine", description="From the peak to the minimum, over the remaining steps.")
    weight_decay: float = Field(default=0.1, ge=0, description="Applied to matrices, not to norms.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay rate for the mean gradient.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="Decay rate for the mean squared gradient.")
    epsilon: float = Field(default=1e-8, gt=0, description="Added to the denominator of an update.")
    clip: float = Field(default=1.0, gt=0, description="Maximum norm of the gradient.")
    distributed: bool = Field(default=False, description="Replicas share the optimizer's state.")

    @model_validator(mode="after")
    def _rates_fit(self) -> Self:
        if self.minimum_learning_rate > self.learning_rate:
            raise ValueError("minimum_learning_rate is above learning_rate; lower it or raise learning_rate")
        return self


class TrainSettings(Strict, frozen=True):
    """The settings of a training run."""

    model: ModelSettings = Field(default=ModelSettings(), description="Shape of the model.")
    parallel: ParallelSettings = Field(default=ParallelSettings(), description="How the model is split over processes.")
    optimizer: OptimizerSettings = Field(default=OptimizerSettings(), description="How the weights are updated.")
    start_from: Place | None = Field(
        default=None,
        description="Initial weights: an earlier training run, or the folder or Hub id of a Llama-like model.",
    )
    steps: int = Field(default=20, ge=1, description="Optimizer steps.")
    sequence_length: int = Field(default=128, ge=2, description="Tokens per row; for packs, at least pack_size.")
    global_batch: int = Field(default=8, ge=1, description="Rows per step, over all replicas.")
    micro_batch: int = Field(default=8, ge=1, description="Rows per forward pass of a replica.")
    precision: Precision | None = Field(default=None, description="Default: bfloat16 on CUDA, float32 on a CPU.")
    device: Device | None = Field(default=None, description="Default: GPUs if there are any, else the CPU.")
    launcher: Launcher = Field(default="local", description="Where to train, or the trainer to write files for.")
    nodes: int = Field(default=1, ge=1, description="Machines.")
    processes: int | None = Field(default=None, ge=1, description="Per machine; default: one per GPU, else one.")
    validate_every: int | None = Field(default=None, ge=1, description="Steps between validations.")
    validation_batches: int = Field(default=4, ge=1, description="Global batches per validation.")
    checkpoint_every: int | None = Field(default=None, ge=1, description="Interval in steps; default: only at the end.")
    keep_checkpoints: int = Field(default=2, ge=1, description="Number of newest checkpoints to keep.")
    max_epochs: float | None = Field(
        default=4.0, gt=0, description="Maximum number of times to read a source; null for no limit."
    )
    seed: int = Field(
        default=42, ge=0, le=2**32 - 1, description="Seed of weights and row order; NumPy and Megatron take 32 bits."
    )
    check_reads: bool = Field(
        default=False, description="Check the hash of every block that is read; needs the hashes of `tokenmill order`."
    )
    skip_list: Place | None = Field(
        default=None, description="File of steps and documents not to train on, from `tokenmill step`."
    )
    retries: int = Field(default=2, ge=0, description="Times to resume a failed run from its checkpoint.")

    @property
    def model_processes(self) -> int:
        """Processes that hold one replica of the model."""
        return self.parallel.tensor * self.parallel.pipeline * self.parallel.context


class OrderPlan(Strict, frozen=True):
    """What decides which samples a training run of documents reads."""

    sequence_length: int = Field(ge=2, description="Tokens per row.")
    global_batch: int = Field(ge=1, description="Rows per step, over all replicas.")
    steps: int = Field(ge=1, description="Optimizer steps.")
    seed: int = Field(
        default=TrainSettings.model_fields["seed"].default, ge=0, le=2**32 - 1, description="Seed of the row order."
    )
    validation_batches: int = Field(
        default=TrainSettings.model_fields["validation_batches"].default,
        ge=0,
        description="Global batches per validation.",
    )

    validate_every: int | None = Field(
        default=None,
        ge=1,
        description="Steps between validations; Megatron-LM sizes the validation and test splits by it.",
    )

    @property
    def sizes(self) -> tuple[int, int]:
        """The samples that tokenmill's trainer reads of the splits train and valid."""
        return self.steps * self.global_batch, self.validation_batches * self.global_batch

    @property
    def all_sizes(self) -> dict[Split, set[int]]:
        """The samples that trainers ask for, by split: tokenmill's, and Megatron-LM (get_train_valid_test_num_samples)."""
        test = self.sizes[1] if self.validate_every else 0
        validations = self.steps // self.validate_every + 1 if self.validate_every else 0
        return {"train": {self.sizes[0]}, "valid": {self.sizes[1], validations * test}, "test": {test}}


class OrderSettings(OrderPlan, ClusterSettings, frozen=True):
    """The settings of an order: the training run's, and where it is made."""

    block_hashes: bool = Field(
        default=False, description="Hash every block of the data, for a training run with check_reads=true."
    )


class EvaluateSettings(Strict, frozen=True):
    """The settings of an evaluation."""

    split: HeldOut = Field(default="valid", description="Held-out documents to evaluate on.")
    max_tokens: int | None = Field(
        default=1_000_000, ge=1, description="Read whole documents of about this many tokens per source; null for all."
    )
    prompts: list[str] = Field(default=[], description="Texts to continue; default: beginnings of held-out documents.")
    documents: int = Field(default=2, ge=0, description="Beginnings to continue, per source.")
    prompt_tokens: int = Field(
        default=32, ge=1, description="Tokens of a beginning; a conversation gives everything before its first answer."
    )
    new_tokens: int = Field(default=32, ge=1, description="Maximum tokens of a continuation.")
    device: Device | None = Field(default=None, description="Default: the GPU if there is one, else the CPU.")
    precision: Precision | None = Field(default=None, description="Default: bfloat16 on CUDA, float32 on a CPU.")
    token_budget: int = Field(default=TOKEN_BUDGET, ge=1, description="Padded tokens per batch.")
    seed: Seed = Field(default=42, description="Random seed for choosing documents to continue.")
