"""Continue from an existing snapshot: the reports that jobs would give of its parts, and its recipe."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from rag_model.corpus.chunk import BUCKET, ChunkFacts
from rag_model.errors import RefusedError
from rag_model.index.kind import Represents
from rag_model.index.recipe import IndexRecipe
from rag_model.snapshots.cut_part import CutPart
from rag_model.snapshots.encoded_part import EncodedPart
from rag_model.snapshots.recipe import Recipe
from rag_model.snapshots.recipe_text import given
from rag_model.store.objects.ranges import ASKED, read_ahead
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest, PartEntry
from rag_model.store.versions.paths import EMBEDDINGS, passages_path
from rag_model.store.versions.snapshot import Snapshot
from rag_model.toml import from_table

REENCODED = "reencoded"  # of a snapshot whose vectors another encoder made: the snapshot that it is one of
CARRIED = (
    "dump",
    "encoder",
    "code",
    REENCODED,
)  # fields of a provenance that stay true for a snapshot made from another


def recipe_of(content: Content) -> Recipe:
    """Return the recipe of a snapshot, which may have been written without some of its settings.

    Its indexes are those that the snapshot has; an index that the recipe does not name is built by its factory. Its
    chunker is left out: nothing is cut again, and the chunker need not be installed here.

    Raises:
        UsageError: a setting is unknown to this version; the message names it.
    """
    others = {name: value for name, value in content.recipe.items() if name not in {"chunk", "index"}}
    whole = from_table(Recipe, given(others), "the snapshot's recipe")
    named = content.recipe.get("index") or {}
    indexes = {name: _index(named.get(name), entry) for name, entry in content.indexes.items()}
    return replace(whole, index=indexes)


def carried(manifest: Manifest) -> dict[str, Any]:
    """Return the provenance fields of a snapshot that stay true for one made of its passages and vectors."""
    return {name: manifest.provenance[name] for name in CARRIED if name in manifest.provenance}


def facts_of(store: Store, content: Content) -> tuple[list[CutPart], dict[str, list[EncodedPart]]]:
    """Return one report per part, as of the chunk job and, by representation, of the embed job; `made` is False.

    Reads two columns of the passages, part by part.

    Raises:
        RefusedError: the snapshot has no vectors.
        StoreError: a passage file is missing or damaged.
    """
    spaces = [name for name in content.representations if content.space_of(name) is not None]
    wanted = [content.rows_path(name, part.name) for part in content.parts for name in spaces]
    if not {*wanted} <= {*content.files} or EMBEDDINGS not in spaces or not content.parts:
        raise RefusedError("the snapshot holds no vectors to build an index over: rebuild it with `reindex`")
    with Snapshot.of(store, Manifest(content)) as snapshot:
        passages = list(_cut(snapshot))
    return passages, {name: [_encoded(content, part, name) for part in content.parts] for name in spaces}


def vectors_of(content: Content) -> dict[str, Represents]:
    """Return a snapshot's encoded representations, and what each has of a passage: one vector, many, or terms."""
    kinds: dict[str, Represents] = {kind: kind for kind in get_args(Represents)}
    spaces = [name for name in content.representations if content.space_of(name) is not None]
    return {name: kinds.get(content.kind_of(name), "vectors") for name in spaces}


def widths_of(snapshot: Snapshot) -> dict[str, int]:
    """Return the dimensions of the vectors of each representation of a snapshot, by name.

    Raises:
        StoreError: vectors are missing or damaged.
    """
    content = snapshot.manifest.content
    return {name: snapshot.dim_of(name) for name in content.representations if content.space_of(name) is not None}


def _encoded(content: Content, part: PartEntry, representation: str) -> EncodedPart:
    return EncodedPart(content.files[content.rows_path(representation, part.name)], part.rows)


def _cut(snapshot: Snapshot) -> Iterator[CutPart]:
    return read_ahead(partial(_cut_part, snapshot), snapshot.parts, ASKED)


def _cut_part(snapshot: Snapshot, part: PartEntry) -> CutPart:
    content, pages, lengths = snapshot.manifest.content, set[str](), Counter[int]()
    for batch in snapshot.batches(part.name, ["page_id", "n_words"]):
        pages.update(batch["page_id"].to_pylist())
        lengths.update(words // BUCKET * BUCKET for words in batch["n_words"].to_pylist())
    facts = ChunkFacts(
        rows=part.rows,
        articles=len(pages),
        newest_revision=content.corpus.get("newest_revision") or "",
        lengths={str(length): count for length, count in sorted(lengths.items())},
    )
    return CutPart(content.files[passages_path(part.name)], facts)


def _index(settings: Any, entry: Mapping[str, Any]) -> IndexRecipe:
    stated = {name: entry[name] for name in ("factory", "metric", "over", "settings") if name in entry}
    table = settings if isinstance(settings, Mapping) else stated
    return from_table(IndexRecipe, given(table), "an index of the snapshot's recipe")
