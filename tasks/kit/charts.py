"""Charts: bars, columns, flows and clouds of points, as shapes of SVG that `html` writes.

They don't need a plotting library, which takes 0.5 s to import and draws text for one background. A chart takes about 1 ms, has 1 to
5 kB, takes the colors of the page, light or dark, and is 360 units wide, so that its text has its natural size on a phone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

import numpy as np

from .parts import Cell, Chart, Mark, counted, number, shortened

WIDTH = 360
MAX_BARS = 16  # bars of a chart, or names on a side of a flow; the page counts the rest
MAX_POINTS = 20_000  # above this many points, a cloud is drawn as cells, the darker the more points they have
CELLS = 40  # cells of a cloud in either direction


def bars(
    title: str, values: Mapping[str, Sequence[float]], series: Sequence[str], shown: Callable[[float], str]
) -> Chart:
    """Horizontal bars: for each name one per series, with its value. Names are above their bars."""
    names = list(values)[:MAX_BARS]
    largest = max((each for name in names for each in values[name]), default=0) or 1
    height = 18 + 15 * len(series)
    marks: list[Mark] = []
    for place, name in enumerate(names):
        top = place * height
        marks.append(Mark("text", {"x": 0, "y": top + 12}, shortened(name, 56)))
        for at, value in enumerate(values[name]):
            y, wide = top + 16 + 15 * at, max(280 * value / largest, 1)  # the value has the other 80 units
            marks.append(Mark("rect", {"x": 0, "y": y, "width": f"{wide:.1f}", "height": 12}, series=at))
            marks.append(Mark("text", {"x": f"{wide + 5:.1f}", "y": y + 10}, shown(value)))
    more = f" ({len(values) - len(names):,} more in the table)" if len(values) > len(names) else ""
    described = f"{title}: " + "; ".join(f"{name} {', '.join(map(shown, values[name]))}" for name in names)
    return Chart(title + more, described, max(height * len(names), 1), marks, series if len(series) > 1 else ())


def columns(title: str, counts: Sequence[float], labels: Sequence[str], unit: str) -> Chart:
    """Upright columns with a label below each, as many as fit: a histogram, or amounts over time."""
    top, base = 16, 136
    wide, largest = WIDTH / max(len(counts), 1), max(counts, default=0) or 1
    # Labels that would overlap are omitted; a digit is 7 units wide
    every = -(-len(labels) * max((len(label) + 1 for label in labels), default=1) * 7 // WIDTH)
    axis = {"x1": 0, "x2": WIDTH, "y1": base, "y2": base, "stroke": "currentColor"}
    marks = [Mark("text", {"x": 0, "y": 11}, f"{number(_plain(largest))} {unit}"), Mark("line", axis)]
    for at, count in enumerate(counts):
        tall = max((base - top) * count / largest, 1) if count else 0
        place = {"x": f"{at * wide + 0.5:.1f}", "y": f"{base - tall:.1f}"}
        size = {"width": f"{max(wide - 1, 0.5):.1f}", "height": f"{tall:.1f}"}
        marks.append(Mark("rect", place | size, title=f"{labels[at]}: {number(_plain(count))}", series=0))
        if at % every == 0:
            marks.append(Mark("text", {"x": place["x"], "y": base + 13}, labels[at]))
    counted = [f"{name}: {number(_plain(count))}" for name, count in zip(labels, counts, strict=True) if count]
    return Chart(title, f"{title}: {'; '.join(counted)}", base + 18, marks)


def _plain(value: float) -> Cell:
    return int(value) if float(value).is_integer() else float(value)


def flow(title: str, links: Mapping[tuple[str, str], int], lost: Iterable[str]) -> Chart:
    """Bands from names on the left to names on the right, as thick as their counts; `lost` ones have a different color.

    The smallest names on either side become one band, `other`, if there are more than fit.
    """
    kept = [
        set(sorted(sums, key=lambda name: (-sums[name], name))[: MAX_BARS - 1]) if len(sums) > MAX_BARS else set(sums)
        for sums in (_sums(links, 0), _sums(links, 1))
    ]
    bands: dict[tuple[str, str], int] = {}
    for (left, right), count in links.items():
        ends = left if left in kept[0] else "other", right if right in kept[1] else "other"
        bands[ends] = bands.get(ends, 0) + count
    lefts, rights = _sums(bands, 0), _sums(bands, 1)
    total, lost = sum(lefts.values()) or 1, set(lost)
    # A gap above every name holds its label; a few names get a low chart, so that their bands don't look like blocks
    gap, tall, middle = 24, min(180, 45 * max(len(lefts), len(rights))), WIDTH / 2
    # Where the first band of each name starts; each band then moves the place for the next one
    starts = [
        dict(zip(sums, accumulate((tall * count / total + gap for count in sums.values()), initial=gap - 6.0), strict=False))
        for sums in (lefts, rights)
    ]  # fmt: skip
    left_end, right_end = map(dict[str, float], starts)
    marks: list[Mark] = []
    for (left, right), count in bands.items():
        thick = tall * count / total
        drawn = max(thick, 0.5)  # a thinner one can't be seen
        begin, end = left_end[left], right_end[right]
        path = (
            f"M0 {begin:.1f} C{middle} {begin:.1f} {middle} {end:.1f} {WIDTH} {end:.1f} v{drawn:.1f} "
            f"C{middle} {end + drawn:.1f} {middle} {begin + drawn:.1f} 0 {begin + drawn:.1f} Z"
        )
        marks.append(Mark("path", {"d": path, "opacity": ".75"}, series=1 if right in lost else 0))
        left_end[left] += thick
        right_end[right] += thick
    for at, sums, x, anchor in ((starts[0], lefts, 0, "start"), (starts[1], rights, WIDTH, "end")):
        for name, count in sums.items():
            place = {"x": x, "y": f"{at[name] - 4:.1f}", "text-anchor": anchor}
            marks.append(Mark("text", place, f"{shortened(name, 22)} {count:,}", title=name))
    described = f"{title}: " + "; ".join(f"{left} to {right}: {count:,}" for (left, right), count in bands.items())
    return Chart(title, described, tall + gap * max(len(lefts), len(rights)) + 4, marks)


def _sums(links: Mapping[tuple[str, str], int], side: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for ends, count in links.items():
        found[ends[side]] = found.get(ends[side], 0) + count
    return found


def cloud(title: str, groups: Mapping[str, np.ndarray], axes: tuple[str, str]) -> list[Chart]:
    """Points (float64 [rows, 2]) of each group in its color; a chart of cells for each group if there are many points.

    The first group is drawn last, above the others. All charts have the same limits.
    """
    points = np.concatenate(list(groups.values()))
    (left, low), (right, high) = points.min(axis=0).tolist(), points.max(axis=0).tolist()
    wide, tall = (right - left) or 1.0, (high - low) or 1.0
    size = WIDTH - 8
    scaled = {
        name: np.column_stack([4 + size * (of[:, 0] - left) / wide, 18 + size * (high - of[:, 1]) / tall])
        for name, of in groups.items()
    }
    # Text states the limits of the axes: ticks would need room, which a phone doesn't have
    below = f"{axes[0]}: {left:.3g} to {right:.3g}"
    around = [
        Mark("text", {"x": 0, "y": 11}, f"{axes[1]}: {low:.3g} to {high:.3g}"),
        Mark("text", {"x": WIDTH, "y": size + 34, "text-anchor": "end"}, below),
    ]
    named = {name: f"{name} ({len(of):,})" for name, of in groups.items()}
    if len(points) <= MAX_POINTS:
        dots = ["".join(f"M{x:.1f} {y:.1f}h0" for x, y in of.tolist()) for of in scaled.values()]
        # One path draws all dots of a group: lines without length, which round ends make visible
        ends = {"stroke-width": 4, "stroke-linecap": "round", "opacity": ".7"}
        marks = [Mark("path", {"d": path} | ends, series=at) for at, path in enumerate(dots)][::-1]
        return [
            Chart(title, f"{title}: {'; '.join(named.values())}", size + 40, [*around, *marks], list(named.values()))
        ]
    return [
        Chart(f"{title}: {named[name]}", f"{title}: {named[name]}", size + 40, [*around, *_cells(of, size)])
        for name, of in scaled.items()
    ]  # fmt: skip


def _cells(places: np.ndarray, size: float) -> list[Mark]:
    """A square for each cell with points, as dark as the logarithm of their number."""
    counts, *_ = np.histogram2d(places[:, 0], places[:, 1], CELLS, [[4, 4 + size], [18, 18 + size]])
    wide, most = size / CELLS, np.log1p(counts.max())
    return [
        Mark(
            "rect",
            {
                "x": f"{4 + column * wide:.1f}", "y": f"{18 + row * wide:.1f}", "width": f"{wide:.1f}",
                "height": f"{wide:.1f}", "opacity": f"{0.15 + 0.85 * np.log1p(counts[column, row]) / most:.2f}",
            },
            title=counted(int(counts[column, row]), "row"), series=0,
        )
        for column, row in np.argwhere(counts).tolist()
    ]  # fmt: skip
