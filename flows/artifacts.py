"""Artifacts of a run in the Prefect UI: a table of counts, metrics and timings, and a link to the report.

Outside a flow run nothing is written.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

from flows.outcome import Compared, Evaluated, Reindexed, Released
from flows.stage import in_run


def show(outcome: Reindexed) -> None:
    """Write an outcome's table and link to its report as artifacts of the run."""
    rows = [{"what": name, "value": f"{value:,}"} for name, value in outcome.counts.items() if name != "dropped"]
    rows += [{"what": f"dropped: {why}", "value": f"{n:,}"} for why, n in outcome.counts["dropped"].items()]
    rows += [
        {"what": f"index {index}: {figure}", "value": f"{value:,}"}
        for index, figures in outcome.metrics.items()
        for figure, value in figures.items()
    ]
    rows += [{"what": f"{stage}, seconds", "value": f"{seconds:.1f}"} for stage, seconds in outcome.seconds.items()]
    moved = f"{outcome.ref}@{outcome.number} means it now" if outcome.number else f"{outcome.ref} did not move"
    described = f"Snapshot {(outcome.snapshot or '')[:12]} is published: {moved}"
    table(rows, key="reindex-counts", description=described)
    if outcome.report:
        link(outcome.report, "Build report", key="reindex-report")


def show_answers(outcome: Evaluated) -> None:
    """Write an evaluation's figures, those of its ablations, and the link to its report as artifacts of the run."""
    found = {**outcome.metrics, **outcome.ranks}
    rows = [{"what": name, "value": f"{value:.3f}{_interval(outcome, name)}"} for name, value in found.items()]
    rows += [
        {"what": f"{row['condition']}: {name}", "value": f"{figure['value']:.3f}"}
        for row in outcome.ablations[1:]
        for name, figure in row["metrics"].items()
    ]
    rows += [{"what": f"collapse: {name}", "value": f"{value:,.3g}"} for name, value in outcome.collapse.items()]
    described = f"Model {outcome.named} on snapshot {outcome.snapshot[:12]}, {outcome.n:,} questions"
    table(rows, key="evaluate-figures", description=described)
    if outcome.report:
        link(Path(outcome.report).absolute().as_uri(), "How it answers", key="evaluate-report")


def show_retrievers(outcome: Compared) -> None:
    """Write the figures of each retriever, of its stages and groups, and the link to the report as artifacts."""
    rows = [row for expression, one in outcome.standings.items() for row in _retriever_rows(expression, one)]
    described = (
        f"Retrievers of snapshot {outcome.snapshot[:12]}, {outcome.n:,} questions judged by {outcome.judged_by}: "
        f"{outcome.advice}"
    )
    table(rows, key="compare-figures", description=described)
    if outcome.report:
        link(Path(outcome.report).absolute().as_uri(), "How passages are found", key="compare-report")


def show_release(outcome: Released) -> None:
    """Write what a release did, its figures and its checks as an artifact of the run."""
    rows = [{"what": step, "value": "done" if it else "as before"} for step, it in outcome.done.items()]
    rows += [{"what": name, "value": value} for name, value in outcome.figures.items()]
    rows += [
        {"what": f"check: {one['name']}", "value": f"{one['observed']}, wanted {one['wanted']}"}
        for one in outcome.gate["checks"]
    ]
    stands = f"{outcome.ref}@{outcome.number} names it" if outcome.number else f"{outcome.ref} did not move"
    described = f"Snapshot {outcome.snapshot[:12]}, evaluation {outcome.evaluation[:12]}: {stands}"
    table(rows, key="release-steps", description=described)


def _retriever_rows(expression: str, told: dict[str, Any]) -> Iterator[dict[str, Any]]:
    costs = {"ms a question": f"{told['milliseconds']:.3g}", "bytes": f"{told['bytes']:,}"}
    yield {"retriever": expression, "of": "all", **_values(told), **costs}
    for one in told["stages"]:
        costs = {"ms a question": f"{one['milliseconds']:.3g}", "bytes": f"{one['bytes']:,}"}
        yield {"retriever": expression, "of": f"stage {one['stage']}", **_values(one), **costs}
    for name, one in told["groups"].items():
        yield {"retriever": expression, "of": f"{name} ({one['n']:,} questions)", **_values(one)}


def _values(told: dict[str, Any]) -> dict[str, str]:
    ends, lost = told["intervals"], told.get("differences", {})
    return {
        name: f"{value:.3f} [{ends[name][0]:.3f}, {ends[name][1]:.3f}]"
        + (
            f", {lost[name]['value']:+.3f} [{lost[name]['low']:+.3f}, {lost[name]['high']:+.3f}]"
            if name in lost
            else ""
        )
        for name, value in told["metrics"].items()
    }


def table(rows: list[dict[str, Any]], key: str, description: str) -> None:
    """Write a table as an artifact of the run."""
    if in_run():
        create_table_artifact(rows, key=key, description=description)


def link(address: str, text: str, key: str) -> None:
    """Write a link as an artifact of the run."""
    if in_run() and address.startswith(("http://", "https://")):
        create_link_artifact(address, text, key=key, description=text)
    elif in_run():  # browsers do not open s3://, nor file:// from a server's page: show the address for copying
        create_markdown_artifact(f"`{address}`", key=key, description=text)


def _interval(outcome: Evaluated, name: str) -> str:
    ends = outcome.intervals.get(name)
    return f" [{ends[0]:.3f}, {ends[1]:.3f}]" if ends else ""
