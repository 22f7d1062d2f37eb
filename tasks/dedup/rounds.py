"""The rounds of deduplication: the shards of each, and running them in order.

    sign     per slice       signatures of the documents
    exact    per partition   edges of exact duplicates
    pairs    per partition   candidate pairs without exact duplicates
    verify   per partition   the pairs that are near-duplicates, compared shingle by shingle
    narrow   one shard       documents that are dropped in any case, even without large buckets
    crowds   per partition   near-duplicates among the rest of large buckets
    settle   one shard       near-duplicates and contaminated documents to drop
    cap      per partition   documents beyond the cap of their prompt, among the rest
    decide   one shard       the outcome of each document, by slice; edges and hits to publish

Each part of a round is a shard with a key, a folder and a receipt. A round starts once all shards of the previous one have
receipts, and builds only shards without one. Keys derive from the keys of the signatures, so all are known before anything is
built.

A partition takes the memory of its rows (768 bytes of bands per document, about 0.4 GB per 128 MB of text), `settle` 100
bytes per verified pair, `decide` 200 bytes per dropped document. Every partition opens a file of every slice, so slices
should be large.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.build import building
from tokenmill.tasks.shards.kind import BuildShards, Stage, run_stage
from tokenmill.tasks.shards.manifest import file_hash
from tokenmill.tasks.shards.plan import WHOLE, Plan, PlannedShard
from tokenmill.tasks.shards.publish import Output, publish_bytes, sweep
from tokenmill.tasks.shards.receipt import Receipt, shard_identity
from tokenmill.tasks.shards.store import Store, read_bytes
from tokenmill.tasks.sources.files import Slice, SourceFile
from tokenmill.tasks.storage import is_local, join
from xxhash import xxh3_128_hexdigest

from . import near
from .contamination import (
    HITS,
    EvaluationFile,
    Evaluations,
    evaluation_records,
    evaluations_from,
    find_evaluations,
    fingerprint,
    hits,
    load_evaluations,
)
from .decisions import Decisions, decisions_in, warnings_about, write_decisions
from .documents import (
    CAPPED,
    EDGES,
    KEYED,
    NumberedTexts,
    beyond_cap,
    distinct,
    exact_duplicates,
    ranks_of,
    sorted_union,
    write_prompt_keys,
    write_text_keys,
)
from .near import (
    BANDS_SCHEMA,
    CROWDED,
    MADE_OF,
    SHINGLED,
    VERIFIED,
    compare_large_buckets,
    read_buckets,
    write_candidates,
)
from .partitions import (
    ROWS_PER_SLICE,
    PartitionedFile,
    SliceFile,
    partitioned,
    read_numbered,
    read_partition,
    write_table,
)
from .readers import READERS
from .settings import DedupChoices, DedupStep, RoundRecipe, SignRecipe

NAMES = pa.schema({"number": pa.int64(), "name": pa.large_string()})
"""A document and its name, documents ascending."""


def sign_slice(shard: PlannedShard, store: Store, evaluations: Evaluations | None) -> Receipt:
    """Sign one slice in its folder of the store and publish its receipt: one pass writes everything that later steps need.

    exact.arrow      the hash of each text                          partitioned by key
    bands.arrow      32 band keys of each document's MinHash        partitioned by key; for near-duplicates
    shingles.arrow   the shingles of each document                  for near-duplicates
    units.arrow      the number of units of each kind               for near-duplicates
    prompts.arrow    the prompt of each document                    partitioned by key; for a cap
    names.arrow      the name of each document                      if documents have names
    hits.arrow       runs shared with evaluations                   if there are evaluations

    A million documents of 480 bytes take 8 s of a core, a quarter of it reading JSON, and 1.3 GB on disk.
    Raises RunError when the source changed since the plan, OSError from the storage.
    """
    recipe = SignRecipe(**shard.identity["recipe"])
    with building(shard, store) as builder:

        def created(name: str, schema: pa.Schema, partitions: int) -> PartitionedFile:
            return builder.enter(partitioned(store.path(shard.key, f"{name}.arrow"), schema, partitions))

        # A slice without documents has these files too, empty.
        files = {
            name: created(name, schema, partitions)
            for name, schema, partitions, is_wanted in (
                ("exact", KEYED, recipe.partitions, True),
                ("bands", BANDS_SCHEMA, recipe.partitions, recipe.near),
                ("shingles", SHINGLED, 1, recipe.near),
                ("units", MADE_OF, 1, recipe.near),
                ("prompts", KEYED, recipe.partitions, recipe.prompts),
                ("hits", HITS, 1, evaluations is not None),
            )
            if is_wanted
        }
        units, without_prompt = Counter[str](), 0
        for some in READERS[recipe.reader](shard.part, recipe.options, recipe.near_on):
            builder.rows_in += len(some.rows) + sum(some.left_out.values())
            builder.drops.update(some.left_out)
            if not len(some.rows):
                continue
            builder.keep(WHOLE, len(some.rows))
            ranks = ranks_of(some.qualities, some.sizes)
            viewed = NumberedTexts(some.rows, some.views, ranks)
            write_text_keys(files["exact"], NumberedTexts(some.rows, some.texts, ranks))
            if recipe.near:
                units += near.sign(files["bands"], files["shingles"], files["units"], viewed)
            if evaluations is not None:
                files["hits"].append(hits(viewed, evaluations))
            if recipe.prompts and some.prompts is not None:
                shortest = ranks_of(some.qualities, -some.sizes)  # of one prompt's documents, the shortest are kept
                without_prompt += write_prompt_keys(files["prompts"], some.rows, some.prompts, shortest)
            if some.names is not None:
                files["names"] = files.get("names") or created("names", NAMES, 1)
                files["names"].append(pa.Table.from_arrays([pa.array(some.rows), some.names], schema=NAMES))
        if recipe.near:
            builder.facts["units"] = dict(sorted(units.items()))
        if recipe.prompts:
            builder.facts["without_prompt"] = without_prompt
    return builder.receipt


KIND = "dedup"
FORMAT_VERSION, VALUES_VERSION = 3, 4
"""Increment them when the same recipe and source give different bytes; the second is for slices whose names or prompts are
fields (`id_field`, `cap_by`).
"""

SLICE_LISTS = "rosters"
PARTITION_BYTES = 128_000_000
MAX_PARTITIONS = 1024


def partitions_for(source_bytes: int) -> int:
    """Return the number of partitions: the smallest power of two that gives each at most 128 MB of source, up to 1024. It changes only
    when the data doubles, so signatures survive additions.
    """
    wanted = max(1, -(-source_bytes // PARTITION_BYTES))
    return min(MAX_PARTITIONS, 1 << (wanted - 1).bit_length())


@dataclass(frozen=True, slots=True)
class SignedSlices:
    """The slices to compare, in order: the keys of their signatures, and the names of their documents before `#row`."""

    signatures: tuple[str, ...]
    names: tuple[str, ...]

    def dump(self) -> bytes:
        """Return the list as JSON."""
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
    def steps(self) -> Iterator[DedupStep]:
        """The steps that the settings need, in order."""
        for name, step in STEPS.items():
            is_off = self.recipe.threshold is None if step.is_near else name == "cap" and self.recipe.cap is None
            if not is_off:
                yield name

    def shards(self, step: DedupStep) -> list[PlannedShard]:
        """Return the shards of a step; none if the step is not needed."""
        if step not in self.steps:
            return []
        recipe = RoundRecipe(
            step, self.recipe.partitions, **{name: getattr(self.recipe, name) for name in STEPS[step].settings}
        )
        # Only the last step names documents, so that new names cost nothing but it.
        whole = self.slices if step == "decide" else replace(self.slices, names=())
        content = xxh3_128_hexdigest(whole.dump())
        count = 1 if STEPS[step].is_single else self.recipe.partitions
        file = SourceFile(self.uri, self.size, "json")
        parts = [
            Slice(file, number, number + 1, f"{content}[{number}:{number + 1}]", size=self.size // count)
            for number in range(count)
        ]
        return [PlannedShard("all", step, part, shard_identity(KIND, FORMAT_VERSION, recipe, part)) for part in parts]

    def signatures(self, name: str) -> list[SliceFile]:
        """Return the files of this name of all slices."""
        return [
            SliceFile(self.store.path(key, f"{name}.arrow"), number * ROWS_PER_SLICE)
            for number, key in enumerate(self.slices.signatures)
        ]

    def results(self, step: DedupStep, name: str) -> list[str]:
        """Return the files of this name that a step has written; none if the step is not needed."""
        return [self.store.path(shard.key, f"{name}.arrow") for shard in self.shards(step)]


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
) -> tuple[list[PlannedShard], Rounds, list[dict[str, Any]]]:
    """Return the shards that sign the slices, the rounds over them, and the records of the evaluations that building them needs."""
    evaluations = find_evaluations(choices.evaluations)
    size = sum(each.part.size for each in slices)
    partitions = partitions_for(size)
    signed: list[PlannedShard] = []
    for each in slices:
        # Without near-duplicates and evaluations, nothing is compared but whole texts.
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
        version = VALUES_VERSION if each.options.get("id_field") or each.options.get("cap_by") else FORMAT_VERSION
        identity = shard_identity(KIND, version, recipe, each.part)
        signed.append(PlannedShard(each.name or "all", "sign", each.part, identity))
    all_slices = SignedSlices(tuple(shard.key for shard in signed), tuple(each.name for each in slices))
    recipe = RoundRecipe(
        "decide", partitions, choices.threshold if choices.near else None, bool(evaluations), choices.cap
    )
    rounds = Rounds(store, all_slices, all_slices.place(store), recipe, size)
    return signed, rounds, evaluation_records(evaluations)


def decide(
    slices: Sequence[DocumentSlice],
    choices: DedupChoices,
    store_place: str,
    build_shards: BuildShards,
    *,
    rebuild: bool,
) -> Decisions:
    """Decide on every document of the slices, round by round, reusing valid results in the store at `store_place`.

    Raises InputError for unreadable evaluations, RunError for a failed round.
    """
    store = Store(store_place, KIND)
    signed, rounds, evaluations = planned_rounds(slices, choices, store)
    (last,) = rounds.shards("decide")
    if not rebuild and (receipt := store.receipt(last.key)):
        if all(file_hash(store.path(last.key, output.path)) == output.xxh3_128 for output in receipt.outputs):
            return decisions_in(store, receipt)
        store.withdraw(last.key)  # published files link to these, so changed ones are built again
    if is_local(store.place):  # an object store leaves no parts of files that a killed run was writing
        sweep(store.folder(SLICE_LISTS))
    rounds.slices.publish(store)
    done = Plan.of(store, [], rebuild=rebuild)
    # Every key is known by now, so that a round builds only what the store hasn't.
    for name, shards in [("sign", signed), *((step, rounds.shards(step)) for step in rounds.steps)]:
        stage, plan = Stage(f"dedup-{name}", build_round), Plan.of(store, shards, rebuild=rebuild)
        done = run_stage(stage, plan, build_shards, {"evaluations": evaluations}, rebuild=rebuild)
    (decided,) = done.finished
    return decisions_in(store, decided.receipt)


def build_round(shard: PlannedShard, store: Store, evaluations: Sequence[Mapping[str, Any]]) -> Receipt:
    """Build one shard of any round in this process; `evaluations` are records."""
    files = evaluations_from(evaluations)
    if "step" not in shard.identity["recipe"]:
        return sign_slice(shard, store, load_evaluations(files)[0] if files else None)
    with building(shard, store) as builder:
        uri = shard.part.file.uri
        rounds = Rounds(store, SignedSlices.load(uri), uri, RoundRecipe(**shard.identity["recipe"]))
        work = _Work(rounds, shard, files, builder.facts)
        builder.outputs, builder.rows_in = STEPS[shard.identity["recipe"]["step"]].build(work)
        if builder.rows_in:  # what a step finds is counted as its documents
            builder.keep(WHOLE, builder.rows_in)
    return builder.receipt


@dataclass(frozen=True, slots=True)
class _Work:
    """One shard of a round, and its inputs."""

    rounds: Rounds
    shard: PlannedShard
    evaluations: tuple[EvaluationFile, ...]
    facts: dict[str, Any]

    @property
    def partition(self) -> int:
        return self.shard.part.start

    @property
    def partitions(self) -> int:
        return self.rounds.recipe.partitions

    @property
    def threshold(self) -> float:
        return self.rounds.recipe.threshold or near.THRESHOLD

    @property
    def folder(self) -> str:
        return self.rounds.store.folder(self.shard.key)

    def result(self, step: DedupStep, name: str, schema: pa.Schema) -> pa.Table:
        """All findings of a step without partitions."""
        return read_partition(self.rounds.results(step, name), 0, 1, schema)

    def write(self, name: str, table: pa.Table) -> Output:
        return write_table(f"{self.folder}/{name}.arrow", table)


Found = tuple[list[Output], int]
"""The files that a step has written, and their number of findings."""


def _exact(work: _Work) -> Found:
    table = exact_duplicates(work.rounds.signatures("exact"), work.partition, work.partitions)
    return [work.write("edges", table)], table.num_rows


def _pairs(work: _Work) -> Found:
    gone = sorted_union(_gone(work, "exact", "edges", EDGES))
    buckets = read_buckets(work.rounds.signatures("bands"), work.partition, work.partitions, gone)
    pairs = write_candidates(buckets, f"{work.folder}/pairs.arrow", work.partitions)
    return [pairs, work.write("crowded", buckets.crowded)], 0


def _verify(work: _Work) -> Found:
    pairs, shingled = work.rounds.results("pairs", "pairs"), work.rounds.signatures("shingles")
    table = near.verify(pairs, shingled, work.partition, work.partitions, work.threshold)
    return [work.write("verified", table)], table.num_rows


def _narrow(work: _Work) -> Found:
    # Those in large buckets haven't been compared with all better ones yet.
    crowded = (
        distinct(read_partition([uri], 0, 1, CROWDED)["number"].to_numpy())
        for uri in work.rounds.results("pairs", "crowded")
    )
    gone = near.certain_drops([work.result("verify", "verified", VERIFIED)], sorted_union(*crowded))
    return [work.write("gone", _numbers(gone))], len(gone)


def _crowds(work: _Work) -> Found:
    crowded = read_partition([work.rounds.results("pairs", "crowded")[work.partition]], 0, 1, CROWDED)
    gone = _gone(work, "narrow", "gone", CAPPED)
    found = compare_large_buckets(crowded, gone, work.rounds.signatures("shingles"), work.threshold)
    outputs = [work.write("verified", found.verified), work.write("unseen", _numbers(found.unseen))]
    return outputs, found.verified.num_rows


def _settle(work: _Work) -> Found:
    edges = near.resolve([work.result(step, "verified", VERIFIED) for step in ("verify", "crowds")])
    gone = sorted_union(_gone(work, "exact", "edges", EDGES), edges["dropped"].to_numpy())
    # A document has one reason: a duplicate that holds an evaluation is a duplicate.
    contaminated = np.setdiff1d(_hits(work)["number"].to_numpy(), gone)
    outputs = [work.write("near", edges), work.write("contaminated", _numbers(contaminated))]
    return outputs, edges.num_rows + len(contaminated)


def _cap(work: _Work) -> Found:
    gone = sorted_union(
        _gone(work, "exact", "edges", EDGES),
        _gone(work, "settle", "near", EDGES),
        _gone(work, "settle", "contaminated", CAPPED),
    )
    most = work.rounds.recipe.cap or 0
    table = beyond_cap(work.rounds.signatures("prompts"), work.partition, work.partitions, most, gone)
    return [work.write("capped", table)], table.num_rows


def _decide(work: _Work) -> Found:
    drops = {
        "exact_duplicate": work.result("exact", "edges", EDGES),
        "near_duplicate": work.result("settle", "near", EDGES),
        "contaminated": work.result("settle", "contaminated", CAPPED),
        "beyond_cap": work.result("cap", "capped", CAPPED),
    }
    # All hits are published, also those of documents that are dropped for another reason.
    hits = _hits(work) if work.rounds.recipe.evaluations else None
    unseen = work.result("crowds", "unseen", CAPPED)["dropped"].to_numpy()
    slices = work.rounds.slices
    store = work.rounds.store
    outputs, facts = write_decisions(work.folder, store, slices.signatures, slices.names, drops, hits, unseen)
    facts["evaluations"] = load_evaluations(work.evaluations)[1] if work.evaluations else []
    work.facts.update(facts, warnings=list(warnings_about(facts)))
    return outputs, sum(table.num_rows for table in drops.values())


def _numbers(documents: np.ndarray) -> pa.Table:
    return pa.Table.from_arrays([pa.array(documents)], schema=CAPPED)


def _gone(work: _Work, step: DedupStep, name: str, schema: pa.Schema) -> np.ndarray:
    return work.result(step, name, schema)["dropped"].to_numpy()


def _hits(work: _Work) -> pa.Table:
    """All runs that documents share with evaluations."""
    files = work.rounds.signatures("hits") if work.rounds.recipe.evaluations else []
    return read_numbered(files, 0, 1, HITS)


@dataclass(frozen=True, slots=True)
class RoundStep:
    """How a step is built, the settings that affect it, whether it runs only for near-duplicates, and whether it has a single
    shard, because it needs all pairs or all decisions at once.
    """

    build: Callable[[_Work], Found]
    settings: Sequence[str] = ()
    is_near: bool = False
    is_single: bool = False


STEPS: Mapping[DedupStep, RoundStep] = {
    "exact": RoundStep(_exact),
    "pairs": RoundStep(_pairs, is_near=True),
    "verify": RoundStep(_verify, ("threshold",), is_near=True),
    "narrow": RoundStep(_narrow, ("threshold",), is_near=True, is_single=True),
    "crowds": RoundStep(_crowds, ("threshold",), is_near=True),
    "settle": RoundStep(_settle, ("threshold", "evaluations"), is_single=True),
    "cap": RoundStep(_cap, ("threshold", "evaluations", "cap")),
    "decide": RoundStep(_decide, ("threshold", "evaluations", "cap"), is_single=True),
}
