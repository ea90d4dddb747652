"""Format a comparison of retrievers as plain text: metrics, stages and groups of questions."""

from collections.abc import Iterator, Mapping, Sequence

from flows.outcome import CompareOutcome, EvaluateOutcome
from rag_model.evaluation.reports.page import format_bytes
from rag_model.evaluation.retrieval.staged import ENCODER


def format_comparison(outcome: CompareOutcome) -> str:
    """Format a comparison of retrievers for a terminal."""
    return "\n".join(_iter_comparison_lines(outcome))


def iter_metric_lines(metrics: Mapping[str, float], intervals: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    """Yield a line for each metric, with its confidence interval if there is one."""
    for name, value in metrics.items():
        interval = intervals.get(name)
        yield f"{name:<12} {value:.3f}" + (f"  [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "")


def _iter_comparison_lines(outcome: CompareOutcome) -> Iterator[str]:
    first = outcome.standings[outcome.first_retriever]
    yield (
        f"{outcome.n} questions on snapshot {outcome.snapshot[:12]}, judged by "
        f"{outcome.judged_by}, retriever {outcome.first_retriever}"
    )
    yield from iter_metric_lines({**first["metrics"], **first["ranks"]}, first["intervals"])
    if kinds := first.get("kinds"):
        yield "answered by  " + ", ".join(f"{kind} {share:.3f}" for kind, share in kinds.items())
    if len(outcome.standings) > 1:
        yield ""
        yield from _align_columns(_iter_retriever_rows(outcome))
    if any(len(comparison["stages"]) > 1 for comparison in outcome.standings.values()):
        yield ""
        yield from _align_columns(_iter_stage_rows(outcome))
    if any(comparison["groups"] for comparison in outcome.standings.values()):
        yield ""
        yield from _align_columns(_iter_group_rows(outcome))
    yield from (f"note         {note}" for note in outcome.notes)
    yield describe_record(outcome)
    yield f"advice       {outcome.advice}"
    if outcome.report:
        yield f"report       {outcome.report}"


def describe_record(outcome: CompareOutcome | EvaluateOutcome) -> str:
    """Return a line with the id of a recorded evaluation, or the reason why it was not recorded."""
    if outcome.evaluation is None:
        return f"evaluation   not recorded: {outcome.unrecorded}"
    return f"evaluation   {outcome.evaluation[:12]}"


def _iter_retriever_rows(outcome: CompareOutcome) -> Iterator[Sequence[str]]:
    """Yield a row of metrics for each retriever, and one of its differences to the first."""
    names = list(outcome.standings[outcome.first_retriever]["metrics"])
    yield "retriever", *names, "ms", "bytes"
    for expression, comparison in outcome.standings.items():
        costs = f"{comparison['milliseconds']:.3g}", format_bytes(comparison["bytes"])
        yield expression, *(f"{comparison['metrics'][name]:.3f}" for name in names), *costs
        if differences := comparison.get("differences"):
            yield (
                f"  minus {outcome.first_retriever}",
                *(_format_difference(differences[name]) for name in names),
                "",
                "",
            )


def _iter_stage_rows(outcome: CompareOutcome) -> Iterator[Sequence[str]]:
    yield "stage", outcome.measure, "own ms", "own bytes"
    for expression, comparison in outcome.standings.items():
        if comparison["encoder"]["milliseconds"]:
            yield (
                f"{expression}: {ENCODER}",
                "",
                f"{comparison['encoder']['milliseconds']:.3g}",
                format_bytes(comparison["encoder"]["bytes"]),
            )
        for stage in comparison["stages"]:
            value = f"{stage['metrics'][outcome.measure]:.3f}"
            yield f"{expression}: {stage['stage']}", value, f"{stage['milliseconds']:.3g}", format_bytes(stage["bytes"])


def _iter_group_rows(outcome: CompareOutcome) -> Iterator[Sequence[str]]:
    yield "questions", "n", "retriever", outcome.measure, f"minus {outcome.first_retriever}"
    for name in outcome.standings[outcome.first_retriever]["groups"]:
        for expression, comparison in outcome.standings.items():
            group = comparison["groups"][name]
            differences = group.get("differences")
            difference = _format_difference(differences[outcome.measure]) if differences else ""
            yield name, f"{group['n']:,}", expression, f"{group['metrics'][outcome.measure]:.3f}", difference


def _format_difference(difference: Mapping[str, float]) -> str:
    return f"{difference['value']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}]"


def _align_columns(rows: Iterator[Sequence[str]]) -> Iterator[str]:
    all_rows = list(rows)
    widths = [max(len(row[column]) for row in all_rows) for column in range(len(all_rows[0]))]
    for row in all_rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
