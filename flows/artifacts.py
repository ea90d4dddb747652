"""What people read of a run in the Prefect UI: a table of counts, metrics and timings, and the way to the report."""

from prefect.artifacts import create_link_artifact, create_table_artifact

from flows.outcome import Reindexed


def show(outcome: Reindexed) -> None:
    """Put an outcome's table and report where the run's page shows them."""
    rows = [{"what": name, "value": f"{value:,}"} for name, value in outcome.counts.items() if name != "dropped"]
    rows += [{"what": f"dropped: {why}", "value": f"{n:,}"} for why, n in outcome.counts["dropped"].items()]
    rows += [
        {"what": f"index {index}: {figure}", "value": f"{value:,}"}
        for index, figures in outcome.metrics.items()
        for figure, value in figures.items()
    ]
    rows += [{"what": f"{stage}, seconds", "value": f"{seconds:.1f}"} for stage, seconds in outcome.seconds.items()]
    create_table_artifact(rows, key="reindex-counts", description=f"Snapshot {(outcome.snapshot or '')[:12]}")
    if outcome.report:
        create_link_artifact(outcome.report, "Build report", key="reindex-report")
