"""`bookwheel index --plan`: the planned index, its memory, disk and time, without any vectors."""

from typing import Any

from flows.command.reply import Reply, figures
from flows.index import Order, planned
from rag_model.index.factory import Graph, Lists, parse
from rag_model.index.recipe import VectorPlan
from rag_model.index.sizing.amounts import gigabytes
from rag_model.index.sizing.estimate import Estimate, estimate
from rag_model.index.sizing.rate import measured_seconds


def prospect(order: Order, n: int, d: int) -> Reply:
    """Plan an order for n vectors of d dimensions, and time the build of a small graph on this machine.

    Raises:
        UsageError: the recipe does not fit `d`.
        ResourceError: it does not fit in memory; the message names an index that does.
    """
    plan = planned(order, n, d)
    cost, (small, seconds) = estimate(plan), measured_seconds(plan)
    of_plan = {name: getattr(plan, name) for name in ("factory", "metric", "n", "d")}
    of_cost = {name: getattr(cost, name) for name in ("search_bytes", "disk_bytes", "work_bytes", "beside_bytes")}
    rounded = {stage: round(spent, 1) for stage, spent in seconds.items()}
    document = of_plan | _numbers(plan) | {"search": dict(plan.search), "build_bytes": cost.build_bytes}
    document |= {"stage_bytes": dict(cost.stages)} | of_cost | {"cpu_seconds": rounded, "notes": list(plan.notes)}
    stages = ", ".join(f"{stage} {gigabytes(held)}" for stage, held in cost.stages.items())
    times = ", ".join(f"{stage} {_time(spent)}" for stage, spent in seconds.items())
    lines = [
        f"index     {plan.factory} ({plan.metric}) over {plan.n:,} vectors of {plan.d} dimensions",
        f"numbers   {figures(_numbers(plan)) or 'none'}",
        f"search    {figures(plan.search) or 'exact'}",
        *(f"note      {note}" for note in plan.notes),
        f"memory    {gigabytes(cost.build_bytes)} to build ({stages}; a task each), "
        f"{gigabytes(cost.search_bytes)} to search",
        f"disk      {gigabytes(cost.disk_bytes)} for the index, {cost.disk_bytes / plan.n:,.0f} bytes a vector; "
        f"{gigabytes(cost.work_bytes)} while it is built",
        *([_beside(plan, cost)] if plan.refine else []),
        f"time      {_time(sum(seconds.values()))} of one core ({times})",
        f"          extrapolated from {small.factory} over {small.n:,} synthetic vectors of {plan.d} "
        "dimensions, built here just now: real vectors and other machines differ",
    ]
    return Reply(document, "\n".join(lines))


def _beside(plan: VectorPlan, cost: Estimate) -> str:
    return (
        f"vectors   {gigabytes(cost.beside_bytes)} on disk beside the index, {cost.beside_bytes / plan.n:,.0f} bytes "
        f"each in float16: they rank {plan.search['refine']} times as many candidates as a question asks for"
    )


def _numbers(plan: VectorPlan) -> dict[str, Any]:
    """Return the structure's parameters by name."""
    factory = parse(plan.factory)
    if isinstance(factory, Graph):
        cut = {"border": plan.border, "linked": plan.linked} if plan.cells > 1 else {}
        return {"M": factory.links, "ef_construction": plan.ef_construction, "cells": plan.cells, **cut}
    return {"lists": factory.lists, "train_sample": plan.train_sample} if isinstance(factory, Lists) else {}


def _time(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} hours" if seconds >= 3600 else f"{seconds:,.0f} s"
