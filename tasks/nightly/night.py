"""What a night does around its preparations, in plain functions: `stage.py` wraps them for Prefect."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokenmill.tasks.storage import absolute, join

from .blends import KINDS
from .compare import Comparison, store_of
from .prune import Leftovers, leftovers, references, remove
from .versions import claim, folders_in, follow, latest, lineage, order, prune_versions

NOTHING = Leftovers(0, [], 0)


def claimed(compared: Comparison, now: float) -> Comparison:
    """The same, with a version that no other night takes."""
    return replace(compared, version=claim(compared.output_dir, compared.version, now))


def follow_prepared(compared: Comparison, record: Mapping[str, Any]) -> None:
    """Lead readers to the next version, unless a later night was faster: `record` is that of its preparation."""
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
    """Remove all but the `keep` newest versions of each blend, then what no version refers to; the folders and the shards.

    Versions of blends that are gone stay by the same rule. `also_keep` are versions and other outputs that stay with their
    shards. The store's lock must be held. Raises InputError where one of these is no output of this store.
    """
    stay = [absolute(place) for place in also_keep]
    if stay:
        references(store_of(output_dir), stay)  # refused before anything is removed
    kept, young_from = list(stay), time.time() - grace_seconds
    gone: list[str] = []
    for of_blend in _blends_of(absolute(output_dir)):
        gone += [join(of_blend, version) for version in prune_versions(of_blend, keep, stay, young_from)]
        kept += [join(of_blend, version) for version in lineage(of_blend)]
    if not kept:
        return gone, NOTHING
    store = store_of(output_dir)
    found = leftovers(store, kept, grace_seconds)
    remove(store, found)
    return gone, found


def _blends_of(output_dir: str) -> list[str]:
    """The folders of blends, by kind, of those that are there now and of those that were."""
    return [join(output_dir, kind, name) for kind in KINDS for name in folders_in(join(output_dir, kind))]
