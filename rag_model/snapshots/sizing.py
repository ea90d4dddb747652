"""Resolve the indexes of a build and estimate their memory, before any passage is encoded."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rag_model.errors import InputError
from rag_model.index.plan import IndexPlan
from rag_model.index.recipe import IndexRecipe, over_of
from rag_model.index.registry import kind_for
from rag_model.snapshots.cut_part import CutPart
from rag_model.snapshots.heritage import steady
from rag_model.snapshots.parent import Parent


def plan_indexes(
    recipes: Mapping[str, IndexRecipe],
    passages: Sequence[CutPart],
    widths: Mapping[str, int],
    memory_bytes: int | None,
    parent: Parent | None = None,
) -> dict[str, IndexPlan]:
    """Return the plan of each recipe for the passages that were cut.

    `widths` are the dimensions of the vectors of each representation, by name; `memory_bytes` is the memory of a
    worker, None if unknown. The parent's number of cells is kept if it is close enough.

    Raises:
        InputError: there are no passages.
        UsageError: a factory does not fit.
        ResourceError: a build would not fit in memory; the message names a factory that would.
    """
    rows = [cut.rows for cut in passages]
    if not any(rows):
        raise InputError("the dump has no passages: see the reasons of the dropped pages")
    plans: dict[str, IndexPlan] = {}
    for name, recipe in recipes.items():
        kind, over = kind_for(recipe.factory), over_of(recipe)
        plan = kind.plan(recipe, sum(rows), widths.get(over, 0), memory=memory_bytes, part_rows=max(rows))
        kept = steady(recipe, plan, parent or Parent(), name)
        fits = memory_bytes is None or kind.estimate(kept, max(rows)).build_bytes <= memory_bytes
        plans[name] = replace(kept if fits else plan, over=over)
    return plans
