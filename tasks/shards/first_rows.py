"""Look at the first rows of each dataset as a run would: its own code builds a shard of them, in a temporary folder.

So a plan can't disagree with the run that follows it. Only the first file of a dataset is opened, and built shards don't need
look: its receipts have the counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

from tokenmill.tasks.errors import RunError
from tokenmill.tasks.sources.forms import first_records

from .kind import Kind, Planned
from .manifest import totals
from .plan import Finished, Plan, PlannedShard
from .publication import check_bad_rows, check_shrinkage, first_bad_row
from .receipt import unread
from .store import Store

MOST_ROWS = 100
MOST_BYTES = 1_000_000
"""The nominal size of first-row shards, so that choosing an engine for them doesn't need a race."""


@dataclass(frozen=True, slots=True)
class FirstRows:
    """What becomes of the first rows of a dataset.

    `dropped` counts them by reason, `not_read` by what of them isn't read; `bad` is the first bad row, with file, line and reason.
    `shape` names the shape of the first row, if known. `every`: the dataset doesn't have other rows.
    """

    rows: int
    documents: int
    dropped: Mapping[str, int]
    not_read: Mapping[str, int]
    bad: str
    every: bool
    shape: str | None


def look(kind: Kind[Any, Any], planned: Planned[Any, Any]) -> tuple[dict[str, FirstRows], RunError | None]:
    """Return the first rows of each dataset (`split/name`) with shards to build, and the error that would stop a run of the plan.

    Raises the errors of building a shard.
    """
    with TemporaryDirectory(prefix="tokenmill-") as folder:
        store = Store(folder, planned.plan.store.kind)
        first: list[PlannedShard] = []
        for shard in {(shard.split, shard.dataset): shard for shard in reversed(planned.plan.pending)}.values():
            part = next(iter(shard.part.members), shard.part)  # of a bundle, only the first file is read
            rows = min(part.rows or MOST_ROWS, MOST_ROWS)
            first.append(replace(shard, part=replace(part, rows=rows, size=min(part.size, MOST_BYTES))))
        plan = Plan.of(store, first, rebuild=True)
        built: list[Finished] = []
        if plan.shards:
            stage = kind.stages[0]
            # A bad row must not end the look: the policy is applied to the counts, below.
            arguments = {**stage.arguments(replace(planned, plan=plan)), "on_bad_row": "quarantine"}
            read = stage.read or stage.build
            built = [Finished(shard, shard.key, read(shard, store, **arguments)) for shard in plan.shards]
        sources = {(split, each.name): each for split, listed in planned.blend.parts().items() for each in listed}
        found: dict[str, FirstRows] = {}
        for item in built:
            receipt, record = item.receipt, next(iter(first_records(item.shard.part)), None)
            (*others, last) = (each for each in planned.plan.shards if (each.split, each.dataset) == item.dataset)
            whole = receipt.rows_in < MOST_ROWS or last.part.rows == MOST_ROWS
            found["/".join(item.dataset)] = FirstRows(
                rows=receipt.rows_in,
                documents=receipt.documents,
                dropped=receipt.drops,
                not_read=unread(receipt.not_read, receipt.documents),
                bad=first_bad_row([item], store),
                every=not others and len(last.part.members) <= 1 and whole,
                shape=None if record is None else kind.shape(sources[item.dataset], record),
            )
        try:
            _require_publishable(kind, planned, built, found, store)
        except RunError as error:
            return found, error
        return found, None


def _require_publishable(
    kind: Kind[Any, Any],
    planned: Planned[Any, Any],
    built: Sequence[Finished],
    found: Mapping[str, FirstRows],
    store: Store,
) -> None:
    """Raise RunError as publication does, for certain failures: datasets without a good first row, or without other rows."""
    settings, plan = planned.settings, planned.plan
    tolerate = settings.on_bad_row == "quarantine"
    looks = [(item, found["/".join(item.dataset)]) for item in built]
    certain = [item for item, seen in looks if not tolerate or seen.every or not seen.documents]
    check_bad_rows(certain, store, settings.max_bad_row_fraction, tolerate=tolerate)
    proven = plan.finished
    check_bad_rows(proven, plan.store, settings.max_bad_row_fraction, tolerate=tolerate)
    if all(seen.every for seen in found.values()):
        bad = next((seen.bad for seen in found.values() if seen.bad), "")
        check_shrinkage(planned.output_dir, settings, kind.header(planned), totals([*proven, *built]), bad)
