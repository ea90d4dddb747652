"""What an index inherits of the parent's: what was learnt of the corpus, while it is of the same plan and still fits.

Cells and quantizers are inputs of all that is made of them, and files of the snapshot. A build that has a parent uses
the parent's, so that what has not changed keeps its pieces: the same dump with the same parent gives the same snapshot
again, while without that parent index files may differ, because others were learnt from another sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rag_model.corpus.records import Part
from rag_model.index.plan import IndexPlan
from rag_model.index.quality.fit import Trained
from rag_model.index.recipe import IndexRecipe
from rag_model.index.registry import kind_named
from rag_model.snapshots.encoded_part import EncodedPart
from rag_model.snapshots.parent import Parent
from rag_model.store.comparing.diff import differences
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.store.versions.paths import rows_path, trained_path

NO_PARENT = "no parent"
NO_RECORD = "no record"
_LOOKED_AT = 8  # parts that changed, and as many that did not, in which new vectors and old ones are looked for

_SAID = {"plan", "code", "losses", "imbalance", "imbalance_now"}  # of a trained file, by `trained_entry`


@dataclass(frozen=True, slots=True)
class Heirloom:
    """A trained file of the parent, and where to look whether it fits."""

    snapshot: str  # whose it was
    blob: BlobRef
    trained: Trained
    changed: tuple[tuple[BlobRef, tuple[BlobRef, ...]], ...] = ()  # vectors of parts, with the parent's of their ranges
    same: tuple[BlobRef, ...] = ()  # vectors of parts that are as they were

    def settled(self, drift: float) -> bool:
        """Whether it fits without a look: nothing has changed, and it has not worn out."""
        return not self.changed and self.trained.reason(drift) is None


def trained_entry(plan: IndexPlan, trained: Trained) -> dict[str, Any]:
    """Return what an index's entry in a manifest says of its trained file: what a later build compares."""
    return {"plan": plan.shared(), "code": kind_named(plan.kind).VERSION, **trained.to_json()}


def obstacles(parent: Parent, name: str, plan: IndexPlan, space: str | None) -> list[str]:
    """Return the settings in which the parent's index of that name differs, so that nothing is inherited; [] if none.

    `no parent` and `no record` stand for themselves.
    """
    if parent.manifest is None:
        return [NO_PARENT]
    entry = _entry(parent, name)
    if not entry:
        return [NO_RECORD]
    content = parent.manifest.content
    asked = (content.space_of(content.over(name)) or {}).get("digest")
    before = {**entry["plan"], "code": entry["code"], "space": asked}
    now = {**plan.shared(), "code": kind_named(plan.kind).VERSION, "space": space}
    return [setting for setting, _ in differences(before, now)]


def inherit(
    store: Store,
    parent: Parent,
    name: str,
    plan: IndexPlan,
    space: str | None,
    parts: Sequence[Part],
    embeddings: Sequence[EncodedPart],
) -> Heirloom | None:
    """Return the parent's trained file of an index; None: there is none, or it is of another plan or space.

    `embeddings` are what the embed job reports of each of the `parts`. Of those that changed a few are named, drawn by
    the plan's seed, in which new vectors can be told from old ones.
    """
    if parent.manifest is None or space is None or not kind_named(plan.kind).learns:
        return None
    if obstacles(parent, name, plan, space):
        return None
    files = parent.manifest.content.files
    if not store.blobs.exists(files[trained_path(name)]):
        return None
    over, entries = parent.manifest.content.over(name), parent.manifest.content.parts
    known = {files[path] for entry in entries if (path := rows_path(over, entry.name)) in files}
    encoded = [(part, made.vectors) for part, made in zip(parts, embeddings, strict=True) if made.rows]
    changed = _some([(part, vectors) for part, vectors in encoded if vectors not in known], plan.seed)
    return Heirloom(
        parent.manifest.id,
        files[trained_path(name)],
        Trained.of(_entry(parent, name)),
        tuple((vectors, _earlier(store, parent, part, space)) for part, vectors in changed),
        tuple(_some([vectors for _, vectors in encoded if vectors in known], plan.seed)),
    )


def noted(plan: IndexPlan, lacking: Sequence[str]) -> IndexPlan:
    """Return the plan with a note of the settings for which nothing is inherited, if a parent's index had others."""
    others = sorted({*lacking} - {NO_PARENT, NO_RECORD})
    if not others:
        return plan
    return replace(plan, notes=(*plan.notes, f"trained anew: the parent's index differs in {', '.join(others)}"))


def steady(recipe: IndexRecipe, plan: IndexPlan, parent: Parent, name: str) -> IndexPlan:
    """Return the plan with what of the parent's index of that name the kind keeps, such as the number of cells."""
    return kind_named(plan.kind).steady(recipe, plan, _entry(parent, name).get("plan", {}))


def _entry(parent: Parent, name: str) -> Mapping[str, Any]:
    """Return what the parent says of a trained file; nothing where it has none, or none that this version reads."""
    content = parent.manifest.content if parent.manifest else None
    if content is None or trained_path(name) not in content.files:
        return {}
    entry = content.indexes.get(name, {}).get("trained")
    return dict(entry) if isinstance(entry, dict) and set(entry) >= _SAID else {}


def _earlier(store: Store, parent: Parent, part: Part, space: str) -> tuple[BlobRef, ...]:
    return tuple(known.beside for known in parent.encoded(part, space) if store.blobs.exists(known.beside))


def _some(found: Sequence[Any], seed: int) -> list[Any]:
    """Return at most so many as are looked at, in their order."""
    chosen = np.random.default_rng(seed).choice(len(found), min(_LOOKED_AT, len(found)), replace=False, shuffle=False)
    return [found[place] for place in np.sort(chosen)]
