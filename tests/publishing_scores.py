"""Folders of scores as a scoring run publishes them, written by hand."""

import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.seal import sealed


def publish_scores(out, kind, tables):
    """A published folder: `tables` are pairs of the file that was scored and its scores."""
    (out / kind).mkdir(parents=True, exist_ok=True)
    shards = []
    for number, (scored, table) in enumerate(tables):
        name = f"{kind}/part-{number:05d}-{number:08x}.parquet"
        pq.write_table(table, out / name)
        shards.append({"file": str(scored), "published": {"all": [name]}})
    manifest = {"type": kind, "recipes": [], "shards": shards, "missing": [], "files": [], "volatile": {"store": ""}}
    (out / "manifest.json").write_bytes(sealed(manifest))
    return str(out)


def nll_table(rows, nll, **columns):
    """The NLL of rows that are dicts, `nll` in the same order; a few of the columns of such tables."""
    return pa.table({
        **{name: pa.array([row[name] for row in rows], pa.string()) for name in ("row_id", "id", "dataset", "split")},
        "loss_mode": pa.array(["assistant_all"] * len(rows)),
        "nll_mean": pa.array(nll, pa.float64()),
        "completion_token_count": pa.array(range(len(rows)), pa.int32()),
        "truncated": pa.array([number % 2 == 0 for number in range(len(rows))]),
        "model": pa.array(["small"] * len(rows)),
        **columns,
    })  # fmt: skip


def embeddings_table(row_ids, vectors, **columns):
    """The embeddings of rows, float32 [rows, dimensions]."""
    flat = pa.array(vectors.astype("float16").reshape(-1))
    names = {name: pa.array(["a"] * len(row_ids)) for name in ("id", "dataset", "split")}
    return pa.table({
        "row_id": pa.array(row_ids, pa.string()),
        **names,
        "embedding": pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1]),
        "token_count": pa.array([7] * len(row_ids), pa.int32()),
        "truncated": pa.array([False] * len(row_ids)),
        **columns,
    })  # fmt: skip
