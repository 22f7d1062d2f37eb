"""What building one shard of a round does: read what earlier rounds have written, find, write."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from socket import gethostname
from typing import Any

import numpy as np
import pyarrow as pa

from tasks.dedup import cap, exact, near
from tasks.dedup.candidates import write_candidates
from tasks.dedup.cap import CAPPED
from tasks.dedup.contamination import HITS
from tasks.dedup.decisions import Findings, write_decisions
from tasks.dedup.edges import EDGES
from tasks.dedup.evaluations import EvaluationFile, held
from tasks.dedup.near import VERIFIED
from tasks.dedup.partitions import read_numbered, read_partition, write_table
from tasks.dedup.rounds import Rounds, rounds_of, sorted_union
from tasks.dedup.settings import Step
from tasks.dedup.sign import sign_slice
from tasks.shards.manifest import WHOLE
from tasks.shards.plan import PlannedShard
from tasks.shards.publish import Output
from tasks.shards.receipt import PartCount, Receipt
from tasks.shards.store import Store


def build_shard(shard: PlannedShard, store: Store, evaluations: tuple[EvaluationFile, ...]) -> Receipt:
    """Build one shard of any round in this process."""
    if "step" not in shard.identity["recipe"]:
        return sign_slice(shard, store, held(evaluations).evaluations if evaluations else None)
    started, cpu = time.time(), time.process_time()
    work = _Work(rounds_of(shard, store), shard, evaluations)
    outputs, count = STEPS[shard.identity["recipe"]["step"]](work)
    return store.issue(
        shard.identity,
        outputs=outputs,
        rows_in=count,
        parts={WHOLE: PartCount(count, 0)} if count else {},
        drops={},
        facts=work.facts,
        volatile={
            "built_at": started, "seconds": time.time() - started, "cpu_seconds": time.process_time() - cpu,
            "host": gethostname(), "source": shard.part.file.uri, "source_bytes": shard.part.size,
        },
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Work:
    """One shard of a round, and what it can ask for."""

    rounds: Rounds
    shard: PlannedShard
    evaluations: tuple[EvaluationFile, ...]
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def partition(self) -> int:
        return self.shard.part.start

    @property
    def partitions(self) -> int:
        return self.rounds.recipe.partitions

    @property
    def folder(self) -> str:
        return self.rounds.store.folder(self.shard.key)

    def result(self, step: Step, name: str, schema: pa.Schema) -> pa.Table:
        """All that a step has found, which is not cut."""
        return read_partition(self.rounds.results(step, name), 0, 1, schema)

    def write(self, name: str, table: pa.Table) -> Output:
        return write_table(f"{self.folder}/{name}.arrow", table)


Found = tuple[list[Output], int]
"""The files that a step has written, and how many findings they hold."""


def _exact(work: _Work) -> Found:
    table = exact.resolve(work.rounds.signatures("exact"), work.partition, work.partitions)
    return [work.write("edges", table)], table.num_rows


def _pairs(work: _Work) -> Found:
    gone = sorted_union(_gone(work, "exact", "edges", EDGES))
    place = f"{work.folder}/pairs.arrow"
    output = write_candidates(work.rounds.signatures("bands"), work.partition, place, work.partitions, gone)
    return [output], 0


def _verify(work: _Work) -> Found:
    pairs, shingled = work.rounds.results("pairs", "pairs"), work.rounds.signatures("shingles")
    threshold = work.rounds.recipe.threshold or near.THRESHOLD
    table = near.verify(pairs, shingled, work.partition, work.partitions, threshold)
    return [work.write("verified", table)], table.num_rows


def _settle(work: _Work) -> Found:
    edges = near.resolve([work.result("verify", "verified", VERIFIED)])
    gone = sorted_union(_gone(work, "exact", "edges", EDGES), edges["dropped"].to_numpy())
    contaminated = np.setdiff1d(_hits(work)["number"].to_numpy(), gone)
    table = pa.Table.from_arrays([pa.array(contaminated)], schema=CAPPED)
    return [work.write("near", edges), work.write("contaminated", table)], edges.num_rows + table.num_rows


def _cap(work: _Work) -> Found:
    gone = sorted_union(
        _gone(work, "exact", "edges", EDGES),
        _gone(work, "settle", "near", EDGES),
        _gone(work, "settle", "contaminated", CAPPED),
    )
    most = work.rounds.recipe.cap or 0
    table = cap.resolve(work.rounds.signatures("prompts"), work.partition, work.partitions, most, gone)
    return [work.write("capped", table)], table.num_rows


def _decide(work: _Work) -> Found:
    drops = {
        "exact_duplicate": work.result("exact", "edges", EDGES),
        "near_duplicate": work.result("settle", "near", EDGES),
        "contaminated": work.result("settle", "contaminated", CAPPED),
        "beyond_cap": work.result("cap", "capped", CAPPED),
    }
    hits = _hits(work) if work.rounds.recipe.evaluations else None
    findings = Findings(work.rounds.roster, work.rounds.store, drops, hits)
    outputs, facts = write_decisions(findings, work.folder)
    books = held(work.evaluations).books if work.evaluations else []
    work.facts.update(facts, evaluations=books)
    return outputs, sum(table.num_rows for table in drops.values())


def _gone(work: _Work, step: Step, name: str, schema: pa.Schema) -> np.ndarray:
    return work.result(step, name, schema)["dropped"].to_numpy()


def _hits(work: _Work) -> pa.Table:
    """What all documents share with evaluations."""
    files = work.rounds.signatures("hits") if work.rounds.recipe.evaluations else []
    return read_numbered(files, 0, 1, HITS)


STEPS: Mapping[Step, Callable[[_Work], Found]] = {
    "exact": _exact,
    "pairs": _pairs,
    "verify": _verify,
    "settle": _settle,
    "cap": _cap,
    "decide": _decide,
}
