"""The report page about a training: losses, dev measures, and refreshes of the passage index."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rag_model.evaluation.reports.page import (
    ChartPoint,
    Node,
    chart_row,
    header,
    legend,
    line_chart,
    note,
    render_document,
    section,
    tag,
)
from rag_model.untrusted_text import parse_json

_MAX_POINTS = 300  # maximum number of points of a curve, because a screen cannot show more
_AGE_CURVE, _WAITED_CURVE = "train snapshot_age", "train waited_seconds"
_SECONDS_CURVES = {f"train {name}_seconds": name for name in ("encoding", "rebuild", "swap")}
_INDEX_CURVES = {_AGE_CURVE, _WAITED_CURVE, *_SECONDS_CURVES, "train refreshes_failed"}

Series = Sequence[tuple[float, float]]  # step and value


@dataclass(frozen=True, slots=True)
class TrainingCurves:
    """The curves of a training."""

    # curves by the kind of record and the name of the metric, such as `dev nll`
    series: Mapping[str, Series] = field(default_factory=dict)
    index_moves: tuple[float, ...] = ()  # steps at which training switched to another snapshot


def read_training_curves(path: Path) -> TrainingCurves:
    """Read the curves from the `metrics.jsonl` of a training; there are none if it does not exist.

    A curve of more than 300 points is thinned evenly. The seconds for which the training waited for
    its index are cumulated. Lines and values in another format are skipped, because a report does
    not need all of them.
    """
    points_by_curve, move_steps, snapshot_ids = dict[str, list[tuple[float, float]]](), list[float](), list[str]()
    for record in _iter_records(path):
        step, snapshot = float(record["step"]), record.get("snapshot")
        if isinstance(snapshot, str) and snapshot not in snapshot_ids[-1:]:
            move_steps += [step] if snapshot_ids else []
            snapshot_ids.append(snapshot)
        for name, metric in record.items():
            if name not in {"kind", "step"} and isinstance(metric, int | float) and math.isfinite(metric):
                points_by_curve.setdefault(f"{record['kind']} {name}", []).append((step, float(metric)))
    if _WAITED_CURVE in points_by_curve:
        points_by_curve[_WAITED_CURVE] = _accumulate_points(points_by_curve[_WAITED_CURVE])
    return TrainingCurves(
        {name: points[:: -(-len(points) // _MAX_POINTS)] for name, points in points_by_curve.items()}, tuple(move_steps)
    )


def _iter_records(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        with suppress(ValueError, TypeError, KeyError):
            record = parse_json(line, finite=False)
            float(record["step"]), record["kind"]  # raises an error if one is missing or invalid
            yield record


def _accumulate_points(points: Series) -> list[tuple[float, float]]:
    running_total, running_totals = 0.0, list[tuple[float, float]]()
    for step, increment in points:
        running_total += increment
        running_totals.append((step, running_total))
    return running_totals


def render_training_report(title: str, stages: Mapping[str, TrainingCurves]) -> str:
    """Return the HTML document about a training; a stage with an empty name has no heading."""
    content_nodes = [header(title)]
    for name, curves in stages.items():
        content_nodes += [*([tag("h1", name)] if name else []), *iter_training_sections(curves)]
    return render_document(title, content_nodes)


def iter_training_sections(curves: TrainingCurves) -> Iterator[Node]:
    """Yield the sections with the curves, first those about index refreshes, if there are any."""
    if not any(curves.series.values()):
        return
    is_moving = _AGE_CURVE in curves.series
    index_curves = {name for name in curves.series if is_moving and (name in _INDEX_CURVES or name.startswith("dev "))}
    if is_moving:
        yield section("The moving index", _render_refresh_note(curves), chart_row(*_render_index_charts(curves)))
    other_curves = [name for name, points in curves.series.items() if points and name not in index_curves]
    if other_curves:
        yield section(
            "Training",
            chart_row(
                *(_render_line_chart(name, {name: curves.series[name]}, curves.index_moves) for name in other_curves)
            ),
        )


def _render_refresh_note(curves: TrainingCurves) -> Node:
    n_failed_refreshes = max((n_failed for _, n_failed in curves.series.get("train refreshes_failed", ())), default=0.0)
    refresh_summary = f"The training moved to a rebuilt index {len(curves.index_moves):,} times, at the dashed lines"
    return note(f"{refresh_summary}; {n_failed_refreshes:,.0f} rebuilds failed.")


def _render_index_charts(curves: TrainingCurves) -> Iterator[Node]:
    for name, points in curves.series.items():
        if name.startswith("dev "):
            yield _render_line_chart(name, {name: points}, curves.index_moves)
    yield _render_line_chart("age of the index in steps", {"age": curves.series[_AGE_CURVE]}, curves.index_moves)
    seconds_by_label = {label: curves.series[name] for name, label in _SECONDS_CURVES.items() if name in curves.series}
    yield _render_line_chart("seconds to refresh the index in use", seconds_by_label, curves.index_moves)
    if _WAITED_CURVE in curves.series:
        yield _render_line_chart("seconds waited so far", {"waited": curves.series[_WAITED_CURVE]}, curves.index_moves)


def _render_line_chart(title: str, series: Mapping[str, Series], moves: Sequence[float]) -> Node:
    points_by_series = {name: [ChartPoint(x, y, y, y) for x, y in points] for name, points in series.items()}
    legend_nodes = [legend(series)] if len(series) > 1 else []
    return tag("div", tag("h3", title), *legend_nodes, line_chart(points_by_series, title, "steps", marks=moves))
