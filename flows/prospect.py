"""`bookwheel index --plan`: the planned index, its memory, disk and time, without any vectors."""

from typing import Any

from flows.command.reply import Reply, figures
from flows.index import Order, planned
from rag_model.errors import ResourceError
from rag_model.index.registry import kind_for
from rag_model.index.sizing.amounts import gigabytes
from rag_model.needs.build import row_bytes, stage_seconds

_NUMBERS = ("ef_construction", "cells", "border", "linked"), ("train_sample",)  # of a plan with shards, and of others


def prospect(order: Order, n: int, d: int) -> Reply:
    """Plan an order for n vectors of d dimensions, or for n passages with token vectors of d dimensions.

    Raises:
        UsageError: the recipe does not fit `d`.
        ResourceError: it does not fit in memory; the message names an index that does.
    """
    kind = kind_for(order.recipe.factory)
    vectors = kind.represents == "vectors"
    plan: Any = planned(order, n, d) if vectors else kind.plan(order.recipe, n, d)
    cost, row, seconds = kind.estimate(plan), row_bytes(kind.represents, d), stage_seconds(plan, d)
    needed = cost.needed_bytes()
    if order.memory is not None and needed > order.memory:
        what = f"{plan.factory} over {n:,} passages takes {gigabytes(needed)} of memory to build"
        raise ResourceError(f"{what}: raise --memory from {gigabytes(order.memory)}")
    numbers = {name: getattr(plan, name) for name in _NUMBERS[not plan.shards] if getattr(plan, name, None) is not None}
    document = plan.entry() | numbers | {"notes": list(plan.notes), "stage_bytes": dict(cost.stages)}
    document |= {"build_bytes": needed, "search_bytes": cost.search_bytes, "disk_bytes": cost.disk_bytes}
    document |= {"work_bytes": cost.work_bytes, "beside_bytes": n * row}
    document["cpu_seconds"] = {stage: round(spent, 1) for stage, spent in seconds.items()}
    lines = [
        f"index     {plan.factory} over {n:,} {f'vectors of {d} dimensions' if vectors else 'passages'}",
        f"numbers   {figures(numbers) or 'none'}",
        f"search    {figures(plan.search) or 'exact'}",
        *(f"note      {note}" for note in plan.notes),
        *(
            f"{stage:<9} {gigabytes(cost.stages.get(stage, 0))} of memory a task, {spent / 60:,.1f} minutes of one core"
            for stage, spent in seconds.items()
        ),
        f"memory    {gigabytes(needed)} to build, {gigabytes(cost.search_bytes)} to search",
        f"disk      {gigabytes(cost.disk_bytes)} for the index, {cost.disk_bytes / n:,.0f} bytes a passage; "
        f"{gigabytes(cost.work_bytes)} while it is built",
        f"{kind.represents:<9} {gigabytes(n * row)} on disk beside the index, {row:,} bytes a passage",
        f"time      {sum(seconds.values()) / 60:,.1f} minutes of one core, about",
    ]
    return Reply(document, "\n".join(lines))
