"""Show results of a run in the Prefect UI: counts, metrics, timings, and a link to the report.

Outside a flow run nothing is written.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flows.outcome import BuildOutcome, CompareOutcome, EvaluateOutcome, ReleaseOutcome, ReproduceOutcome
from flows.stage import is_in_flow_run, log


def show_build(outcome: BuildOutcome) -> None:
    """Write a build's table, and the link to its report, as artifacts of the run."""
    log_build(outcome)
    rows = [{"what": name, "value": f"{count:,}"} for name, count in outcome.counts.items() if name != "dropped"]
    rows += [{"what": f"dropped: {reason}", "value": f"{n:,}"} for reason, n in outcome.counts["dropped"].items()]
    rows += [
        {"what": f"index {index_name}: {metric}", "value": f"{metric_value:,}"}
        for index_name, metrics in outcome.metrics.items()
        for metric, metric_value in metrics.items()
    ]
    rows += [{"what": f"{stage}, seconds", "value": f"{seconds:.1f}"} for stage, seconds in outcome.seconds.items()]
    move_sentence = f"{outcome.ref}@{outcome.number} names it now" if outcome.number else f"{outcome.ref} did not move"
    table_description = f"Snapshot {(outcome.snapshot or '')[:12]} is published: {move_sentence}"
    create_table(rows, "reindex-counts", table_description, outcome.report, "Build report")


def log_build(outcome: BuildOutcome) -> None:
    """Write the counts, the gate's checks, the snapshot and the ref into the run's log."""
    counts_text = ", ".join(f"{count:,} {name}" for name, count in outcome.counts.items() if name != "dropped")
    dropped_counts = ", ".join(f"{n:,} {reason}" for reason, n in outcome.counts["dropped"].items())
    log(f"counts: {counts_text}; dropped: {dropped_counts or 'none'}")
    log_gate(outcome.gate)
    for warning in outcome.warnings:
        log(f"warning: {warning}")
    move_sentence = f"{outcome.ref}@{outcome.number} names it" if outcome.number else f"{outcome.ref} did not move"
    log(f"snapshot {outcome.snapshot}: {move_sentence}")


def log_gate(gate: dict[str, Any]) -> None:
    """Write the verdict of a gate and each of its checks into the run's log."""
    checks = "; ".join(f"{check['name']} is {check['observed']}, wanted {check['wanted']}" for check in gate["checks"])
    log(f"gate: {'passed' if gate['passed'] else 'refused'}: {checks or 'no checks'}")


def log_metrics(subject: str, metrics: Mapping[str, float], n: int) -> None:
    """Write the metrics of an evaluation into the run's log."""
    metrics_text = ", ".join(f"{name} {metric_value:.3f}" for name, metric_value in metrics.items())
    log(f"{subject}, {n:,} questions: {metrics_text}")


def show_answers(outcome: EvaluateOutcome) -> None:
    """Write the metrics of an evaluation and its ablations, and the link to its report."""
    log_metrics(f"model {outcome.model_label} on snapshot {outcome.snapshot}", outcome.metrics, outcome.n)
    metrics = {**outcome.metrics, **outcome.ranks}
    rows = [{"what": name, "value": f"{value:.3f}{_format_interval(outcome, name)}"} for name, value in metrics.items()]
    rows += [
        {"what": f"{row['condition']}: {name}", "value": f"{estimate['value']:.3f}"}
        for row in outcome.ablations[1:]
        for name, estimate in row["metrics"].items()
    ]
    rows += [{"what": f"collapse: {name}", "value": f"{value:,.3g}"} for name, value in outcome.collapse.items()]
    table_description = f"Model {outcome.model_label} on snapshot {outcome.snapshot[:12]}, {outcome.n:,} questions"
    create_table(rows, "evaluate-figures", table_description, outcome.report, "How it answers")


def show_retrievers(outcome: CompareOutcome) -> None:
    """Write the metrics of retrievers, stages and question groups, and link to the report."""
    for expression, comparison in outcome.comparisons.items():
        log_metrics(f"{expression} on snapshot {outcome.snapshot}", comparison["metrics"], outcome.n)
    rows = [
        row
        for expression, comparison in outcome.comparisons.items()
        for row in _iter_retriever_rows(expression, comparison)
    ]
    table_description = (
        f"Retrievers of snapshot {outcome.snapshot[:12]}, {outcome.n:,} questions judged by "
        f"{outcome.judged_by}: {outcome.advice}"
    )
    create_table(rows, "compare-figures", table_description, outcome.report, "How passages are found")


def show_release(outcome: ReleaseOutcome) -> None:
    """Write the steps, metrics and checks of a release as an artifact of the run."""
    log_gate(outcome.gate)
    rows = [{"what": step, "value": "done" if is_done else "as before"} for step, is_done in outcome.done.items()]
    rows += [{"what": name, "value": metric_text} for name, metric_text in outcome.figures.items()]
    rows += [
        {"what": f"check: {check['name']}", "value": f"{check['observed']}, wanted {check['wanted']}"}
        for check in outcome.gate["checks"]
    ]
    move_sentence = f"{outcome.ref}@{outcome.number} names it" if outcome.number else f"{outcome.ref} did not move"
    table_description = f"Snapshot {outcome.snapshot[:12]}, evaluation {outcome.evaluation[:12]}: {move_sentence}"
    create_table(rows, key="release-steps", description=table_description)


def show_reproduction(outcome: ReproduceOutcome) -> None:
    """Write the table of a reproduction, and the link to the page that shows it."""
    column_names = ("row", "data", "measure", "published", "value", "difference", "verdict")
    rows = [{column: line[column] for column in column_names} for line in outcome.lines]
    create_table(rows, "reproduce-table", f"{outcome.reproduction}, {outcome.summary}", outcome.report, "The table")


def _iter_retriever_rows(expression: str, comparison: dict[str, Any]) -> Iterator[dict[str, Any]]:
    costs = {"ms a question": f"{comparison['milliseconds']:.3g}", "bytes": f"{comparison['bytes']:,}"}
    yield {"retriever": expression, "of": "all", **_format_metrics(comparison), **costs}
    for stage in comparison["stages"]:
        costs = {"ms a question": f"{stage['milliseconds']:.3g}", "bytes": f"{stage['bytes']:,}"}
        yield {"retriever": expression, "of": f"stage {stage['stage']}", **_format_metrics(stage), **costs}
    for name, group in comparison["groups"].items():
        yield {"retriever": expression, "of": f"{name} ({group['n']:,} questions)", **_format_metrics(group)}


def _format_metrics(comparison: dict[str, Any]) -> dict[str, str]:
    intervals, differences = comparison["intervals"], comparison.get("differences", {})
    return {
        name: f"{metric_value:.3f} [{intervals[name][0]:.3f}, {intervals[name][1]:.3f}]"
        + (f", {format_paired_difference(differences[name])}" if name in differences else "")
        for name, metric_value in comparison["metrics"].items()
    }


def format_paired_difference(difference: Mapping[str, float]) -> str:
    """Format a difference and its confidence interval."""
    return f"{difference['value']:+z.3f} [{difference['low']:+z.3f}, {difference['high']:+z.3f}]"


def create_table(
    rows: list[dict[str, Any]], key: str, description: str, report: str | None = None, title: str = ""
) -> None:
    """Write a table as an artifact of the run, and the link `title` to its report, if any."""
    if is_in_flow_run():
        from prefect.artifacts import create_table_artifact  # noqa: PLC0415 - a slow import

        create_table_artifact(rows, key=key, description=description)
    if report:
        create_link(to_url(report), title, f"{key.partition('-')[0]}-report")


def to_url(page: str) -> str:
    """Return the URL of a page; the page is given as a path or as a URL."""
    return page if "://" in page else Path(page).absolute().as_uri()


def create_link(url: str, text: str, key: str) -> None:
    """Write a link as an artifact of the run, and into its log."""
    log(f"{text[0].lower()}{text[1:]}: {url}")
    if not is_in_flow_run():
        return
    from prefect.artifacts import create_link_artifact, create_markdown_artifact  # noqa: PLC0415

    if url.startswith(("http://", "https://")):
        create_link_artifact(url, text, key=key, description=text)
    # Browsers open neither s3:// links nor file:// links on a server's page, so show the address
    # for copying.
    else:
        create_markdown_artifact(f"`{url}`", key=key, description=text)


def _format_interval(outcome: EvaluateOutcome, name: str) -> str:
    interval = outcome.intervals.get(name)
    return f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""
