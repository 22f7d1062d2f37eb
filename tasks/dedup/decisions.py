"""Decisions: whether each document is kept, and why not.

    outcomes.arrow   per slice its dropped rows: the row, the reason, the document kept instead, the similarity
    edges.parquet    dropped and kept documents, by name
    hits.parquet     runs shared with evaluations, if there are any

Steps run in order (exact, near, contamination, cap), and each sees only the rows that the earlier ones kept, so a document is dropped at
most once. The document kept by its step may be dropped by a later one; its own row records this.

A slice reads only its own batch, by hash: if the decisions about a slice are unchanged, so are its rows.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, BinaryIO, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.publish import Output, publish
from tokenmill.tasks.shards.receipt import RECEIPT, Receipt
from tokenmill.tasks.shards.store import Store, read_bytes
from xxhash import xxh3_128

from .contamination import MIN_WORDS
from .documents import sorted_union
from .near import MADE_OF
from .partitions import ROWS_PER_SLICE, partitioned, read_partition, tables
from .shingles import KINDS

KEPT = "kept"
REASONS = ("exact_duplicate", "near_duplicate", "contaminated", "beyond_cap")
"""Reasons for dropping documents, in the order of the steps."""

DROPPED = pa.schema({"number": pa.int64(), "outcome": pa.string(), "kept": pa.int64(), "jaccard": pa.float64()})
"""A dropped document, the reason, the document kept instead (null if none), and their similarity (null if none)."""


def dropped(drops: Mapping[str, pa.Table]) -> pa.Table:
    """Return the dropped documents, a table of `DROPPED`, ascending.

    `drops` has for each reason a table with a column `dropped` and, for duplicates, `kept` and `jaccard`. Raises
    RunError for a document dropped twice. Memory is 50 bytes per document.
    """
    parts = [DROPPED.empty_table()]
    for reason, found in drops.items():
        nothing, names = pa.nulls(found.num_rows), found.column_names
        kept, jaccard = (found[name] if name in names else nothing for name in ("kept", "jaccard"))
        columns = [found["dropped"], pa.array([reason] * found.num_rows, pa.string()), kept, jaccard]
        parts.append(pa.table(columns, names=DROPPED.names).cast(DROPPED))
    table = pa.concat_tables(parts)
    table = table.take(pa.array(np.argsort(table["number"].to_numpy(), kind="stable"))).combine_chunks()
    numbers = table["number"].to_numpy()
    twice = np.flatnonzero(numbers[1:] == numbers[:-1])  # each step sees only what earlier ones kept
    if twice.size:
        number, reason = numbers[twice[0]], table["outcome"][int(twice[0]) + 1]
        raise RunError(
            f"document {number} is dropped twice, the second time as {reason} ({twice.size} such documents); "
            "this is a bug in tokenmill; please report it"
        )
    return table


OUTCOMES_FILE, EDGES_FILE, HITS_FILE = "outcomes.arrow", "edges.parquet", "hits.parquet"
NAMES_FILE, UNITS_FILE = "names.arrow", "units.arrow"

OUTCOMES = pa.schema(
    {"row": pa.int64(), "outcome": pa.string(), "duplicate_of": pa.large_string(), "jaccard": pa.float64()}
)
"""A dropped row of a slice, the reason, the name of the document kept instead (null if none), and their similarity
(null if none). Rows ascend."""

NAMED_EDGES = pa.schema([
    pa.field("dropped", pa.large_string()),
    pa.field("kept", pa.large_string()),
    pa.field("jaccard", pa.float64()),
    pa.field("reason", pa.string()),
    pa.field("group", pa.large_string()),
    *(pa.field(kind, pa.int32()) for kind in KINDS),
])  # fmt: skip
"""A dropped and a kept document; `group` is the first document of their connected component. The unit counts belong to
the dropped near-duplicate; null for exact duplicates."""

NAMED_HITS = pa.schema(
    {
        "document": pa.large_string(),
        "evaluation": pa.large_string(),
        "row": pa.int64(),
        "runs": pa.int64(),
        "words": pa.large_string(),
    }
)
"""A document, the file and row of an evaluation, the number of shared runs, and the words of the first."""

MAX_NAMED = 10
"""The maximum number of documents to name that were not compared with all candidates."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """Decisions in the store, made by `decisions_in`. Read outcomes with `rows_decided(uri, digest)` in any process.

    `edges` and `hits` are files in `folder`. `facts` holds the number of documents by outcome (`tally`), by their most
    frequent unit type (`units`), documents kept without a full comparison (`not_compared`, and the first of them),
    the `evaluations`, the number without a prompt, and `warnings`.
    """

    folder: str
    digests: Sequence[str]
    edges: Output
    hits: Output | None
    facts: Mapping[str, Any]

    @property
    def uri(self) -> str:
        """The file of outcomes."""
        return f"{self.folder}/{OUTCOMES_FILE}"

    @property
    def tally(self) -> Mapping[str, int]:
        """The number of documents by outcome, kept ones included."""
        return self.facts["tally"]

    @property
    def files(self) -> list[tuple[str, Output]]:
        """The published files: the place of each, and its size and hash."""
        return [(f"{self.folder}/{output.path}", output) for output in (self.edges, self.hits) if output is not None]


def decisions_in(store: Store, receipt: Receipt) -> Decisions:
    """Return the decisions recorded in a receipt."""
    files = {output.path: output for output in receipt.outputs}
    facts = {name: value for name, value in receipt.facts.items() if name != "slices"}
    return Decisions(store.folder(receipt.key), receipt.facts["slices"], files[EDGES_FILE], files.get(HITS_FILE), facts)


def rows_decided(uri: str, digest: str) -> pa.Table:
    """Return the decisions about the slices with this hash, a table of `OUTCOMES`.

    Raises RunError if there are none or the file changed.
    """
    known = _digests(uri)
    table = read_partition([uri], known.index(digest), len(known), OUTCOMES) if digest in known else None
    if table is None or digest_of(table) != digest:
        raise RunError(f"{uri}: doesn't contain decisions {digest}; rerun the same command with force=true")
    return table


@lru_cache(maxsize=1)
def _digests(uri: str) -> list[str]:
    """The hashes of all slices, from the receipt beside the outcomes."""
    place = f"{uri.rpartition('/')[0]}/{RECEIPT}"
    return Receipt.load(read_bytes(place) or b"").facts["slices"]


def digest_of(table: pa.Table) -> str:
    """Return the hash of decisions, in hexadecimal."""
    hasher = xxh3_128()
    for column in table.columns:  # by values: Arrow's buffers may differ for equal ones
        hasher.update(orjson.dumps(column.to_pylist()))
    return hasher.hexdigest()


def write_decisions(
    folder: str,
    store: Store,
    signatures: Sequence[str],
    slice_names: Sequence[str],
    drops: Mapping[str, pa.Table],
    hits: pa.Table | None,
    unseen: np.ndarray,
) -> tuple[list[Output], dict[str, Any]]:
    """Write the decision files, given the findings of the rounds by document number, and return them with their facts.

    `signatures` are the keys and `slice_names` the names of the slices; `hits` is None without evaluations; `unseen` (int64)
    are documents not compared with all candidates.

    Raises RunError for a document dropped twice or missing signatures, OSError and InputError as `publish` does.
    """
    signed = store.proven(signatures)
    receipts = [signed[key] for key in signatures if key in signed]
    if len(receipts) < len(signatures):
        raise RunError("signatures are missing; rerun the same command to rebuild them")
    table, edges = dropped(drops), _edges(drops)
    unseen = np.setdiff1d(unseen, table["number"].to_numpy())  # a dropped one needs no warning
    named = [unseen[:MAX_NAMED], *(edges[name].to_numpy() for name in ("dropped", "kept", "group"))]
    # Names are read for the documents that are shown, of which there are few.
    shown = sorted_union(*named, *([] if hits is None else [hits["number"].to_numpy()]))
    names = _names(shown, store, slice_names, receipts)
    columns = [names(edges["dropped"]), names(edges["kept"]), edges["jaccard"], edges["reason"]]
    columns += [names(edges["group"]), *_made_of(edges, store, receipts)]
    outputs = [_write_parquet(f"{folder}/{EDGES_FILE}", pa.Table.from_arrays(columns, schema=NAMED_EDGES))]
    if hits is not None:
        named_hits = pa.Table.from_arrays([names(hits["number"]), *hits.columns[1:]], schema=NAMED_HITS)
        outputs.append(_write_parquet(f"{folder}/{HITS_FILE}", named_hits))
    outcomes, digests = _write_outcomes(f"{folder}/{OUTCOMES_FILE}", table, names, len(receipts))
    tally = Counter(table["outcome"].to_pylist())
    tally[KEPT] = sum(receipt.documents for receipt in receipts) - table.num_rows
    facts = {
        "slices": digests,
        "tally": dict(sorted(tally.items())),
        "units": dict(sum((Counter(receipt.facts.get("units", {})) for receipt in receipts), Counter[str]())),
        "not_compared": {"documents": len(unseen), "first": names(pa.array(unseen[:MAX_NAMED])).to_pylist()},
        "without_prompt": sum(receipt.facts.get("without_prompt", 0) for receipt in receipts),
    }
    return [*outputs, outcomes], facts


def warnings_about(facts: Mapping[str, Any]) -> Iterator[str]:
    """Warnings for the user, given the facts of decisions."""
    for each in facts["evaluations"]:
        if each["too_short"]:
            yield (
                f"evaluation {each['name']}: {each['too_short']:,} of {each['rows']:,} rows have fewer than "
                f"{MIN_WORDS} words and are not searched for"
            )
    if without := facts["without_prompt"]:
        yield f"cap: {without:,} documents don't have a prompt, so the cap doesn't apply to them"
    if count := facts["not_compared"]["documents"]:
        yield (
            f"near-duplicates: {count:,} kept documents have too many similar ones to be compared with all of them, "
            f"such as {', '.join(facts['not_compared']['first'])}; some near-duplicates may remain"
        )


Named = Callable[[pa.ChunkedArray | pa.Array], pa.Array]
"""Document names, by number; null for null."""


def _names(numbers: np.ndarray, store: Store, slice_names: Sequence[str], receipts: Sequence[Receipt]) -> Named:
    """Look up names for the documents `numbers` (int64, ascending): their own, otherwise slice name and row."""
    parts: list[pa.Array] = [pa.array([], pa.large_string())]
    for slice_number in np.unique(numbers // ROWS_PER_SLICE).tolist():
        first = slice_number * ROWS_PER_SLICE
        rows = numbers[slice(*np.searchsorted(numbers, [first, first + ROWS_PER_SLICE]))] - first
        prefix = slice_names[slice_number]
        places = pa.array([f"{prefix}#{row}" for row in rows.tolist()], pa.large_string())
        receipt = receipts[slice_number]
        if NAMES_FILE in {output.path for output in receipt.outputs}:
            found = [_chosen(table, rows) for table in tables(store.path(receipt.key, NAMES_FILE), 0, 1)]
            own = pa.concat_tables(found).combine_chunks()["name"].combine_chunks()
            places = compute.call_function("coalesce", [own, places])
        parts.append(places)
    names = pa.concat_arrays(parts)

    def named(asked: pa.ChunkedArray | pa.Array) -> pa.Array:
        wanted = asked.fill_null(-1).to_numpy()  # no document has a negative number
        return names.take(pa.array(np.searchsorted(numbers, wanted), mask=wanted < 0))

    return named


def _chosen(table: pa.Table, rows: np.ndarray) -> pa.Table:
    return table.filter(pa.array(np.isin(table["number"].to_numpy(), rows)))


def _edges(drops: Mapping[str, pa.Table]) -> pa.Table:
    """The edges of all steps with their reason, by dropped document."""
    found = [
        table.append_column("reason", pa.array([reason] * table.num_rows, pa.string()))
        for reason, table in drops.items()
        if "kept" in table.column_names
    ]
    return pa.concat_tables(found).sort_by("dropped").combine_chunks()


def _made_of(edges: pa.Table, store: Store, receipts: Sequence[Receipt]) -> list[pa.Array]:
    """Units by kind of the dropped near-duplicates, one column per kind; null for exact duplicates."""
    near = compute.call_function("equal", [edges["reason"], pa.scalar("near_duplicate")])
    numbers = edges.filter(near)["dropped"].to_numpy()
    slices = numbers // ROWS_PER_SLICE
    found = [
        _chosen(table, numbers[slices == number] - number * ROWS_PER_SLICE)
        for number in np.unique(slices).tolist()
        for table in tables(store.path(receipts[number].key, UNITS_FILE), 0, 1)
    ]
    table = pa.concat_tables([MADE_OF.empty_table(), *found]).combine_chunks()
    places = np.cumsum(near.to_numpy()) - 1  # edges ascend as the table does
    rows = pa.array(places, mask=~near.to_numpy())
    return [table[kind].combine_chunks().take(rows) for kind in KINDS]


def _write_parquet(place: str, table: pa.Table) -> Output:
    with publish(place) as file, pq.ParquetWriter(cast("BinaryIO", file), table.schema, compression="zstd") as writer:
        writer.write_table(table)
    return file.output


def _write_outcomes(place: str, table: pa.Table, names: Named, slices: int) -> tuple[Output, list[str]]:
    """Write the outcomes of dropped documents, slice by slice, and return the hash of each slice."""
    digests: list[str] = []
    bounds = np.searchsorted(table["number"].to_numpy(), np.arange(slices + 1) * ROWS_PER_SLICE).tolist()
    with partitioned(place, OUTCOMES, slices) as file:
        for number, (start, stop) in enumerate(pairwise(bounds)):
            some = table.slice(start, stop - start)
            rows = pa.array(some["number"].to_numpy() - number * ROWS_PER_SLICE)
            columns = [rows, some["outcome"], names(some["kept"]), some["jaccard"]]
            decided = pa.Table.from_arrays(columns, schema=OUTCOMES)
            file.append(decided)
            digests.append(digest_of(decided))  # part of a written shard's identity
    return file.output, digests
