"""The report page of a model's answers: measures, ablations, and wrong answers. A wrong answer is shown with its
passages and their weights, which show whether the retriever, the generator or the gold answer is the cause.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rag_model.evaluation.answers.ablation import OPEN, Row
from rag_model.evaluation.answers.abstaining import Abstaining, abstention_words
from rag_model.evaluation.answers.collapse import Collapse
from rag_model.evaluation.answers.readings import Shown
from rag_model.evaluation.answers.scores import AnswerKind, Scored, right_by
from rag_model.evaluation.bootstrap import Estimate
from rag_model.evaluation.reports.charts import Point, courses, legend
from rag_model.evaluation.reports.markup import Child, Node, join, tag
from rag_model.evaluation.reports.page import document, pair, section, table, tiles
from rag_model.evaluation.reports.training import Curves, training_sections

_WHOLE = f"all stages, {OPEN}"  # a question to its answer
_SHOWN_TEXT = 400  # characters of a passage


@dataclass(frozen=True, slots=True)
class AnswerReport:
    """Everything that the page shows; a section whose values are empty is left out."""

    model: str
    snapshot: str
    created_at: str  # ISO 8601 UTC
    kind: AnswerKind
    rows: Sequence[Row]  # the open book first, then ablations
    retrieval: Mapping[str, float]  # Success@k and the like
    collapse: Collapse
    intervals: Mapping[str, Estimate] = field(default_factory=dict)  # intervals of these, if known
    collapsed: str = ""  # one sentence, if retrieval has collapsed or passages are not used
    curves: Curves = field(default_factory=Curves)  # of its training
    lineage: Mapping[str, str] = field(default_factory=dict)
    search: Mapping[str, float] = field(default_factory=dict)  # milliseconds a question of each stage of retrieval
    abstaining: Abstaining | None = None  # None: no threshold was asked for
    worth: str = ""  # one sentence: whether retrieval earns its price here
    notes: Sequence[str] = ()  # sentences about the ablations
    most_wrong: int = 100  # wrong answers shown


def render(report: AnswerReport) -> str:
    """Return the whole HTML document."""
    return document(f"{Path(report.model).name[:12]}: how it answers", _sections(report))


def _sections(report: AnswerReport) -> Iterator[Node]:
    book = report.rows[0]
    yield _header(report, len(book.scored))
    yield section(*_verdict(report), class_="verdict no" if report.collapsed else "verdict")
    yield tiles((name, f"{one.value:.3f}") for name, one in book.figures.items())
    yield _figures(report, book)
    yield from _prices(report)
    if report.abstaining is not None:
        yield _abstaining(report.abstaining)
    if len(report.rows) > 1:
        yield _ablations(report)
    yield from training_sections(report.curves)
    wrong = [one for one in book.scored if one.measures.get(right_by(report.kind), 1.0) < 1]
    if wrong:
        yield _wrong(wrong, len(book.scored), report.most_wrong)
    if report.lineage:
        yield section(
            "Lineage", table(("", ""), [(name, tag("code", value)) for name, value in report.lineage.items()])
        )


def _header(report: AnswerReport, questions: int) -> Node:
    facts = tag(
        "p",
        f"{questions:,} questions, model ",
        tag("code", report.model),
        ", snapshot ",
        tag("code", report.snapshot),
        f", {report.created_at}",
    )
    return tag("header", tag("h1", "How the model answers"), facts)


def _verdict(report: AnswerReport) -> tuple[str, Node]:
    seen = report.collapse
    facts = (
        f"{seen.distinct:,} distinct passages for {seen.questions:,} questions, spread {seen.spread:.2f} "
        "(0: all questions have the same, 1: evenly spread)"
    )
    if seen.unchanged is not None:
        facts += f"; {seen.unchanged:.0%} of the answers do not change with another question's passages"
    said = f"{report.collapsed}." if report.collapsed else "no collapse was found."
    return said[0].upper() + said[1:], tag("p", f"{facts}.", class_="note")


def _figures(report: AnswerReport, book: Row) -> Node:
    known = {**report.intervals, **book.figures}
    values = {**report.retrieval, **{name: one.value for name, one in book.figures.items()}}
    rows = [
        (name, f"{value:.3f}", *((_range(known[name]), f"{known[name].n:,}") if name in known else ("", "")))
        for name, value in values.items()
    ]
    titles = ("measure", f"{OPEN}, k = {book.k}", "95 % interval", "questions")
    return section("Figures", table(titles, rows))


def _range(one: Estimate) -> str:
    return f"{one.low:.3f} to {one.high:.3f}"


def _ablations(report: AnswerReport) -> Node:
    figures = report.rows[0].figures
    shown = [name for name in dict.fromkeys((right_by(report.kind), "F1")) if name in figures]
    titles = ["passages", "k", "questions", *(title for name in shown for title in (name, "minus open book"))]
    rows = [_ablation(row, shown) for row in report.rows]
    swept = _swept(report.rows)
    return section(
        "Where the loss is",
        table(titles, rows),
        tag(
            "p",
            "Closed book is the knowledge of the weights alone. 1 minus gold passage is the generator's loss,  "
            "gold passage minus open book is the retriever's. In brackets: 95 % intervals; differences "
            "are over the questions of both.",
            class_="note",
        ),
        *(tag("p", f"{note[0].upper()}{note[1:]}.", class_="note") for note in report.notes),
        *(_sweep(swept) if len(swept) > 1 else ()),
    )


def _ablation(row: Row, shown: Sequence[str]) -> tuple[Child, ...]:
    cells: list[Child] = []
    for name in shown:
        here, against = row.figures.get(name), row.against.get(name)
        cells.append(_bracketed(here, "") if here else "–")
        cells.append(_bracketed(against, "+") if against else "")
    return row.name, row.k, f"{len(row.scored):,}", *cells


def _bracketed(one: Estimate, sign: str) -> Node:
    ends = f" [{one.low:{sign}.3f}, {one.high:{sign}.3f}]"
    return join(f"{one.value:{sign}.3f}", tag("span", ends, class_="ends"))


def _prices(report: AnswerReport) -> Iterator[Node]:
    """Yield what search and reading cost, stage by stage and condition by condition, where anything is known."""
    costs = {f"{row.name}, k = {row.k}" if row.name == OPEN else row.name: row.costs for row in report.rows}
    search = [(name, f"{milliseconds:.1f}", "–", "–") for name, milliseconds in report.search.items()]
    if not search and not any(costs.values()):
        return
    title = "What it costs" if not report.worth else f"{report.worth[0].upper()}{report.worth[1:]}."
    titles = ("stage", "ms a question", "tokens read", "tokens written")
    book = {name: 1000 * seconds for name, seconds in report.rows[0].stages.items()}
    search += [(name, f"{milliseconds:.1f}", "–", "–") for name, milliseconds in book.items()]
    if search and book:
        search.append((_WHOLE, f"{sum(report.search.values()) + sum(book.values()):.1f}", "–", "–"))
    note = (
        "Search: the median of questions that were asked one by one. Reading: means over the questions, a question's "
        "time a share of its batch's, as measured when it was answered: assembly and generation are its stages."
    )
    curve = [Point(row.k, ms, ms, ms) for row in _swept(report.rows) if (ms := _milliseconds(row.costs)) is not None]
    series = {"reading": curve}
    pictures = (pair(courses(series, "milliseconds", "passages per question", log=True)),) if len(curve) > 1 else ()
    yield section(title, table(titles, [*search, *_reading(costs)]), tag("p", note, class_="note"), *pictures)


def _reading(costs: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[Child, ...]]:
    for name, one in costs.items():
        yield (
            f"reading, {name}",
            *(_figure(value, 1) for value in (_milliseconds(one), one.get("read"), one.get("written"))),
        )


def _milliseconds(costs: Mapping[str, float]) -> float | None:
    return 1000 * costs["seconds"] if "seconds" in costs else None


def _abstaining(found: Abstaining) -> Node:
    series: dict[str, list[Point]] = {
        signal: [Point(one.coverage, one.risk, one.risk, one.risk) for one in points]
        for signal, points in found.curves.items()
    }
    areas = ", ".join(f"{signal} {value:.3f}" for signal, value in found.areas.items())
    note = f"Risk: the share of wrong answers among those given. Area under each curve, smaller is better: {areas}."
    return section(
        abstention_words(found),
        tag("p", note, class_="note"),
        legend(series),
        pair(courses(series, "risk", "coverage")),
    )


def _swept(rows: Sequence[Row]) -> list[Row]:
    return sorted((row for row in rows if row.name.startswith(OPEN)), key=lambda row: row.k)


def _sweep(rows: Sequence[Row]) -> tuple[Node, Node]:
    names = [name for name in rows[0].figures if all(name in row.figures for row in rows)]
    series = {
        name: [Point(row.k, one.value, one.low, one.high) for row in rows for one in [row.figures[name]]]
        for name in names
    }
    return legend(series), pair(courses(series, "measures", "passages per question", log=True))


def _wrong(wrong: Sequence[Scored], asked: int, most: int) -> Node:
    shown = [_mistake(one) for one in wrong[:most]]
    said = f"{len(wrong):,} of {asked:,} answers are not right"
    return section(said if len(wrong) <= most else f"{said}; the first {most}", *shown)


def _mistake(one: Scored) -> Node:
    measures = ", ".join(f"{name} {value:.2f}" for name, value in one.measures.items())
    said = tag("b", (one.reading.answer or "(nothing)") + ("" if one.reading.ended else " …"))
    wanted = tag("span", "wanted: ", " / ".join(one.question.answers) or "–", class_="wanted")
    summary = tag("summary", one.question.text, tag("span", "said: ", said, class_="said"), wanted)
    rows = [_shown(passage) for passage in one.reading.passages]
    titles = ("weight p(z|x)", "posterior p(z|x,y)", "score", "passage")
    return tag(
        "details",
        summary,
        tag("p", f"{measures}; log p {_figure(one.reading.log_likelihood, 2)}", class_="note"),
        table(titles, rows),
    )


def _shown(passage: Shown) -> tuple[Child, ...]:
    text = passage.text if len(passage.text) <= _SHOWN_TEXT else f"{passage.text[:_SHOWN_TEXT]}…"
    shown = join(tag("b", passage.title), " ", text)
    return _figure(passage.weight), _figure(passage.posterior), _figure(passage.score), shown


def _figure(value: float | None, places: int = 3) -> str:
    return "–" if value is None else f"{value:.{places}f}"
