"""A preparation kind is one class, which flows, commands, verification, nightly runs, viewing and training use.

Every kind runs the same way:

    plan ─► build the shards of each stage, on one cluster ─► publish ─► report

A stage makes shards from slices of sources, or from shards of an earlier stage. `kinds` lists all kinds.
"""

import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Any, Generic, Literal, Protocol, Self, TypeVar, cast

from tokenmill.tasks.blend.models import Blend, DataSource
from tokenmill.tasks.sources.files import Record
from tokenmill.tasks.sources.forms import read_blend
from tokenmill.tasks.sources.parquet import require_text

from .build import BuildShard
from .plan import Finished, Plan, PlannedShard
from .planning import places, plan_shards
from .progress import say
from .publication import Layout, check_bad_rows, publish_preparation
from .receipt import Receipt, TextRecipe
from .records import Manifest
from .settings import RUNTIME_SETTINGS, PreparationSettings
from .store import Store, unpruned

TRAINABLE = "train on the --output-dir of tokenmill pretrain or tokenmill sft"

LITTLE_BYTES = 4_000_000
"""Source bytes for which no worker is started: 0.2 to 1 s of work, compressed files and slow kinds more."""

Settings = TypeVar("Settings", bound=PreparationSettings)
Found = TypeVar("Found")


@dataclass(frozen=True)
class Planned(Generic[Settings, Found]):
    """A planned preparation: its blend, settings and shards, and the results of planning specific to its kind.

    `found` holds what building and publishing need: a vocabulary, a checked template, tables. `notes` are remarks on a dataset
    (by `split/name`) to show before the run. `plan` is for the first stage; `later` are the plans of later stages, once built.
    """

    blend: Blend
    settings: Settings
    output_dir: str
    plan: Plan
    found: Found = field(repr=False)
    notes: Mapping[str, str] = field(default_factory=dict[str, str])
    later: tuple[Plan, ...] = ()

    def after(self, plan: Plan) -> Self:
        return replace(self, later=(*self.later, plan))

    def require_whole(self) -> None:
        """Raises RunError for a shard of the first stage without a receipt, unless partial output is allowed."""
        if not self.settings.allow_partial:
            self.plan.require_whole(", or set allow_partial=true to publish without them")

    @property
    def receipts(self) -> dict[str, Receipt]:
        """The receipts of every stage, by key."""
        return {key: receipt for plan in (self.plan, *self.later) for key, receipt in plan.proven.items()}

    @property
    def last(self) -> list[Finished]:
        return (self.later or (self.plan,))[-1].finished


def _given(planned: Planned[Any, Any], _finished: Sequence[Finished]) -> Plan:
    return planned.plan


def _none(_planned: Planned[Any, Any]) -> Mapping[str, Any]:
    return {}


def bad_row_policy(planned: Planned[Any, Any]) -> Mapping[str, Any]:
    """Return the arguments of a stage that only reads rows."""
    return {"on_bad_row": planned.settings.on_bad_row}


@dataclass(frozen=True, slots=True)
class Stage:
    """One step: its name, also in Prefect, and the function that builds one shard in it.

    `build(shard, store, **arguments)` is a module-level function, because workers import it by name; `arguments` are JSON. `plan`
    lists the shards, given the finished ones of the previous stage. `in_threads`: most of its work is outside Python, so threads of
    one process can build shards side by side. `repairs`: also build pending shards that have a receipt. `read`: like `build`, for a
    plan, without an engine or model.
    """

    name: str
    build: Callable[..., Receipt]
    plan: Callable[[Planned[Any, Any], Sequence[Finished]], Plan] = _given
    arguments: Callable[[Planned[Any, Any]], Mapping[str, Any]] = _none
    in_threads: bool = False
    repairs: bool = False
    read: Callable[..., Receipt] | None = None

    def building(self, arguments: Mapping[str, Any]) -> BuildShard:
        return partial(self.build, **arguments)


class BuildShards(Protocol):
    """Build pending shards on the workers: in this process, on Dask, or on Dask under Prefect."""

    def __call__(
        self,
        stage: Stage,
        pending: Sequence[PlannedShard],
        store: Store,
        arguments: Mapping[str, Any],
        *,
        rebuild: bool,
    ) -> Sequence[Receipt]:
        """The receipts of `pending`, after all have been tried. Raises RunError that names the failed batches."""
        ...


def run_stage(
    stage: Stage, plan: Plan, build_shards: BuildShards, arguments: Mapping[str, Any], *, rebuild: bool
) -> Plan:
    """Return the plan of a stage whose pending shards are built. Raises RunError as `build_shards` does, and for gaps."""
    done = plan.after(build_shards(stage, plan.pending, plan.store, arguments, rebuild=rebuild or stage.repairs))
    done.require_whole()
    return done


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements for building: the number of workers of a local cluster (None: one per core), the resources of each
    worker, such as `{"GPU": 1}`, and the Prefect concurrency limit that a batch holds, if that limit exists. Workers must have
    the same versions of the `libraries`.
    """

    workers: int | None
    resources: Mapping[str, float] = field(default_factory=dict[str, float])
    limit: str | None = None
    libraries: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Release:
    """How to publish finished shards: their layout, and their entries in the manifest.

    `shards` replace the shards of the plan if others were derived from them; `last` are the shards of a last stage that was made of
    all of them and may drop documents (see `totals`); `volatile` joins the run metadata.
    """

    layout: Layout
    header: Mapping[str, Any]
    shards: Sequence[Finished] | None = None
    last: Sequence[Finished] = ()
    volatile: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Kind(ABC, Generic[Settings, Found]):
    """Everything that defines a kind; its methods have defaults.

    Attributes:
        name: The kind of its shards, and the `type` of its manifest.
        settings: The settings of the user.
        libraries: Packages whose versions can change bytes; the manifest records them.
        stages: How its shards are built; the first reads the rows.
        next_steps: Commands to run next, one line each; `{0}` is the output folder, `{manifest}` its manifest.
        version: Increase it when the same recipe and source give different bytes.
        formats: The format versions whose files have the form that `inspect` knows, by shard kind; empty for all.
        tokens: How tokens are stored in the published files, for `view` and training; None without tokens.
        training_advice: Advice to show instead of training on the output; `{path}` is its folder.
        hidden: Settings that the flow does not offer, because the kind rejects them.
        records_failure: Whether a failed run leaves a manifest about it if nothing was published before.
    """

    name: str
    settings: type[Settings]
    libraries: Sequence[str]
    stages: Sequence[Stage]
    next_steps: str = ""
    version: int = 1
    formats: Mapping[str, range] = {}
    tokens: Literal["packs", "documents"] | None = None
    training_advice: str = TRAINABLE
    hidden: frozenset[str] = frozenset()
    records_failure: bool = False

    def plan(self, blend: Blend, settings: Settings, output_dir: str | None) -> Planned[Settings, Found]:
        """Plan `blend` for `output_dir`; without one, nothing counts as built and hashes are cached per user.

        By default, shards of texts are planned. Raises InputError for anything that must be fixed first.
        """
        output_dir, store = places(blend, settings, output_dir, self.name)
        plan = plan_shards(
            blend,
            settings,
            store,
            self.version,
            lambda source: [source.text_field],
            require_text,
            lambda source, _, slices: [TextRecipe(source.text_field)] * len(slices),
            form="documents",
        )
        return Planned(blend, settings, output_dir, plan, cast("Found", None))

    @abstractmethod
    def release(self, planned: Planned[Settings, Found], finished: Sequence[Finished]) -> Release:
        """Return how to publish the finished shards of the first stage. Raises RunError for shards that do not fit together."""

    def read_blend(self, blend: Blend | Mapping[str, Any] | str) -> Blend:
        """Return the named blend, loaded; a file of rows is a blend of one dataset."""
        return read_blend(blend)

    def check(self, blend: Blend, settings: Settings, output_dir: str) -> None:
        """Raises InputError for problems with blend, settings and output folder that are visible before anything starts."""

    def needs(self, planned: Planned[Settings, Found]) -> Needs:
        return Needs(planned.settings.workers)

    def shape(self, source: DataSource, record: Record) -> str | None:
        """Return the name of the shape in which a row of a dataset is read, for a plan; None without one."""
        return None

    def outlook(self, planned: Planned[Settings, Found]) -> Sequence[str]:
        """Lines for a dry run about later stages."""
        return ()

    def inspect(self, store: Store, receipt: Receipt) -> list[str]:
        """Problems of a stored shard beyond sizes and hashes, for `verify`."""
        return []

    def accept(self, manifest: Manifest, output_dir: str) -> None:
        """Raises RunError for a published manifest that violates a limit in the settings."""

    def named_files(self, settings: Settings) -> Mapping[str, str]:
        """Return a digest of each group of files that settings name but shards do not depend on, for nightly runs."""
        return {}

    def summary(self, manifest: Manifest) -> Sequence[str]:
        """Lines for this kind in the summary of a manifest."""
        return ()

    def record(self, manifest: Manifest) -> Mapping[str, Any]:
        return {}

    def build(self, planned: Planned[Settings, Found], build_shards: BuildShards) -> Planned[Settings, Found]:
        """Build the pending shards of every stage; returns the plans with their receipts.

        Raises RunError as `build_shards` does, for gaps, unless partial output is allowed, and for too many bad rows.
        """
        # The first stage reads rows: it may end with gaps, if partial output is allowed, and has the bad rows.
        first, *others = self.stages
        settings, plan = planned.settings, planned.plan
        done = plan.after(
            build_shards(first, plan.pending, plan.store, first.arguments(planned), rebuild=settings.force)
        )
        planned = replace(planned, plan=done, later=())
        planned.require_whole()
        tolerate = settings.on_bad_row == "quarantine"
        check_bad_rows(done.finished, plan.store, settings.max_bad_row_fraction, tolerate=tolerate)
        for stage in others:
            later, arguments = stage.plan(planned, planned.last), stage.arguments(planned)
            planned = planned.after(run_stage(stage, later, build_shards, arguments, rebuild=settings.force))
        return planned

    def publish(self, planned: Planned[Settings, Found], started: float) -> Manifest:
        """Publish the finished shards, and return the manifest. `started` is a Unix time.

        Raises RunError for gaps, if a shard is gone from the store, and as `release` and `publish_preparation` do.
        """
        planned.require_whole()
        plan = planned.plan
        with unpruned(plan.store.place, say):
            # Shards that were reused may have been pruned since they were planned.
            for each in (plan, *planned.later):
                each.require_kept()
            finished = plan.finished
            release = self.release(planned, finished)
            header = {**self.header(planned), **release.header, "missing": plan.missing}
            total, built = len(set(plan.keys)), len(plan.built)
            volatile = {
                "created_at": time.time(),
                "seconds": time.time() - started,
                "store": plan.store.place,
                "shards": {"total": total, "built": built, "reused": total - built},
                "settings": planned.settings.model_dump(include=RUNTIME_SETTINGS),
                "versions": {"python": platform.python_version(), **{name: version(name) for name in self.libraries}},
            }
            return publish_preparation(
                planned.output_dir,
                plan.store,
                finished if release.shards is None else release.shards,
                release.layout,
                planned.settings,
                header,
                {**volatile, **release.volatile},
                release.last,
            )

    def header(self, planned: Planned[Settings, Found]) -> dict[str, Any]:
        """Return the part of a manifest that describes its preparation."""
        return {
            "type": self.name,
            "blend": planned.blend.model_dump(exclude_none=True),
            "settings": planned.settings.model_dump(exclude=RUNTIME_SETTINGS),
            "skipped_files": planned.plan.skipped,
            "warnings": [asdict(warning) for warning in planned.plan.warnings],
        }
