"""A nightly run as plain functions: compare a blend with its latest version, follow, prune, report; `stage` wraps them for Prefect."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.dataset.fates import FOLLOWED
from tokenmill.tasks.kit.parts import counted
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.shards.manifest import published_manifest
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.storage import absolute, join

from .blends import KINDS, NightlyBlend, settings_of
from .changes import plan_changes
from .prune import Leftovers, references, remove_leftovers
from .versions import claim, folders_in, follow, latest, lineage, next_version, order, prune_versions

STORE = "shards"  # the store that all blends share; its name differs from every preparation kind


@dataclass(frozen=True, slots=True)
class Comparison:
    """A blend, its latest version, the reasons for a new one (none if it is up to date), and the next version.

    `before` is the latest version, None before the first; `previous` is its folder if that exists; `named_files` are digests of
    the files that settings name.
    """

    blend: NightlyBlend
    settings: PreparationSettings
    output_dir: str
    before: str | None
    previous: str | None
    version: str
    reasons: list[str]
    named_files: Mapping[str, str]

    @property
    def path(self) -> str:
        return join(self.output_dir, self.version)

    @property
    def diff(self) -> str | None:
        """Return the command that compares the next version with its latest, document by document; None for a first version."""
        comparable = self.previous and self.blend.kind in FOLLOWED
        return f"tokenmill diff {self.previous} {self.path}" if comparable else None

    @property
    def chosen(self) -> dict[str, Any]:
        """The explicitly set settings, and the version to compare with."""
        chosen = {name: getattr(self.settings, name) for name in self.settings.model_fields_set}
        return {**chosen, "previous": self.previous}


def store_of(output_dir: str) -> str:
    """Return the store of the shards of all blends."""
    return join(absolute(output_dir), STORE)


def compare_blend(blend: NightlyBlend, output_dir: str, under: Mapping[str, Any], now: float) -> Comparison:
    """Compare a blend with its latest version below `output_dir`; `under` are default settings.

    Costs a listing of the sources, and for new or touched files the footers of Parquet and a hash of local files. `now` is a
    Unix time. Raises InputError for anything that must be fixed first.
    """
    settings = settings_of(blend, store_of(output_dir), under)
    loaded = load_blend(blend.path)
    of_blend = join(absolute(output_dir), blend.name)
    newest = latest(of_blend)
    kind = preparation(blend.kind)
    named_files = kind.named_files(settings)
    # A version is up to date if its manifest matches the sources, so receipts are not read.
    planned = kind.plan(loaded, settings.model_copy(update={"force": True}), of_blend)
    manifest = published_manifest(newest.path) if newest else None
    if newest is None:
        why = [f"nothing was published before; datasets: {sum(map(len, loaded.parts().values()))}"]
    elif manifest is None:
        why = [f"the latest version, {newest.version}, is no longer there"]
    else:
        changed = [name for name in sorted(named_files) if newest.named_files.get(name) != named_files[name]]
        why = [*plan_changes(manifest, planned), *(f"{name}: the files it names changed" for name in changed)]
    before, previous = (newest.version, newest.path if manifest else None) if newest else (None, None)
    version = next_version([*lineage(of_blend), *([before] if before else [])], now)
    return Comparison(blend, settings, of_blend, before, previous, version, why, named_files)


def claimed(compared: Comparison, now: float) -> Comparison:
    """Return the comparison with a version that no other run uses."""
    return replace(compared, version=claim(compared.output_dir, compared.version, now))


def follow_prepared(compared: Comparison, record: Mapping[str, Any]) -> None:
    """Point readers to the version of `record`, unless an overlapping run has published a later one."""
    newest = latest(compared.output_dir)
    if newest and order(newest.version) > order(compared.version):
        return
    own = {name: getattr(compared, name) for name in ("version", "before", "reasons")}
    follow(compared.output_dir, record, **own, named_files=dict(compared.named_files))


def prune_night(
    output_dir: str, keep: int, grace_seconds: float, also_keep: Sequence[str] = ()
) -> tuple[list[str], Leftovers]:
    """Remove all but the `keep` newest versions of each blend, then the shards that no version refers to; return both.

    `also_keep` are versions and other outputs to keep with their shards.
    Raises InputError if one of these is not an output of this store. Requires the store's lock.
    """
    pinned = [absolute(place) for place in also_keep]
    if pinned:
        references(store_of(output_dir), pinned)  # raises before anything is removed
    kept, young_from = list(pinned), time.time() - grace_seconds
    removed: list[str] = []
    # The folders that are there, and not the blends: one that no longer exists has versions to remove, too
    of_kinds = [join(absolute(output_dir), kind) for kind in KINDS]
    for of_blend in [join(of_kind, name) for of_kind in of_kinds for name in folders_in(of_kind)]:
        removed += [join(of_blend, version) for version in prune_versions(of_blend, keep, pinned, young_from)]
        kept += [join(of_blend, version) for version in lineage(of_blend)]
    if not kept:  # nothing was published yet, and `references` needs an output
        return removed, Leftovers(0, [], 0)
    return removed, remove_leftovers(store_of(output_dir), kept, grace_seconds)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome for a blend: latest version if known, reasons for a new one, shards built and reused, and any error.

    `diff` is the command that accounts for every document of the new version and the one before, if it can.
    """

    blend: NightlyBlend
    result: Literal["unchanged", "prepared", "failed"]
    version: str | None = None
    reasons: Sequence[str] = ()
    shards: Mapping[str, int] = field(default_factory=dict[str, int])
    error: str | None = None
    diff: str | None = None

    @property
    def row(self) -> dict[str, Any]:
        return {
            "blend": self.blend.name, "result": self.result, "version": self.version or "-",
            "built": self.shards.get("built", 0), "reused": self.shards.get("reused", 0),
            "why": "; ".join([*([self.error] if self.error else []), *self.reasons]), "diff": self.diff or "-",
        }  # fmt: skip


def night_record(outcomes: Sequence[Outcome], output_dir: str, prune_error: str | None) -> dict[str, Any]:
    """Return the JSON record of a nightly run; `prune_error` is the error of pruning, or None."""
    counts = Counter(outcome.result for outcome in outcomes)
    made_from = [{"type": "blend", "path": outcome.blend.path} for outcome in outcomes]
    blends = {row.pop("blend"): row for row in (outcome.row for outcome in outcomes)}
    results = {result: counts[result] for result in ("unchanged", "prepared", "failed")}
    what = {"path": output_dir, "type": "nightly", **results, "blends": blends, "prune_error": prune_error}
    return {"nightly": {**what, "made_from": made_from}}


def failures(outcomes: Sequence[Outcome]) -> str:
    """Return the failed blends with their errors; empty if none failed."""
    failed = [outcome for outcome in outcomes if outcome.result == "failed"]
    if not failed:
        return ""
    named = "; ".join(f"{outcome.blend.name}: {outcome.error}" for outcome in failed)
    return f"{len(failed)} of {counted(len(outcomes), 'blend')} failed, all others are up to date: {named}"
