"""The table of a reproduction compares published with measured values, as HTML and Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rag_model.errors import format_count
from rag_model.evaluation.reports.page import (
    Child,
    Node,
    header,
    iter_lineage_sections,
    note,
    render_document,
    run_summary,
    section,
    table,
    tag,
    to_sentence,
)

Verdict = Literal["reproduced", "undecided", "higher", "lower", "not compared", "no published value", "failed"]
_TITLES = ("row", "data set", "measure", "published", "ours", "difference", "95 % interval", "verdict", "source")
_MEANINGS = (
    "Values, differences and intervals are in percentage points. A row is reproduced if it differs by at most its "
    "tolerance. It is undecided if it differs by more, but the interval of our value overlaps the tolerance around "
    "the published value. Otherwise our value is higher or lower."
)


@dataclass(frozen=True, slots=True)
class ReproductionRow:
    """A measured value and, if there is one, the published value, in percent.

    If the measurement failed, the row has `failure` but no value, interval or evaluation.
    """

    row: str  # name of the row in the table
    data: str  # name of the data set
    measure: str
    published: float | None
    tolerance: float  # maximum difference of a reproduced value, in percentage points
    value: float | None
    low: float | None  # lower end of the 95 % interval, if there is one
    high: float | None
    source: str  # publication of the published value
    command: str  # shell command that measures only this row and data set
    evaluation: str  # full id of the evaluation
    questions: int  # number of questions
    # whether only a sample was measured, which is not compared with the published value
    is_sample: bool = False
    failure: str = ""  # reason why the row has no value; empty if it has a value

    @property
    def difference(self) -> float | None:
        """The measured minus the published value; None if either is missing or it is a sample."""
        if self.published is None or self.value is None or self.is_sample:
            return None
        return self.value - self.published

    @property
    def verdict(self) -> Verdict:
        """Whether the measured value reproduces the published value."""
        if self.failure:
            return "failed"
        if self.is_sample:
            return "not compared"
        if self.published is None or self.difference is None:
            return "no published value"
        if abs(self.difference) <= self.tolerance + 1e-9:
            return "reproduced"
        if self.low is not None and self.high is not None:
            tolerance_band = self.published - self.tolerance, self.published + self.tolerance
            if self.low <= tolerance_band[1] and self.high >= tolerance_band[0]:
                return "undecided"
        return "higher" if self.difference > 0 else "lower"

    def list_cells(self) -> tuple[str, ...]:
        """Return the cells of the row as strings, in the order of the table's columns."""
        interval = "" if self.low is None or self.high is None else f"{self.low:.2f} to {self.high:.2f}"
        published = "" if self.published is None else f"{self.published:.2f} ± {self.tolerance:g}"
        value_text = "" if self.value is None else f"{self.value:.2f}"
        difference = "" if self.difference is None else f"{self.difference:+.2f}"
        first_cells = self.row, self.data, self.measure, published, value_text
        return (*first_cells, difference, interval, self.verdict, "" if self.published is None else self.source)


@dataclass(frozen=True, slots=True)
class ReproductionReport:
    """The content of the page about a reproduction."""

    title: str
    created_at: str  # ISO 8601 UTC
    lines: Sequence[ReproductionRow]
    notes: Sequence[str]  # sentences, such as the passage count of each library
    lineage: Mapping[str, str]


def summarize_verdicts(lines: Sequence[ReproductionRow]) -> str:
    """Return a clause with the number of values per verdict: `of 3 values: 3 reproduced`."""
    verdicts = [line.verdict for line in lines]
    count_text = ", ".join(f"{verdicts.count(verdict):,} {verdict}" for verdict in dict.fromkeys(verdicts))
    return f"of {format_count(len(lines), 'value')}: {count_text}"


def render_reproduction_page(report: ReproductionReport) -> str:
    """Return the whole HTML document."""
    return render_document(report.title, _iter_sections(report))


def _iter_sections(report: ReproductionReport) -> Iterator[Node]:
    n_questions = sum({line.data: line.questions for line in report.lines}.values())
    yield header(report.title, run_summary(n_questions, report.created_at))
    verdicts = {line.verdict for line in report.lines}
    is_bad, is_good = verdicts & {"higher", "lower", "failed"}, "reproduced" in verdicts
    css_class = "verdict no" if is_bad else "verdict" if is_good else None
    yield section(to_sentence(summarize_verdicts(report.lines)), class_=css_class)
    # With this class, lines break anywhere in the path of a source, which has no spaces.
    cells = [line.list_cells() for line in report.lines]
    table_rows: list[list[Child]] = [
        [*line_cells[:-1], tag("span", line_cells[-1], class_="label")] for line_cells in cells
    ]
    yield section("Table", table(_TITLES, table_rows), note(_MEANINGS))
    yield section("Notes", *(tag("p", sentence) for sentence in report.notes))
    commands = dict.fromkeys((f"{line.row}, {line.data}", line.command) for line in report.lines)
    yield section("Commands", table(("row", "command"), [(name, tag("code", text)) for name, text in commands]))
    yield from iter_lineage_sections(report.lineage)


def render_reproduction_markdown(report: ReproductionReport) -> str:
    """Return the table, its notes and its commands as Markdown."""
    commands = dict.fromkeys((f"{line.row}, {line.data}", line.command) for line in report.lines)
    markdown_parts = [
        f"# {report.title}",
        to_sentence(summarize_verdicts(report.lines)),
        format_markdown_table(_TITLES, [line.list_cells() for line in report.lines]),
        _MEANINGS,
        "\n".join(f"* {_escape_table_cell(sentence)}" for sentence in report.notes),
        format_markdown_table(("row", "command"), [(name, f"`{text}`") for name, text in commands]),
        format_markdown_table(("lineage", ""), list(report.lineage.items())),
    ]
    return "\n\n".join(part for part in markdown_parts if part) + "\n"


def format_markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    table_rows = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(map(_escape_table_cell, cells))} |" for cells in table_rows)


def _escape_table_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")
