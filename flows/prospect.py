"""`bookwheel index --plan`: the planned index, its memory, disk and time, without any vectors."""

from typing import Any

from flows.command.reply import Reply, figures
from flows.index import Order, planned
from rag_model.errors import ResourceError
from rag_model.index.postings.impact import TERMS, VOCABULARY
from rag_model.index.registry import kind_for
from rag_model.index.sizing.amounts import gigabytes
from rag_model.index.tokens.kind import TOKENS
from rag_model.needs import build, machine, reading

_OVER = {
    "vectors": "vectors of {d} dimensions",
    "tokens": f"passages, {TOKENS} tokens of {{d}} dimensions each",
    "sparse": f"passages, {TERMS} weighted terms each",
}
_NUMBERS = ("ef_construction", "cells", "border", "linked"), ("train_sample",)  # of a plan with shards, and of others
_ENCODERS = {"MiniLM": (10.6e6, 384), "BERT-base": (85e6, 768)}  # weights of the layers, used twice a token; width
_DEVICES = {"core": machine.CORE, "GPU": machine.GPU}
_LOGITS = {"tokens": 0, "sparse": VOCABULARY}  # that an encoder gives for each token


def prospect(order: Order, n: int, d: int) -> Reply:
    """Plan an order for n vectors of d dimensions, or for n passages with token vectors of d dimensions.

    Raises:
        UsageError: the recipe does not fit `d`.
        ResourceError: it does not fit in memory; the message names an index that does.
    """
    kind = kind_for(order.recipe.factory)
    plan: Any = planned(order, n, d) if kind.represents == "vectors" else kind.plan(order.recipe, n, d)
    cost, row, seconds = kind.estimate(plan), build.row_bytes(kind.represents, d), build.stage_seconds(plan, d)
    numbers = {name: getattr(plan, name) for name in _NUMBERS[not plan.shards] if getattr(plan, name, None) is not None}
    document = plan.entry() | numbers | {"notes": list(plan.notes), "stage_bytes": dict(cost.stages)}
    document |= {name: getattr(cost, name) for name in ("build_bytes", "search_bytes", "disk_bytes", "work_bytes")}
    document |= {"cpu_seconds": {stage: round(spent, 1) for stage, spent in seconds.items()}, "beside_bytes": n * row}
    stages = ", ".join(f"{stage} {gigabytes(held)}" for stage, held in cost.stages.items())
    built = f"{gigabytes(cost.build_bytes)} to build ({stages}; a task each)"
    if order.memory is not None and cost.build_bytes > order.memory:
        raise ResourceError(
            f"{plan.factory} over {n:,} passages takes {built}: raise --memory from {gigabytes(order.memory)}"
        )
    times = ", ".join(f"{stage} {_time(spent)}" for stage, spent in seconds.items())
    ranks = getattr(plan, "refine", None) and f": they rank {plan.search['refine']} times as many candidates as wanted"
    lines = [
        f"index     {plan.factory} over {n:,} {_OVER.get(kind.represents, 'passages').format(d=d)}",
        f"numbers   {figures(numbers) or 'none'}",
        f"search    {figures(plan.search) or 'exact'}",
        *(f"note      {note}" for note in plan.notes),
        f"memory    {built}, {gigabytes(cost.search_bytes)} to search",
        f"disk      {gigabytes(cost.disk_bytes)} for the index, {cost.disk_bytes / n:,.0f} bytes a passage; "
        f"{gigabytes(cost.work_bytes)} while it is built",
        f"{kind.represents:<9} {gigabytes(n * row)} on disk beside the index, {row:,} bytes a passage{ranks or ''}",
        f"time      {_time(sum(seconds.values()))} of one core, about ({times})",
    ]
    if kind.represents in _LOGITS:
        logits = _LOGITS[kind.represents]
        hours = {
            f"{name} on a {device}": float(f"{2 * (size + width * logits) * reading.PASSAGE * n / speed / 3600:.3g}")
            for name, (size, width) in _ENCODERS.items()
            for device, speed in _DEVICES.items()
        }
        document["encoding_hours"] = hours
        lines.append(f"encoding  hours, about: {figures(hours)}")
    return Reply(document, "\n".join(lines))


def _time(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} hours" if seconds >= 3600 else f"{seconds:,.0f} s"
