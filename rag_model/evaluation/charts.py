"""The report's pictures as inline SVG and plain bars: no script, no font, no colour but the page's own.

Every mark carries a `<title>`, so a pointer shows its value; the report prints the same numbers as tables
beside them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from rag_model.evaluation.markup import Node, join, tag
from rag_model.index.health import Effort

_WIDTH, _HEIGHT = 720.0, 300.0  # the viewBox; the page scales it
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 24.0, 20.0, 50.0  # margins that hold the labels
_X0, _X1 = _LEFT, _WIDTH - _RIGHT
_Y0, _Y1 = _HEIGHT - _BOTTOM, _TOP


class Scale:
    """Maps data to the picture: a line through two points, on a linear or logarithmic axis."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool = False) -> None:
        """Map `low` to `start` and `high` to `end`."""
        self._shape = math.log if log else float
        self._low, self._start = self._shape(low), start
        self._slope = (end - start) / ((self._shape(high) - self._low) or 1.0)

    def __call__(self, value: float) -> float:
        """Return the place of `value`."""
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


def histogram(buckets: Mapping[int, int], unit: str) -> Node:
    """Return a histogram; a bucket is named by its lower bound, and all are as wide as the closest two."""
    lows = sorted(buckets)
    width = min((b - a for a, b in pairwise(lows)), default=max(1, lows[-1] if lows else 1))
    first, last = (lows[0], lows[-1] + width) if lows else (0, width)
    top = max(buckets.values(), default=1)
    x = Scale(first, last, _X0, _X1)
    y = Scale(0, top, _Y0, _Y1)
    columns = (
        tag(
            "rect",
            tag("title", f"{low} to {low + width - 1} {unit}: {buckets[low]:,}"),
            class_="s1 mark",
            x=x(low) + 1,
            y=y(buckets[low]),
            width=max(1.0, x(low + width) - x(low) - 2),
            height=_Y0 - y(buckets[low]),
        )
        for low in lows
    )
    heights = [_level(y(tick), f"{tick:,.0f}") for tick in _ticks(0, top)]
    feet = [_foot(x(tick), f"{tick:,.0f}") for tick in _ticks(first, last, 8)]
    return _figure(f"passages by length in {unit}", join(*heights, *columns, *feet, _caption(f"{unit} in a passage")))


def trade_offs(curves: Mapping[str, Sequence[Effort]], k: int) -> Node:
    """Return recall@k against milliseconds a query, one line an index.

    A point is the mean over the queries; its whisker goes down to their 5th percentile.
    """
    points = [effort for efforts in curves.values() for effort in efforts]
    times = [max(effort.milliseconds, 1e-4) for effort in points] or [1.0]
    low, high = min(times) / 1.3, max(times) * 1.3
    least = min((min(e.recall_p5, e.recall_mean) for e in points), default=0.0)
    floor = min(math.floor(least * 10) / 10, 0.9)
    x = Scale(low, high, _X0, _X1, log=True)
    y = Scale(floor, 1.0, _Y0, _Y1)
    levels = [_level(y(tick), f"{tick:.2f}") for tick in _ticks(floor, 1.0)]
    feet = [_foot(x(tick), f"{tick:g}") for tick in _log_ticks(low, high)]
    lines = [_curve(n, name, efforts, x, y) for n, (name, efforts) in enumerate(curves.items(), start=1)]
    caption = _caption("milliseconds a query (logarithmic)")
    return _figure(f"recall@{k} against time", join(*levels, *feet, caption, *lines))


def _curve(number: int, name: str, efforts: Sequence[Effort], x: Scale, y: Scale) -> Node:
    ordered = sorted(efforts, key=lambda effort: effort.milliseconds)
    places = [(x(max(e.milliseconds, 1e-4)), y(e.recall_mean), y(e.recall_p5)) for e in ordered]
    line = tag("polyline", points=" ".join(f"{px:.1f},{py:.1f}" for px, py, _ in places), class_="line")
    marks = [
        tag(
            "g",
            tag(
                "title",
                f"{name}, {e.setting}: mean {e.recall_mean:.3f}, 5th percentile {e.recall_p5:.3f}, "
                f"{e.milliseconds:.3g} ms",
            ),
            tag("line", x1=px, x2=px, y1=py, y2=low, class_="whisker"),
            tag("circle", cx=px, cy=py, r=4.5, class_="mark"),
        )
        for e, (px, py, low) in zip(ordered, places, strict=True)
    ]
    return tag("g", line, *marks, class_=f"s{number}")


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round values in [low, high], a step of 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / about or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**p for p in powers for m in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high]


def _level(y: float, label: str) -> Node:
    grid = tag("line", x1=_X0, x2=_X1, y1=y, y2=y, class_="grid")
    return join(grid, tag("text", label, x=_X0 - 8, y=y + 4, text_anchor="end"))


def _foot(x: float, label: str) -> Node:
    return tag("text", label, x=x, y=_Y0 + 20, text_anchor="middle")


def _caption(text: str) -> Node:
    return tag("text", text, x=(_X0 + _X1) / 2, y=_HEIGHT - 6, text_anchor="middle")


def _figure(label: str, content: Node) -> Node:
    axis = tag("line", x1=_X0, x2=_X1, y1=_Y0, y2=_Y0, class_="axis")
    return tag("svg", content, axis, viewBox=f"0 0 {_WIDTH:g} {_HEIGHT:g}", role="img", aria_label=label)


def legend(names: Iterable[str]) -> Node:
    """Return the key of the lines: a swatch and a name each, in the order of `trade_offs`."""
    keys = (tag("span", tag("i", class_=f"swatch b{n}"), name, class_="key") for n, name in enumerate(names, start=1))
    return tag("div", *keys, class_="legend")
