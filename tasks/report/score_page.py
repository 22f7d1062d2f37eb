"""A static HTML page about scores: inline plots, no scripts, no requests.

The plots depend on the folders given. NLL: a histogram per dataset and split; with the scored rows, also NLL against the share
of solved tries. Embeddings: a map, with rows coloured by pool, otherwise by dataset. Rows: their pools. A row in several pools
has the colour of the first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.score.embedded import read_embeddings
from tokenmill.tasks.select.scores import ROW_ID, ScoreFolder, score_folder, with_scores
from tokenmill.tasks.shards.manifest import MANIFEST, read_manifest
from tokenmill.tasks.shards.publish import Output, publish_bytes
from tokenmill.tasks.storage import absolute, filesystem, join

from .plots import bars, embedding_map, nll_by_correctness, nll_histograms
from .visible import visible_line

PAGE = "scores.html"

CORRECTNESS = "meta_correctness_own"
NLL = "nll_mean"

ROWS, DRAWN = "harmony", ("nll", "embeddings")
"""The type of a folder of rows, and those of scores."""

STYLE = """
:root { color-scheme: light; }
body { font: 14px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 75em; margin: 2em auto; padding: 0 1em; }
h1, h2 { font-size: 1.1em; overflow-wrap: anywhere; }
p { color: #555; overflow-wrap: anywhere; }
svg { max-width: 100%; height: auto; }
"""

HEAD = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>tokenmill report</title>
<style>{STYLE}</style>
</head>
<body>
"""


@dataclass(frozen=True, slots=True)
class Plot:
    """An SVG plot, its title, and a note."""

    title: str
    note: str
    svg: bytes


@dataclass(frozen=True, slots=True)
class RowsFolder:
    """A published folder of Harmony rows: its path, its row files, and the files of each pool, in order of pools."""

    place: str
    files: Sequence[str]
    pools: Mapping[str, Sequence[str]]


def report_page(places: Sequence[str]) -> list[Plot]:
    """The page for published folders of rows, NLL and embeddings.

    Raises InputError for any other folder, and for more than one folder of rows.
    """
    rows, scores = _folders(places)
    plots: list[Plot] = []
    if rows is not None and rows.pools:
        plots.append(_pools(rows))
    for folder in scores:
        plots += _nll(folder, rows) if folder.type == "nll" else _map(folder, rows)
    if not plots:
        raise InputError(f"{', '.join(places)}: there is nothing to draw; name a folder of scores with --scores")
    return plots


def publish_page(places: Sequence[str], plots: Sequence[Plot], place: str) -> Output:
    """Write the page to the file or object `place`; errors as in `publish`."""
    body = "".join(map(_section, plots))
    title = escape(visible_line(", ".join(places)))
    return publish_bytes(absolute(place), f"{HEAD}<h1>{title}</h1>\n{body}</body>\n</html>\n".encode())


def _section(plot: Plot) -> str:
    picture = plot.svg[plot.svg.index(b"<svg") :].decode()
    title, note = escape(visible_line(plot.title)), escape(visible_line(plot.note))
    return f"<section>\n<h2>{title}</h2>\n<p>{note}</p>\n{picture}</section>\n"


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
        raise InputError(f"{', '.join(each.place for each in rows)}: name only one folder of rows")
    return (rows[0] if rows else None), scores


def _rows_folder(place: str, manifest: Mapping[str, Any]) -> RowsFolder:
    derived = manifest.get("derived", {}).get("shards", [])
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


def _pools(rows: RowsFolder) -> Plot:
    counts = [sum(_metadata(place).num_rows for place in places) for places in rows.pools.values()]
    note = "In the order of their definitions; a row may be in several."
    return Plot(f"Pools of {rows.place}", note, bars(list(rows.pools), counts, "rows"))


def _nll(folder: ScoreFolder, rows: RowsFolder | None) -> Iterator[Plot]:
    """Histograms of NLL, and NLL against correctness for rows with both."""
    if not folder.files:
        return
    table = _read([file.place for file in folder.files], [ROW_ID, "dataset", "split", NLL])
    scored = table.filter(compute.field(NLL).is_valid())
    if scored.num_rows:
        groups, owners = _grouped(scored)
        values = scored[NLL].to_numpy()
        note = f"{scored.num_rows:,} rows of {table.num_rows:,} have a mean NLL; the line is the median."
        yield Plot(f"NLL, by dataset and split: {folder.place}", note, nll_histograms(groups, values, owners))
    if rows is None or not rows.files:
        return
    known = _read(rows.files, [ROW_ID, CORRECTNESS])
    joined = with_scores(known, [table.select([ROW_ID, NLL])])
    both = joined.filter(compute.field(NLL).is_valid() & compute.field(CORRECTNESS).is_valid())
    if both.num_rows:
        note = f"{both.num_rows:,} rows of {joined.num_rows:,} have both."
        plot = nll_by_correctness(both[CORRECTNESS].to_numpy(), both[NLL].to_numpy())
        yield Plot(f"NLL against correctness: {folder.place}", note, plot)


def _map(folder: ScoreFolder, rows: RowsFolder | None) -> Iterator[Plot]:
    """The map of embeddings; its vectors are held in memory, see `embedded`."""
    found = read_embeddings(folder)
    if rows is not None and rows.pools:
        groups, owners, by = list(rows.pools), _pool_of(found.names, rows), "first pool"
    else:
        (groups, owners), by = _grouped(found.names), "dataset and split"
    note = f"{len(found.vectors):,} vectors of {found.vectors.shape[1]} dimensions, by their {by}."
    yield Plot(f"Map of embeddings: {folder.place}", note, embedding_map(found.vectors, groups, owners))


def _pool_of(names: pa.Table, rows: RowsFolder) -> np.ndarray:
    """The index of each row's first pool, int64 [rows], or -1."""
    owners = np.full(names.num_rows, -1)
    for number, places in reversed(list(enumerate(rows.pools.values()))):
        ids = _read(places, [ROW_ID])[ROW_ID]
        owners[compute.call_function("is_in", [names[ROW_ID]], compute.SetLookupOptions(ids)).to_numpy()] = number
    return owners


def _grouped(table: pa.Table) -> tuple[list[str], np.ndarray]:
    """Datasets and splits by name, and their index for each row, int64 [rows]."""
    columns = [table[name].fill_null("") for name in ("dataset", "split")]
    found = compute.call_function("binary_join_element_wise", [*columns, pa.scalar("/")]).combine_chunks()
    encoded = found.dictionary_encode()
    groups = encoded.dictionary.to_pylist()
    order = np.argsort(groups, kind="stable")
    return [groups[number] for number in order], np.argsort(order)[encoded.indices.to_numpy()]


def _read(places: Sequence[str], columns: Sequence[str]) -> pa.Table:
    return pa.concat_tables([_table(place, columns) for place in places])


def _table(place: str, columns: Sequence[str]) -> pa.Table:
    system, path = filesystem(place)
    with cast("BinaryIO", system.open(path, "rb")) as stream:
        return pq.read_table(stream, columns=list(columns), use_threads=False)


def _metadata(place: str) -> pq.FileMetaData:
    system, path = filesystem(place)
    with cast("BinaryIO", system.open(path, "rb")) as stream:
        return pq.read_metadata(stream)
