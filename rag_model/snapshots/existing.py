"""Read the recipe and the stage results of an existing snapshot, to build another one from it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

from rag_model.corpus.chunk import LENGTH_BIN, ChunkStats
from rag_model.corpus.passages import PassageFile
from rag_model.encoders import embed
from rag_model.errors import RefusedError
from rag_model.evaluation.gate import GateRecipe
from rag_model.index.kind import RepresentationType
from rag_model.index.recipe import IndexRecipe
from rag_model.snapshots.content import build_commits_provenance
from rag_model.snapshots.encoding import COMMITS, StoredEncoder
from rag_model.snapshots.recipe import Recipe, drop_none
from rag_model.snapshots.reused_training import SHARDS
from rag_model.snapshots.stage_results import ChunkResult, EmbedResult
from rag_model.store.recorded_tasks import PartTask, TaskRunner, run_tasks
from rag_model.store.store import Store
from rag_model.store.versions.build_history import HISTORY, format_history
from rag_model.store.versions.manifest import (
    EMBEDDINGS,
    QUESTION_ENCODER,
    Content,
    Manifest,
    PartEntry,
    embeddings_path,
    passages_path,
    trained_path,
)
from rag_model.store.versions.snapshot import Snapshot
from rag_model.toml import from_table

# provenance field with the id of the snapshot whose passages were encoded again
REENCODED = "reencoded"
# Provenance fields that stay true for a snapshot that is derived from another.
INHERITED_PROVENANCE = "dump", "encoder", COMMITS, "code", "arithmetic", REENCODED, SHARDS


def read_snapshot_recipe(content: Content) -> Recipe:
    """Return the recipe of a snapshot, with defaults for settings that it does not state.

    The recipe names the indexes that the snapshot has; if an index has no table in the snapshot's
    recipe, its factory string is used. The chunker is left out: no passage is chunked again, so it
    need not be installed.

    Raises:
        UsageError: this version does not know a setting; the message names it.
    """
    settings = {name: setting for name, setting in content.recipe.items() if name not in {"chunk", "index"}}
    recipe = from_table(Recipe, drop_none(settings), "the snapshot's recipe")
    index_tables = content.recipe.get("index") or {}
    indexes = {name: _read_index_recipe(index_tables.get(name), entry) for name, entry in content.indexes.items()}
    return replace(recipe, index=indexes)


def inherit_provenance(manifest: Manifest) -> dict[str, Any]:
    """Return the provenance fields that stay true when another snapshot reuses the passages and
    vectors.
    """
    fields = {name: manifest.provenance[name] for name in INHERITED_PROVENANCE if name in manifest.provenance}
    return fields | {HISTORY: format_history(manifest)}


@dataclass(frozen=True, slots=True)
class PassageStatsTask(PartTask):
    """Counts the articles of a part, and its passages by length."""

    stage: ClassVar[str] = "passage-stats"
    code: ClassVar[int] = 1

    def compute(self, store: Store) -> dict[str, Any]:
        """Return the fields `articles` and `lengths` of `ChunkStats`."""
        page_ids, length_counts = set[str](), Counter[int]()
        with PassageFile(store.blobs.get_local_path(self.file)) as file:
            for batch in file.iter_batches(["page_id", "n_words"]):
                page_ids.update(batch["page_id"].to_pylist())
                length_counts.update(n_words // LENGTH_BIN * LENGTH_BIN for n_words in batch["n_words"].to_pylist())
        return {
            "articles": len(page_ids),
            "lengths": {str(length): n for length, n in sorted(length_counts.items())},
        }


def read_stage_results(
    store: Store, content: Content, runner: TaskRunner | None = None
) -> tuple[list[ChunkResult], dict[str, list[EmbedResult]]]:
    """Return the chunk job's result of each part, and the embed job's results by representation.

    `runner` runs the tasks, which read two columns of the passages; without it they run in this
    process.

    Raises:
        RefusedError: the snapshot has no vectors.
        StoreError: a passage file is missing or damaged.
    """
    names = [*list_encoded_representations(content)]
    vector_paths = [content.rows_path(name, part.name) for part in content.parts for name in names]
    if not {*vector_paths} <= {*content.files} or EMBEDDINGS not in names or not content.parts:
        raise RefusedError("the snapshot holds no vectors to build an index over: rebuild it with `reindex`")
    passage_blobs = [content.files[passages_path(part.name)] for part in content.parts]
    newest_revision = content.corpus.get("newest_revision") or ""
    passage_stats = run_tasks(store, [*map(PassageStatsTask, passage_blobs)], runner)
    passages = [
        ChunkResult(file, ChunkStats(rows=part.rows, newest_revision=newest_revision, **result))
        for file, part, result in zip(passage_blobs, content.parts, passage_stats, strict=True)
    ]
    return passages, {name: [_build_embed_result(content, part, name) for part in content.parts] for name in names}


def list_encoded_representations(content: Content) -> dict[str, RepresentationType]:
    """Return the row type of each encoded representation of a snapshot."""
    row_types: dict[str, RepresentationType] = {kind: kind for kind in get_args(RepresentationType)}
    names = [name for name in content.representations if content.space_of(name) is not None]
    return {name: row_types.get(content.kind_of(name), "vectors") for name in names}


def read_dimensions(snapshot: Snapshot) -> dict[str, int]:
    """Return the vector dimension of each representation of a snapshot, by name.

    Raises:
        StoreError: vectors are missing or damaged.
    """
    return {name: snapshot.dim_of(name) for name in list_encoded_representations(snapshot.manifest.content)}


def _build_embed_result(content: Content, part: PartEntry, representation: str) -> EmbedResult:
    return EmbedResult(content.files[content.rows_path(representation, part.name)], part.rows)


def _read_index_recipe(recipe_table: Any, entry: Mapping[str, Any]) -> IndexRecipe:
    entry_settings = {name: entry[name] for name in ("factory", "metric", "over", "settings") if name in entry}
    index_settings = recipe_table if isinstance(recipe_table, Mapping) else entry_settings
    return from_table(IndexRecipe, drop_none(index_settings), "an index of the snapshot's recipe")


def read_reencode_recipe(content: Content) -> Recipe:
    """Return the snapshot's recipe, changed so that its gate allows another vector space.

    Raises:
        UsageError: a setting is unknown to this version; the message names it.
    """
    return replace(read_snapshot_recipe(content), gate=GateRecipe(same_space=False))


def list_stale_indexes(content: Content, recipe: Recipe) -> dict[str, IndexRecipe]:
    """Return the indexes that have to be built again when the snapshot's passages are encoded by
    another encoder: those over the representation `embeddings`.
    """
    return {
        name: index_recipe
        for name, index_recipe in recipe.index.items()
        if content.representation_of(name) == EMBEDDINGS
    }


def replace_embeddings(content: Content, encoder: StoredEncoder, embed_results: Sequence[EmbedResult]) -> Content:
    """Return the content with new vectors and their question encoder, and without indexes over the
    old vectors.

    `embed_results` holds one result per part, in order. Other representations and indexes stay as
    they are.
    """
    indexes = {name: entry for name, entry in content.indexes.items() if content.representation_of(name) != EMBEDDINGS}
    removed_paths = {
        path for name in {*content.indexes} - {*indexes} for path in (content.index_file(name), trained_path(name))
    }
    kept_files = {path: blob for path, blob in content.files.items() if path not in removed_paths}
    files = {path: blob for path, blob in kept_files.items() if not path.startswith(f"{QUESTION_ENCODER}/")}
    files |= {f"{QUESTION_ENCODER}/{name}": blob for name, blob in encoder.question}
    files |= {
        embeddings_path(part.name): result.vectors for part, result in zip(content.parts, embed_results, strict=True)
    }
    representation = {"kind": encoder.kind, "space": encoder.space.to_json()}
    representations = {**content.representations, EMBEDDINGS: representation}
    return replace(content, files=files, representations=representations, indexes=indexes)


def build_reencoded_provenance(old_manifest: Manifest, encoder: StoredEncoder) -> dict[str, Any]:
    """Return the provenance of a snapshot with the passages of `old_manifest`, encoded by
    `encoder`.
    """
    provenance = {name: record for name, record in inherit_provenance(old_manifest).items() if name != "arithmetic"}
    code_versions: Mapping[str, Any] = provenance.get("code") or {}
    commits = build_commits_provenance([encoder])
    code_versions = {**code_versions, "embed": embed.VERSION}
    return {**provenance, "encoder": encoder.name, **commits, "code": code_versions, REENCODED: {"of": old_manifest.id}}
