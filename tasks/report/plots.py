"""SVG plots of scores: histograms of NLL, NLL against the share of solved tries, and maps of embeddings.

Figures need no display. They use matplotlib's own defaults (not the user's configuration), text as text, a fixed salt for ids
and no date, so equal numbers give equal bytes on machines of the same kind. Above 20,000 points, cells with counts replace
points: 20,000 points take 2 MB, cells 0.15 MB per panel for any number of rows.
"""

import io
import warnings
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from tokenmill.tasks.errors import InputError

from .visible import visible_line

try:
    import matplotlib.style
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
except ImportError as error:
    raise InputError(
        f"matplotlib cannot be imported ({error}); install it with: pip install 'tokenmill[report]'"
    ) from error

MOST_POINTS = 20_000
"""Above this many points, plot counts in cells."""

MOST_PANELS = 24
"""Datasets and splits with their own histogram: those with the most rows."""

COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf")
"""Colours of groups of points, largest group first; all further groups share one."""

STRONG, QUIET = COLOURS[0], "#bbbbbb"

SECOND_AXIS = "second principal component"

BINS, CELLS = 40, 40
STEPS = 9
"""Medians of the NLL to draw, from correctness 0 to correctness 1."""

LONGEST_NAME = 32
POINT, PANEL = 6.0, 3.2
"""The area of a point in square points, and the width of a panel in inches."""

PROJECTED = 1 << 14
"""Vectors projected at a time."""

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tokenmill",
    "text.parse_math": False,  # names of datasets are not math, even with dollar signs
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
}


LEAST_WIDTH = 4.2
"""The minimum width in inches, for the label below a single histogram."""


def nll_histograms(groups: Sequence[str], values: np.ndarray, owners: np.ndarray) -> bytes:
    """A histogram of the NLL of each group, on a shared scale; groups without rows have none.

    `values` is float64 [rows], finite; `owners` is int64 [rows], the group number of each row.
    """
    counts = np.bincount(owners, minlength=len(groups))
    largest = _largest(counts, MOST_PANELS)
    edges = np.histogram_bin_edges(values, BINS)
    columns = min(4, len(largest))

    def draw(figure: Figure) -> None:
        panels = figure.subplots(-(-len(largest) // columns), columns, sharex=True, squeeze=False).flat
        for group, panel in zip(largest, panels, strict=False):
            of_group = values[owners == group]
            panel.stairs(np.histogram(of_group, edges)[0], edges, fill=True, color=STRONG)
            panel.axvline(float(np.median(of_group)), color="black", linewidth=1)
            panel.set_title(f"{_shown(groups[group])}\n{len(of_group):,} rows, median {np.median(of_group):.3f}")
        for panel in list(panels):
            panel.set_axis_off()
        figure.supxlabel("mean NLL of the completion, nats per token")
        figure.supylabel("rows")

    width = max(PANEL * columns, LEAST_WIDTH)
    return _svg((width, 0.6 + 2.2 * -(-len(largest) // columns)), draw)


def nll_by_correctness(correctness: np.ndarray, nll: np.ndarray) -> bytes:
    """NLL against the share of tries that solved the problem, with medians. Both are float64 [rows] and finite."""

    def draw(figure: Figure) -> None:
        panel = figure.subplots()
        _place(figure, panel, np.column_stack([correctness, nll]), STRONG)
        steps = np.clip(np.rint(correctness * (STEPS - 1)), 0, STEPS - 1).astype(np.int64)
        found = np.unique(steps)
        medians = [float(np.median(nll[steps == step])) for step in found]
        panel.plot(found / (STEPS - 1), medians, color="black", marker="o", markersize=4, label="median")
        panel.set_xlabel("correctness of the problem, at the row's own effort")
        panel.set_ylabel("mean NLL of the completion")
        panel.legend()

    return _svg((6.4, 4.4), draw)


def embedding_map(vectors: np.ndarray, groups: Sequence[str], owners: np.ndarray) -> bytes:
    """Vectors (float32 [rows, dimensions]) in the plane of largest variance, coloured by group.

    `owners` is int64 [rows], the group number of each row, or -1. If there are many rows, each group has its own panel.
    """
    points, share = principal_plane(vectors)
    counts = np.bincount(owners[owners >= 0], minlength=len(groups))
    largest = _largest(counts, len(COLOURS))
    parts = [(_shown(groups[group]), owners == group, colour) for group, colour in zip(largest, COLOURS, strict=False)]
    others = ~np.isin(owners, largest)
    parts = [("all others", others, QUIET), *parts] if others.any() else parts
    if len(points) > MOST_POINTS:
        return _panels(points, share, [(name, rows) for name, rows, _ in parts])

    def draw(figure: Figure) -> None:
        panel = figure.subplots()
        drawn = [_place(figure, panel, points[rows], colour) for _, rows, colour in parts]
        names = [f"{name} ({np.count_nonzero(rows):,})" for name, rows, _ in parts]
        figure.legend(drawn, names, loc="outside right upper", markerscale=2)
        _name_axes(panel, share)

    return _svg((8, 5), draw)


def choice_map(vectors: np.ndarray, chosen: np.ndarray) -> bytes:
    """All vectors (float32 [rows, dimensions]) and the `chosen` rows (int64), in the plane of largest variance of all."""
    points, share = principal_plane(vectors)
    rows = np.zeros(len(points), np.bool_)
    rows[chosen] = True
    if len(points) > MOST_POINTS:
        return _panels(points, share, [("all rows", np.ones_like(rows)), ("chosen", rows)])

    def draw(figure: Figure) -> None:
        panel = figure.subplots()
        drawn = [_place(figure, panel, points[~rows], QUIET), _place(figure, panel, points[rows], STRONG)]
        names = [f"left out ({np.count_nonzero(~rows):,})", f"chosen ({np.count_nonzero(rows):,})"]
        figure.legend(drawn, names, loc="outside right upper", markerscale=2)
        _name_axes(panel, share)

    return _svg((8, 5), draw)


def bars(names: Sequence[str], counts: Sequence[int], label: str) -> bytes:
    """A bar per name, the first on top."""

    def draw(figure: Figure) -> None:
        panel = figure.subplots()
        places = np.arange(len(names))
        drawn = panel.barh(places, counts, color=STRONG)
        panel.bar_label(drawn, [f"{count:,}" for count in counts], padding=3)
        panel.set_yticks(places, [_shown(name) for name in names])
        panel.invert_yaxis()
        panel.margins(x=0.15)
        panel.set_xlabel(label)

    return _svg((8, 0.8 + 0.25 * len(names)), draw)


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
    plane = np.zeros((dimensions, 2))
    found = directions[:, ::-1][:, :2]
    plane[:, : found.shape[1]] = found * np.where(found[np.abs(found).argmax(axis=0), range(found.shape[1])] < 0, -1, 1)
    points = np.empty((len(vectors), 2))
    for start in range(0, len(vectors), PROJECTED):
        points[start : start + PROJECTED] = (vectors[start : start + PROJECTED] - mean) @ plane
    total = float(variances.sum())
    return points, float(variances[::-1][:2].sum()) / total if total > 0 else 0.0


def _largest(counts: np.ndarray, most: int) -> list[int]:
    """The indices of the largest nonzero counts, largest first."""
    return [int(number) for number in np.argsort(-counts, kind="stable")[:most] if counts[number]]


def _svg(size: tuple[float, float], draw: Callable[[Figure], None]) -> bytes:
    with matplotlib.style.context(["default", STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the viewer has other fonts
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()


def _place(figure: Figure, panel: Axes, points: np.ndarray, colour: str) -> Artist:
    """Draw points (float64 [rows, 2]), or counts in cells if there are many."""
    if len(points) <= MOST_POINTS:
        return panel.scatter(points[:, 0], points[:, 1], s=POINT, alpha=0.7, linewidths=0, color=colour)
    counted = _count(panel, points, _limits(points))
    _explain(figure, [panel], [counted])
    return counted


def _panels(points: np.ndarray, share: float, parts: Sequence[tuple[str, np.ndarray]]) -> bytes:
    """A panel of cells for each group, on a shared scale."""
    columns = min(3, len(parts))
    lines = -(-len(parts) // columns)
    limits = _limits(points)

    def draw(figure: Figure) -> None:
        panels = list(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat)
        counted: list[PolyCollection] = []
        for (name, rows), panel in zip(parts, panels, strict=False):
            counted.append(_count(panel, points[rows], limits))
            panel.set_title(f"{name} ({np.count_nonzero(rows):,})")
        for panel in panels[len(parts) :]:
            panel.set_axis_off()
        _explain(figure, panels, counted)
        figure.supxlabel(_first_axis(share))
        figure.supylabel(SECOND_AXIS)

    return _svg((PANEL * columns + 1, 3 * lines + 0.5), draw)


def _count(panel: Axes, points: np.ndarray, limits: tuple[float, float, float, float]) -> PolyCollection:
    return panel.hexbin(points[:, 0], points[:, 1], gridsize=CELLS, mincnt=1, extent=limits, linewidths=0.1)


def _explain(figure: Figure, panels: Sequence[Axes], counted: Sequence[PolyCollection]) -> None:
    """Give the cells a shared logarithmic colour scale, and label it."""
    most = max(float(cast("np.ndarray", each.get_array()).max()) for each in counted)
    for each in counted:
        each.set_norm(LogNorm(1, max(most, 2)))
    figure.colorbar(counted[0], ax=list(panels), label="rows in a cell", format="%g")


def _limits(points: np.ndarray) -> tuple[float, float, float, float]:
    """The left, right, lower and upper limits, with a margin even if all points coincide."""
    (left, lower), (right, upper) = points.min(axis=0).tolist(), points.max(axis=0).tolist()
    wide, high = float(left == right), float(lower == upper)
    return left - wide, right + wide, lower - high, upper + high


def _name_axes(panel: Axes, share: float) -> None:
    panel.set_xlabel(_first_axis(share))
    panel.set_ylabel(SECOND_AXIS)


def _first_axis(share: float) -> str:
    return f"first principal component ({share:.0%} of the variance in both)"


def _shown(name: str) -> str:
    """A name on one line, truncated if it is long."""
    text = visible_line(name)
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…"
