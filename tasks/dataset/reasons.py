"""Why a row was dropped: the recorded reason, or the reason of a shard that is built only from this row.

A shard records the reason of every bad row, and of every decision about duplicates; of other drops it only counts the reasons.
If there are several, the row is read from its source again, whose content must be unchanged, and a shard of one row is built in
a temporary folder, in the same way. That costs two reads of the slice.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, BinaryIO, cast

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.build import FILTERED, QUARANTINE
from tokenmill.tasks.shards.kind import Planned
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.publish import Output, publish, publish_bytes
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.settings import RUNTIME_SETTINGS
from tokenmill.tasks.shards.store import Store, read_bytes
from tokenmill.tasks.sources.files import Row, Slice, SourceFile
from tokenmill.tasks.sources.formats import format_of
from tokenmill.tasks.sources.integrity import HASHED
from tokenmill.tasks.sources.slices import content_hash
from tokenmill.tasks.storage import is_local
from tokenmill.tasks.strict import parse

Entry = Mapping[str, Any]
"""A shard in a manifest."""

SELECTING = {"scale", "sample", "splits"}
"""Settings that choose the rows of the blend: a shard's slice records which were chosen."""


def quarantined(store: Store, receipt: Receipt) -> dict[int, Mapping[str, Any]]:
    """The bad rows of a shard, by row in the slice. Raises RunError if the file is missing."""
    if not any(output.path == QUARANTINE for output in receipt.outputs):
        return {}
    place = store.path(receipt.key, QUARANTINE)
    content = read_bytes(place)
    if content is None:
        raise RunError(f"{place}: missing; run tokenmill verify on the folder, then prepare it again")
    return {row["row"]: row for row in map(orjson.loads, content.splitlines())}


def reason_of(path: str, manifest: Mapping[str, Any], entry: Entry, row: int) -> str:
    """The reason why a row of a shard, neither quarantined nor decided about, was dropped.

    Raises RunError or InputError if it cannot be found out, for example because the source has changed.
    """
    kind = preparation(manifest["type"])
    planned = _planned(path, manifest, entry)
    part = _slice(planned, entry)
    identity = manifest["recipes"][entry["recipe"]]
    if identity["format_version"] != planned.plan.shards[0].identity["format_version"]:
        raise RunError("a different version of tokenmill built the shard; prepare the data again")
    with tempfile.TemporaryDirectory(prefix="tokenmill-why-") as folder:
        alone = _alone(part, row, folder)
        if alone is None:
            return FILTERED
        source = {"content": "", "format": alone.file.format, "compression": None}
        shard = PlannedShard(entry["dataset"], entry["split"], alone, {**identity, "source": source})
        receipt = kind.stages[0].build(shard, Store(folder, kind.name), **kind.stages[0].arguments(planned))
    if not receipt.drops:
        raise RunError("the row is not dropped today; run tokenmill verify on the folder")
    return next(iter(receipt.drops))


def _planned(path: str, manifest: Mapping[str, Any], entry: Entry) -> Planned[Any, Any]:
    """Return the plan of a shard's dataset, reduced to its file if that is local and its path doesn't give fields: the workers' input, and the file today."""
    kind = preparation(manifest["type"])
    (source,) = (each for each in manifest["blend"][entry["split"]] if each["name"] == entry["dataset"])
    if is_local(entry["file"]) and "keys" not in entry["source"]:
        source = {**source, "path": entry["file"]}
    unused = {*SELECTING, *RUNTIME_SETTINGS, *kind.hidden}
    chosen = {name: value for name, value in manifest["settings"].items() if name not in unused}
    chosen |= {"store": manifest["volatile"]["store"], "on_bad_row": "quarantine"}
    settings = parse(kind.settings, chosen, "manifest.json: settings")
    return kind.plan(Blend.model_validate({entry["split"]: [source]}), settings, path)


def _slice(planned: Planned[Any, Any], entry: Entry) -> Slice:
    """The slice of a shard in the file as it is today. Raises RunError if its content has changed."""
    planned_parts = (part for shard in planned.plan.shards for part in shard.part.members or [shard.part])
    parts = [part for part in planned_parts if part.file.uri == entry["file"]]
    recorded, limit = entry["source"]["content"], entry["source"].get("rows")
    if parts and entry["stop"] <= max(part.stop for part in parts):
        part = replace(parts[0], start=entry["start"], stop=entry["stop"], content=recorded, rows=limit)
        contents = (
            {content_hash(part, part.fields)} if recorded.startswith(HASHED) else {each.content for each in parts}
        )
        if recorded in contents:
            return part
    raise RunError(f"{entry['file']} has changed since the shard was built; restore it, or prepare the data again")


def _alone(part: Slice, row: int, folder: str) -> Slice | None:
    """A file with one row of a slice, in `folder`; None for a row that is not read, because the filter drops its row group."""
    first, found = 0, None
    for rows in format_of(part.file).rows(part):
        if first <= row < first + len(rows):
            found = rows[row - first : row - first + 1]
        first += len(rows)
    if found is None:
        raise RunError(f"{part.file.uri}: the slice doesn't contain row {row + 1} any more; prepare the data again")
    if isinstance(found, range):
        return None
    chosen: dict[str, Any] = {"filters": part.filters, "where": part.where, "keys": part.keys}
    if isinstance(found, pa.RecordBatch):
        output = _write_parquet(f"{folder}/row.parquet", found)
        return Slice(SourceFile(output.path, output.size, "parquet"), 0, 1, size=output.size, **chosen)
    line = cast("Row", found[0])
    content = line if isinstance(line, bytes) else line.head
    output = publish_bytes(f"{folder}/row.jsonl", content.replace(b"\n", b" ") + b"\n")
    return Slice(SourceFile(output.path, output.size, "jsonl"), 0, output.size, size=output.size, **chosen)


def _write_parquet(place: str, rows: pa.RecordBatch) -> Output:
    with publish(place) as file, pq.ParquetWriter(cast("BinaryIO", file), rows.schema) as writer:
        writer.write_batch(rows)
    return file.output
