"""Tune the search parameters of each index for its recall target, before the manifest is written.

The parameters are content, because readers of a snapshot search with them. So they are recorded in
the memo under their exact inputs, and a rerun, even on a machine that rounds differently, gets the
same parameters and the same snapshot.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rag_model.evaluation.gate import GateRecipe
from rag_model.index.kind import get_kind_of_entry
from rag_model.retrieve.indexes import index_files
from rag_model.snapshots.content import BuiltIndex
from rag_model.snapshots.measure import cache_query_sets
from rag_model.store.objects.memo import StageResult
from rag_model.store.store import Store
from rag_model.store.versions.manifest import EMBEDDINGS, Content, Manifest
from rag_model.store.versions.snapshot import Snapshot

CODE = 1  # increase it when the same index and questions would give another setting
# folders of the questions' and the neighbours' inputs
_INPUT_FOLDERS = ("passages", "encoder", "embeddings")


def tune_searches(store: Store, draft: Content, built: Sequence[BuiltIndex], recipe: GateRecipe) -> list[BuiltIndex]:
    """Return the indexes with search parameters that reach their recall target.

    An index without a target is unchanged. Queries are sampled like the gate's but with another
    seed, so that the gate judges the parameters on other queries. A target that cannot be reached
    becomes a note of the index.

    Args:
        store: the store with the files of the draft.
        draft: the content before tuning.
        built: the indexes of the draft.
        recipe: the gate's depth k and number of queries.

    Raises:
        InputError: an index or its vectors are damaged.
    """
    with Snapshot.from_manifest(store, Manifest(draft)) as snapshot:
        get_query_set = cache_query_sets(snapshot, replace(recipe, seed=recipe.seed + 1))

        def tune_index(index: BuiltIndex) -> BuiltIndex:
            target = index.plan.recall_target
            if target is None or not snapshot.n:
                return index

            def produce(workdir: Path) -> StageResult:
                entry, query_set = draft.indexes[index.name], get_query_set(draft.representation_of(index.name))
                tuning = get_kind_of_entry(entry).tune(index_files(snapshot, index.name), entry, query_set, target)
                return StageResult({}, {"search": dict(tuning.search), "note": tuning.note})

            stats = store.memo.get_or_create("tune", _inputs(draft, index, recipe), produce)[0].stats
            notes = (*index.plan.notes, stats["note"]) if stats["note"] else index.plan.notes
            return replace(index, plan=replace(index.plan, search=stats["search"], notes=notes))

        return [tune_index(index) for index in built]


def _inputs(draft: Content, index: BuiltIndex, recipe: GateRecipe) -> dict[str, object]:
    over = draft.representation_of(index.name)
    files = {path: ref.id for path, ref in sorted(draft.files.items()) if path.partition("/")[0] in _INPUT_FOLDERS}
    return {
        "index": index.blob.id,
        "target": index.plan.recall_target,
        "files": files,
        "questions": [recipe.k, recipe.queries, recipe.seed + 1],
        "code": CODE,
        # which encoder asks: equal vectors may have another one
        **({} if over == EMBEDDINGS else {"over": over}),
    }
