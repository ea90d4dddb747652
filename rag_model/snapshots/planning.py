"""The plan of a build: its parts, and its indexes before any passage is encoded.

The plan of the parts is kept in the store: the next run does not split a source again.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rag_model.corpus.multistream import index_of, is_index
from rag_model.corpus.parts import Fences
from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import Plan
from rag_model.corpus.source import expand, read_bytes
from rag_model.digest import digest_chunks
from rag_model.errors import InputError
from rag_model.index.plan import IndexPlan
from rag_model.index.recipe import IndexRecipe, over_of
from rag_model.index.registry import kind_for
from rag_model.snapshots.cut_part import CutPart
from rag_model.snapshots.heritage import steady
from rag_model.snapshots.parent import Parent
from rag_model.snapshots.recipe import Recipe
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store

CODE = 3  # increase it when the same files would give other parts


def plan_parts(store: Store, dump: str, recipe: Recipe, limit: int | None = None, parent: Parent | None = None) -> Plan:
    """Return the parts of `dump`; files in which workers cannot seek are split once and put into the store.

    The parent's ranges of pages are kept where possible (`rag_model.corpus.parts`).

    Raises:
        InputError: a file is missing, damaged or not of the kind that its name says.
        UsageError: the files are of an unknown kind or of several kinds.
    """
    fences = parent.fences(recipe) if parent else None
    urls = [url for url in expand(dump) if not is_index(url)]
    if limit is not None or all(index_of(url) for url in urls):
        return _plan(store, dump, recipe, limit, fences, {})  # cheap: reads the index, or the first pages
    inputs = {
        "files": [[url, digest_chunks(read_bytes(url))] for url in urls],  # plain XML is not copied
        "store": store.url,  # a plan names its slices by URL, which change if the store moves
        "part_bytes": recipe.part_bytes,
        "code": CODE,
    }
    known = store.memo.get("plan", store.memo.key(_with(inputs, fences)))
    if known is not None:
        return Plan.from_json(known.facts)
    staged: dict[str, BlobRef] = {}
    facts: Mapping[str, Any] = _plan(store, dump, recipe, None, fences, staged).to_json()
    own = _fences(Plan.from_json(facts))  # the parent's ranges when the same dump is built again
    for its in (fences, own):
        made = _with(inputs, its)
        facts = store.memo.record("plan", store.memo.key(made), staged, facts, made).facts
    return Plan.from_json(facts)


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
        fits = memory_bytes is None or kind.estimate(kept, max(rows)).needed_bytes() <= memory_bytes
        plans[name] = replace(kept if fits else plan, over=over)
    return plans


def _with(inputs: Mapping[str, Any], fences: Fences | None) -> dict[str, Any]:
    return {**inputs, "fences": asdict(fences) if fences else None}


def _fences(plan: Plan) -> Fences:
    starts = tuple(part.first_page for part in plan.parts)
    return Fences(plan.kind, plan.siteinfo.dbname, starts, plan.parts[-1].last_page + 1)


def _plan(
    store: Store, dump: str, recipe: Recipe, limit: int | None, fences: Fences | None, staged: dict[str, BlobRef]
) -> Plan:
    def stage(path: Path) -> str:
        ref = store.blobs.put_file(path)
        staged[f"{len(staged):05d}"] = ref
        return store.blobs.url(ref)

    with tempfile.TemporaryDirectory(prefix="bookwheel-plan-") as workdir:
        folder = Path(workdir)
        return plan_dump(dump, workdir=folder, stage=stage, limit=limit, part_bytes=recipe.part_bytes, fences=fences)
