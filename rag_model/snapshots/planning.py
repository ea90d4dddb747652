"""The plan of a build, kept in the store: the next run does not split a source again."""

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rag_model.corpus.multistream import index_of, is_index
from rag_model.corpus.parts import Fences
from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import Plan
from rag_model.corpus.source import expand, read_bytes
from rag_model.digest import digest_chunks
from rag_model.snapshots.parent import Parent
from rag_model.snapshots.recipe import Recipe
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store

CODE = 2  # increase it when the same files would give other parts


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
