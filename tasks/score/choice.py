"""A choice published: which of the rows that were embedded are chosen, which not, and why.

    OUT/chosen.parquet      row_id, cluster, distance to its centre, and place: 1 for the nearest to it that was chosen
    OUT/rejected.parquet    every other row: its cluster, its distance, and the reason
    OUT/report.md, .json    clusters, quotas, data sets, and pairs that are nearly the same
    OUT/manifest.json       settings, what was read, and the hashes of these files

Every row that was embedded stands in one of the tables, once. It was left out because it is nearly the same as a row
that was chosen (`near_duplicate`, with that row as `witness` and their cosine), or because its cluster gave its share
before it (`quota`).

All vectors are in memory, see `embedded`. Given the seed and a CPU the tables are the same bytes on every run; see `choose` for the time.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any, Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.select.scores import CHOICE, CHOSEN, ROW_ID, ScoreFolder
from tokenmill.tasks.shards.lock import locked
from tokenmill.tasks.shards.manifest import MANIFEST, manifest_bytes, published_manifest
from tokenmill.tasks.shards.publish import Output, publish, publish_bytes
from tokenmill.tasks.shards.published import file_hash
from tokenmill.tasks.storage import absolute, is_local, join
from tokenmill.tasks.strict import Seed, Strict

from .choice_report import choice_facts, choice_markdown
from .choose import Choice, choose
from .embedded import embeddings_folder, read_embeddings
from .engines import nearest_engine

REJECTED = "rejected.parquet"
REPORT = "report"

ROWS_PER_CLUSTER = 20
"""How many rows a cluster gives where nobody says how many clusters there are."""


class ChoiceSettings(Strict, frozen=True):
    """Everything a person can choose about a diverse choice."""

    rows: int = Field(default=10_000, ge=1, description="How many rows are chosen, if there are as many.")
    clusters: int | None = Field(default=None, ge=1, description="Clusters; by default one for 20 rows to be chosen.")
    quota: int | None = Field(default=None, ge=1, description="Most rows of a cluster; by default as even as possible.")
    threshold: float = Field(
        default=0.95, gt=0, description="No two rows with this cosine or more are chosen; above 1 all may be."
    )
    seed: Seed = Field(default=42, description="Seed of the choice.")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="Where clusters are found.")


Draw = Callable[[np.ndarray, np.ndarray], bytes]
"""Draws vectors (float32 [rows, dimensions]) and those chosen among them (the numbers of the rows, int64) as SVG."""


def choose_rows(embeddings: str, output_dir: str, settings: ChoiceSettings, draw: Draw | None = None) -> dict[str, Any]:
    """Choose rows of a published folder of embeddings, publish the choice under `output_dir`, and return its manifest.

    Raises InputError for a folder of anything else, for settings that make no sense and for a GPU that is not there,
    RunError for vectors that are none.
    """
    started, output_dir = time.time(), absolute(output_dir)
    _require_own(output_dir)
    nearest = nearest_engine(settings.device)
    folder = embeddings_folder(embeddings)
    found = read_embeddings(folder)
    clusters = settings.clusters or max(1, min(settings.rows, len(found.vectors)) // ROWS_PER_CLUSTER)
    choice = choose(found.vectors, settings.rows, clusters, settings.threshold, settings.seed, nearest, settings.quota)
    facts = choice_facts(choice, found.names, settings.quota)
    documents = {
        f"{REPORT}.json": orjson.dumps(facts, option=orjson.OPT_INDENT_2),
        f"{REPORT}.md": choice_markdown(facts),
    }
    if draw is not None:
        documents[f"{REPORT}.svg"] = draw(found.vectors, choice.rows)
    tables = {CHOSEN: chosen_rows(choice, found.names), REJECTED: rejected_rows(choice, found.names)}
    with locked(output_dir) if is_local(output_dir) else nullcontext():
        files = [_write_table(output_dir, name, table) for name, table in tables.items()]
        files += [replace(publish_bytes(join(output_dir, name), data), path=name) for name, data in documents.items()]
        manifest = _manifest(folder, settings, facts, files, {"store": output_dir, "seconds": time.time() - started})
        publish_bytes(join(output_dir, MANIFEST), manifest_bytes(manifest))
    return manifest


def _require_own(output_dir: str) -> None:
    """Raises InputError where the folder is that of something else."""
    manifest = published_manifest(output_dir)
    if manifest is not None and manifest["type"] != CHOICE:
        raise InputError(
            f"{output_dir}: holds a preparation of type {manifest['type']!r}; choose into a folder of its own"
        )


def chosen_rows(choice: Choice, names: pa.Table) -> pa.Table:
    """The rows that were chosen, cluster by cluster, the nearest to the centre first."""
    labels, distances = choice.clusters.labels[choice.rows], choice.clusters.distances[choice.rows]
    order = np.lexsort((choice.rows, distances, labels))
    rows, labels = choice.rows[order], labels[order]
    first = np.searchsorted(labels, labels)
    return pa.table({
        ROW_ID: names[ROW_ID].take(pa.array(rows)),
        "cluster": pa.array(labels, pa.int32()),
        "distance": pa.array(np.sqrt(distances[order]), pa.float32()),
        "place": pa.array(np.arange(len(rows)) - first + 1, pa.int32()),
    })  # fmt: skip


def rejected_rows(choice: Choice, names: pa.Table) -> pa.Table:
    """The rows that were not chosen, in their order, each with its reason."""
    rows = np.setdiff1d(np.arange(names.num_rows), choice.rows)
    removed = choice.removed.sort_by("removed")
    places = np.searchsorted(rows, removed["removed"].to_numpy())
    witness, cosine = np.full(len(rows), -1), np.zeros(len(rows), np.float32)
    witness[places], cosine[places] = removed["kept"].to_numpy(), removed["cosine"].to_numpy()
    near = witness >= 0
    return pa.table({
        ROW_ID: names[ROW_ID].take(pa.array(rows)),
        "cluster": pa.array(choice.clusters.labels[rows], pa.int32()),
        "distance": pa.array(np.sqrt(choice.clusters.distances[rows]), pa.float32()),
        "reason": pa.array(np.where(near, "near_duplicate", "quota"), pa.string()),
        "witness": names[ROW_ID].take(pa.array(witness, mask=~near)),
        "cosine": pa.array(cosine, pa.float32(), mask=~near),
    })  # fmt: skip


def _write_table(output_dir: str, name: str, table: pa.Table) -> Output:
    with publish(join(output_dir, name)) as file, pq.ParquetWriter(file, table.schema, compression="zstd") as writer:
        writer.write_table(table)
    return replace(file.output, path=name)


def _manifest(
    folder: ScoreFolder,
    settings: ChoiceSettings,
    facts: Mapping[str, Any],
    files: Sequence[Output],
    volatile: Mapping[str, Any],
) -> dict[str, Any]:
    """The manifest of a choice: of one piece, so it has no shards."""
    return {
        "type": CHOICE,
        "settings": settings.model_dump(),
        "inputs": [file_hash(file.place) for file in folder.files],
        "totals": {"rows": facts["rows"], "documents": facts["chosen"], "dropped": facts["left_out"]},
        "recipes": [],
        "shards": [],
        "missing": [],
        "files": [asdict(file) for file in files],
        "volatile": {"created_at": time.time(), "embeddings": folder.place, **volatile},
    }


def choice_record(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The one line that the next program reads."""
    return {CHOICE: {"path": manifest["volatile"]["store"], "type": CHOICE, **manifest["totals"]}}
