"""The report's charts as inline SVG and plain bars: no script, no font, only the page's colours.

Every mark has a `<title>`, so a pointer shows its value; the report prints the same numbers in tables.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from rag_model.evaluation.reports.markup import Node, join, tag
from rag_model.index.quality.health import Effort

_WIDTH, _HEIGHT = 460.0, 280.0  # the viewBox: half the page, or the whole width of a phone
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 16.0, 16.0, 48.0  # margins for the labels
_X0, _X1 = _LEFT, _WIDTH - _RIGHT
_Y0, _Y1 = _HEIGHT - _BOTTOM, _TOP
_SHADES = 4  # colours of the page for lines, then repeated
_FEET = 6  # labels below a chart
_DASHES = 60  # dashed lines of a chart at most
_GAP = 0.5  # on either side of a column
_RECALLS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)  # levels of recall; higher ones are not distinguished
_PRICES = {"distances": "distance computations per query", "milliseconds": "milliseconds per query"}

Price = Literal["distances", "milliseconds"]
Place = Callable[[Effort], tuple[float, float, float]]  # across, mean, 5th percentile


class Scale:
    """Maps data to the chart: a line through two points, on a linear or logarithmic axis."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool = False) -> None:
        """Map `low` to `start` and `high` to `end`."""
        self._shape = math.log if log else float
        self._low, self._start = self._shape(low), start
        self._slope = (end - start) / ((self._shape(high) - self._low) or 1.0)

    def __call__(self, value: float) -> float:
        """Return the position of `value`."""
        return self._start + (self._shape(value) - self._low) * self._slope


def bars(rows: Sequence[tuple[str, float, str]]) -> Node:
    """Return horizontal bars of (label, value, value as text) in that order; the longest fills the width."""
    longest = max((value for _, value, _ in rows), default=0) or 1
    return tag("div", *(_bar(label, value / longest, text) for label, value, text in rows), class_="bars")


def _bar(label: str, share: float, text: str) -> Node:
    fill = tag("span", class_="fill", style=f"width:{max(share, 0.002):.2%}")
    return tag(
        "div",
        tag("span", label, class_="label"),
        tag("span", fill, class_="track"),
        tag("span", text, class_="value"),
        class_="bar",
    )


def histogram(buckets: Mapping[int, int], things: str, unit: str) -> Node:
    """Return a histogram: how many of `things` fall into each bucket of `unit`.

    A bucket is named by its lower bound; all have the smallest distance between two bounds as width.
    """
    lows = sorted(buckets)
    width = min((b - a for a, b in pairwise(lows)), default=max(1, lows[-1] if lows else 1))
    first, last = (lows[0], lows[-1] + width) if lows else (0, width)
    x = Scale(first, last, _X0, _X1)
    names = {low: f"{low} to {low + width - 1}" if width > 1 else f"{low}" for low in lows}
    bars = [(x(low), x(low + width), buckets[low], f"{names[low]} {unit}: {buckets[low]:,} {things}") for low in lows]
    feet = [_foot(x(tick), f"{tick:,.0f}") for tick in _ticks(first, last, _FEET)]
    return _columns(bars, feet, f"{things} by {unit}", unit)


def doublings(counts: Sequence[int], things: str, unit: str) -> Node:
    """Return a histogram over 0, 1, 2-3, 4-7, … of `unit`: counts[i] `things` fall into the i-th bucket."""
    used = [i for i, count in enumerate(counts) if count]
    shown = range(used[0], used[-1] + 1) if used else range(0)
    x = Scale(shown.start, max(shown.stop, shown.start + 1), _X0, _X1)
    lows = {i: 1 << i >> 1 for i in shown}
    names = {i: f"{low:,}" if i < 2 else f"{low:,} to {2 * low - 1:,}" for i, low in lows.items()}
    bars = [(x(i), x(i + 1), counts[i], f"{names[i]} {unit}: {counts[i]:,} {things}") for i in shown]
    feet = [_foot((x(i) + x(i + 1)) / 2, f"{lows[i]:,}") for i in shown[:: max(1, -(-len(shown) // _FEET))]]
    return _columns(bars, feet, f"{things} by {unit}", f"{unit}, doubling")


def _columns(bars: Sequence[tuple[float, float, int, str]], feet: Sequence[Node], label: str, caption: str) -> Node:
    """Return upright bars of (left, right, count, title)."""
    top = max((count for _, _, count, _ in bars), default=0) or 1
    y = Scale(0, top, _Y0, _Y1)
    marks = (
        tag(
            "rect",
            tag("title", title),
            class_="s1 mark",
            x=left + _GAP,
            y=y(count),
            width=max(1.0, right - left - 2 * _GAP),
            height=_Y0 - y(count),
        )
        for left, right, count, title in bars
    )
    heights = [_level(y(tick), f"{tick:,.0f}") for tick in _ticks(0, top)]
    return _figure(label, join(*heights, *marks, *feet, _caption(caption)))


def trade_offs(
    curves: Mapping[str, Sequence[Effort]], k: int, price: Price, settings: Mapping[str, Effort] | None = None
) -> Node:
    """Return recall@k against the cost per query, one line per index; both axes are logarithmic.

    A point is the mean over the queries; its whisker goes to their 5th percentile. The axis is 1 - recall, so that .99
    and .999 are as far apart as .9 and .99. A ring marks the default setting of an index.
    """
    points = [effort for efforts in curves.values() for effort in efforts] + list((settings or {}).values())
    prices = [_price(effort, price) for effort in points] or [1.0]
    low, high = min(prices) / 1.3, max(prices) * 1.3
    least = min((min(e.recall_p5, e.recall_mean) for e in points), default=0.0)
    floor = max(tick for tick in _RECALLS[:4] if tick <= least)
    x = Scale(low, high, _X0, _X1, log=True)
    missed = Scale(1 - floor, 1 - _RECALLS[-1], _Y0, _Y1, log=True)

    def place(effort: Effort) -> tuple[float, float, float]:
        y, end = (missed(max(1 - recall, 1 - _RECALLS[-1])) for recall in (effort.recall_mean, effort.recall_p5))
        return x(_price(effort, price)), y, end

    ticks = [tick for tick in _RECALLS if tick >= floor]
    levels = [_level(missed(1 - t), f"{t:g}" if t < ticks[-1] else f"{t:g}+") for t in ticks]
    feet = [_foot(x(tick), f"{tick:,g}") for tick in _log_ticks(low, high)]
    lines = [_curve(n, name, efforts, price, place) for n, (name, efforts) in enumerate(curves.items(), start=1)]
    rings = [_ring(n, settings[name], place) for n, name in enumerate(curves, start=1) if settings and name in settings]
    label = f"recall@{k} by {_PRICES[price]}"
    return _figure(label, join(*levels, *feet, _caption(_PRICES[price]), *lines, *rings))


def _price(effort: Effort, price: Price) -> float:
    return max(effort.distances if price == "distances" else effort.milliseconds, 1e-4)


def _curve(number: int, name: str, efforts: Sequence[Effort], price: Price, place: Place) -> Node:
    ordered = sorted(efforts, key=lambda effort: _price(effort, price))
    places = [place(effort) for effort in ordered]
    line = tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places), class_="line")
    marks = [
        tag(
            "g",
            tag(
                "title",
                f"{name}, {e.setting}: mean {e.recall_mean:.3f}, 5th percentile {e.recall_p5:.3f}, "
                f"{e.distances:,.0f} distances, {e.milliseconds:.3g} ms",
            ),
            tag("line", x1=x, x2=x, y1=y, y2=end, class_="whisker"),
            tag("circle", cx=x, cy=y, r=4, class_="mark"),
        )
        for e, (x, y, end) in zip(ordered, places, strict=True)
    ]
    return tag("g", line, *marks, class_=f"s{_shade(number)}")


def _ring(number: int, effort: Effort, place: Place) -> Node:
    x, y, _ = place(effort)
    return tag("g", tag("circle", cx=x, cy=y, r=8, class_="ring"), class_=f"s{_shade(number)}")


def _shade(number: int) -> int:
    return (number - 1) % _SHADES + 1


@dataclass(frozen=True, slots=True)
class Point:
    """A value at a position, with its interval."""

    x: float
    y: float
    low: float
    high: float


def courses(
    series: Mapping[str, Sequence[Point]], what: str, across: str, *, log: bool = False, marks: Sequence[float] = ()
) -> Node:
    """Return values against a quantity, one line per series in the order of `legend`; a whisker is the interval.

    Args:
        series: by name, any number of points in any order; y finite.
        what: the values' name.
        across: the quantity's name.
        log: whether the axis is logarithmic; the quantity must be above 0 then.
        marks: quantities with a dashed line, where something happened; more than 60 are not drawn.
    """
    points = [point for some in series.values() for point in some] or [Point(1, 0, 0, 1)]
    left, right = min(p.x for p in points), max(p.x for p in points)
    bottom, top = min(p.low for p in points), max(p.high for p in points)
    room = (top - bottom or abs(top) or 1.0) / 20
    x, y = Scale(left, right, _X0 + 8, _X1 - 8, log=log), Scale(bottom - room, top + room, _Y0, _Y1)
    named = _marks(sorted({point.x for point in points}), log=log)
    levels = [_level(y(tick), f"{tick:g}") for tick in _ticks(bottom - room, top + room)]
    feet = [_foot(x(tick), f"{tick:,g}") for tick in named]
    dashes = [_dash(x(mark), f"{mark:,g}") for mark in marks if left <= mark <= right and len(marks) <= _DASHES]
    lines = [_course(n, name, some, x, y) for n, (name, some) in enumerate(series.items(), start=1)]
    return _figure(f"{what} by {across}", join(*levels, *feet, *dashes, _caption(across), *lines))


def _dash(x: float, title: str) -> Node:
    return tag("line", tag("title", title), x1=x, x2=x, y1=_Y0, y2=_Y1, class_="dash")


def _marks(asked: Sequence[float], *, log: bool) -> list[float]:
    """Return what is labelled below a chart: the quantities themselves if they are few and whole, else round ones."""
    if len(asked) <= _FEET and all(float(one).is_integer() for one in asked):
        return list(asked)
    spread = _log_ticks(asked[0], asked[-1]) if log else []
    return spread if len(spread) > 1 else _ticks(asked[0], asked[-1], _FEET)


def _course(number: int, name: str, points: Sequence[Point], x: Scale, y: Scale) -> Node:
    ordered = sorted(points, key=lambda point: point.x)
    line = tag("polyline", points=" ".join(f"{x(p.x):.1f},{y(p.y):.1f}" for p in ordered), class_="line")
    marks = [
        tag(
            "g",
            tag("title", f"{name}, {p.x:,g}: {p.y:.4g}" + (f" [{p.low:.4g}, {p.high:.4g}]" if p.low < p.high else "")),
            tag("line", x1=x(p.x), x2=x(p.x), y1=y(p.low), y2=y(p.high), class_="whisker"),
            tag("circle", cx=x(p.x), cy=y(p.y), r=4, class_="mark"),
        )
        for p in ordered
    ]
    return tag("g", line, *marks, class_=f"s{_shade(number)}")


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round values in [low, high], a step of 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / about or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round values in [low, high], evenly spread: up to three per power of ten if the labels fit."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [m * 10.0**p for p in powers for m in steps if low <= m * 10.0**p <= high]
        if len(ticks) <= _FEET:
            break
    return ticks


def _level(y: float, label: str) -> Node:
    grid = tag("line", x1=_X0, x2=_X1, y1=y, y2=y, class_="grid")
    return join(grid, tag("text", label, x=_X0 - 8, y=y + 4, text_anchor="end"))


def _foot(x: float, label: str) -> Node:
    return tag("text", label, x=x, y=_Y0 + 20, text_anchor="middle")


def _caption(text: str) -> Node:
    return tag("text", text, x=(_X0 + _X1) / 2, y=_HEIGHT - 5, text_anchor="middle")


def _figure(label: str, content: Node) -> Node:
    axis = tag("line", x1=_X0, x2=_X1, y1=_Y0, y2=_Y0, class_="axis")
    return tag("svg", content, axis, viewBox=f"0 0 {_WIDTH:g} {_HEIGHT:g}", role="img", aria_label=label)


def legend(names: Iterable[str]) -> Node:
    """Return the legend of the lines: a swatch and a name each, in the order of `trade_offs`."""
    return tag("div", *(_key(number, name) for number, name in enumerate(names, start=1)), class_="legend")


def _key(number: int, name: str) -> Node:
    return tag("span", tag("i", class_=f"swatch b{_shade(number)}"), name, class_="key")
