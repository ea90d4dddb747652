"""The report page of retrievers: figures beside the first one's, the trade-off of quality and time, every stage, and
every group of questions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rag_model.evaluation.bootstrap import Estimate
from rag_model.evaluation.reports.charts import Point, courses, legend
from rag_model.evaluation.reports.markup import Child, Node, join, tag
from rag_model.evaluation.reports.page import document, pair, section, sized, table, tiles
from rag_model.evaluation.retrieval.comparison import GroupFigures, Standing
from rag_model.evaluation.retrieval.judging import JudgedBy
from rag_model.evaluation.retrieval.staged import ENCODER, Staged

JUDGEMENTS: Mapping[JudgedBy, str] = {
    "answers": "A passage is relevant if it holds an answer, by DPR's token match.",
    "pages": "A passage is relevant if the questions name its page.",
    "passages": "A passage is relevant if the questions name it by its id.",
}


@dataclass(frozen=True, slots=True)
class RetrievalReport:
    """Everything that the page shows; a section whose values are empty is left out."""

    snapshot: str
    created_at: str  # ISO 8601 UTC
    questions: int
    k: int
    judged_by: JudgedBy
    measure: str  # that the charts show
    standings: Sequence[Standing]  # the first is what the others are compared with
    advice: str = ""  # one sentence
    notes: Sequence[str] = ()
    lineage: Mapping[str, str] = field(default_factory=dict)


def render(report: RetrievalReport) -> str:
    """Return the whole HTML document."""
    return document(f"{report.snapshot[:12]}: how passages are found", _sections(report))


def _sections(report: RetrievalReport) -> Iterator[Node]:
    yield _header(report)
    if report.advice:
        yield section(f"{report.advice[0].upper()}{report.advice[1:]}.", class_="verdict")
    yield tiles((one.expression, f"{one.all.figures[report.measure].value:.3f}") for one in report.standings)
    yield _beside(report.standings)
    yield _trade_off(report)
    for one in report.standings:
        yield _stages(one)
    for name in dict.fromkeys(name for one in report.standings for name in one.groups):
        yield _group(name, {one.expression: one.groups[name] for one in report.standings})
    if report.lineage:
        yield section("Lineage", table(("", ""), [(name, tag("code", said)) for name, said in report.lineage.items()]))


def _header(report: RetrievalReport) -> Node:
    facts = tag(
        "p", f"{report.questions:,} questions, snapshot ", tag("code", report.snapshot), f", {report.created_at}"
    )
    notes = [tag("p", f"{note}.", class_="note") for note in (JUDGEMENTS[report.judged_by][:-1], *report.notes)]
    return tag("header", tag("h1", "How passages are found"), facts, *notes)


def _beside(standings: Sequence[Standing]) -> Node:
    names = list(standings[0].all.figures)
    rows = [
        (
            one.expression,
            *_cells(one.all, names),
            _milliseconds(one.staged.whole.total_milliseconds),
            sized(one.staged.whole.total_bytes),
        )
        for one in standings
    ]
    note = (
        "Below a figure: its 95 % interval; then the difference to the first retriever, question by question, with its "
        f"interval. Milliseconds: {standings[0].staged.timed:,} questions, asked one by one. Bytes: the files that a "
        "search reads, the question encoder's among them."
    )
    titles = ("retriever", *names, "ms a question", "bytes")
    return section("Retrievers", table(titles, rows), tag("p", note, class_="note"))


def _cells(figures: GroupFigures, names: Sequence[str]) -> Iterator[Child]:
    for name in names:
        one = figures.figures[name]
        lost = figures.differences.get(name)
        yield join(f"{one.value:.3f}", _ends(one, ""), *([_ends(lost, "+")] if lost else []))


def _ends(one: Estimate, sign: str) -> Node:
    value = f"{one.value:+.3f} " if sign else ""
    return tag("span", f"{value}[{one.low:{sign}.3f}, {one.high:{sign}.3f}]", class_="ends")


def _trade_off(report: RetrievalReport) -> Node:
    """Show each stage of each retriever as a point: what a question costs up to there, and how good the list is."""
    names = [one.expression for one in report.standings]
    charts = [
        courses(
            {one.expression: list(_points(one, report.measure, alone)) for one in report.standings},
            report.measure,
            f"milliseconds a question{', without the encoder' if alone else ''}",
            log=True,
        )
        for alone in (False, True)
    ]
    note = (
        "A line is a retriever, a point one of its stages: its list, and the time until it is known. A whisker is "
        "the interval."
    )
    return section("Quality over time", legend(names), pair(*charts), tag("p", note, class_="note"))


def _points(standing: Standing, measure: str, alone: bool) -> Iterator[Point]:
    for stage, figures in zip(standing.staged.stages, standing.stages, strict=True):
        one = figures[measure]
        spent = stage.search_milliseconds if alone else stage.total_milliseconds
        yield Point(max(spent, 1e-3), one.value, one.low, one.high)


def _stages(standing: Standing) -> Node:
    names = list(standing.all.figures)
    rows: list[tuple[Child, ...]] = list(_encoder(standing.staged, len(names)))
    for stage, figures in zip(standing.staged.stages, standing.stages, strict=True):
        values = (join(f"{figures[name].value:.3f}", _ends(figures[name], "")) for name in names)
        costs = _milliseconds(stage.milliseconds), sized(stage.bytes)
        rows.append((stage.name, *values, *costs))
    return section(f"Stages of {standing.expression}", table(("stage", *names, "own ms", "own bytes"), rows))


def _encoder(staged: Staged, empty: int) -> Iterator[tuple[Child, ...]]:
    if staged.encoder_milliseconds:
        costs = _milliseconds(staged.encoder_milliseconds), sized(staged.encoder_bytes)
        yield ENCODER, *("" for _ in range(empty)), *costs


def _group(name: str, figures: Mapping[str, GroupFigures]) -> Node:
    names = list(next(iter(figures.values())).figures)
    rows = [(expression, *_cells(one, names)) for expression, one in figures.items()]
    n = next(iter(figures.values())).n
    return section(f"{n:,} questions: {name}", table(("retriever", *names), rows))


def _milliseconds(value: float) -> str:
    return f"{value:,.3g}"
