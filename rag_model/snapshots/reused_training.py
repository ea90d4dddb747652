"""Reuse the trained file of the parent's index if the plan is the same and the file still fits.

Every piece of an index depends on the trained cells and quantizers, which are files of the
snapshot. A build reuses the trained files of its parent, so that pieces of unchanged parts stay
valid: the same dump with the same parent gives the same snapshot. With another parent the index
files may differ, because cells and quantizers are trained on another sample.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from rag_model.corpus.records import Part
from rag_model.errors import StoreError
from rag_model.index.kind import ShardUpdatingKind, get_kind
from rag_model.index.plan import IndexPlan
from rag_model.index.quality.results import TrainingStats
from rag_model.index.recipe import IndexRecipe
from rag_model.snapshots.parent import Parent
from rag_model.snapshots.stage_results import BuiltShard, EmbedResult
from rag_model.store.diff import iter_differences
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.pulling.overlap import PageRanges
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest, trained_path

SHARDS = "shards"  # the provenance field with the shards of the indexes
NO_PARENT, NO_RECORD = "no parent", "no record"  # obstacles to reuse if nothing can be compared
_SAMPLED_PARTS = 8  # maximum number of changed, and of unchanged, parts whose vectors are sampled

# Fields of an entry of `build_training_entry`.
_ENTRY_FIELDS = {"plan", "code", "losses", "imbalance", "imbalance_now"}


@dataclass(frozen=True, slots=True)
class ParentRows:
    """A part of the parent's index: its vectors, and its part number without empty parts."""

    rows: BlobRef
    number: int


@dataclass(frozen=True, slots=True)
class RedactedRows:
    """The vectors of a part before and after a takedown."""

    old: BlobRef
    remaining: BlobRef | None  # None if all vectors were removed


@dataclass(frozen=True, slots=True)
class ReusedTraining:
    """A trained file of the parent, and sampled vectors to check whether it still fits."""

    snapshot: str  # id of the parent
    blob: BlobRef
    stats: TrainingStats
    # for each sampled changed part, its vectors and the parent's vectors of the same pages
    changed_parts: tuple[tuple[BlobRef, tuple[BlobRef, ...]], ...] = ()
    unchanged_parts: tuple[BlobRef, ...] = ()  # vectors of sampled unchanged parts
    # JSON list that has, for each non-empty part, the `ParentRows` of its pages
    parent_rows: BlobRef | None = None
    # JSON list of the parent's `BuiltShard`s; without it, all shards are built from scratch
    shards: BlobRef | None = None
    # JSON list that a takedown wrote: the `RedactedRows` of each part that has removed rows
    redacted_parts: BlobRef | None = None
    # describes how sizes in the plan differ from the parent's, such as the number of cells; the
    # index then needs `ShardUpdatingKind.follow`
    growth: str = ""

    def fits_untested(self, drift: float) -> bool:
        """Return whether the trained file can be reused without a test: no part changed, and the
        cells are balanced.
        """
        is_as_built = not (self.changed_parts or self.redacted_parts or self.growth)
        return is_as_built and self.stats.explain_misfit(drift) is None


def build_training_entry(plan: IndexPlan, stats: TrainingStats) -> dict[str, Any]:
    """Return the manifest entry of a trained file, with which a later build compares its plan."""
    return {"plan": plan.piece_inputs(), "code": get_kind(plan.kind).VERSION, **asdict(stats)}


def find_reuse_obstacles(parent: Parent, name: str, plan: IndexPlan, space: str | None) -> list[str]:
    """Return the settings that differ from the parent's index and prevent reuse; empty if reuse is
    possible.

    Returns [`no parent`] or [`no record`] if there is nothing to compare.
    """
    if parent.manifest is None:
        return [NO_PARENT]
    entry = _get_training_entry(parent, name)
    if not entry:
        return [NO_RECORD]
    content = parent.manifest.content
    parent_space = (content.space_of(content.representation_of(name)) or {}).get("digest")
    parent_inputs = {**entry["plan"], "code": entry["code"], "space": parent_space}
    inputs = {**plan.piece_inputs(), "code": get_kind(plan.kind).VERSION, "space": space}
    changed_settings = [setting for setting, _ in iter_differences(parent_inputs, inputs)]
    is_same_code_and_space = entry["code"] == inputs["code"] and parent_space == space
    return [] if is_same_code_and_space and _describe_growth(entry, plan) else changed_settings


def _describe_growth(training_entry: Mapping[str, Any], plan: IndexPlan) -> str:
    """Describe how the sizes in a plan differ from the parent's plan, if the trained file can be
    adapted; otherwise return an empty string.
    """
    kind = get_kind(plan.kind)
    if not isinstance(kind, ShardUpdatingKind) or not kind.can_follow(plan, training_entry["plan"]):
        return ""
    differences = iter_differences(training_entry["plan"], plan.piece_inputs())
    changes = [f"{size} {name} instead of {old_size}" for name, (old_size, size) in differences]
    return f"there are {', '.join(changes)}"


def find_reusable_training(
    store: Store,
    parent: Parent,
    name: str,
    plan: IndexPlan,
    space: str | None,
    parts: Sequence[Part],
    embed_results: Sequence[EmbedResult],
    *,
    rebuild_graphs: bool = False,
) -> ReusedTraining | None:
    """Return the parent's trained file of an index; None if it does not exist, or belongs to
    another plan or encoder space.

    `embed_results` are those of `parts`. Some changed and unchanged parts are sampled with
    the plan's seed, to compare new vectors with old ones. With `rebuild_graphs`, the parent's
    shards are left out.
    """
    if parent.manifest is None or space is None or not get_kind(plan.kind).learns:
        return None
    if find_reuse_obstacles(parent, name, plan, space):
        return None
    files = parent.manifest.content.files
    if not store.blobs.exists(files[trained_path(name)]):
        return None
    content = parent.manifest.content
    representation = content.representation_of(name)
    parent_vectors = {
        files[path] for part in content.parts if (path := content.rows_path(representation, part.name)) in files
    }
    encoded_parts = [(part, result.vectors) for part, result in zip(parts, embed_results, strict=True) if result.rows]
    changed_parts = _sample_items(
        [(part, vectors) for part, vectors in encoded_parts if vectors not in parent_vectors], plan.seed
    )
    return ReusedTraining(
        parent.manifest.id,
        files[trained_path(name)],
        TrainingStats.from_json(_get_training_entry(parent, name)),
        tuple((vectors, _list_parent_vectors(store, parent, part, space)) for part, vectors in changed_parts),
        tuple(_sample_items([vectors for _, vectors in encoded_parts if vectors in parent_vectors], plan.seed)),
        _store_parent_rows(store, content, representation, [part for part, _ in encoded_parts]),
        None if rebuild_graphs else find_shard_list(parent.manifest, name),
        growth=_describe_growth(_get_training_entry(parent, name), plan),
    )


def find_training_to_redact(
    store: Store,
    manifest: Manifest,
    name: str,
    plan: IndexPlan,
    redacted_parts: Sequence[RedactedRows],
) -> ReusedTraining | None:
    """Return the trained file of a snapshot's index, to delete removed vectors from the index.
    Return None if the index kind cannot delete vectors (`ShardUpdatingKind.redact`), so that the
    index has to be built again.
    """
    content, parent = manifest.content, Parent(manifest)
    space = (content.space_of(content.representation_of(name)) or {}).get("digest")
    if not isinstance(get_kind(plan.kind), ShardUpdatingKind) or find_reuse_obstacles(parent, name, plan, space):
        return None
    trained_file, part_records = content.files[trained_path(name)], [asdict(part) for part in redacted_parts]
    if not store.blobs.exists(trained_file) or _describe_growth(_get_training_entry(parent, name), plan):
        return None
    return ReusedTraining(
        manifest.id,
        trained_file,
        TrainingStats.from_json(_get_training_entry(parent, name)),
        shards=find_shard_list(manifest, name),
        redacted_parts=store.blobs.put_bytes(json.dumps(part_records).encode()),
    )


def find_shard_list(manifest: Manifest, name: str) -> BlobRef | None:
    """Return the list of an index's `BuiltShard`s that a snapshot's build recorded, or None."""
    with suppress(StoreError, KeyError, TypeError):
        return BlobRef.from_json(manifest.provenance[SHARDS][name]["list"])
    return None


def read_shards(store: Store, shard_list: BlobRef) -> list[BuiltShard]:
    """Return the shards of a list, or an empty list if it is missing or damaged.

    `gc` keeps these shards while a ref names the snapshot.
    """
    with suppress(StoreError, ValueError, KeyError, TypeError):
        return [BuiltShard.from_json(shard) for shard in json.loads(store.blobs.read(shard_list))]
    return []


def build_shards_entry(store: Store, shard_list: BlobRef) -> dict[str, Any]:
    """Return the provenance of an index's shards: their list, and the history of each."""
    shards = read_shards(store, shard_list)
    shard_histories = {name: [getattr(shard, name) for shard in shards] for name in ("generation", "replaced")}
    return {"list": shard_list.to_json(), **shard_histories}


def note_obstacles(plan: IndexPlan, obstacles: Sequence[str]) -> IndexPlan:
    """Return the plan with a note that names the settings that prevent reuse of the parent's
    index.
    """
    changed_settings = sorted({*obstacles} - {NO_PARENT, NO_RECORD})
    if not changed_settings:
        return plan
    return replace(
        plan, notes=(*plan.notes, f"trained again: the parent's index differs in {', '.join(changed_settings)}")
    )


def keep_parent_sizes(recipe: IndexRecipe, plan: IndexPlan, parent: Parent, name: str) -> IndexPlan:
    """Return the plan with those sizes that the index kind takes from the parent's index, such as
    the number of cells.
    """
    return get_kind(plan.kind).steady(recipe, plan, _get_training_entry(parent, name).get("plan", {}))


def _get_training_entry(parent: Parent, name: str) -> Mapping[str, Any]:
    """Return the parent's manifest entry of an index's trained file; empty if there is none that
    this version can read.
    """
    content = parent.manifest.content if parent.manifest else None
    if content is None or trained_path(name) not in content.files:
        return {}
    entry = content.indexes.get(name, {}).get("trained")
    return dict(entry) if isinstance(entry, dict) and set(entry) >= _ENTRY_FIELDS else {}


def _list_parent_vectors(store: Store, parent: Parent, part: Part, space: str) -> tuple[BlobRef, ...]:
    return tuple(
        parent_part.log_or_vectors
        for parent_part in parent.find_encoded_parts(part, space)
        if store.blobs.exists(parent_part.log_or_vectors)
    )


def _store_parent_rows(store: Store, content: Content, representation: str, parts: Sequence[Part]) -> BlobRef:
    """Store a JSON list with the `ParentRows` that have the pages of each part."""
    nonempty_parts = [part for part in content.parts if part.rows]
    row_files = [content.files.get(content.rows_path(representation, part.name)) for part in nonempty_parts]
    page_ranges = PageRanges(nonempty_parts)
    rows_of_parts = [
        [
            asdict(ParentRows(vectors, part_number))
            for part_number, _ in page_ranges.find_overlapping(part.first_page, part.last_page)
            if (vectors := row_files[part_number]) is not None
        ]
        for part in parts
    ]
    return store.blobs.put_bytes(json.dumps(rows_of_parts).encode())


def _sample_items(items: Sequence[Any], seed: int) -> list[Any]:
    """Return a random sample of at most `_SAMPLED_PARTS` items, in the order of `items`."""
    positions = np.random.default_rng(seed).choice(
        len(items), min(_SAMPLED_PARTS, len(items)), replace=False, shuffle=False
    )
    return [items[position] for position in np.sort(positions)]
