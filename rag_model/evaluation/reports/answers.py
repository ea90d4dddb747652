"""The report page of a model's answers: measures, ablations, costs, and wrong answers.

Wrong answers are shown with their passages and the passage weights, from which a reader can see
whether the retriever, the generator or the gold answer is the cause.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rag_model.errors import format_count
from rag_model.evaluation.answers.ablation import OPEN_BOOK, AblationResult
from rag_model.evaluation.answers.abstaining import AbstentionReport, describe_abstention
from rag_model.evaluation.answers.collapse import CollapseStats
from rag_model.evaluation.answers.readings import AnswerPassage
from rag_model.evaluation.answers.scores import ScoredAnswer, get_deciding_measure
from rag_model.evaluation.bootstrap import Estimate
from rag_model.evaluation.measures.measure import AnswerKind
from rag_model.evaluation.reports.page import (
    ChartPoint,
    Child,
    Node,
    chart_row,
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
from rag_model.evaluation.reports.training import TrainingCurves, iter_training_sections

_TOTAL_STAGE = f"all stages, {OPEN_BOOK}"  # title of the row with the total time of an answer
_MAX_SHOWN_TEXT = 400  # maximum characters of a passage on the page


@dataclass(frozen=True, slots=True)
class AnswerReport:
    """The content of the page about answers; a section without values is left out."""

    model: str  # id or folder of the model
    snapshot: str  # id of the snapshot
    created_at: str  # ISO 8601 UTC
    kind: AnswerKind
    results: Sequence[AblationResult]  # results of the conditions, beginning with the open book
    retrieval: Mapping[str, float]  # measures of retrieval, such as Success@k
    collapse: CollapseStats
    # intervals of the values in `retrieval`, if known
    retrieval_intervals: Mapping[str, Estimate] = field(default_factory=dict)
    # Sentence that says that retrieval has collapsed or the model ignores passages; else empty.
    collapse_reason: str = ""
    curves: TrainingCurves = field(default_factory=TrainingCurves)  # curves of the model's training
    lineage: Mapping[str, str] = field(default_factory=dict)
    # milliseconds per question, by stage of retrieval
    search_milliseconds: Mapping[str, float] = field(default_factory=dict)
    # report on the threshold of abstention; None if no threshold was requested
    abstention: AbstentionReport | None = None
    retrieval_worth: str = ""  # one sentence on whether retrieval is worth its cost
    notes: Sequence[str] = ()  # sentences about the ablations, to be shown as notes
    max_wrong: int = 100  # maximum number of wrong answers on the page


def render_answer_report(report: AnswerReport) -> str:
    """Return the whole HTML document."""
    return render_document(f"{Path(report.model).name[:12]}: how it answers", _iter_sections(report))


def _iter_sections(report: AnswerReport) -> Iterator[Node]:
    open_result = report.results[0]
    ids = {"model": report.model, "snapshot": report.snapshot}
    yield header("How the model answers", run_summary(len(open_result.scored_answers), report.created_at, **ids))
    yield section(*_describe_collapse(report), class_="verdict no" if report.collapse_reason else "verdict")
    yield tiles((name, f"{estimate.value:.3f}") for name, estimate in open_result.metrics.items())
    yield _render_measures(report, open_result)
    yield from _render_costs(report)
    if report.abstention is not None:
        yield _render_abstention(report.abstention)
    if len(report.results) > 1:
        yield _render_ablations(report)
    yield from iter_training_sections(report.curves)
    wrong_answers = [
        answer
        for answer in open_result.scored_answers
        if answer.measures.get(get_deciding_measure(report.kind), 1.0) < 1
    ]
    if wrong_answers:
        yield _render_wrong_answers(wrong_answers, len(open_result.scored_answers), report.max_wrong)
    yield from iter_lineage_sections(report.lineage)


def _describe_collapse(report: AnswerReport) -> tuple[str, Node]:
    collapse = report.collapse
    collapse_summary = (
        f"{collapse.distinct:,} distinct passages for {format_count(collapse.questions, 'question')}, spread "
        f"{collapse.spread:.2f} (0: all questions have the same, 1: evenly spread)"
    )
    if collapse.unchanged is not None:
        collapse_summary += f"; {collapse.unchanged:.0%} of the answers do not change with another question's passages"
    return to_sentence(report.collapse_reason or "no collapse was found"), note(f"{collapse_summary}.")


def _render_measures(report: AnswerReport, open_book: AblationResult) -> Node:
    intervals = {**report.retrieval_intervals, **open_book.metrics}
    value_by_measure = {**report.retrieval, **{name: estimate.value for name, estimate in open_book.metrics.items()}}
    table_rows = [
        (
            name,
            f"{metric:.3f}",
            *((_format_range(intervals[name]), f"{intervals[name].n:,}") if name in intervals else ("", "")),
        )
        for name, metric in value_by_measure.items()
    ]
    titles = ("measure", f"{OPEN_BOOK}, k = {open_book.k}", "95 % interval", "questions")
    return section("Figures", table(titles, table_rows))


def _format_range(estimate: Estimate) -> str:
    return f"{estimate.low:.3f} to {estimate.high:.3f}"


def _render_ablations(report: AnswerReport) -> Node:
    open_book_metrics = report.results[0].metrics
    measures = [name for name in dict.fromkeys((get_deciding_measure(report.kind), "F1")) if name in open_book_metrics]
    titles = ["passages", "k", "questions", *(title for measure in measures for title in (measure, "minus open book"))]
    table_rows = [_render_ablation_row(result, measures) for result in report.results]
    sweep_results = _list_sweep_results(report.results)
    return section(
        "Sources of the loss",
        table(titles, table_rows),
        note(
            "Closed book measures the knowledge in the weights. 1 minus gold passage is the loss "
            "of the generator; gold passage minus open book is the loss of the retriever. In "
            "brackets: 95 % intervals; differences are over the shared questions."
        ),
        *(note(to_sentence(clause)) for clause in report.notes),
        *(_render_sweep_chart(sweep_results) if len(sweep_results) > 1 else ()),
    )


def _render_ablation_row(result: AblationResult, measures: Sequence[str]) -> tuple[Child, ...]:
    measure_cells: list[Child] = []
    for measure in measures:
        estimate, difference = result.metrics.get(measure), result.differences.get(measure)
        measure_cells.append(_format_estimate(estimate, "") if estimate else "–")
        measure_cells.append(_format_estimate(difference, "+") if difference else "")
    return result.name, result.k, f"{len(result.scored_answers):,}", *measure_cells


def _format_estimate(estimate: Estimate, sign: str) -> Node:
    interval_text = f" [{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"
    return join(f"{estimate.value:{sign}.3f}", tag("span", interval_text, class_="ends"))


def _render_costs(report: AnswerReport) -> Iterator[Node]:
    """Yield a section with the costs of search and answers, by stage and ablation, if known."""
    costs_by_condition = {
        f"{row.name}, k = {row.k}" if row.name == OPEN_BOOK else row.name: row.costs for row in report.results
    }
    cost_rows = [(name, f"{milliseconds:.1f}", "–", "–") for name, milliseconds in report.search_milliseconds.items()]
    if not cost_rows and not any(costs_by_condition.values()):
        return
    title = to_sentence(report.retrieval_worth) if report.retrieval_worth else "What it costs"
    titles = ("stage", "ms a question", "tokens read", "tokens written")
    milliseconds_by_stage = {stage: 1000 * seconds for stage, seconds in report.results[0].stages.items()}
    cost_rows += [(name, f"{milliseconds:.1f}", "–", "–") for name, milliseconds in milliseconds_by_stage.items()]
    if cost_rows and milliseconds_by_stage:
        cost_rows.append(
            (
                _TOTAL_STAGE,
                f"{sum(report.search_milliseconds.values()) + sum(milliseconds_by_stage.values()):.1f}",
                "–",
                "–",
            )
        )
    timing_note = (
        "Search: the median over queries that were run one by one. Reading: the mean over the "
        "questions, with an equal share of the batch's time for each; assembly and generation are "
        "its stages."
    )
    curve_points = [
        ChartPoint(row.k, ms, ms, ms)
        for row in _list_sweep_results(report.results)
        if (ms := _get_answer_milliseconds(row.costs)) is not None
    ]
    points_by_series = {"reading": curve_points}
    cost_charts = (
        (chart_row(line_chart(points_by_series, "milliseconds", "passages per question", log=True)),)
        if len(curve_points) > 1
        else ()
    )
    yield section(
        title, table(titles, [*cost_rows, *_iter_reading_rows(costs_by_condition)]), note(timing_note), *cost_charts
    )


def _iter_reading_rows(costs: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[Child, ...]]:
    for name, condition_costs in costs.items():
        yield (
            f"reading, {name}",
            *(
                _format_number(cost, 1)
                for cost in (
                    _get_answer_milliseconds(condition_costs),
                    condition_costs.get("read"),
                    condition_costs.get("written"),
                )
            ),
        )


def _get_answer_milliseconds(costs: Mapping[str, float]) -> float | None:
    return 1000 * costs["seconds"] if "seconds" in costs else None


def _render_abstention(report: AbstentionReport) -> Node:
    points_by_series: dict[str, list[ChartPoint]] = {
        signal: [ChartPoint(point.coverage, point.risk, point.risk, point.risk) for point in points]
        for signal, points in report.curves.items()
    }
    area_text = ", ".join(f"{signal} {area:.3f}" for signal, area in report.areas.items())
    explanation = (
        f"Risk: the share of wrong answers among those given. Area under each curve, smaller is better: {area_text}."
    )
    return section(
        describe_abstention(report),
        note(explanation),
        legend(points_by_series),
        chart_row(line_chart(points_by_series, "risk", "coverage")),
    )


def _list_sweep_results(results: Sequence[AblationResult]) -> list[AblationResult]:
    return sorted((result for result in results if result.name.startswith(OPEN_BOOK)), key=lambda result: result.k)


def _render_sweep_chart(results: Sequence[AblationResult]) -> tuple[Node, Node]:
    measures = [name for name in results[0].metrics if all(name in result.metrics for result in results)]
    points_by_series = {
        name: [
            ChartPoint(result.k, estimate.value, estimate.low, estimate.high)
            for result in results
            for estimate in [result.metrics[name]]
        ]
        for name in measures
    }
    return legend(points_by_series), chart_row(
        line_chart(points_by_series, "measures", "passages per question", log=True)
    )


def _render_wrong_answers(wrong_answers: Sequence[ScoredAnswer], n_questions: int, max_shown: int) -> Node:
    answer_nodes = [_render_wrong_answer(answer) for answer in wrong_answers[:max_shown]]
    title = f"{len(wrong_answers):,} of {n_questions:,} answers are not right"
    return section(title if len(wrong_answers) <= max_shown else f"{title}; the first {max_shown}", *answer_nodes)


def _render_wrong_answer(answer: ScoredAnswer) -> Node:
    measure_text = ", ".join(f"{measure} {value:.2f}" for measure, value in answer.measures.items())
    problem = answer.reading.problem
    empty_text = "(nothing)" if problem is None else f"({problem.message})"
    prediction_node = tag("b", (answer.reading.answer or empty_text) + ("" if answer.reading.ended else " …"))
    gold_node = tag("span", "wanted: ", " / ".join(answer.question.answers) or "–", class_="wanted")
    summary = tag("summary", answer.question.text, tag("span", "said: ", prediction_node, class_="said"), gold_node)
    passage_rows = [_render_passage_row(passage) for passage in answer.reading.passages]
    titles = ("weight p(z|x)", "posterior p(z|x,y)", "score", "passage")
    return tag(
        "details",
        summary,
        note(f"{measure_text}; log p {_format_number(answer.reading.log_likelihood, 2)}"),
        table(titles, passage_rows),
    )


def _render_passage_row(passage: AnswerPassage) -> tuple[Child, ...]:
    text = passage.text if len(passage.text) <= _MAX_SHOWN_TEXT else f"{passage.text[:_MAX_SHOWN_TEXT]}…"
    cell = join(tag("b", passage.title), " ", text)
    return _format_number(passage.weight), _format_number(passage.posterior), _format_number(passage.score), cell


def _format_number(number: float | None, n_decimals: int = 3) -> str:
    return "–" if number is None else f"{number:.{n_decimals}f}"
