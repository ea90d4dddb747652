"""`bookwheel expire`: delete old moves of refs, and versions that no move names."""

from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from flows.command.reply import Common, Reply, StoreUrl, Yes, parse_age
from rag_model.errors import format_count
from rag_model.store.store import Store
from rag_model.store.upkeep.expire import ExpirePolicy
from rag_model.store.upkeep.expire import expire_store as expire_old


def expire(
    *,
    store: StoreUrl,
    keep: Annotated[int, Parameter(help="Number of newest moves of every ref to keep, of any age.")] = 10,
    older_than: Annotated[
        str, Parameter(help="Keep younger moves; the age of a move is the time since the ref moved away from it.")
    ] = "90d",
    yes: Yes = False,
    common: Common | None = None,
) -> Reply:
    """Delete old moves of refs, and versions that no other move names; a dry run unless --yes.

    Evaluations are deleted with their snapshot or model, and unfinished trainings when their
    checkpoint is as old. The current snapshot of a ref is never deleted. The files of deleted
    snapshots stay until `bookwheel gc`.
    """
    report = expire_old(Store.open(store), ExpirePolicy(keep, parse_age(older_than)), dry_run=not yes)
    lines = [
        *(f"move      {move}" for move in report.moves),
        *(f"snapshot  {snapshot[:12]}" for snapshot in report.snapshots),
        *(f"model     {model[:12]}" for model in report.models),
        *(f"evaluation {evaluation[:12]}" for evaluation in report.evaluations),
        *(f"training  {key[:12]}" for key in report.trainings),
        f"{'deleted' if yes else 'would delete'} {format_count(len(report.moves), 'move')}, "
        f"{format_count(len(report.snapshots), 'snapshot')}, {format_count(len(report.models), 'model')}, "
        f"{format_count(len(report.evaluations), 'evaluation')} and "
        f"{format_count(len(report.trainings), 'training')}"
        + ("" if yes else "; nothing was changed: give --yes to do it"),
    ]
    return Reply({"dry_run": not yes, **asdict(report)}, "\n".join(lines))
