"""The decision about a row among duplicates: the outcome, and the row kept instead.

Deduplicated text has its decisions in the store, by the row in the slice. Normalized rows have their own; decisions about dropped ones
are in the store too, by the row in the shard before deduplication. A decision names the kept document by its file and row, by
its own id (`id_field`), or by the `row_id` of a normalized row.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute
from tokenmill.tasks.blend.models import SPLITS
from tokenmill.tasks.dedup.decisions import KEPT, NAMES_FILE, OUTCOMES_FILE, rows_decided
from tokenmill.tasks.dedup.partitions import tables
from tokenmill.tasks.dedup.rounds import KIND
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.harmony.columns import SCHEMA as ROWS
from tokenmill.tasks.harmony.shard import FILE
from tokenmill.tasks.shards.receipt import RECEIPT, InvalidReceiptError, Receipt, shard_key
from tokenmill.tasks.shards.records import Manifest, ShardEntry
from tokenmill.tasks.shards.store import Store, read_bytes, size_of
from tokenmill.tasks.sources.discovery import name_within
from tokenmill.tasks.storage import filesystem, join, open_binary

COLUMNS = ("source_row", "row_id", "dedup_outcome", "dup_of", "dup_jaccard", "stats_token_len")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a row is dropped or tagged, the name of the document kept instead, and their similarity (None if there is none)."""

    outcome: str
    kept: str | None
    jaccard: float | None


def verdict_of(store: Store, manifest: Manifest, entry: ShardEntry, row: int) -> Verdict | None:
    """Return the decision about a row of the slice in a shard; None if the row isn't a duplicate.

    Raises RunError if the decisions are no longer in the store.
    """
    if "decided" not in entry:
        return None
    if store.kind == KIND:
        return _decided(store, entry, row)
    found = normalized_row(store, entry["key"], row)
    if found is not None:
        number, rows = found
        outcome, kept, jaccard = (rows[name][number].as_py() for name in COLUMNS[2:5])
        return None if outcome == KEPT else Verdict(outcome, kept, jaccard)
    planned = _planned_key(manifest, entry)
    # A dropped row is only among the rows that decisions were made about, which may have been pruned
    if entry["decided"]["mode"] == "drop" and size_of(place := store.path(planned, FILE)) is None:
        raise RunError(f"{place}: the rows before deduplication are gone; normalize the data again")
    before = normalized_row(store, planned, row)
    return before and _decided(store, entry, before[0])


def _planned_key(manifest: Manifest, entry: ShardEntry) -> str:
    """The key of the shard as planned, before decisions about its rows."""
    return shard_key({**manifest["recipes"][entry["recipe"]], "source": entry["source"]})


def normalized_row(store: Store, key: str, row: int) -> tuple[int, pa.Table] | None:
    """Return the place of a row in the slice among the normalized rows of a shard, and these rows; None if it is not there."""
    rows = normalized_rows(store.path(key, FILE))
    places = np.flatnonzero(rows["source_row"].to_numpy() == row)
    return (int(places[0]), rows) if places.size else None


@lru_cache(maxsize=8)
def normalized_rows(place: str) -> pa.Table:
    """Return the rows of a file of normalized rows, a table of `COLUMNS`; empty without such a file."""
    try:
        with open_binary(place) as stream:
            return pq.read_table(stream, columns=list(COLUMNS))
    except FileNotFoundError:
        return pa.schema([ROWS.field(name) for name in COLUMNS]).empty_table()


@lru_cache(maxsize=8)
def source_rows(place: str) -> np.ndarray:
    """Return the row of the slice of each row in a file of normalized rows or in a list of them, int64 [rows]."""
    with open_binary(place) as stream:
        return pq.read_table(stream, columns=["source_row"])["source_row"].to_numpy()


def _decided(store: Store, entry: ShardEntry, number: int) -> Verdict | None:
    digest = entry["decided"]["outcomes"]
    system, path = filesystem(join(store.place, KIND))
    # The manifest has the digest of the decisions; which round made them is only in the receipts of rounds
    for found in sorted(cast("list[str]", system.glob(f"{path}/*/{OUTCOMES_FILE}"))):
        place = system.unstrip_protocol(found).removeprefix("file://")
        try:
            receipt = Receipt.load(read_bytes(f"{place.rpartition('/')[0]}/{RECEIPT}") or b"")
        except InvalidReceiptError:
            continue
        if digest in receipt.facts["slices"]:
            decided = rows_decided(place, digest)
            rows = decided.filter(compute.field("row") == number).slice(0, 1).to_pylist()
            return Verdict(rows[0]["outcome"], rows[0]["duplicate_of"], rows[0]["jaccard"]) if rows else None
    raise RunError(f"{join(store.place, KIND)}: the decisions about duplicates are gone; run the deduplication again")


def kept_row(store: Store, manifest: Manifest, name: str) -> tuple[int, int] | None:
    """Return the shard, by its number in the manifest, and the row in its slice of the document that a decision names; None if
    there is none.
    """
    find = _text_row if store.kind == KIND else _normalized_row_called
    rows = ((shard, find(store, manifest, entry, name)) for shard, entry in enumerate(manifest["shards"]))
    return next(((shard, row) for shard, row in rows if row is not None), None)


def _text_row(store: Store, manifest: Manifest, entry: ShardEntry, name: str) -> int | None:
    if manifest["settings"]["id_field"]:
        place = store.path(_planned_key(manifest, entry), NAMES_FILE)
        for table in tables(place, 0, 1) if size_of(place) else ():
            named = table.filter(compute.field("name") == name)["number"].to_pylist()
            if named:
                return named[0]
    # A document without an id of its own is named by its file, the start of its slice, and its row there
    (source,) = (each for each in manifest["blend"][entry["split"]] if each["name"] == entry["dataset"])
    split = f"{entry['split']}/" if entry["split"] in SPLITS else ""
    file = f"{split}{entry['dataset']}/{name_within(source['path'], entry['file'])}@{entry['start']}#"
    number = name.removeprefix(file)
    return int(number) if number != name and number.isdecimal() else None


def _normalized_row_called(store: Store, manifest: Manifest, entry: ShardEntry, name: str) -> int | None:
    keys = dict.fromkeys([entry["key"], _planned_key(manifest, entry)])
    for rows in (normalized_rows(store.path(key, FILE)) for key in keys):
        row = compute.call_function("index_in", [pa.scalar(name)], compute.SetLookupOptions(rows["row_id"])).as_py()
        if row is not None:
            return rows["source_row"][row].as_py()
    return None
