"""The plan of a build, kept in the store: a source that had to be split is not split again by the next run."""

import tempfile
from pathlib import Path

from rag_model.build.recipe import Recipe
from rag_model.corpus.multistream import index_of, is_index
from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import Plan
from rag_model.corpus.source import expand, read_bytes
from rag_model.digest import digest_chunks
from rag_model.store.blobs import BlobRef
from rag_model.store.store import Store

CODE = 1  # raise it when the same files would give other parts


def plan_parts(store: Store, dump: str, recipe: Recipe, limit: int | None = None) -> Plan:
    """Return the parts of `dump`; what workers cannot seek in is split once and put into the store.

    Raises:
        InputError: a file is missing, broken or not what its name says.
        UsageError: the files are of no known kind or of several.
    """
    urls = [url for url in expand(dump) if not is_index(url)]
    if limit is not None or all(index_of(url) for url in urls):
        return _plan(store, dump, recipe, limit, {})  # cheap: reads the index, or the first pages
    inputs = {
        "files": [[url, digest_chunks(read_bytes(url))] for url in urls],  # plain XML is read where it lies
        "store": store.url,  # a plan names its slices by URL: a store that moved needs new ones
        "part_bytes": recipe.part_bytes,
        "code": CODE,
    }
    key = store.memo.key(inputs)
    known = store.memo.get("plan", key)
    if known is None:
        staged: dict[str, BlobRef] = {}
        plan = _plan(store, dump, recipe, None, staged)
        known = store.memo.record("plan", key, staged, plan.to_json(), inputs)
    return Plan.from_json(known.facts)


def _plan(store: Store, dump: str, recipe: Recipe, limit: int | None, staged: dict[str, BlobRef]) -> Plan:
    def stage(path: Path) -> str:
        ref = store.blobs.put_file(path)
        staged[f"{len(staged):05d}"] = ref
        return store.blobs.url(ref)

    with tempfile.TemporaryDirectory(prefix="bookwheel-plan-") as workdir:
        return plan_dump(dump, workdir=Path(workdir), stage=stage, limit=limit, part_bytes=recipe.part_bytes)
