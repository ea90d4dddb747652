"""A comparison of retrievers in words: figures, stages and groups as tables of plain text."""

from collections.abc import Iterator, Mapping, Sequence

from flows.outcome import Compared, Evaluated
from rag_model.evaluation.reports.page import sized
from rag_model.evaluation.retrieval.staged import ENCODER


def words(outcome: Compared) -> str:
    """Return what a terminal shows of a comparison."""
    return "\n".join(_lines(outcome))


def figures(found: Mapping[str, float], intervals: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    """Yield a line for each measure, with its interval where there is one."""
    for name, value in found.items():
        ends = intervals.get(name)
        yield f"{name:<12} {value:.3f}" + (f"  [{ends[0]:.3f}, {ends[1]:.3f}]" if ends else "")


def _lines(outcome: Compared) -> Iterator[str]:
    first = outcome.standings[outcome.first]
    yield (
        f"{outcome.n} questions on snapshot {outcome.snapshot[:12]}, judged by {outcome.judged_by}, retriever "
        f"{outcome.first}"
    )
    yield from figures({**first["metrics"], **first["ranks"]}, first["intervals"])
    if len(outcome.standings) > 1:
        yield ""
        yield from _table(_beside(outcome))
    if any(len(one["stages"]) > 1 for one in outcome.standings.values()):
        yield ""
        yield from _table(_stages(outcome))
    if any(one["groups"] for one in outcome.standings.values()):
        yield ""
        yield from _table(_groups(outcome))
    yield from (f"note         {note}" for note in outcome.notes)
    yield kept(outcome)
    yield f"advice       {outcome.advice}"
    if outcome.report:
        yield f"report       {outcome.report}"


def kept(outcome: Compared | Evaluated) -> str:
    """Return the line that says where an evaluation is kept."""
    if outcome.evaluation is None:
        return f"evaluation   not recorded: {outcome.unrecorded}"
    return f"evaluation   {outcome.evaluation[:12]}"


def _beside(outcome: Compared) -> Iterator[Sequence[str]]:
    """Yield each retriever's row: every measure, beneath it its difference to the first with the interval."""
    names = list(outcome.standings[outcome.first]["metrics"])
    yield "retriever", *names, "ms", "bytes"
    for expression, told in outcome.standings.items():
        costs = f"{told['milliseconds']:.3g}", sized(told["bytes"])
        yield expression, *(f"{told['metrics'][name]:.3f}" for name in names), *costs
        if lost := told.get("differences"):
            yield f"  minus {outcome.first}", *(_difference(lost[name]) for name in names), "", ""


def _stages(outcome: Compared) -> Iterator[Sequence[str]]:
    yield "stage", outcome.measure, "own ms", "own bytes"
    for expression, told in outcome.standings.items():
        if told["encoder"]["milliseconds"]:
            yield (
                f"{expression}: {ENCODER}",
                "",
                f"{told['encoder']['milliseconds']:.3g}",
                sized(told["encoder"]["bytes"]),
            )
        for stage in told["stages"]:
            value = f"{stage['metrics'][outcome.measure]:.3f}"
            yield f"{expression}: {stage['stage']}", value, f"{stage['milliseconds']:.3g}", sized(stage["bytes"])


def _groups(outcome: Compared) -> Iterator[Sequence[str]]:
    yield "questions", "n", "retriever", outcome.measure, f"minus {outcome.first}"
    for name in outcome.standings[outcome.first]["groups"]:
        for expression, told in outcome.standings.items():
            group = told["groups"][name]
            lost = group.get("differences")
            said = _difference(lost[outcome.measure]) if lost else ""
            yield name, f"{group['n']:,}", expression, f"{group['metrics'][outcome.measure]:.3f}", said


def _difference(one: Mapping[str, float]) -> str:
    return f"{one['value']:+.3f} [{one['low']:+.3f}, {one['high']:+.3f}]"


def _table(rows: Iterator[Sequence[str]]) -> Iterator[str]:
    every = list(rows)
    widths = [max(len(row[place]) for row in every) for place in range(len(every[0]))]
    for row in every:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
