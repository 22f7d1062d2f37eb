"""The steps of a nightly run around its preparations, as plain functions; `stage.py` wraps them for Prefect."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokenmill.tasks.storage import absolute, join

from .blends import KINDS
from .compare import Comparison, store_of
from .prune import Leftovers, references, remove_leftovers
from .versions import claim, folders_in, follow, latest, lineage, order, prune_versions

NOTHING = Leftovers(0, [], 0)


def claimed(compared: Comparison, now: float) -> Comparison:
    """The comparison with a version that no other run uses."""
    return replace(compared, version=claim(compared.output_dir, compared.version, now))


def follow_prepared(compared: Comparison, record: Mapping[str, Any]) -> None:
    """Point readers to the version of `record`, unless an overlapping run has published a later one."""
    newest = latest(compared.output_dir)
    if newest and order(newest.version) > order(compared.version):
        return
    follow(
        compared.output_dir,
        record,
        version=compared.version,
        before=compared.before,
        reasons=compared.reasons,
        named_files=dict(compared.named_files),
    )


def prune_night(
    output_dir: str, keep: int, grace_seconds: float, also_keep: Sequence[str] = ()
) -> tuple[list[str], Leftovers]:
    """Remove all but the `keep` newest versions of each blend, then the shards that no version refers to; return both.

    The same rule applies to blends that no longer exist. `also_keep` are versions and other outputs to keep with their shards.
    Raises InputError if one of these is not an output of this store. Requires the store's lock.
    """
    pinned = [absolute(place) for place in also_keep]
    if pinned:
        references(store_of(output_dir), pinned)  # raises before anything is removed
    kept, young_from = list(pinned), time.time() - grace_seconds
    removed: list[str] = []
    for of_blend in _blends_of(absolute(output_dir)):
        removed += [join(of_blend, version) for version in prune_versions(of_blend, keep, pinned, young_from)]
        kept += [join(of_blend, version) for version in lineage(of_blend)]
    if not kept:
        return removed, NOTHING
    return removed, remove_leftovers(store_of(output_dir), kept, grace_seconds)


def _blends_of(output_dir: str) -> list[str]:
    """The folders of blends by kind, including blends that no longer exist."""
    return [join(output_dir, kind, name) for kind in KINDS for name in folders_in(join(output_dir, kind))]
