"""The curves of a training, and the page that shows them: losses, dev measures, and how the index moved beside them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rag_model.evaluation.reports.charts import Point, courses, legend
from rag_model.evaluation.reports.markup import Node, tag
from rag_model.evaluation.reports.page import document, pair, section
from rag_model.json_text import parse_json

_POINTS = 300  # points of a curve: a screen shows no more
_AGE, _WAITED = "train snapshot_age", "train waited_seconds"
_SECONDS = {f"train {name}_seconds": name for name in ("encoding", "rebuild", "swap")}
_MOVING = {_AGE, _WAITED, *_SECONDS, "train refreshes_failed"}

Values = Sequence[tuple[float, float]]  # step and value


@dataclass(frozen=True, slots=True)
class Curves:
    """The curves of a training."""

    values: Mapping[str, Values] = field(default_factory=dict)  # by kind and name, such as `dev nll`
    moves: tuple[float, ...] = ()  # steps from which another snapshot was asked


def read_curves(path: Path) -> Curves:
    """Return the curves of a training's `metrics.jsonl`; empty without the file.

    A curve of more than 300 points is thinned evenly. The seconds that a training waited for its index are added up.
    Lines and values in another format are left out: the curves are only an illustration.
    """
    values, moves, asked = dict[str, list[tuple[float, float]]](), list[float](), list[str]()
    for row in _rows(path):
        step, snapshot = float(row["step"]), row.get("snapshot")
        if isinstance(snapshot, str) and snapshot not in asked[-1:]:
            moves += [step] if asked else []
            asked.append(snapshot)
        for name, value in row.items():
            if name not in {"kind", "step"} and isinstance(value, int | float) and math.isfinite(value):
                values.setdefault(f"{row['kind']} {name}", []).append((step, float(value)))
    if _WAITED in values:
        values[_WAITED] = _added_up(values[_WAITED])
    return Curves({name: points[:: -(-len(points) // _POINTS)] for name, points in values.items()}, tuple(moves))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        with suppress(ValueError, TypeError, KeyError):
            row = parse_json(line, finite=False)
            float(row["step"]), row["kind"]
            yield row


def _added_up(points: Values) -> list[tuple[float, float]]:
    total, found = 0.0, list[tuple[float, float]]()
    for step, value in points:
        total += value
        found.append((step, total))
    return found


def render(title: str, stages: Mapping[str, Curves]) -> str:
    """Return the whole HTML document of a training; `stages` by name, one without a name if there is only one."""
    content = [tag("header", tag("h1", title))]
    for name, curves in stages.items():
        content += [*([tag("h1", name)] if name else []), *training_sections(curves)]
    return document(title, content)


def training_sections(curves: Curves) -> Iterator[Node]:
    """Return the curves, in two parts if the index moved: first what shows whether it moved often enough."""
    if not any(curves.values.values()):
        return
    moving = _AGE in curves.values
    beside = {name for name in curves.values if moving and (name in _MOVING or name.startswith("dev "))}
    if moving:
        yield section("The moving index", _how(curves), pair(*_beside(curves)))
    others = [name for name, points in curves.values.items() if points and name not in beside]
    if others:
        yield section("Training", pair(*(_picture(name, {name: curves.values[name]}, curves.moves) for name in others)))


def _how(curves: Curves) -> Node:
    failed = max((value for _, value in curves.values.get("train refreshes_failed", ())), default=0.0)
    said = f"The training moved to a rebuilt index {len(curves.moves):,} times, at the dashed lines"
    return tag("p", f"{said}; {failed:,.0f} rebuilds failed.", class_="note")


def _beside(curves: Curves) -> Iterator[Node]:
    for name, points in curves.values.items():
        if name.startswith("dev "):
            yield _picture(name, {name: points}, curves.moves)
    yield _picture("age of the index in steps", {"age": curves.values[_AGE]}, curves.moves)
    seconds = {short: curves.values[name] for name, short in _SECONDS.items() if name in curves.values}
    yield _picture("seconds of the index that is asked", seconds, curves.moves)
    if _WAITED in curves.values:
        yield _picture("seconds waited so far", {"waited": curves.values[_WAITED]}, curves.moves)


def _picture(title: str, series: Mapping[str, Values], moves: Sequence[float]) -> Node:
    points = {name: [Point(x, y, y, y) for x, y in some] for name, some in series.items()}
    names = [legend(series)] if len(series) > 1 else []
    return tag("div", tag("h3", title), *names, courses(points, title, "steps", marks=moves))
