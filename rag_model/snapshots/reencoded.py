"""A snapshot whose passages are encoded again by another encoder: the same passages, other vectors."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rag_model.encoders import embed
from rag_model.evaluation.gate import GateRecipe
from rag_model.index.recipe import IndexRecipe
from rag_model.snapshots.encoded_part import EncodedPart
from rag_model.snapshots.encoding import StoredEncoder
from rag_model.snapshots.existing import REENCODED, carried, recipe_of
from rag_model.snapshots.recipe import Recipe
from rag_model.store.versions.manifest import Content, Manifest
from rag_model.store.versions.paths import EMBEDDINGS, QUESTION_ENCODER, embeddings_path, trained_path


def recipe_for(content: Content) -> Recipe:
    """Return the recipe of the new snapshot: that of the old one; the gate allows another encoder space.

    Raises:
        UsageError: a setting is unknown to this version; the message names it.
    """
    return replace(recipe_of(content), gate=GateRecipe(same_space=False))


def stale(content: Content, recipe: Recipe) -> dict[str, IndexRecipe]:
    """Return the indexes that have to be built again: those over the representation `embeddings`."""
    return {name: its for name, its in recipe.index.items() if content.over(name) == EMBEDDINGS}


def reencoded(content: Content, encoder: StoredEncoder, embeddings: Sequence[EncodedPart]) -> Content:
    """Return the content with new vectors and their question encoder, and without indexes over the old vectors.

    `embeddings` holds one report per part, in order. Other representations and indexes stay as they are.
    """
    indexes = {name: entry for name, entry in content.indexes.items() if content.over(name) != EMBEDDINGS}
    gone = {path for name in {*content.indexes} - {*indexes} for path in (content.index_file(name), trained_path(name))}
    kept = {path: ref for path, ref in content.files.items() if path not in gone}
    files = {path: ref for path, ref in kept.items() if not path.startswith(f"{QUESTION_ENCODER}/")}
    files |= {f"{QUESTION_ENCODER}/{name}": ref for name, ref in encoder.question}
    files |= {
        embeddings_path(part.name): report.vectors for part, report in zip(content.parts, embeddings, strict=True)
    }
    entry = {"kind": encoder.kind, "space": encoder.space.to_json()}
    representations = {**content.representations, EMBEDDINGS: entry}
    return replace(content, files=files, representations=representations, indexes=indexes)


def derived(old: Manifest, encoder: str) -> dict[str, Any]:
    """Return the provenance of a snapshot that was encoded again from another, by the encoder of that name."""
    made = carried(old)
    code: Mapping[str, Any] = made.get("code") or {}
    return {**made, "encoder": encoder, "code": {**code, "embed": embed.VERSION}, REENCODED: {"of": old.id}}
