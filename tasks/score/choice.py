"""Publish a choice: the chosen rows, the rejected rows, and the reasons.

    OUT/chosen.parquet      row_id, cluster, distance to its center, and place: 1 for the chosen row nearest to the center
    OUT/rejected.parquet    every other row: its cluster, its distance, and the reason
    OUT/report.md, .json    clusters, quotas, datasets, and pairs of near-duplicates
    OUT/manifest.json       settings, inputs, and the hashes of these files

Every embedded row is in exactly one of the tables. A row is rejected as a near-duplicate of a chosen row (`near_duplicate`,
with that row as `witness` and their cosine), or because its cluster's quota was full (`quota`).

All vectors are held in memory, see `embed`. On a CPU the same seed gives the same bytes; see `choose` for timings.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any, Literal, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.kit.parts import Cell, Table, table_lines
from tokenmill.tasks.seal import sealed
from tokenmill.tasks.select.scores import CHOICE, CHOSEN, ROW_ID
from tokenmill.tasks.shards.manifest import MANIFEST, file_hash, published_manifest
from tokenmill.tasks.shards.publish import Output, publish, publish_bytes
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.shards.store import locked
from tokenmill.tasks.storage import absolute, is_local, join
from tokenmill.tasks.strict import Seed, Strict

from .choose import Choice, choose, nearest_centers, nearest_with_torch, quotas
from .embed import embeddings_folder, read_embeddings

REJECTED = "rejected.parquet"
REPORT = "report"

ROWS_PER_CLUSTER = 20  # rows to choose per cluster if the settings do not set the number of clusters
MAX_LISTED = 50  # the maximum number of pairs in the report, the most similar first, and of clusters in its text


class ChoiceSettings(Strict, frozen=True):
    """The settings of a diverse choice."""

    rows: int = Field(default=10_000, ge=1, description="Rows to choose, or all if there are fewer.")
    clusters: int | None = Field(default=None, ge=1, description="Clusters; by default one per 20 rows to choose.")
    quota: int | None = Field(default=None, ge=1, description="Row limit per cluster; by default as even as possible.")
    threshold: float = Field(
        default=0.95, gt=0, description="Choose no two rows with this cosine or more; above 1, any rows."
    )
    seed: Seed = Field(default=42, description="Random seed.")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="Device that computes the clusters.")


def choose_rows(embeddings: str, output_dir: str, settings: ChoiceSettings) -> Manifest:
    """Choose rows from a published embedding folder, publish the choice under `output_dir`, and return its manifest.

    Raises InputError for a different type of folder, settings out of range or a missing GPU, RunError for non-finite vectors.
    """
    started, output_dir = time.time(), absolute(output_dir)
    manifest = published_manifest(output_dir)
    if manifest is not None and manifest["type"] != CHOICE:
        raise InputError(
            f"{output_dir}: holds a preparation of type {manifest['type']!r}; choose a different --output-dir"
        )
    nearest = nearest_centers if settings.device == "cpu" else nearest_with_torch()
    folder = embeddings_folder(embeddings)
    found = read_embeddings(folder)
    clusters = settings.clusters or max(1, min(settings.rows, len(found.vectors)) // ROWS_PER_CLUSTER)
    choice = choose(found.vectors, settings.rows, clusters, settings.threshold, settings.seed, nearest, settings.quota)
    facts = choice_facts(choice, found.names, settings.quota)
    documents = {
        f"{REPORT}.json": orjson.dumps(facts, option=orjson.OPT_INDENT_2),
        f"{REPORT}.md": "".join(f"{line}\n" for line in _lines(facts)).encode(),
    }
    tables = {CHOSEN: chosen_rows(choice, found.names), REJECTED: rejected_rows(choice, found.names)}
    files: list[Output] = []
    with locked(output_dir) if is_local(output_dir) else nullcontext():  # no locks in an object store
        for name, table in tables.items():
            with (
                publish(join(output_dir, name)) as file,
                pq.ParquetWriter(file, table.schema, compression="zstd") as writer,
            ):
                writer.write_table(table)
            files.append(replace(file.output, path=name))
        files += [replace(publish_bytes(join(output_dir, name), data), path=name) for name, data in documents.items()]
        record = {
            "type": CHOICE, "settings": settings.model_dump(),
            "inputs": [file_hash(file.place) for file in folder.files],
            "totals": {"rows": facts["rows"], "documents": facts["chosen"], "dropped": facts["left_out"]},
            "recipes": [], "shards": [], "missing": [],  # a choice is made in one piece
            "files": [asdict(file) for file in files],
            "volatile": {
                "created_at": time.time(), "embeddings": folder.place, "store": output_dir, "seconds": time.time() - started,
            },
        }  # fmt: skip
        publish_bytes(join(output_dir, MANIFEST), sealed(record))
    return cast("Manifest", record)


def chosen_rows(choice: Choice, names: pa.Table) -> pa.Table:
    """Return the chosen rows, cluster by cluster, the nearest to the center first."""
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
    """Return the rejected rows in their original order, each with a reason."""
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


def choice_record(manifest: Manifest) -> dict[str, Any]:
    """Return the record that the next command reads from stdin."""
    return {CHOICE: {"path": manifest["volatile"]["store"], "type": CHOICE, **manifest["totals"]}}


def choice_facts(choice: Choice, names: pa.Table, quota: int | None) -> dict[str, Any]:
    """Return the report as plain JSON. `names` are the rows' `row_id`, `dataset` and `split`; `quota` is the maximum per cluster."""
    ids, sizes, rows = names[ROW_ID], choice.clusters.sizes, names.num_rows
    shares = quotas(np.zeros_like(sizes), np.minimum(sizes, rows if quota is None else quota), choice.budget)
    chosen, near = (
        np.bincount(choice.clusters.labels[each], minlength=len(choice.clusters.centers))
        for each in (choice.rows, choice.removed["removed"].to_numpy())
    )
    order = np.lexsort((choice.clusters.distances, choice.clusters.labels))
    nearest = np.append(order, 0)[np.searchsorted(choice.clusters.labels[order], np.arange(len(sizes)))]
    pairs = choice.removed.sort_by([("cosine", "descending"), ("removed", "ascending")]).slice(0, MAX_LISTED)
    removed = choice.removed.num_rows
    is_chosen = np.zeros(rows, np.int64)
    is_chosen[choice.rows] = 1
    table = names.select(["dataset", "split"]).append_column("chosen", pa.array(is_chosen))
    # On one thread, because several would return the groups in any order.
    counted = table.group_by(["dataset", "split"], use_threads=False).aggregate([([], "count_all"), ("chosen", "sum")])
    largest_first = [("count_all", "descending"), ("dataset", "ascending"), ("split", "ascending")]
    return {
        "rows": rows, "budget": choice.budget, "chosen": len(choice.rows), "seed": choice.seed,
        "threshold": choice.threshold, "most_of_a_cluster": quota,
        "left_out": {"near_duplicate": removed, "quota": rows - len(choice.rows) - removed},
        "data_sets": [
            {"dataset": each["dataset"], "split": each["split"], "rows": each["count_all"], "chosen": each["chosen_sum"]}
            for each in counted.sort_by(largest_first).to_pylist()
        ],
        "clusters": [
            {
                "cluster": cluster, "rows": int(sizes[cluster]), "chosen": int(chosen[cluster]),
                "near_duplicates": int(near[cluster]), "typical_row": ids[int(nearest[cluster])].as_py(),
                "quota": int(shares[cluster]),
            }
            for cluster in np.argsort(-sizes, kind="stable").tolist() if sizes[cluster]
        ],
        "removed_pairs": [
            {**pair, "removed": ids[pair["removed"]].as_py(), "kept": ids[pair["kept"]].as_py()}
            for pair in pairs.to_pylist()
        ],
    }  # fmt: skip


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """The report as Markdown, with the first rows of each table that has any."""
    left_out, clusters, most = facts["left_out"], facts["clusters"], facts["most_of_a_cluster"]
    asked = "1 row was" if facts["budget"] == 1 else f"{facts['budget']:,} rows were"
    limit = "" if most is None else f", but at most {most:,}"
    yield f"# {facts['chosen']:,} of {facts['rows']:,} rows\n"
    yield (
        f"{asked} asked for. The rows form {len(clusters):,} cluster{'s' * (len(clusters) != 1)}, and the same "
        f"number is chosen from each, as far as it has enough{limit}; within a cluster the choice is random, with the seed {facts['seed']}. A row is left "
        f"out if its cosine with a chosen row is {facts['threshold']} or more. Other clusters make up for one that runs out.\n"
    )
    yield f"* near-duplicates of a chosen row: {left_out['near_duplicate']:,}"
    yield f"* the quota of the cluster was full: {left_out['quota']:,}\n"
    tables: list[tuple[str, Sequence[str], list[tuple[Cell, ...]]]] = [
        ("Datasets", ("dataset", "split", "rows", "chosen", "share"), [
            (each["dataset"], each["split"], each["rows"], each["chosen"], f"{each['chosen'] / each['rows']:.1%}")
            for each in facts["data_sets"]
        ]),
        ("Clusters", ("cluster", "rows", "quota", "chosen", "near-duplicates", "most typical row"), [
            tuple(each[name] for name in ("cluster", "rows", "quota", "chosen", "near_duplicates", "typical_row"))
            for each in clusters
        ]),
        ("Near-duplicates", ("excluded", "chosen", "cosine"), [
            (each["removed"], each["kept"], f"{each['cosine']:.4f}") for each in facts["removed_pairs"]
        ]),
    ]  # fmt: skip
    for title, columns, rows in tables:
        if rows:
            yield f"## {title}\n"
            yield from table_lines(Table(title, columns, rows[:MAX_LISTED]))
        if len(rows) > MAX_LISTED:
            yield f"… and {len(rows) - MAX_LISTED:,} more\n"
