"""A kind of preparation is one record, `Preparation`, which flows, commands, verification, nightly runs, viewing and training
use.

Every kind runs the same way:

    plan ─► build pending shards (and rounds over them, on the same cluster) ─► publish ─► report

A kind defines how to plan, how to build one shard, and how to lay out finished shards in the output folder. `kinds` lists them.
"""

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, Generic, Literal, Protocol, TypeVar

from tokenmill.tasks.blend.models import Blend, DataSource
from tokenmill.tasks.sources.files import Record
from tokenmill.tasks.sources.forms import read_blend

from .build import BuildShard
from .manifest import Finished
from .plan import Plan, PlannedShard
from .progress import say
from .publication import Layout, check_bad_rows, collect, publish_preparation
from .receipt import Receipt
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
    (by `split/name`) to show before the run.
    """

    blend: Blend
    settings: Settings
    output_dir: str
    plan: Plan
    found: Found = field(repr=False)
    notes: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Step:
    """The name of the mapped task in Prefect, and the function that builds one shard in it.

    `build(shard, store, **arguments)` is a module-level function, because workers import it by name. `in_threads`: most of its
    work is outside Python, so that threads of one process can build shards side by side.
    """

    name: str
    build: Callable[..., Receipt]
    in_threads: bool = False

    def building(self, arguments: Mapping[str, Any]) -> BuildShard:
        """The function with its arguments."""
        return lambda shard, store: self.build(shard, store, **arguments)


class BuildShards(Protocol):
    """Build pending shards on the workers, and return when all have been tried."""

    def __call__(
        self, step: Step, pending: Sequence[PlannedShard], store: Store, arguments: Mapping[str, Any], *, rebuild: bool
    ) -> None:
        """Build `pending`. `arguments` are JSON. Raises RunError that names the failed batches."""
        ...


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

    `shards` replace the shards of the plan if others were derived from them; `last` are the shards of a last round that was made of
    all of them and may drop documents (see `totals`); `volatile` joins the run metadata.
    """

    layout: Layout
    header: Mapping[str, Any]
    shards: Sequence[Finished] | None = None
    last: Sequence[Finished] = ()
    volatile: Mapping[str, Any] = field(default_factory=dict[str, Any])


def _nothing(*_: object) -> None: ...


def _no_shape(_source: DataSource, _record: Record) -> None: ...


def _no_files(_settings: PreparationSettings) -> Mapping[str, str]:
    return {}


def _no_lines(_: object) -> Sequence[str]:
    return ()


def _no_counts(_manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    return {}


def _no_problems(_store: Store, _receipt: Receipt) -> list[str]:
    return []


def _bad_row_policy(planned: Planned[Any, Any]) -> Mapping[str, Any]:
    return {"on_bad_row": planned.settings.on_bad_row}


def _all_cores(planned: Planned[Any, Any]) -> Needs:
    return Needs(planned.settings.workers)


@dataclass(frozen=True)
class Preparation(Generic[Settings, Found]):
    """Everything that defines a kind of preparation.

    Required:
        name: The kind of its shards, and the `type` of its manifest.
        settings: The settings of the user.
        libraries: Packages whose versions can change bytes; the manifest records them.
        plan: Plans a preparation, given a blend, settings and output folder (None: nothing counts as built). Raises InputError.
        step: Builds one shard.
        release: Decides how to publish the finished shards. Raises RunError for shards that do not fit together.
        next_steps: What to do with the output, one line each; `{0}` is its folder, `{manifest}` its manifest.

    With a default:
        reading: Reads and counts the rows of a shard as `step` does, for a plan, if the step loads an engine or a model.
        shape: The name of the shape in which a row of a dataset is read, for a plan; None if it has no name.
        arguments: Arguments of `step` other than shard and store, as JSON; by default the bad-row policy.
        inspect: Problems of a stored shard beyond sizes and hashes, for `verify`.
        formats: The format versions whose files have the form that `inspect` knows, by kind of shard; empty for all.
        read_blend: The named blend, loaded; a file of rows is a blend of one dataset.
        check: Raises InputError for problems with blend, settings and output folder that are visible before anything starts.
        rounds: Builds the shards, by default all pending ones at once; returns the plan to publish.
        needs: Workers and resources for building.
        accept: Raises RunError for a published manifest that violates a limit in the settings.
        named_files: A digest of each group of files that settings name but shards do not depend on, for nightly runs.
        outlook: Lines for a dry run about what is built after the pending shards.
        summary: Lines for this kind in the summary of a manifest.
        record: Counts of this kind in the JSON record of a manifest.
        tokens: How tokens are stored in the published files, for `view` and training; None if there are no tokens.
        training_advice: Advice to show instead of training on the output; `{path}` is its folder.
        hidden: Settings that the flow does not offer, because the kind refuses them.
        records_failure: Whether a failed run leaves a manifest that says so if nothing was published before.
    """

    name: str
    settings: type[Settings]
    libraries: Sequence[str]
    plan: Callable[[Blend, Settings, str | None], Planned[Settings, Found]]
    step: Step
    release: Callable[[Planned[Settings, Found], Sequence[Finished]], Release]
    next_steps: str
    reading: Callable[..., Receipt] | None = None
    shape: Callable[[DataSource, Record], str | None] = _no_shape
    arguments: Callable[[Planned[Settings, Found]], Mapping[str, Any]] = _bad_row_policy
    inspect: Callable[[Store, Receipt], list[str]] = _no_problems
    formats: Mapping[str, range] = field(default_factory=dict[str, range])
    read_blend: Callable[[Blend | Mapping[str, Any] | str], Blend] = read_blend
    check: Callable[[Blend, Settings, str], None] = _nothing
    rounds: Callable[[Planned[Settings, Found], BuildShards], Planned[Settings, Found]] | None = None
    needs: Callable[[Planned[Settings, Found]], Needs] = _all_cores
    accept: Callable[[Mapping[str, Any], str], None] = _nothing
    named_files: Callable[[Settings], Mapping[str, str]] = _no_files
    outlook: Callable[[Planned[Settings, Found]], Sequence[str]] = _no_lines
    summary: Callable[[Mapping[str, Any]], Sequence[str]] = _no_lines
    record: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _no_counts
    tokens: Literal["packs", "documents"] | None = None
    training_advice: str = TRAINABLE
    hidden: frozenset[str] = frozenset()
    records_failure: bool = False

    def build(self, planned: Planned[Settings, Found], build_shards: BuildShards) -> Planned[Settings, Found]:
        """Build everything pending; returns the plan to publish. Raises RunError as `build_shards` does."""
        if self.rounds is not None:
            return self.rounds(planned, build_shards)
        self.build_pending(planned, build_shards)
        return planned

    def build_pending(self, planned: Planned[Settings, Found], build_shards: BuildShards) -> None:
        """Build the pending shards of the plan."""
        plan, arguments = planned.plan, self.arguments(planned)
        build_shards(self.step, plan.pending, plan.store, arguments, rebuild=planned.settings.force)

    def publish(self, planned: Planned[Settings, Found], started: float) -> dict[str, Any]:
        """Check every planned shard against its receipt, publish, and return the manifest. `started` is a Unix time.

        Raises RunError for gaps, for too many bad rows, and as `release` and `publish_preparation` do.
        """
        with unpruned(planned.plan.store.place, say):
            finished, missing = proven_shards(planned)
            release = self.release(planned, finished)
            header = {**self.header(planned), **release.header, "missing": missing}
            return publish_preparation(
                planned.output_dir,
                planned.plan.store,
                finished if release.shards is None else release.shards,
                release.layout,
                planned.settings,
                header,
                {**self._run_metadata(planned, started), **release.volatile},
                release.last,
            )

    def header(self, planned: Planned[Settings, Found]) -> dict[str, Any]:
        """The part of a manifest that describes its preparation."""
        return {
            "type": self.name,
            "blend": planned.blend.model_dump(exclude_none=True),
            "settings": planned.settings.model_dump(exclude=RUNTIME_SETTINGS),
            "skipped_files": planned.plan.skipped,
            "warnings": [asdict(warning) for warning in planned.plan.warnings],
        }

    def _run_metadata(self, planned: Planned[Settings, Found], started: float) -> dict[str, Any]:
        """Times, host, reuse and versions: what may differ between equal preparations."""
        plan = planned.plan
        total, built = len(set(plan.keys)), len(plan.pending)
        return {
            "created_at": time.time(),
            "seconds": time.time() - started,
            "store": plan.store.place,
            "shards": {"total": total, "built": built, "reused": total - built},
            "settings": planned.settings.model_dump(include=RUNTIME_SETTINGS),
            "versions": {"python": platform.python_version(), **{name: version(name) for name in self.libraries}},
        }


def proven_shards(planned: Planned[Any, Any]) -> tuple[list[Finished], list[str]]:
    """Every planned shard with its receipt, and the places of those without one.

    Raises RunError for too many bad rows, and for a missing receipt unless partial output is allowed.
    """
    settings = planned.settings
    finished, missing = collect(planned.plan, allow_partial=settings.allow_partial)
    tolerate = settings.on_bad_row == "quarantine"
    check_bad_rows(finished, planned.plan.store, settings.max_bad_row_fraction, tolerate=tolerate)
    return finished, missing
