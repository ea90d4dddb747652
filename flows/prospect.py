"""`bookwheel index --plan`: the planned index, its memory, disk and time, without any vectors."""

from typing import Any

from flows.command.reply import Reply, format_numbers
from flows.index import IndexRequest, plan_index
from rag_model.errors import ResourceError
from rag_model.index.byte_sizes import format_bytes
from rag_model.index.kind import get_kind_for_factory
from rag_model.resources.estimates import estimate_row_bytes, estimate_stage_seconds

_NUMBERS = ("ef_construction", "cells", "border", "linked"), ("train_sample",)  # of a plan with shards, and of others


def describe_plan(request: IndexRequest, n: int, d: int) -> Reply:
    """Plan an order for n vectors of d dimensions, or for n passages with token vectors of d dimensions.

    Raises:
        UsageError: the recipe does not fit `d`.
        ResourceError: it does not fit in memory; the message names an index that does.
    """
    kind = get_kind_for_factory(request.recipe.factory)
    vectors = kind.represents == "vectors"
    plan: Any = plan_index(request, n, d) if vectors else kind.plan(request.recipe, n, d)
    cost, row, seconds = kind.estimate(plan), estimate_row_bytes(kind.represents, d), estimate_stage_seconds(plan, d)
    needed_bytes = cost.peak_bytes()
    if request.memory is not None and needed_bytes > request.memory:
        what = f"{plan.factory} over {n:,} passages takes {format_bytes(needed_bytes)} of memory to build"
        raise ResourceError(f"{what}: raise --memory from {format_bytes(request.memory)}")
    numbers = {name: getattr(plan, name) for name in _NUMBERS[not plan.shards] if getattr(plan, name, None) is not None}
    document = plan.entry() | numbers | {"notes": list(plan.notes), "stage_bytes": dict(cost.stages)}
    document |= {"build_bytes": needed_bytes, "search_bytes": cost.search_bytes, "disk_bytes": cost.disk_bytes}
    document |= {"work_bytes": cost.work_bytes, "beside_bytes": n * row}
    document["cpu_seconds"] = {stage: round(stage_seconds, 1) for stage, stage_seconds in seconds.items()}
    lines = [
        f"index     {plan.factory} over {n:,} {f'vectors of {d} dimensions' if vectors else 'passages'}",
        f"numbers   {format_numbers(numbers) or 'none'}",
        f"search    {format_numbers(plan.search) or 'exact'}",
        *(f"note      {note}" for note in plan.notes),
        *(
            f"{stage:<9} {format_bytes(cost.stages.get(stage, 0))} of memory a task, {core_seconds / 60:,.1f} minutes of one core"
            for stage, core_seconds in seconds.items()
        ),
        f"memory    {format_bytes(needed_bytes)} to build, {format_bytes(cost.search_bytes)} to search",
        f"disk      {format_bytes(cost.disk_bytes)} for the index, {cost.disk_bytes / n:,.0f} bytes a passage; "
        f"{format_bytes(cost.work_bytes)} while it is built",
        f"{kind.represents:<9} {format_bytes(n * row)} on disk beside the index, {row:,} bytes a passage",
        f"time      {sum(seconds.values()) / 60:,.1f} minutes of one core, about",
    ]
    return Reply(document, "\n".join(lines))
