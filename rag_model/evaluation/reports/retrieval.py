"""The report page about retrievers.

The page compares the metrics of all retrievers with those of the first one. It shows quality and
time, every stage of a retriever, and every group of questions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rag_model.errors import format_count
from rag_model.evaluation.bootstrap import Estimate
from rag_model.evaluation.measures.measure import JudgedBy
from rag_model.evaluation.reports.page import (
    ChartPoint,
    Child,
    Node,
    chart_row,
    format_bytes,
    header,
    iter_lineage_sections,
    join,
    legend,
    line_chart,
    note,
    render_document,
    run_summary,
    section,
    table,
    tag,
    tiles,
    to_sentence,
)
from rag_model.evaluation.retrieval.comparison import GroupMetrics, RetrieverComparison
from rag_model.evaluation.retrieval.staged import ENCODER, RetrieverMetrics

JUDGEMENTS: Mapping[JudgedBy, str] = {
    "answers": "A passage is relevant if it contains an answer, by DPR's token matching.",
    "pages": "A passage is relevant if the questions name its page.",
    "passages": "A passage is relevant if the questions name it by its id.",
}


@dataclass(frozen=True, slots=True)
class RetrievalReport:
    """The content of the page about retrievers; a section without values is left out."""

    snapshot: str  # id of the snapshot
    created_at: str  # ISO 8601 UTC
    questions: int  # number of questions
    k: int  # depth of the search
    judged_by: JudgedBy
    measure: str  # measure that the charts show
    # Every retriever is compared with the first one.
    retrievers: Sequence[RetrieverComparison]
    advice: str = ""  # one sentence on which retriever to use
    notes: Sequence[str] = ()
    lineage: Mapping[str, str] = field(default_factory=dict)


def render_retrieval_report(report: RetrievalReport) -> str:
    """Return the whole HTML document."""
    return render_document(f"{report.snapshot[:12]}: how passages are found", _iter_sections(report))


def _iter_sections(report: RetrievalReport) -> Iterator[Node]:
    yield _render_header(report)
    if report.advice:
        yield section(to_sentence(report.advice), class_="verdict")
    yield tiles(
        (retriever.expression, f"{retriever.overall.metrics[report.measure].value:.3f}")
        for retriever in report.retrievers
    )
    yield _render_comparison(report.retrievers)
    yield _render_trade_off(report)
    for retriever in report.retrievers:
        yield _render_stages(retriever)
    for name in dict.fromkeys(name for retriever in report.retrievers for name in retriever.groups):
        yield _render_group(name, {retriever.expression: retriever.groups[name] for retriever in report.retrievers})
    yield from iter_lineage_sections(report.lineage)


def _render_header(report: RetrievalReport) -> Node:
    summary_node = run_summary(report.questions, report.created_at, snapshot=report.snapshot)
    notes = [note(f"{clause}.") for clause in (JUDGEMENTS[report.judged_by][:-1], *report.notes)]
    return header("Retrieval", summary_node, *notes)


def _render_comparison(retrievers: Sequence[RetrieverComparison]) -> Node:
    measures = list(retrievers[0].overall.metrics)
    table_rows = [
        (
            retriever.expression,
            *_iter_estimate_cells(retriever.overall, measures),
            _format_milliseconds(retriever.retriever_metrics.final_stage.total_milliseconds),
            format_bytes(retriever.retriever_metrics.final_stage.total_bytes),
        )
        for retriever in retrievers
    ]
    metric_explanation = (
        "Below a value: its 95 % interval; then the paired difference from the first retriever, with "
        f"its interval. Milliseconds: {retrievers[0].retriever_metrics.n_timed_queries:,} queries, run one by one. "
        "Bytes: the size of the files that a search reads, including the question encoder's."
    )
    titles = ("retriever", *measures, "ms a question", "bytes")
    return section("Retrievers", table(titles, table_rows), note(metric_explanation))


def _iter_estimate_cells(group: GroupMetrics, measures: Sequence[str]) -> Iterator[Child]:
    for measure in measures:
        estimate = group.metrics[measure]
        difference = group.differences.get(measure)
        yield join(
            f"{estimate.value:.3f}",
            _format_interval(estimate, ""),
            *([_format_interval(difference, "+")] if difference else []),
        )


def _format_interval(estimate: Estimate, sign: str) -> Node:
    difference_text = f"{estimate.value:+z.3f} " if sign else ""
    return tag("span", f"{difference_text}[{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]", class_="ends")


def _render_trade_off(report: RetrievalReport) -> Node:
    """Return a chart with the quality and the time of each stage of each retriever."""
    expressions = [retriever.expression for retriever in report.retrievers]
    charts = [
        line_chart(
            {
                retriever.expression: list(_iter_stage_points(retriever, report.measure, without_encoder))
                for retriever in report.retrievers
            },
            report.measure,
            f"milliseconds a question{', without the encoder' if without_encoder else ''}",
            log=True,
        )
        for without_encoder in (False, True)
    ]
    explanation = (
        "Each line is a retriever. Each point is the result list of a stage, at the time until it is "
        "known. A whisker is the interval."
    )
    return section("Quality over time", legend(expressions), chart_row(*charts), note(explanation))


def _iter_stage_points(retriever: RetrieverComparison, measure: str, without_encoder: bool) -> Iterator[ChartPoint]:
    for stage, estimates in zip(retriever.retriever_metrics.stages, retriever.stages, strict=True):
        estimate = estimates[measure]
        milliseconds = stage.search_milliseconds if without_encoder else stage.total_milliseconds
        yield ChartPoint(max(milliseconds, 1e-3), estimate.value, estimate.low, estimate.high)


def _render_stages(retriever: RetrieverComparison) -> Node:
    measures = list(retriever.overall.metrics)
    rows: list[tuple[Child, ...]] = list(_render_encoder_row(retriever.retriever_metrics, len(measures)))
    for stage, estimates in zip(retriever.retriever_metrics.stages, retriever.stages, strict=True):
        value_cells = (join(f"{estimates[name].value:.3f}", _format_interval(estimates[name], "")) for name in measures)
        cost_cells = _format_milliseconds(stage.milliseconds), format_bytes(stage.bytes)
        rows.append((stage.name, *value_cells, *cost_cells))
    return section(f"Stages of {retriever.expression}", table(("stage", *measures, "own ms", "own bytes"), rows))


def _render_encoder_row(metrics: RetrieverMetrics, n_empty_cells: int) -> Iterator[tuple[Child, ...]]:
    if metrics.encoder_milliseconds:
        costs = _format_milliseconds(metrics.encoder_milliseconds), format_bytes(metrics.encoder_bytes)
        yield ENCODER, *("" for _ in range(n_empty_cells)), *costs


def _render_group(name: str, groups: Mapping[str, GroupMetrics]) -> Node:
    measures = list(next(iter(groups.values())).metrics)
    rows = [(expression, *_iter_estimate_cells(group, measures)) for expression, group in groups.items()]
    n = next(iter(groups.values())).n
    return section(f"{format_count(n, 'question')}: {name}", table(("retriever", *measures), rows))


def _format_milliseconds(milliseconds: float) -> str:
    return f"{milliseconds:,.3g}"
