"""The report page of a build, rendered from a record of plain values."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rag_model.evaluation.gate import GateCheck, GateVerdict
from rag_model.evaluation.reports.page import (
    ChartPoint,
    Child,
    Node,
    bar_chart,
    chart_row,
    doubling_histogram,
    format_bytes,
    header,
    histogram,
    iter_lineage_sections,
    legend,
    line_chart,
    note,
    render_document,
    section,
    section_columns,
    table,
    tag,
    tiles,
    trade_off_chart,
)
from rag_model.index.kind import IndexMeasurement
from rag_model.index.quality.results import IndexHealth, OperatingPoint
from rag_model.store.versions.build_history import PastBuild, list_warnings

# titles of statistics, by their name in `IndexHealth.metrics` or `build_metrics`
_STATISTICS: Mapping[str, str] = {
    "degree": "mean links of a node",
    "unlinked": "nodes without a link from another node",
    "repaired": "nodes unreachable before repair",
    "unreachable": "nodes unreachable",
    "built_cells": "cells whose graph was built again",
    "updated_cells": "cells whose graph was updated",
    "reused_cells": "cells with the parent's graph",
    "generation": "maximum updates of a cell since it was built",
    "replaced": "maximum share of a cell replaced since it was built",
    "imbalance": "imbalance of the lists (1: equal sizes)",
    "largest_list": "vectors in the largest list",
    "quantization_error": "quantization error, |x - x̂|² / |x|²",
}
_HISTORY_METRICS = {
    "recall": "recall",
    "distances": "distances per query",
    "degree": "links of a node",
    "replaced": "share replaced",
}


@dataclass(frozen=True, slots=True)
class BuildStage:
    """One stage of the build."""

    name: str
    seconds: float
    created: int  # parts or shards created
    reused: int  # parts or shards reused from a previous run


@dataclass(frozen=True, slots=True)
class BuildReport:
    """The content of the page about a build; a section without values is left out."""

    title: str  # title of the corpus, such as enwiki, 2026-11-01
    snapshot: str  # id of the snapshot
    created_at: str  # ISO 8601 UTC
    verdict: GateVerdict
    counts: Mapping[str, int]  # counts by name, such as articles, passages, embedded, reused
    k: int = 20  # cutoff k of the recall curves
    dropped: Mapping[str, int] = field(default_factory=dict)  # number of dropped pages by reason
    # number of articles that use an unknown template, by name of the template
    unknown_templates: Mapping[str, int] = field(default_factory=dict)
    language: str = ""  # language of the corpus
    quarantined: Sequence[tuple[str, str, str]] = ()  # (page id, title, reason) of each page
    # number of passages by length in words; the keys are lower bounds of ranges
    lengths: Mapping[int, int] = field(default_factory=dict)
    measurements: Mapping[str, IndexMeasurement] = field(default_factory=dict)  # by index name
    # statistics of the build, such as nodes that were unreachable before repair, by index
    build_metrics: Mapping[str, Mapping[str, float | int]] = field(default_factory=dict)
    stages: Sequence[BuildStage] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)  # size in bytes by kind of file
    # ids and versions of the inputs: dump, recipe, vector space, parent snapshot and packages
    lineage: Mapping[str, str] = field(default_factory=dict)
    history: Sequence[PastBuild] = ()  # the last builds, oldest first, including this one


def render_build_report(report: BuildReport) -> str:
    """Return the whole HTML document."""
    return render_document(f"{report.title}: build report", _iter_sections(report))


def _iter_sections(report: BuildReport) -> Iterator[Node]:
    yield _render_header(report)
    yield _render_gate(report.verdict)
    yield tiles((name, f"{n:,}") for name, n in report.counts.items())
    measurements = report.measurements.items()
    if curves := {name: m.curve for name, m in measurements if m.curve}:
        yield _render_recalls(curves, {name: m.setting for name, m in measurements if m.setting}, report.k)
    if health := {name: m.health for name, m in measurements if m.health}:
        yield _render_health(health, report.build_metrics)
    yield section_columns(
        _render_lengths(report.lengths),
        _render_stages(report.stages),
        _render_sizes(report.sizes),
        _render_dropped_pages(report),
        _render_unknown_templates(report),
    )
    if len(report.history) > 1:
        yield _render_history(report.history)
    if report.quarantined:
        titles = ("page", "title", "reason")
        yield section("Pages that could not be parsed", table(titles, report.quarantined))
    yield from iter_lineage_sections(report.lineage)


def _render_header(report: BuildReport) -> Node:
    summary = tag("p", "Snapshot ", tag("code", report.snapshot), f", built {report.created_at}")
    return header(report.title, summary)


def _render_gate(verdict: GateVerdict) -> Node:
    title = "The gate passed it." if verdict.passed else f"The gate refused it: {verdict.reason}."
    failure_notes = (note(check.name, ": ", check.why) for check in verdict.checks if not check.passed)
    checks_table = table(("check", "", "observed", "wanted"), [_render_check_row(check) for check in verdict.checks])
    return section(title, *failure_notes, checks_table, class_="verdict" if verdict.passed else "verdict no")


def _render_check_row(check: GateCheck) -> tuple[Child, ...]:
    mark, word, style = ("✓", " passed", "yes") if check.passed else ("✗", " failed", "no-mark")
    result_node = tag("span", mark, tag("span", word, class_="word"), class_=style)
    return check.name, result_node, check.observed, check.wanted


def _render_recalls(
    curves: Mapping[str, Sequence[OperatingPoint]], settings: Mapping[str, OperatingPoint], k: int
) -> Node:
    table_rows = [
        (name, p.setting, f"{p.recall_mean:.3f}", f"{p.recall_p5:.3f}", f"{p.distances:,.0f}", f"{p.milliseconds:.3g}")
        for name, points in curves.items()
        for p in points
    ]
    titles = ("index", "setting", f"recall@{k}, mean", "5th percentile", "distances per query", "ms per query")
    ring_note = " A ring is the default setting of the index." if settings else ""
    return section(
        "Recall of each index against exact search, and its cost",
        legend(curves),
        chart_row(
            trade_off_chart(curves, k, "distances", settings), trade_off_chart(curves, k, "milliseconds", settings)
        ),
        note(
            f"A point is the mean recall@{k} of the sampled queries, its whisker their 5th "
            f"percentile.{ring_note} Distance computations are the same on every machine; for lists "
            "they count the compared codes."
        ),
        tag("details", tag("summary", "the numbers"), table(titles, table_rows)),
    )


def _render_health(health: Mapping[str, IndexHealth], build_metrics: Mapping[str, Mapping[str, float | int]]) -> Node:
    """Return a section with statistics of each index file, and histograms of its links or lists."""
    statistics_by_index = {name: {**stats.metrics(), **build_metrics.get(name, {})} for name, stats in health.items()}
    rows = [
        (title, *(_format_statistic(statistics.get(statistic_name)) for statistics in statistics_by_index.values()))
        for statistic_name, title in _STATISTICS.items()
        if any(statistic_name in statistics for statistics in statistics_by_index.values())
    ]
    charts = [chart for name, index_health in health.items() for chart in _render_distributions(name, index_health)]
    return section("Inside each index", table(("", *statistics_by_index), rows), chart_row(*charts))


def _format_statistic(statistic: float | int | None) -> str:
    if statistic is None:
        return "–"
    return f"{statistic:,}" if isinstance(statistic, int) else f"{statistic:.4g}"


def _render_distributions(name: str, health: IndexHealth) -> Iterator[Node]:
    if health.graph is not None:
        degrees = dict(enumerate(health.graph.degrees))
        yield tag("div", tag("h3", f"{name}: links"), histogram(degrees, "nodes", "links of a node"))
    if health.lists is not None:
        yield tag(
            "div", tag("h3", f"{name}: lists"), doubling_histogram(health.lists.sizes, "lists", "vectors in a list")
        )


def _render_history(history: Sequence[PastBuild]) -> Node:
    """Return a section on the last builds: charts of cost and quality, warnings and a table."""
    has_cpu = all(build.cpu for build in history)
    build_costs = [sum((build.cpu if has_cpu else build.seconds).values()) for build in history]
    unit = "CPU seconds" if has_cpu else "seconds"
    # Full builds are left out: on a scale that includes them, all other builds would look alike.
    plotted_costs = [
        cost if build.changed is None or 2 * build.changed <= build.passages else None
        for build, cost in zip(history, build_costs, strict=True)
    ]
    index_names = dict.fromkeys(name for build in history for name in build.indexes)
    history_charts = [_render_history_chart(unit, {"cost": plotted_costs})] if any(plotted_costs) else []
    columns_by_title = {unit: [f"{cost:,.1f}" for cost in build_costs]}
    for metric, title in _HISTORY_METRICS.items():
        values_by_index = {name: [build.indexes.get(name, {}).get(metric) for build in history] for name in index_names}
        plotted_values_by_index = {
            name: numbers for name, numbers in values_by_index.items() if any(n is not None for n in numbers)
        }
        if plotted_values_by_index:
            history_charts.append(_render_history_chart(title, plotted_values_by_index))
        columns_by_title |= {
            f"{name}: {title}": [_format_statistic(number) for number in numbers]
            for name, numbers in plotted_values_by_index.items()
        }
    titles = ("build", "built", "snapshot", "passages", "changed", *columns_by_title)
    table_rows: list[Sequence[Child]] = [
        (
            build_number,
            build.created_at,
            tag("code", build.snapshot[:12]),
            f"{build.passages:,}",
            _format_statistic(build.changed),
            *(cells[build_number - 1] for cells in columns_by_title.values()),
        )
        for build_number, build in enumerate(history, 1)
    ]
    return section(
        "The last builds",
        *(note("Warning: ", warning, ".") for warning in list_warnings(history)),
        chart_row(*history_charts),
        note("Builds that changed more than half of the passages are not in the line of the cost."),
        tag("details", tag("summary", "the numbers"), table(titles, table_rows)),
    )


def _render_history_chart(title: str, values: Mapping[str, Sequence[float | None]]) -> Node:
    points_by_series = {
        name: [ChartPoint(build, n, n, n) for build, n in enumerate(numbers, 1) if n is not None]
        for name, numbers in values.items()
    }
    return tag("div", tag("h3", title), line_chart(points_by_series, title, "build"), legend(points_by_series))


def _render_lengths(lengths: Mapping[int, int]) -> Node | None:
    return section("Passage lengths", histogram(lengths, "passages", "words in a passage")) if lengths else None


def _render_dropped_pages(report: BuildReport) -> Node | None:
    reason_counts = sorted(report.dropped.items(), key=lambda item: -item[1])
    chart = bar_chart([(reason, n, f"{n:,}") for reason, n in reason_counts])
    return section("Pages left out, by reason", chart) if reason_counts else None


def _render_unknown_templates(report: BuildReport) -> Node | None:
    title = f"Articles with unknown templates, by name ({report.language or 'unknown language'})"
    chart = bar_chart([(name, n, f"{n:,}") for name, n in report.unknown_templates.items()])
    return section(title, chart) if report.unknown_templates else None


def _render_stages(stages: Sequence[BuildStage]) -> Node | None:
    stage_bars = [(stage.name, stage.seconds, _format_stage(stage)) for stage in stages]
    return section("Time by stage", bar_chart(stage_bars)) if stage_bars else None


def _format_stage(stage: BuildStage) -> str:
    return f"{stage.seconds:,.1f} s" + (f", {stage.reused} reused" if stage.reused else "")


def _render_sizes(bytes_by_kind: Mapping[str, int]) -> Node | None:
    rows = sorted(bytes_by_kind.items(), key=lambda item: -item[1])
    return (
        section("Size by kind of file", bar_chart([(kind, n, format_bytes(n)) for kind, n in rows])) if rows else None
    )
