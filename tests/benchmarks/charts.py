"""A chart of a benchmark as one SVG file: lines on two logarithmic axes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rag_model.evaluation.reports.page import Node, Scale, join, tag

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 720.0, 360.0, 70.0, 50.0, 40.0, 170.0
_COLOURS = ("#8a8a8a", "#2a6f97", "#d1495b", "#66a182")
Points = Sequence[tuple[float, float]]


def write_lines(out: Path, lines: Mapping[str, Points], *, title: str, across: str, up: str) -> None:
    """Draw each named line through its (x, y) points, all above 0, with x and y logarithmic."""
    xs = sorted({x for points in lines.values() for x, _ in points})
    ys = [y for points in lines.values() for _, y in points]
    x = Scale(xs[0], xs[-1], _LEFT, _WIDTH - _RIGHT, log=True)
    y = Scale(min(ys), max(ys), _HEIGHT - _BOTTOM, _TOP, log=True)
    content = [
        tag("rect", width="100%", height="100%", fill="white"),
        _draw_text(title, _LEFT, 22, size=15),
        _draw_text(across, (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, anchor="middle"),
        tag("text", up, x=18, y=_HEIGHT / 2, transform=f"rotate(-90 18 {_HEIGHT / 2})", text_anchor="middle"),
        *(_draw_tick_label(x(tick), f"{tick:,.0f}") for tick in xs),
        *(_draw_level(y(tick), f"{tick:g}") for tick in _list_ticks(min(ys), max(ys))),
        *(
            _draw_line(name, points, colour, x, y)
            for (name, points), colour in zip(lines.items(), _COLOURS, strict=False)
        ),
    ]
    svg = tag(
        "svg",
        *content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH:g} {_HEIGHT:g}",
        font_family="sans-serif",
        font_size=12,
    )
    out.write_text(svg.html)


def _list_ticks(low: float, high: float) -> list[float]:
    return [m * 10.0**p for p in range(-3, 9) for m in (1, 2, 5) if low <= m * 10.0**p <= high]


def _draw_line(name: str, points: Points, colour: str, x: Scale, y: Scale) -> Node:
    positions = [(x(a), y(b)) for a, b in points]
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in positions)
    marks = [
        tag("circle", tag("title", f"{name}: {b:.4g} at {a:,.0f}"), cx=px, cy=py, r=4, fill=colour)
        for (a, b), (px, py) in zip(points, positions, strict=True)
    ]
    end = _draw_text(name, positions[-1][0] + 10, positions[-1][1] + 4)
    return join(tag("polyline", points=path, fill="none", stroke=colour, stroke_width=2), *marks, end)


def _draw_level(y: float, label: str) -> Node:
    grid = tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, stroke="#dddddd")
    return join(grid, _draw_text(label, _LEFT - 8, y + 4, anchor="end"))


def _draw_tick_label(x: float, label: str) -> Node:
    return _draw_text(label, x, _HEIGHT - _BOTTOM + 20, anchor="middle")


def _draw_text(label: str, x: float, y: float, *, anchor: str = "start", size: int = 12) -> Node:
    return tag("text", label, x=x, y=y, text_anchor=anchor, font_size=size)
