"""The rounds of deduplication: the shards of each, and running them in order.

    sign     per slice       signatures of the documents
    exact    per partition   edges of exact duplicates
    pairs    per partition   candidate pairs without exact duplicates
    verify   per partition   the pairs that are near-duplicates, compared shingle by shingle
    narrow   one shard       documents that are dropped in any case, whatever is in large buckets
    crowds   per partition   near-duplicates among the rest of large buckets
    settle   one shard       near-duplicates and contaminated documents to drop
    cap      per partition   documents beyond the cap of their prompt, among the rest
    decide   one shard       the outcome of each document, by slice; edges and hits to publish

Each part of a round is a shard with a key, a folder and a receipt. A round starts once all shards of the previous one have
receipts, and builds only shards without one. Keys derive from the keys of the signatures, so all are known before anything is
built.

A partition takes the memory of its rows (768 bytes of bands per document, some 0.4 GB per 128 MB of text), `settle` 100
bytes per verified pair, `decide` 200 bytes per dropped document. Every partition opens a file of every slice, so slices
should be large.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import orjson
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.identity import shard_identity
from tokenmill.tasks.shards.plan import Plan, PlannedShard
from tokenmill.tasks.shards.publish import publish_bytes, sweep
from tokenmill.tasks.shards.published import file_hash
from tokenmill.tasks.shards.store import Store, read_bytes
from tokenmill.tasks.sources.files import Slice, SourceFile
from tokenmill.tasks.storage import is_local, join
from xxhash import xxh3_128_hexdigest

from .contamination import evaluation_records, find_evaluations, fingerprint
from .decisions import Decisions, decisions_in
from .partitions import ROWS_PER_SLICE, SliceFile
from .settings import DedupChoices, RoundRecipe, SignRecipe, Step

KIND = "dedup"
FORMAT_VERSION = 3
"""Increment it when the same recipe and source give different bytes."""

SLICE_LISTS = "rosters"
PARTITION_BYTES = 128_000_000
MOST_PARTITIONS = 1024

SETTINGS_OF_STEP: Mapping[Step, Sequence[str]] = {
    "exact": (),
    "pairs": (),
    "verify": ("threshold",),
    "narrow": ("threshold",),
    "crowds": ("threshold",),
    "settle": ("threshold", "evaluations"),
    "cap": ("threshold", "evaluations", "cap"),
    "decide": ("threshold", "evaluations", "cap"),
}
"""The settings that affect each step."""

ONCE: Sequence[Step] = ("narrow", "settle", "decide")
"""Steps that have a single shard."""

NEAR: Sequence[Step] = ("pairs", "verify", "narrow", "crowds")
"""Steps that run only for near-duplicates."""


def partitions_for(source_bytes: int) -> int:
    """The number of partitions: the smallest power of two that gives each at most 128 MB of source, up to 1024. It changes only
    when the data doubles, so signatures survive additions.
    """
    wanted = max(1, -(-source_bytes // PARTITION_BYTES))
    return min(MOST_PARTITIONS, 1 << (wanted - 1).bit_length())


@dataclass(frozen=True, slots=True)
class SignedSlices:
    """The slices to compare, in order: the keys of their signatures, and the names of their documents before `#row`."""

    signatures: tuple[str, ...]
    names: tuple[str, ...]

    def dump(self) -> bytes:
        """The list as JSON."""
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2)

    def place(self, store: Store) -> str:
        """Its place in the store."""
        return join(store.folder(SLICE_LISTS), f"{xxh3_128_hexdigest(self.dump())}.json")

    @classmethod
    def load(cls, uri: str) -> "SignedSlices":
        """Read a list; its file is named by the hash of the content. Raises RunError for any other content."""
        data = read_bytes(uri) or b""
        if uri.rpartition("/")[2] != f"{xxh3_128_hexdigest(data)}.json":
            raise RunError(f"{uri}: missing or damaged; rerun the same command to rewrite it")
        fields = orjson.loads(data)
        return cls(tuple(fields["signatures"]), tuple(fields["names"]))

    def publish(self, store: Store) -> str:
        """Write it and return its place."""
        return publish_bytes(self.place(store), self.dump()).path


@dataclass(frozen=True, slots=True)
class Rounds:
    """All rounds over the list of slices at `uri`; `recipe` holds the settings, `size` is the bytes of the sources."""

    store: Store
    slices: SignedSlices
    uri: str
    recipe: RoundRecipe
    size: int = 0

    @property
    def steps(self) -> Iterator[Step]:
        """The steps that the settings need, in order."""
        asked = {**dict.fromkeys(NEAR, self.recipe.threshold), "cap": self.recipe.cap}
        return (step for step in SETTINGS_OF_STEP if asked.get(step, 1) is not None)

    def shards(self, step: Step) -> list[PlannedShard]:
        """The shards of a step; none if the step is not needed."""
        if step not in self.steps:
            return []
        recipe = RoundRecipe(
            step, self.recipe.partitions, **{name: getattr(self.recipe, name) for name in SETTINGS_OF_STEP[step]}
        )
        whole = self.slices if step == "decide" else replace(self.slices, names=())
        content = xxh3_128_hexdigest(whole.dump())
        count = 1 if step in ONCE else self.recipe.partitions
        file = SourceFile(self.uri, self.size, "json")
        parts = [
            Slice(file, number, number + 1, f"{content}[{number}:{number + 1}]", size=self.size // count)
            for number in range(count)
        ]
        return [PlannedShard("all", step, part, shard_identity(KIND, FORMAT_VERSION, recipe, part)) for part in parts]

    def signatures(self, name: str) -> list[SliceFile]:
        """The files of this name of all slices."""
        return [
            SliceFile(self.store.path(key, f"{name}.arrow"), number * ROWS_PER_SLICE)
            for number, key in enumerate(self.slices.signatures)
        ]

    def results(self, step: Step, name: str) -> list[str]:
        """The files of this name that a step has written; none if the step is not needed."""
        return [self.store.path(shard.key, f"{name}.arrow") for shard in self.shards(step)]


def rounds_of(shard: PlannedShard, store: Store) -> Rounds:
    """The part of the rounds that a shard needs."""
    recipe, uri = RoundRecipe(**shard.identity["recipe"]), shard.part.file.uri
    return Rounds(store, SignedSlices.load(uri), uri, recipe)


RunRound = Callable[[str, Sequence[PlannedShard], Mapping[str, Any]], None]
"""Builds the pending shards of a round: its name, the shards, and arguments that all of them share."""


@dataclass(frozen=True, slots=True)
class DocumentSlice:
    """The documents of a slice. `reader` is one of `READERS`, `options` are its settings; both, and `part.content`, are
    part of the identity. Documents without a name are called `name#row`; names do not affect signatures.
    """

    reader: str
    part: Slice
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    name: str = ""


def planned_rounds(
    slices: Sequence[DocumentSlice], choices: DedupChoices, store: Store
) -> tuple[list[PlannedShard], Rounds, dict[str, Any]]:
    """The shards that sign the slices, the rounds over them, and the arguments that building them needs."""
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
    all_slices = SignedSlices(tuple(shard.key for shard in signed), tuple(each.name for each in slices))
    recipe = RoundRecipe(
        "decide", partitions, choices.threshold if choices.near else None, bool(evaluations), choices.cap
    )
    rounds = Rounds(store, all_slices, all_slices.place(store), recipe, size)
    return signed, rounds, {"store": store.place, "evaluations": evaluation_records(evaluations)}


def _proven(rounds: Rounds, store: Store) -> Decisions | None:
    """The decisions, if they are in the store; changed files are rebuilt, because published files link to them."""
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
    """Decide on every document of the slices, round by round, reusing valid results in the store.

    Raises RunError if a shard of a round is missing after it ran.
    """
    store = Store(store_place, KIND)
    signed, rounds, common = planned_rounds(slices, choices, store)
    found = None if rebuild else _proven(rounds, store)
    if found is not None:
        return found
    if is_local(store.place):
        sweep(store.folder(SLICE_LISTS))
    rounds.slices.publish(store)
    _run("sign", signed, store, run, common, rebuild=rebuild)
    for step in rounds.steps:
        _run(step, rounds.shards(step), store, run, common, rebuild=rebuild)
    found = _proven(rounds, store)
    if found is None:
        raise RunError("the decisions about duplicates are missing; rerun the same command")
    return found


def _run(
    name: str, shards: list[PlannedShard], store: Store, run: RunRound, common: Mapping[str, Any], *, rebuild: bool
) -> None:
    """Build the pending shards of a round. Raises RunError if any is missing afterwards."""
    pending = Plan.of(store, shards, rebuild=rebuild).pending
    if not pending:
        return
    run(name, pending, {**common, "rebuild": rebuild})
    proven = store.proven(shard.key for shard in pending)
    missing = [shard.place for shard in pending if shard.key not in proven]
    if missing:
        raise RunError(
            f"{len(missing)} of {len(pending)} shards of the round {name!r} have no receipt, the first {missing[0]}; "
            "rerun the same command to build them"
        )
