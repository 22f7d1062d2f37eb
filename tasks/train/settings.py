"""What a person can choose about training. `configs/tiny.yaml` and `configs/small.yaml` are whole examples."""

from typing import Literal, Self

from pydantic import Field, model_validator
from tokenmill.tasks.strict import Place, Strict

Engine = Literal["megatron-core", "transformers"]
Launcher = Literal["local", "slurm", "kubernetes", "megatron-lm", "megatron-bridge", "nemo-rl"]
Precision = Literal["bfloat16", "float32"]
Device = Literal["cpu", "cuda"]
Decay = Literal["cosine", "linear", "constant"]


class ModelSettings(Strict, frozen=True):
    """The shape of a Llama-like model: RMSNorm, rotary positions, SwiGLU, grouped key and value heads.

    The size of the vocabulary is that of the data.
    """

    layers: int = Field(default=2, ge=1, description="Transformer layers.")
    hidden: int = Field(default=64, ge=2, description="Width of the residual stream.")
    heads: int = Field(default=4, ge=1, description="Query heads.")
    key_value_heads: int = Field(default=2, ge=1, description="Heads of keys and values.")
    feed_forward: int = Field(default=176, ge=1, description="Width inside of a feed-forward layer.")
    rope_base: float = Field(default=10_000.0, gt=0, description="Base of the rotary positions.")
    norm_epsilon: float = Field(default=1e-5, gt=0, description="What RMSNorm adds to a variance.")
    tied_embeddings: bool = Field(default=False, description="One matrix reads and writes tokens.")
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
    """How a model is cut over processes; what is left of them makes data-parallel replicas."""

    tensor: int = Field(default=1, ge=1, description="Processes that share each matrix.")
    pipeline: int = Field(default=1, ge=1, description="Processes that share the layers.")
    context: int = Field(default=1, ge=1, description="Processes that share each sequence.")
    sequence: bool = Field(default=False, description="Norms are shared by the processes of `tensor`.")


class OptimizerSettings(Strict, frozen=True):
    """AdamW with warm-up and decay."""

    learning_rate: float = Field(default=3e-3, gt=0, description="The highest, after warm-up.")
    minimum_learning_rate: float = Field(default=3e-4, ge=0, description="What it decays to.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear growth.")
    decay: Decay = Field(default="cosine", description="From the highest to the lowest, over all steps.")
    weight_decay: float = Field(default=0.1, ge=0, description="Of matrices; norms are spared.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the mean of gradients.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="Decay of the mean of squared gradients.")
    epsilon: float = Field(default=1e-8, gt=0, description="Added to the denominator of an update.")
    clip: float = Field(default=1.0, gt=0, description="Largest norm of the gradient.")
    distributed: bool = Field(default=False, description="Replicas share the optimizer's state.")

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.minimum_learning_rate > self.learning_rate:
            raise ValueError("minimum_learning_rate is above learning_rate; it is what the rate decays to")
        return self


class TrainSettings(Strict, frozen=True):
    """Everything a person can choose about a training run."""

    engine: Engine = Field(default="megatron-core", description="What trains.")
    model: ModelSettings = Field(default=ModelSettings(), description="Shape of the model.")
    parallel: ParallelSettings = Field(default=ParallelSettings(), description="How the model is cut over processes.")
    optimizer: OptimizerSettings = Field(default=OptimizerSettings(), description="How its weights are updated.")
    start_from: Place | None = Field(
        default=None, description="Weights to begin with: an earlier training, or the folder of a Llama-like model."
    )
    steps: int = Field(default=20, ge=1, description="Optimizer steps.")
    sequence_length: int = Field(default=128, ge=2, description="Tokens of a row; of packs, at least pack_size.")
    global_batch: int = Field(default=8, ge=1, description="Rows per step, over all replicas.")
    micro_batch: int = Field(default=8, ge=1, description="Rows that a replica computes at once.")
    precision: Precision | None = Field(default=None, description="bfloat16 on CUDA and float32 on a CPU by default.")
    device: Device | None = Field(default=None, description="The GPUs where there are any, else the CPU.")
    launcher: Launcher = Field(default="local", description="Where training runs, or whose files are written.")
    nodes: int = Field(default=1, ge=1, description="Machines.")
    processes: int | None = Field(default=None, ge=1, description="Per machine; one per GPU, or one, by default.")
    validate_every: int | None = Field(default=None, ge=1, description="Steps between losses on the valid split.")
    validation_batches: int = Field(default=4, ge=1, description="Global batches that such a loss is of.")
    checkpoint_every: int | None = Field(default=None, ge=1, description="Steps; at the end alone by default.")
    keep_checkpoints: int = Field(default=2, ge=1, description="Older ones are removed.")
    max_epochs: float | None = Field(
        default=4.0, gt=0, description="Most often that a source may be repeated; null for any number."
    )
    seed: int = Field(
        default=42,
        ge=0,
        le=2**32 - 1,
        description="Of weights and of the order of rows; NumPy and Megatron take 32 bits.",
    )
    retries: int = Field(default=2, ge=0, description="Times that a run which died goes on from its checkpoint.")

    @property
    def model_processes(self) -> int:
        """Processes that hold one replica of the model."""
        return self.parallel.tensor * self.parallel.pipeline * self.parallel.context
