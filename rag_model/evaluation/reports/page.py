"""The HTML elements of all reports: a self-contained page of sections, tables and tiles.

All text is escaped, because only `tag` and `join` convert text to a `Node`. A page has no scripts
and no fonts and loads nothing; its content security policy forbids this, too.

Charts are inline SVG and HTML bars in the colours of the page. Every point and bar has a `<title>`,
so that its value appears under the mouse pointer. Reports print the same numbers in tables.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import pairwise
from typing import Literal

from rag_model.errors import format_count
from rag_model.index.quality.results import OperatingPoint

_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
# size of the viewBox of a chart: half the width of the page, or the width of a phone
_WIDTH, _HEIGHT = 460.0, 280.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 16.0, 16.0, 48.0  # margins of a chart, for its labels
# Edges of the plot area: left, right, bottom, top. The y of SVG grows downwards.
_X0, _X1 = _LEFT, _WIDTH - _RIGHT
_Y0, _Y1 = _HEIGHT - _BOTTOM, _TOP
_N_COLOURS = 4  # number of line colours; further lines use them again
_MAX_LABELS = 6  # maximum number of labels below a chart
_MAX_MARKS = 60  # maximum number of dashed lines in a chart
_GAP = 0.5  # space on both sides of a bar in a column chart
# Recalls with a grid line. A recall above the last grid line is drawn on this line.
_RECALL_TICKS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
_COST_LABELS = {"distances": "distance computations per query", "milliseconds": "milliseconds per query"}
CostUnit = Literal["distances", "milliseconds"]
# A function that converts a point to (x, y of the mean, y of the 5th percentile) in a chart.
Projection = Callable[[OperatingPoint], tuple[float, float, float]]


class Node:
    """Escaped markup; `tag` and `join` create it from text."""

    __slots__ = ("html",)

    def __init__(self, html: str) -> None:
        """Wrap `html`, whose text must be escaped already."""
        self.html = html


Child = Node | str | int


def tag(name: str, *children: Child, **attributes: str | float | None) -> Node:
    """Return an element with escaped text and attributes; attributes with value None are left out.

    `class_` becomes the attribute `class`. Other underscores become hyphens: `stroke_width=2`
    becomes `stroke-width="2"`.

    >>> tag("p", "1 < 2", class_="note").html
    '<p class="note">1 &lt; 2</p>'
    """
    attribute_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_format_attribute(attribute))}"'
        for key, attribute in attributes.items()
        if attribute is not None
    )
    return Node(f"<{name}{attribute_text}>{join(*children).html}</{name}>")


def join(*children: Child) -> Node:
    """Concatenate nodes and texts, which are escaped, into one node."""
    return Node("".join(child.html if isinstance(child, Node) else escape(str(child)) for child in children))


def _format_attribute(attribute: str | float) -> str:
    return f"{attribute:.5g}" if isinstance(attribute, float) else str(attribute)


def render_document(title: str, content: Iterable[Node]) -> str:
    """Return the whole HTML document."""
    style = Node((files("rag_model.evaluation.reports") / "report.css").read_text(encoding="utf-8"))
    head_node = tag(
        "head",
        Node('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Node(f'<meta http-equiv="Content-Security-Policy" content="{_SECURITY_POLICY}">'),
        tag("title", title),
        tag("style", style),
    )
    html_node = tag("html", head_node, tag("body", tag("main", *content)), lang="en")
    # Titles may contain lone surrogates, which cannot be encoded.
    return f"<!doctype html>\n{html_node.html}\n".encode(errors="replace").decode()


def section(title: str, *content: Child, class_: str | None = None) -> Node:
    """Return a section with a title."""
    return tag("section", tag("h2", title), *content, class_=class_)


def header(title: str, *content: Child) -> Node:
    """Return the header of the page: its title and the text below it."""
    return tag("header", tag("h1", title), *content)


def run_summary(n_questions: int, created_at: str, **ids: str) -> Node:
    """Return the line below a title: the number of questions, named ids, and the time."""
    id_nodes = [child for name, identity in ids.items() for child in (f", {name} ", tag("code", identity))]
    return tag("p", format_count(n_questions, "question"), *id_nodes, f", {created_at}")


def note(*content: Child) -> Node:
    """Return a paragraph in the style of an explanation."""
    return tag("p", *content, class_="note")


def to_sentence(clause: str) -> str:
    """Turn a clause into a sentence: capitalize its first letter and add a full stop."""
    return f"{clause[0].upper()}{clause[1:]}."


def iter_lineage_sections(lineage: Mapping[str, str]) -> Iterator[Node]:
    """Yield the section with the ids and versions of a report's inputs, if there are any."""
    if lineage:
        yield section("Lineage", table(("", ""), [(name, tag("code", value)) for name, value in lineage.items()]))


def chart_row(*pictures: Node) -> Node:
    """Return charts side by side, if the page is wide enough."""
    return tag("div", *pictures, class_="pair")


def section_columns(*sections: Node | None) -> Node:
    """Return sections in two columns, if the page is wide enough; None is left out."""
    return tag("div", *(section_node for section_node in sections if section_node is not None), class_="columns")


def tiles(values: Iterable[tuple[str, str]]) -> Node:
    """Return tiles with the main numbers, given as (name, value)."""
    return tag("div", *(_render_tile(name, value) for name, value in values), class_="tiles")


def _render_tile(name: str, tile_value: str) -> Node:
    return tag("div", tag("b", tile_value), tag("span", name), class_="tile")


def table(titles: Sequence[str], rows: Iterable[Sequence[Child]]) -> Node:
    """Return a table. If all titles are empty, it has no header row."""
    header_rows = [tag("tr", *(tag("th", title) for title in titles))] if any(titles) else []
    body_rows = (tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    # On a narrow screen, the table can be scrolled without the page.
    return tag("div", tag("table", *header_rows, *body_rows), class_="scroll")


def format_bytes(n: int) -> str:
    """Return a number of bytes as text with a unit, such as `1.53 MB`."""
    scaled_bytes = float(n)
    for unit in ("B", "kB", "MB", "GB"):
        if scaled_bytes < 1000:
            return f"{scaled_bytes:.3g} {unit}"
        scaled_bytes /= 1000
    return f"{scaled_bytes:,.3g} TB"


class Scale:
    """Maps values to chart coordinates on a linear or logarithmic axis."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool = False) -> None:
        """Map the value `low` to the coordinate `start`, and `high` to `end`."""
        self._transform = math.log if log else float
        self._low, self._start = self._transform(low), start
        self._slope = (end - start) / ((self._transform(high) - self._low) or 1.0)

    def __call__(self, value: float) -> float:
        """Return the position of `value`."""
        return self._start + (self._transform(value) - self._low) * self._slope


def bar_chart(rows: Sequence[tuple[str, float, str]]) -> Node:
    """Return a chart with a horizontal bar for each (label, value, value as text).

    The longest bar fills the width.
    """
    max_value = max((bar_value for _, bar_value, _ in rows), default=0) or 1
    return tag("div", *(_render_bar(label, value / max_value, text) for label, value, text in rows), class_="bars")


def _render_bar(label: str, share: float, text: str) -> Node:
    filled_bar = tag("span", class_="fill", style=f"width:{max(share, 0.002):.2%}")
    return tag(
        "div",
        tag("span", label, class_="label"),
        tag("span", filled_bar, class_="track"),
        tag("span", text, class_="value"),
        class_="bar",
    )


def histogram(buckets: Mapping[int, int], things: str, unit: str) -> Node:
    """Return a histogram with the number of `things`, such as nodes, by `unit`, such as links.

    The keys of `buckets` are lower bounds. All buckets are as wide as the smallest distance between
    two of them.
    """
    bounds = sorted(buckets)
    width = min((b - a for a, b in pairwise(bounds)), default=max(1, bounds[-1] if bounds else 1))
    minimum, maximum = (bounds[0], bounds[-1] + width) if bounds else (0, width)
    x = Scale(minimum, maximum, _X0, _X1)
    ranges = {low: f"{low} to {low + width - 1}" if width > 1 else f"{low}" for low in bounds}
    bucket_bars = [
        (x(low), x(low + width), buckets[low], f"{ranges[low]} {unit}: {buckets[low]:,} {things}") for low in bounds
    ]
    labels = [_render_bottom_label(x(tick), f"{tick:,.0f}") for tick in _get_ticks(minimum, maximum, _MAX_LABELS)]
    return _render_column_chart(bucket_bars, labels, f"{things} by {unit}", unit)


def doubling_histogram(counts: Sequence[int], things: str, unit: str) -> Node:
    """Return a histogram with doubling buckets: counts[i] `things` have 0, 1, 2-3, … `unit`."""
    used_buckets = [i for i, n_things in enumerate(counts) if n_things]
    buckets = range(used_buckets[0], used_buckets[-1] + 1) if used_buckets else range(0)
    x = Scale(buckets.start, max(buckets.stop, buckets.start + 1), _X0, _X1)
    bounds = {i: 1 << i >> 1 for i in buckets}
    names = {i: f"{low:,}" if i < 2 else f"{low:,} to {2 * low - 1:,}" for i, low in bounds.items()}
    bars = [(x(i), x(i + 1), counts[i], f"{names[i]} {unit}: {counts[i]:,} {things}") for i in buckets]
    labels = [
        _render_bottom_label((x(i) + x(i + 1)) / 2, f"{bounds[i]:,}")
        for i in buckets[:: max(1, -(-len(buckets) // _MAX_LABELS))]
    ]
    return _render_column_chart(bars, labels, f"{things} by {unit}", f"{unit}, doubling")


def _render_column_chart(
    bars: Sequence[tuple[float, float, int, str]], labels: Sequence[Node], label: str, caption: str
) -> Node:
    """Return a chart with a vertical bar for each (left, right, count, title)."""
    max_count = max((n_things for _, _, n_things, _ in bars), default=0) or 1
    y = Scale(0, max_count, _Y0, _Y1)
    bar_marks = (
        tag(
            "rect",
            tag("title", title),
            class_="s1 mark",
            x=x0 + _GAP,
            y=y(n_things),
            width=max(1.0, x1 - x0 - 2 * _GAP),
            height=_Y0 - y(n_things),
        )
        for x0, x1, n_things, title in bars
    )
    grid_lines = [_render_grid_line(y(tick), f"{tick:,.0f}") for tick in _get_ticks(0, max_count)]
    return _render_svg(label, join(*grid_lines, *bar_marks, *labels, _render_caption(caption)))


def trade_off_chart(
    curves: Mapping[str, Sequence[OperatingPoint]],
    k: int,
    unit: CostUnit,
    settings: Mapping[str, OperatingPoint] | None = None,
) -> Node:
    """Return a chart of recall@k by cost per query, with one line per index.

    Both axes are logarithmic. A point is the mean over the queries, and its whisker ends at the 5th
    percentile of the queries. The vertical axis is 1 - recall, so that .99 and .999 are as far
    apart as .9 and .99. A ring marks the default setting of an index.
    """
    points = [point for curve_points in curves.values() for point in curve_points] + list((settings or {}).values())
    point_costs = [_get_cost(point, unit) for point in points] or [1.0]
    low, high = min(point_costs) / 1.3, max(point_costs) * 1.3
    minimum_recall = min((min(point.recall_p5, point.recall_mean) for point in points), default=0.0)
    minimum_tick = max(tick for tick in _RECALL_TICKS[:4] if tick <= minimum_recall)
    x = Scale(low, high, _X0, _X1, log=True)
    miss_scale = Scale(1 - minimum_tick, 1 - _RECALL_TICKS[-1], _Y0, _Y1, log=True)

    def project(point: OperatingPoint) -> tuple[float, float, float]:
        recalls = point.recall_mean, point.recall_p5
        y, whisker_end_y = (miss_scale(max(1 - recall, 1 - _RECALL_TICKS[-1])) for recall in recalls)
        return x(_get_cost(point, unit)), y, whisker_end_y

    ticks = [tick for tick in _RECALL_TICKS if tick >= minimum_tick]
    grid_lines = [_render_grid_line(miss_scale(1 - t), f"{t:g}" if t < ticks[-1] else f"{t:g}+") for t in ticks]
    labels = [_render_bottom_label(x(tick), f"{tick:,g}") for tick in _get_log_ticks(low, high)]
    curve_lines = [
        _render_recall_curve(n, name, curve_points, unit, project)
        for n, (name, curve_points) in enumerate(curves.items(), start=1)
    ]
    rings = [
        _render_ring(n, settings[name], project)
        for n, name in enumerate(curves, start=1)
        if settings and name in settings
    ]
    label = f"recall@{k} by {_COST_LABELS[unit]}"
    return _render_svg(label, join(*grid_lines, *labels, _render_caption(_COST_LABELS[unit]), *curve_lines, *rings))


def _get_cost(point: OperatingPoint, unit: CostUnit) -> float:
    return max(point.distances if unit == "distances" else point.milliseconds, 1e-4)


def _render_recall_curve(
    series: int, name: str, points: Sequence[OperatingPoint], unit: CostUnit, project: Projection
) -> Node:
    ordered_points = sorted(points, key=lambda point: _get_cost(point, unit))
    titles = [
        f"{name}, {p.setting}: mean {p.recall_mean:.3f}, 5th percentile {p.recall_p5:.3f}, "
        f"{p.distances:,.0f} distances, {p.milliseconds:.3g} ms"
        for p in ordered_points
    ]
    return _render_line(series, titles, [(x, y, y, whisker_end) for x, y, whisker_end in map(project, ordered_points)])


def _render_line(series: int, titles: Sequence[str], points: Sequence[tuple[float, float, float, float]]) -> Node:
    """Return a line with whiskers; points are (x, y, start of the whisker, end of the whisker)."""
    line = tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points), class_="line")
    whisker_nodes = [
        tag(
            "g",
            tag("title", title),
            tag("line", x1=x, x2=x, y1=whisker_start, y2=whisker_end, class_="whisker"),
            tag("circle", cx=x, cy=y, r=4, class_="mark"),
        )
        for title, (x, y, whisker_start, whisker_end) in zip(titles, points, strict=True)
    ]
    return tag("g", line, *whisker_nodes, class_=f"s{_get_color_number(series)}")


def _render_ring(series: int, point: OperatingPoint, project: Projection) -> Node:
    x, y, _ = project(point)
    return tag("g", tag("circle", cx=x, cy=y, r=8, class_="ring"), class_=f"s{_get_color_number(series)}")


def _get_color_number(series: int) -> int:
    return (series - 1) % _N_COLOURS + 1


@dataclass(frozen=True, slots=True)
class ChartPoint:
    """A value with its confidence interval, at a position on the horizontal axis."""

    x: float
    y: float
    low: float
    high: float


def line_chart(
    series: Mapping[str, Sequence[ChartPoint]],
    y_label: str,
    x_label: str,
    *,
    log: bool = False,
    marks: Sequence[float] = (),
) -> Node:
    """Return a chart with one line per series; its colours are those of `legend` for these series.

    Whiskers show the confidence intervals.

    Args:
        series: Points by name of the series, in any order; y must be finite.
        y_label: Label of the vertical axis.
        x_label: Label of the horizontal axis.
        log: Whether the horizontal axis is logarithmic; then all x must be above 0.
        marks: Values of x with a dashed line, such as events; if there are more than 60, no dashed
            line is drawn.
    """
    all_points = [point for series_points in series.values() for point in series_points] or [ChartPoint(1, 0, 0, 1)]
    minimum_x, maximum_x = min(p.x for p in all_points), max(p.x for p in all_points)
    bottom, top = min(p.low for p in all_points), max(p.high for p in all_points)
    margin = (top - bottom or abs(top) or 1.0) / 20
    x, y = Scale(minimum_x, maximum_x, _X0 + 8, _X1 - 8, log=log), Scale(bottom - margin, top + margin, _Y0, _Y1)
    label_values = _choose_labels(sorted({point.x for point in all_points}), log=log)
    grid_lines = [_render_grid_line(y(tick), f"{tick:,g}") for tick in _get_ticks(bottom - margin, top + margin)]
    labels = [_render_bottom_label(x(tick), f"{tick:,g}") for tick in label_values]
    dashed_lines = [
        _render_dashed_line(x(mark), f"{mark:,g}")
        for mark in marks
        if minimum_x <= mark <= maximum_x and len(marks) <= _MAX_MARKS
    ]
    ordered_points_by_series = {
        name: sorted(series_points, key=lambda point: point.x) for name, series_points in series.items()
    }
    series_lines = [
        _render_line_with_intervals(n, name, points, x, y)
        for n, (name, points) in enumerate(ordered_points_by_series.items(), start=1)
    ]
    change_texts = [
        f"{name} from {points[0].y:g} to {points[-1].y:g}"
        for name, points in ordered_points_by_series.items()
        if points
    ]
    chart_nodes = join(*grid_lines, *labels, *dashed_lines, _render_caption(x_label), *series_lines)
    return _render_svg(f"{y_label} by {x_label}", chart_nodes, "; ".join(change_texts))


def _render_dashed_line(x: float, title: str) -> Node:
    return tag("line", tag("title", title), x1=x, x2=x, y1=_Y0, y2=_Y1, class_="dash")


def _choose_labels(axis_values: Sequence[float], *, log: bool) -> list[float]:
    """Return the values to label on an axis: all of them if few and whole, else round values."""
    if len(axis_values) <= _MAX_LABELS and all(float(value).is_integer() for value in axis_values):
        return list(axis_values)
    log_ticks = _get_log_ticks(axis_values[0], axis_values[-1]) if log else []
    return log_ticks if len(log_ticks) > 1 else _get_ticks(axis_values[0], axis_values[-1], _MAX_LABELS)


def _render_line_with_intervals(series: int, name: str, points: Sequence[ChartPoint], x: Scale, y: Scale) -> Node:
    """Return a line with whiskers through points that ascend by x."""
    titles = [
        f"{name}, {p.x:,g}: {p.y:.4g}" + (f" [{p.low:.4g}, {p.high:.4g}]" if p.low < p.high else "") for p in points
    ]
    return _render_line(series, titles, [(x(p.x), y(p.y), y(p.low), y(p.high)) for p in points])


def _get_ticks(low: float, high: float, n_ticks: int = 5) -> list[float]:
    """Return round values in [low, high] with a step of 1, 2 or 5 times a power of ten."""
    rough_step = (high - low) / n_ticks or 1.0
    magnitude = 10.0 ** math.floor(math.log10(rough_step))
    tick_step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough_step * 0.999)
    return [n * tick_step for n in range(math.ceil(low / tick_step - 1e-9), math.floor(high / tick_step + 1e-9) + 1)]


def _get_log_ticks(low: float, high: float) -> list[float]:
    """Return evenly spread round values in [low, high], at most three per power of ten."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for mantissas in ((1, 2, 5), (1, 3), (1,)):
        ticks = [m * 10.0**p for p in exponents for m in mantissas if low <= m * 10.0**p <= high]
        if len(ticks) <= _MAX_LABELS:
            break
    return ticks


def _render_grid_line(y: float, label: str) -> Node:
    grid_line = tag("line", x1=_X0, x2=_X1, y1=y, y2=y, class_="grid")
    return join(grid_line, tag("text", label, x=_X0 - 8, y=y + 4, text_anchor="end"))


def _render_bottom_label(x: float, label: str) -> Node:
    return tag("text", label, x=x, y=_Y0 + 20, text_anchor="middle")


def _render_caption(text: str) -> Node:
    return tag("text", text, x=(_X0 + _X1) / 2, y=_HEIGHT - 5, text_anchor="middle")


def _render_svg(label: str, content: Node, description: str = "") -> Node:
    axis_line = tag("line", x1=_X0, x2=_X1, y1=_Y0, y2=_Y0, class_="axis")
    texts = [tag("title", label), *([tag("desc", description)] if description else [])]
    view_box = f"0 0 {_WIDTH:g} {_HEIGHT:g}"
    return tag("svg", *texts, content, axis_line, viewBox=view_box, role="img", aria_label=label)


def legend(names: Iterable[str]) -> Node:
    """Return the legend of a chart; `names` must be in the order of the chart's series."""
    return tag(
        "div", *(_render_legend_entry(series, name) for series, name in enumerate(names, start=1)), class_="legend"
    )


def _render_legend_entry(series: int, name: str) -> Node:
    return tag("span", tag("i", class_=f"swatch b{_get_color_number(series)}"), name, class_="key")
