"""Build one shard of a round from the results of earlier rounds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from tokenmill.tasks.shards.build import building
from tokenmill.tasks.shards.manifest import WHOLE
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.publish import Output
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store

from . import exact, near
from .candidates import CROWDED, read_buckets, write_candidates
from .contamination import HITS, EvaluationFile, load_evaluations
from .decisions import Findings, warnings_about, write_decisions
from .documents import EDGES, distinct, sorted_union
from .exact import CAPPED
from .near import VERIFIED, compare_large_buckets
from .partitions import read_numbered, read_partition, write_table
from .rounds import Rounds, rounds_of
from .settings import Step
from .sign import sign_slice


def build_shard(shard: PlannedShard, store: Store, evaluations: tuple[EvaluationFile, ...]) -> Receipt:
    """Build one shard of any round in this process."""
    if "step" not in shard.identity["recipe"]:
        return sign_slice(shard, store, load_evaluations(evaluations).evaluations if evaluations else None)
    with building(shard, store) as builder:
        work = _Work(rounds_of(shard, store), shard, evaluations, builder.facts)
        builder.outputs, builder.rows_in = STEPS[shard.identity["recipe"]["step"]](work)
        if builder.rows_in:
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

    def result(self, step: Step, name: str, schema: pa.Schema) -> pa.Table:
        """All findings of a step without partitions."""
        return read_partition(self.rounds.results(step, name), 0, 1, schema)

    def write(self, name: str, table: pa.Table) -> Output:
        return write_table(f"{self.folder}/{name}.arrow", table)


Found = tuple[list[Output], int]
"""The files that a step has written, and their number of findings."""


def _exact(work: _Work) -> Found:
    table = exact.resolve(work.rounds.signatures("exact"), work.partition, work.partitions)
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
    table = exact.beyond_cap(work.rounds.signatures("prompts"), work.partition, work.partitions, most, gone)
    return [work.write("capped", table)], table.num_rows


def _decide(work: _Work) -> Found:
    drops = {
        "exact_duplicate": work.result("exact", "edges", EDGES),
        "near_duplicate": work.result("settle", "near", EDGES),
        "contaminated": work.result("settle", "contaminated", CAPPED),
        "beyond_cap": work.result("cap", "capped", CAPPED),
    }
    hits = _hits(work) if work.rounds.recipe.evaluations else None
    unseen = work.result("crowds", "unseen", CAPPED)["dropped"].to_numpy()
    slices = work.rounds.slices
    findings = Findings(slices.signatures, slices.names, work.rounds.store, drops, hits, unseen)
    outputs, facts = write_decisions(findings, work.folder)
    facts["evaluations"] = load_evaluations(work.evaluations).row_counts if work.evaluations else []
    work.facts.update(facts, warnings=list(warnings_about(facts)))
    return outputs, sum(table.num_rows for table in drops.values())


def _numbers(documents: np.ndarray) -> pa.Table:
    return pa.Table.from_arrays([pa.array(documents)], schema=CAPPED)


def _gone(work: _Work, step: Step, name: str, schema: pa.Schema) -> np.ndarray:
    return work.result(step, name, schema)["dropped"].to_numpy()


def _hits(work: _Work) -> pa.Table:
    """All runs that documents share with evaluations."""
    files = work.rounds.signatures("hits") if work.rounds.recipe.evaluations else []
    return read_numbered(files, 0, 1, HITS)


STEPS: Mapping[Step, Callable[[_Work], Found]] = {
    "exact": _exact,
    "pairs": _pairs,
    "verify": _verify,
    "narrow": _narrow,
    "crowds": _crowds,
    "settle": _settle,
    "cap": _cap,
    "decide": _decide,
}
