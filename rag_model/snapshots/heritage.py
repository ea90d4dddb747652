"""The trained file that an index inherits from the parent's index, if the plan is the same and it still fits.

Cells and quantizers are inputs of every piece, and files of the snapshot. A build with a parent uses the parent's, so
that pieces of unchanged parts stay valid: the same dump with the same parent gives the same snapshot. Without that
parent index files may differ, because cells and quantizers are trained on another sample.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from rag_model.corpus.records import Part
from rag_model.index.plan import IndexPlan
from rag_model.index.quality.fit import TrainingFit
from rag_model.index.recipe import IndexRecipe
from rag_model.index.registry import kind_named
from rag_model.snapshots.encoded_part import EncodedPart
from rag_model.snapshots.parent import Parent
from rag_model.store.comparing.diff import differences
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content
from rag_model.store.versions.page_ranges import PageRanges
from rag_model.store.versions.paths import trained_path

NO_PARENT = "no parent"
NO_RECORD = "no record"
_LOOKED_AT = 8  # changed parts, and as many unchanged ones, from which new and old vectors are sampled

_SAID = {"plan", "code", "losses", "imbalance", "imbalance_now"}  # fields of `trained_entry`


@dataclass(frozen=True, slots=True)
class EarlierRows:
    """A part of the parent's index: its vectors, and its number among the parts that have some."""

    rows: BlobRef
    number: int

    def to_json(self) -> list[Any]:
        """Return the record as JSON values."""
        return [self.rows.to_json(), self.number]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Self:
        """Read back what `to_json` wrote."""
        return cls(BlobRef.from_json(value[0]), value[1])


@dataclass(frozen=True, slots=True)
class Heirloom:
    """A trained file of the parent, and the vectors to check whether it fits."""

    snapshot: str  # id of the parent
    blob: BlobRef
    trained: TrainingFit
    changed: tuple[tuple[BlobRef, tuple[BlobRef, ...]], ...] = ()  # vectors of changed parts; the parent's
    same: tuple[BlobRef, ...] = ()  # vectors of unchanged parts
    before: BlobRef | None = None  # JSON list: for each part with rows the parent's `EarlierRows` of its pages

    def settled(self, drift: float) -> bool:
        """Whether it fits without measurement: no part has changed, and its cells are still balanced."""
        return not self.changed and self.trained.reason(drift) is None


def trained_entry(plan: IndexPlan, trained: TrainingFit) -> dict[str, Any]:
    """Return the entry of a trained file in a manifest, which a later build compares."""
    return {"plan": plan.shared(), "code": kind_named(plan.kind).VERSION, **trained.to_json()}


def obstacles(parent: Parent, name: str, plan: IndexPlan, space: str | None) -> list[str]:
    """Return the settings in which the parent's index of that name differs, so that nothing is inherited; [] if none.
    It is [`no parent`] or [`no record`] if there is nothing to compare.
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
    """Return the parent's trained file of an index; None: there is none, or its plan or space differs.

    `embeddings` are the embed job's reports of the `parts`. Some changed and unchanged parts are drawn by the plan's
    seed, to compare new vectors with old ones.
    """
    if parent.manifest is None or space is None or not kind_named(plan.kind).learns:
        return None
    if obstacles(parent, name, plan, space):
        return None
    files = parent.manifest.content.files
    if not store.blobs.exists(files[trained_path(name)]):
        return None
    content = parent.manifest.content
    over = content.over(name)
    known = {files[path] for entry in content.parts if (path := content.rows_path(over, entry.name)) in files}
    encoded = [(part, made.vectors) for part, made in zip(parts, embeddings, strict=True) if made.rows]
    changed = _some([(part, vectors) for part, vectors in encoded if vectors not in known], plan.seed)
    return Heirloom(
        parent.manifest.id,
        files[trained_path(name)],
        TrainingFit.of(_entry(parent, name)),
        tuple((vectors, _earlier(store, parent, part, space)) for part, vectors in changed),
        tuple(_some([vectors for _, vectors in encoded if vectors in known], plan.seed)),
        _put_before(store, content, over, [part for part, _ in encoded]),
    )


def noted(plan: IndexPlan, lacking: Sequence[str]) -> IndexPlan:
    """Return the plan with a note of the settings that differ from the parent's index and so prevent inheritance."""
    others = sorted({*lacking} - {NO_PARENT, NO_RECORD})
    if not others:
        return plan
    return replace(plan, notes=(*plan.notes, f"trained again: the parent's index differs in {', '.join(others)}"))


def steady(recipe: IndexRecipe, plan: IndexPlan, parent: Parent, name: str) -> IndexPlan:
    """Return the plan with the numbers that the kind keeps from the parent's index, such as the number of cells."""
    return kind_named(plan.kind).steady(recipe, plan, _entry(parent, name).get("plan", {}))


def _entry(parent: Parent, name: str) -> Mapping[str, Any]:
    """Return the parent's entry of a trained file; empty if it has none that this version can read."""
    content = parent.manifest.content if parent.manifest else None
    if content is None or trained_path(name) not in content.files:
        return {}
    entry = content.indexes.get(name, {}).get("trained")
    return dict(entry) if isinstance(entry, dict) and set(entry) >= _SAID else {}


def _earlier(store: Store, parent: Parent, part: Part, space: str) -> tuple[BlobRef, ...]:
    return tuple(known.beside for known in parent.encoded(part, space) if store.blobs.exists(known.beside))


def _put_before(store: Store, content: Content, over: str, parts: Sequence[Part]) -> BlobRef:
    """Store what the parent has of the pages of each part."""
    filled = [entry for entry in content.parts if entry.rows]
    rows = [content.files.get(content.rows_path(over, entry.name)) for entry in filled]
    ranges = PageRanges(filled)
    found = [
        [
            EarlierRows(its, number).to_json()
            for number, _ in ranges.within(part.first_page, part.last_page)
            if (its := rows[number]) is not None
        ]
        for part in parts
    ]
    return store.blobs.put_bytes(json.dumps(found).encode())


def _some(found: Sequence[Any], seed: int) -> list[Any]:
    """Return at most `_LOOKED_AT` items, drawn by seed, in their order."""
    chosen = np.random.default_rng(seed).choice(len(found), min(_LOOKED_AT, len(found)), replace=False, shuffle=False)
    return [found[place] for place in np.sort(chosen)]
