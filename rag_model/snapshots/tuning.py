"""Tune the search parameters of each index for its recall target, before the manifest is made.

The setting is content: readers of a snapshot search with it. So it is recorded in the memo under exactly its inputs,
and a rerun, also on a machine with other rounding, gets the same setting and the same snapshot.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rag_model.evaluation.gate import GateRecipe
from rag_model.index.registry import kind_of
from rag_model.retrieve.indexes import files_of
from rag_model.snapshots.content import BuiltIndex
from rag_model.snapshots.measure import trials_of
from rag_model.store.objects.memo import Produced
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest
from rag_model.store.versions.paths import EMBEDDINGS
from rag_model.store.versions.snapshot import Snapshot

CODE = 1  # increase it when the same index and questions would give another setting
_ASKED = ("passages", "encoder", "embeddings")  # folders of the questions' and the neighbours' inputs


def tune_searches(store: Store, draft: Content, built: Sequence[BuiltIndex], recipe: GateRecipe) -> list[BuiltIndex]:
    """Return the indexes with search parameters for their recall target; an index without a target is unchanged.

    Questions are drawn like those of the gate but with another seed, so that the gate judges a setting on other
    questions. A target that cannot be reached becomes a note of the index.

    Args:
        store: holds the files of the draft.
        draft: the content without tuning.
        built: the indexes of the draft.
        recipe: of the gate: the depth k and the number of questions.

    Raises:
        InputError: an index or its vectors are damaged.
    """
    with Snapshot.of(store, Manifest(draft)) as snapshot:
        trials = trials_of(snapshot, replace(recipe, seed=recipe.seed + 1))

        def tuned(index: BuiltIndex) -> BuiltIndex:
            target = index.plan.recall_target
            if target is None or not snapshot.n:
                return index

            def produce(workdir: Path) -> Produced:
                entry, trial = draft.indexes[index.name], trials(draft.over(index.name))
                found = kind_of(entry).tune(files_of(snapshot, index.name), entry, trial, target)
                return Produced({}, {"search": dict(found.search), "note": found.note})

            facts = store.memo.once("tune", _inputs(draft, index, recipe), produce)[0].facts
            notes = (*index.plan.notes, facts["note"]) if facts["note"] else index.plan.notes
            return replace(index, plan=replace(index.plan, search=facts["search"], notes=notes))

        return [tuned(index) for index in built]


def _inputs(draft: Content, index: BuiltIndex, recipe: GateRecipe) -> dict[str, object]:
    over = draft.over(index.name)
    files = {path: ref.id for path, ref in sorted(draft.files.items()) if path.partition("/")[0] in _ASKED}
    return {
        "index": index.blob.id,
        "target": index.plan.recall_target,
        "files": files,
        "questions": [recipe.k, recipe.queries, recipe.seed + 1],
        "code": CODE,
        **({} if over == EMBEDDINGS else {"over": over}),  # which encoder asks: equal vectors may have another one
    }
