"""A static HTML page about scores.

The charts depend on the folders given. NLL: a histogram per dataset and split; with the scored rows, also NLL against the share
of solved tries. Embeddings: a map, with rows colored by pool, otherwise by dataset. Rows: their pools. A row in several pools
has the color of the first. Above 20,000 points, cells with counts replace points.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.kit import html
from tokenmill.tasks.kit.charts import bars, cloud, columns
from tokenmill.tasks.kit.parts import Block, Table, Text, counted
from tokenmill.tasks.score.embed import read_embeddings
from tokenmill.tasks.select.scores import ROW_ID, ScoreFolder, score_folder, with_scores
from tokenmill.tasks.shards.manifest import MANIFEST, derived_entries, read_manifest
from tokenmill.tasks.shards.publish import Output, publish_bytes
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.storage import absolute, join, open_binary

PAGE = "scores.html"
CORRECTNESS = "meta_correctness_own"
NLL = "nll_mean"
ROWS, DRAWN = "harmony", ("nll", "embeddings")  # the types of a row folder and of score folders

# The most histograms, one for each dataset and split, and the most colors; the largest groups have them.
MAX_HISTOGRAMS, MAX_GROUPS = 24, 5

BINS = 40
STEPS = 9  # medians of the NLL, from correctness 0 to correctness 1
PROJECTED = 1 << 14  # vectors projected at a time

Sections = dict[str, Sequence[Block]]


@dataclass(frozen=True, slots=True)
class RowsFolder:
    """A published folder with Harmony rows: its path, its row files, and the files for each pool, in order of pools."""

    place: str
    files: Sequence[str]
    pools: Mapping[str, Sequence[str]]


def report_page(places: Sequence[str]) -> Sections:
    """Return the page for published row, NLL and embedding folders.

    Raises InputError for other folders, and for more than one row folder.
    """
    rows, scores = _folders(places)
    found: Sections = {}
    if rows is not None and rows.pools:
        counts: dict[str, tuple[int]] = {}
        for name, files in rows.pools.items():
            total = 0
            for file in files:
                with open_binary(file) as stream:
                    total += pq.read_metadata(stream).num_rows
            counts[name] = (total,)
        note = Text("In the order of their definitions; a row may be in several.")
        found[f"Pools of {rows.place}"] = [note, bars("Rows", counts, ("rows",), lambda each: f"{each:,.0f}")]
    for folder in scores:
        found |= _nll(folder, rows) if folder.type == "nll" else _map(folder, rows)
    if not found:
        raise InputError(f"{', '.join(places)}: no scores to plot; name a score folder with --scores")
    return found


def publish_page(places: Sequence[str], sections: Sections, place: str) -> Output:
    """Write the page to the file or object `place`; errors as in `publish`."""
    return publish_bytes(absolute(place), html.page(", ".join(places), sections).encode())


def _folders(places: Sequence[str]) -> tuple[RowsFolder | None, list[ScoreFolder]]:
    rows: list[RowsFolder] = []
    scores: list[ScoreFolder] = []
    for place in map(absolute, places):
        manifest = read_manifest(place)
        if manifest is None:
            raise InputError(f"{place}: no {MANIFEST} here; point at the --output-dir of a run")
        if manifest["type"] == ROWS:
            rows.append(_rows_folder(place, manifest))
        elif manifest["type"] in DRAWN:
            scores.append(score_folder(place))
        else:
            raise InputError(f"{place}: holds {manifest['type']!r}; a report shows {', '.join([ROWS, *DRAWN])}")
    if len(rows) > 1:
        raise InputError(f"{', '.join(each.place for each in rows)}: name only one row folder")
    return (rows[0] if rows else None), scores


def _rows_folder(place: str, manifest: Manifest) -> RowsFolder:
    derived = derived_entries(manifest)
    pools: dict[str, list[str]] = {}
    for part, name in sorted(
        (part, name) for entry in derived for part, names in entry["published"].items() for name in names
    ):
        if part.startswith("pool-"):
            pools.setdefault(name.split("/")[-2], []).append(join(place, name))
    names = [
        join(place, name) for entry in manifest["shards"] for names in entry["published"].values() for name in names
    ]
    return RowsFolder(place, names, pools)


def _nll(folder: ScoreFolder, rows: RowsFolder | None) -> Sections:
    """Histograms of NLL, and NLL against correctness for rows with both."""
    if not folder.files:
        return {}
    found: Sections = {}
    table = _read([file.place for file in folder.files], [ROW_ID, "dataset", "split", NLL])
    scored = table.filter(compute.field(NLL).is_valid())
    if scored.num_rows:
        groups, owners = _grouped(scored)
        values = scored[NLL].to_numpy()
        edges = np.histogram_bin_edges(values, BINS)  # one scale, so that histograms can be compared
        labels = [f"{edge:.3g}" for edge in edges[:-1]]
        note = Text(f"{scored.num_rows:,} rows of {table.num_rows:,} have a mean NLL, in nats per token.")
        parts: list[Block] = [note]
        for group in _largest(owners, MAX_HISTOGRAMS):
            own = values[owners == group]
            title = f"{groups[group]}: {counted(len(own), 'row')}, median {np.median(own):.3f}"
            parts.append(columns(title, np.histogram(own, edges)[0].tolist(), labels, "rows"))
        found[f"NLL, by dataset and split: {folder.place}"] = parts
    if rows is None or not rows.files:
        return found
    known = _read(rows.files, [ROW_ID, CORRECTNESS])
    joined = with_scores(known, [table.select([ROW_ID, NLL])])
    both = joined.filter(compute.field(NLL).is_valid() & compute.field(CORRECTNESS).is_valid())
    if both.num_rows:
        correctness, nll = both[CORRECTNESS].to_numpy(), both[NLL].to_numpy()
        # Correctness is a share of tries, of which problems have different numbers, so medians are of steps
        steps = np.clip(np.rint(correctness * (STEPS - 1)), 0, STEPS - 1).astype(np.int64)
        medians = [
            (f"{step / (STEPS - 1):.3g}", int((steps == step).sum()), f"{np.median(nll[steps == step]):.3f}")
            for step in np.unique(steps)
        ]
        axes = ("correctness of the problem, at its effort", "mean NLL of the completion")
        found[f"NLL against correctness: {folder.place}"] = [
            Text(f"{both.num_rows:,} rows of {joined.num_rows:,} have both."),
            *cloud("NLL against correctness", {"rows": np.column_stack([correctness, nll])}, axes),
            Table("Median NLL by correctness", ("correctness, about", "rows", "median NLL"), medians),
        ]
    return found


def _map(folder: ScoreFolder, rows: RowsFolder | None) -> Sections:
    """The map of embeddings; its vectors are held in memory, see `embed`."""
    found = read_embeddings(folder)
    if rows is not None and rows.pools:
        groups, owners, by = list(rows.pools), np.full(found.names.num_rows, -1), "first pool"
        # The last pool first, so that the first one has the last word
        for number, places in reversed(list(enumerate(rows.pools.values()))):
            ids = compute.SetLookupOptions(_read(places, [ROW_ID])[ROW_ID])
            owners[compute.call_function("is_in", [found.names[ROW_ID]], ids).to_numpy()] = number
    else:
        (groups, owners), by = _grouped(found.names), "dataset and split"
    points, share = principal_plane(found.vectors)
    largest = _largest(owners, MAX_GROUPS)
    parts = {groups[group]: points[owners == group] for group in largest}
    if (others := ~np.isin(owners, largest)).any():
        parts["all others"] = points[others]
    note = Text(
        f"{len(points):,} vectors of {found.vectors.shape[1]} dimensions, by their {by}. The map has {share:.0%} of their variance."
    )
    axes = ("first principal component", "second principal component")
    return {f"Map of embeddings: {folder.place}": [note, *cloud("Map", parts, axes)]}


def principal_plane(vectors: np.ndarray) -> tuple[np.ndarray, float]:
    """Project vectors (float32 [rows, dimensions]) onto their plane of largest variance.

    Returns positions (float64 [rows, 2]) and the plane's share of the variance. The axes are the first two principal
    components, each with its largest weight positive. Products are summed in float64, some thousand rows at a time. A million
    vectors of 256 dimensions take 5 s.
    """
    dimensions = vectors.shape[1]
    mean = vectors.mean(axis=0, dtype=np.float64).astype(vectors.dtype)
    products = np.zeros((dimensions, dimensions))
    for start in range(0, len(vectors), PROJECTED):
        part = vectors[start : start + PROJECTED] - mean
        products += part.T @ part
    variances, directions = np.linalg.eigh(products)
    plane = np.zeros((dimensions, 2))  # also of vectors of one dimension
    found = directions[:, ::-1][:, :2]
    plane[:, : found.shape[1]] = found * np.where(found[np.abs(found).argmax(axis=0), range(found.shape[1])] < 0, -1, 1)
    points = np.empty((len(vectors), 2))
    for start in range(0, len(vectors), PROJECTED):
        points[start : start + PROJECTED] = (vectors[start : start + PROJECTED] - mean) @ plane
    total = float(variances.sum())
    return points, float(variances[::-1][:2].sum()) / total if total > 0 else 0.0


def _largest(owners: np.ndarray, limit: int) -> list[int]:
    """The numbers of the largest groups that own rows, largest first."""
    counts = np.bincount(owners[owners >= 0])
    return [int(number) for number in np.argsort(-counts, kind="stable")[:limit] if counts[number]]


def _grouped(table: pa.Table) -> tuple[list[str], np.ndarray]:
    """Datasets and splits by name, and their index for each row, int64 [rows]."""
    columns = [table[name].fill_null("") for name in ("dataset", "split")]
    found = compute.call_function("binary_join_element_wise", [*columns, pa.scalar("/")]).combine_chunks()
    encoded = found.dictionary_encode()
    groups = encoded.dictionary.to_pylist()
    order = np.argsort(groups, kind="stable")
    return [groups[number] for number in order], np.argsort(order)[encoded.indices.to_numpy()]


def _read(places: Sequence[str], columns: Sequence[str]) -> pa.Table:
    tables: list[pa.Table] = []
    for place in places:
        with open_binary(place) as stream:
            tables.append(pq.read_table(stream, columns=list(columns), use_threads=False))
    return pa.concat_tables(tables)
