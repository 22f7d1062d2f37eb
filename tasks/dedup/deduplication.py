"""Deduplication from slices to decisions, whoever maps the rounds: `stage.py` does so on Dask."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.identity import shard_identity
from tokenmill.tasks.shards.plan import Plan, PlannedShard
from tokenmill.tasks.shards.publish import sweep
from tokenmill.tasks.shards.published import file_hash
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import Slice
from tokenmill.tasks.storage import is_local

from .decisions import Decisions, decisions_in
from .evaluations import evaluation_records, find_evaluations, fingerprint
from .rounds import FORMAT_VERSION, KIND, ROSTERS, Roster, Rounds, partitions_for
from .settings import DedupChoices, RoundRecipe, SignRecipe

RunRound = Callable[[str, Sequence[PlannedShard], Mapping[str, Any]], None]
"""Builds the pending shards of a round (its name, the shards, and what all of them need beside their records)."""


@dataclass(frozen=True, slots=True)
class DocumentSlice:
    """Documents of a slice, in the order in which they are told apart where nothing else does.

    `reader` is one of `READERS` and says how rows become documents, `options` are its own and part of the identity, as
    is `part.content`. Documents without a name of their own are called `name#row`; names have no part in signatures.
    """

    reader: str
    part: Slice
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    name: str = ""


def planned_rounds(
    slices: Sequence[DocumentSlice], choices: DedupChoices, store: Store
) -> tuple[list[PlannedShard], Rounds, dict[str, Any]]:
    """The shards that sign the slices, in their order, the rounds over them, and what building any of them needs."""
    evaluations = find_evaluations(choices.evaluations)
    size = sum(each.part.size for each in slices)
    partitions = partitions_for(size)
    signed: list[PlannedShard] = []
    for each in slices:
        near_on = choices.near_on if choices.near or evaluations else "conversation"
        recipe = SignRecipe(
            reader=each.reader,
            options=each.options,
            partitions=partitions,
            near=choices.near,
            near_on=near_on,
            prompts=choices.cap is not None,
            evaluations=fingerprint(evaluations),
        )
        identity = shard_identity(KIND, FORMAT_VERSION, recipe, each.part)
        signed.append(PlannedShard(each.name or "all", "sign", each.part, identity))
    roster = Roster(tuple(shard.key for shard in signed), tuple(each.name for each in slices))
    recipe = RoundRecipe(
        "decide", partitions, choices.threshold if choices.near else None, bool(evaluations), choices.cap
    )
    rounds = Rounds(store, roster, roster.place(store), recipe, size)
    return signed, rounds, {"store": store.place, "evaluations": evaluation_records(evaluations)}


def decided(slices: Sequence[DocumentSlice], choices: DedupChoices, store_place: str) -> Decisions | None:
    """The decisions about documents if they are proven in the store already, else None."""
    store = Store(store_place, KIND)
    _, rounds, _ = planned_rounds(slices, choices, store)
    return _proven(rounds, store)


def _proven(rounds: Rounds, store: Store) -> Decisions | None:
    """The decisions, if they are there and what they were: published files are names of these, and are mended here."""
    (last,) = rounds.shards("decide")
    receipt = store.receipt(last.key)
    if receipt is None:
        return None
    if any(file_hash(store.path(last.key, output.path)) != output.xxh3_128 for output in receipt.outputs):
        store.withdraw(last.key)
        return None
    return decisions_in(store, receipt)


def decide(
    slices: Sequence[DocumentSlice], choices: DedupChoices, store_place: str, run: RunRound, *, rebuild: bool
) -> Decisions:
    """Decide what becomes of every document of the slices, round by round; nothing is run for what is proven.

    Raises RunError when a shard of a round is not proven after it was run.
    """
    store = Store(store_place, KIND)
    signed, rounds, common = planned_rounds(slices, choices, store)
    found = None if rebuild else _proven(rounds, store)
    if found is not None:
        return found
    if is_local(store.place):
        sweep(store.folder(ROSTERS))
    rounds.roster.publish(store)
    _run("sign", signed, store, run, common, rebuild=rebuild)
    for step in rounds.steps:
        _run(step, rounds.shards(step), store, run, common, rebuild=rebuild)
    found = _proven(rounds, store)
    if found is None:
        raise RunError("the decisions about duplicates are gone; run the same command again")
    return found


def _run(
    name: str, shards: list[PlannedShard], store: Store, run: RunRound, common: Mapping[str, Any], *, rebuild: bool
) -> None:
    """Build what is pending of a round. Raises RunError unless all of it is proven then."""
    pending = Plan.of(store, shards, rebuild=rebuild).pending
    if not pending:
        return
    run(name, pending, {**common, "rebuild": rebuild})
    proven = store.proven(shard.key for shard in pending)
    missing = [shard.place for shard in pending if shard.key not in proven]
    if missing:
        raise RunError(
            f"{len(missing)} of {len(pending)} shards of the round {name!r} have no receipt, the first {missing[0]}; "
            "run the same command again to build them"
        )
