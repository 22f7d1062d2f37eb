"""The settings that all preparations share.

YAML files, `key.sub=value` on the command line and flow parameters all become a model derived from `PreparationSettings`.
Settings that can change a byte of a shard are copied into the kind's recipe, part of a shard's identity. The others (paths,
workers, share of the data) never are.
"""

from typing import Literal, Self

from pydantic import Field, model_validator
from tokenmill.tasks.storage import ChangeDetection
from tokenmill.tasks.strict import Place, Seed, Size, Strict

OnBadRow = Literal["quarantine", "fail"]
Scale = Literal["tiny", "small", "medium", "full"]

SHARES: dict[Scale, float] = {"tiny": 0.01, "small": 0.1, "medium": 0.3, "full": 1.0}
TINY_ROWS = 10_000

RUNTIME_SETTINGS = {
    *("cluster", "cluster_timeout", "workers", "force", "allow_partial", "store"),
    *("max_shrink_fraction", "allow_shrink", "previous"),
    *("server", "concurrency"),
}
"""Settings that decide where and how a preparation runs, and what may be published. Equal preparations may differ in them."""


class Holdout(Strict, frozen=True):
    """Shares of documents held out for validation and testing, chosen by a hash of the document."""

    valid: float = Field(default=0.01, ge=0, lt=1, description="Share of documents for validation.")
    test: float = Field(default=0.01, ge=0, lt=1, description="Share of documents for testing.")
    seed: Seed = Field(default=42, description="Seed for choosing documents.")

    @model_validator(mode="after")
    def _leaves_something(self) -> Self:
        if self.valid + self.test >= 1:
            raise ValueError(f"valid + test must be below 1, not {self.valid} + {self.test}")
        return self


class ClusterSettings(Strict, frozen=True):
    """Where work runs, and how long to wait for it."""

    cluster: str = Field(default="local", description="local, a scheduler address, or a YAML file with a profile.")
    cluster_timeout: float | None = Field(
        default=None,
        gt=0,
        description="Seconds to wait for a worker: by default 60 on a local or SSH cluster, 600 at an address, else no limit.",
    )
    workers: int | None = Field(default=None, ge=1, description="Worker processes; all cores by default.")


class PreparationSettings(ClusterSettings, frozen=True):
    """The settings that every preparation shares; the defaults suit a laptop-sized blend."""

    shard_size: Size = Field(default=256_000_000, description="Source bytes per shard, for example 256MB.")
    store: Place | None = Field(default=None, description="Folder or URI of the shards; preparations can share it.")
    holdout: Holdout = Field(default=Holdout(), description="Documents to hold out of a flat blend.")
    change_detection: ChangeDetection = Field(
        default="hash",
        description="How to notice that a local file changed: by a hash of its content, or by size and modification time (mtime).",
    )
    on_bad_row: OnBadRow = Field(default="quarantine", description="What to do with a row that cannot be read.")
    max_bad_row_fraction: float = Field(
        default=0.001, ge=0, le=1, description="Share of a dataset's rows that may be bad."
    )
    max_shrink_fraction: float = Field(
        default=0.5, ge=0, le=1, description="Share of a dataset's documents that may be lost since the last version."
    )
    allow_shrink: list[str] = Field(default=[], description="Datasets that may lose a larger share, or disappear.")
    previous: Place | None = Field(
        default=None, description="Output folder of the last version; output_dir by default."
    )
    scale: Scale = Field(default="full", description="Leading share of each dataset: 1 %, 10 %, 30 % or all.")
    sample: int | None = Field(default=None, ge=1, description="Leading rows of each dataset.")
    force: bool = Field(default=False, description="Build every shard again, even if it has a valid receipt.")
    allow_partial: bool = Field(
        default=False, description="Publish even if shards are missing; the manifest lists them."
    )
