"""Add indexes to an existing snapshot, or replace its indexes, without reading its dump again.

Purpose: add an index, or rebuild one with other settings, without building anything else.
`reencode` encodes the passages with another encoder first. A training that also trains the passage
encoder uses `reencode` to rebuild its index, during the training and at its end.
Caching: the store's memo. An index that was built over the same vectors before is reused.
Requires: a store that this machine and the workers both reach.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated

from cyclopts import Parameter

from beam_jobs import corpus, embed
from beam_jobs.embed import EmbedTask
from beam_jobs.job_settings import JobSettings, OnProgress
from beam_jobs.workers import get_worker_memory
from flows.finish import Build, finish_build
from flows.outcome import BuildOutcome
from flows.parameters import RecipeParameter, StoreParameter, Url
from flows.reindex import prepare_encoder
from flows.stage import StageClock, deployment_flow, stage
from rag_model.encoders.embed import Dtype
from rag_model.errors import UsageError
from rag_model.index.recipe import IndexRecipe
from rag_model.snapshots.content import replace_indexes
from rag_model.snapshots.encoding import StoredEncoder
from rag_model.snapshots.existing import (
    build_reencoded_provenance,
    inherit_provenance,
    list_encoded_representations,
    list_stale_indexes,
    read_dimensions,
    read_reencode_recipe,
    read_snapshot_recipe,
    read_stage_results,
    replace_embeddings,
)
from rag_model.snapshots.planning import plan_indexes
from rag_model.snapshots.recipe import Recipe, check_indexes_and_retrievers
from rag_model.snapshots.stage_results import ChunkResult, EmbedResult
from rag_model.store.store import Store
from rag_model.store.versions.manifest import EMBEDDINGS, Content
from rag_model.store.versions.snapshot import Snapshot


@deployment_flow("add-index", takes_turns=True)
def add_index(
    snapshot: str,
    store: StoreParameter,
    recipe: Annotated[
        RecipeParameter, Parameter(help="A TOML file with indexes and a gate; by default the snapshot's own indexes.")
    ] = None,
    indexes: Annotated[Sequence[str], Parameter(name="--index")] = (),
    ref: str = "latest",
    beam_options: Sequence[str] = (),
) -> BuildOutcome:
    """Publish a copy of a snapshot with new indexes over its passages and vectors; move `ref` to
    it.

    Args:
        snapshot: A ref, ref@number, an id, or a unique prefix of one.
        store: URL or folder of the store.
        recipe: The indexes to build and the gate; by default the snapshot's own are built again.
        indexes: Names of the recipe's indexes to build; by default all.
        ref: The ref to move to the new snapshot.
        beam_options: Options of Beam and its runner, such as `--runner=FlinkRunner
            --flink_master=host:8081`; on the command line after `--`.

    Raises:
        GateRefusedError: the snapshot is published, but the ref did not move; the message says why.
        UsageError: the recipe has no such index.
        BookwheelError: a stage failed; finished work is recorded.
    """
    opened_store, clock = Store.open(store), StageClock()
    opened_store.refs.require_exclusive_creation()
    job_settings = JobSettings.new(opened_store.url, beam_options)
    with opened_store.intents.hold(job_settings.run):
        base_manifest = opened_store.snapshots.get(opened_store.snapshots.resolve_trusted(snapshot))
        effective_recipe = recipe or read_snapshot_recipe(base_manifest.content)
        chosen_indexes = choose_indexes(effective_recipe, indexes)
        check_recipe(base_manifest.content, replace(effective_recipe, index=chosen_indexes))
        with clock("look"), Snapshot.from_manifest(opened_store, base_manifest) as base_snapshot:
            chunk_results, embeddings = read_results(opened_store, base_manifest.content, job_settings)
            dimensions = read_dimensions(base_snapshot)
        plans = plan_indexes(chosen_indexes, chunk_results, dimensions, get_worker_memory(beam_options))
        provenance = inherit_provenance(base_manifest)
        dump_url, encoder = (str(provenance.get(name, "")) for name in ("dump", "encoder"))
        assemble_content = partial(
            replace_indexes, _add_recipe_indexes(base_manifest.content, chosen_indexes, effective_recipe.retriever)
        )
        provenance["indexed"] = {"of": base_manifest.id, "indexes": sorted(chosen_indexes)}
        build_inputs = encoder, chunk_results, embeddings, plans, assemble_content, provenance
        return finish_build(Build(opened_store, job_settings, clock, effective_recipe, ref, dump_url, *build_inputs))


def choose_indexes(recipe: Recipe, names: Sequence[str]) -> dict[str, IndexRecipe]:
    """Return the recipe's indexes with these names, or all of them without names.

    Raises:
        UsageError: the recipe has no index of that name, or no index at all.
    """
    index_names = ", ".join(recipe.index) or "none"
    if unknown_names := sorted({*names} - {*recipe.index}):
        raise UsageError(
            f"the recipe has no index {unknown_names[0]!r}: choose from {index_names}, or name it in a --recipe"
        )
    if not recipe.index:
        raise UsageError("the snapshot has no index to build again: give a --recipe that names one")
    return {name: recipe.index[name] for name in names or recipe.index}


@stage
def read_results(
    store: Store, content: Content, job_settings: JobSettings
) -> tuple[list[ChunkResult], dict[str, list[EmbedResult]]]:
    """Read the files of a snapshot; return the chunk and embed results of its parts."""
    return read_stage_results(store, content, partial(corpus.run, job_settings=job_settings))


def check_recipe(content: Content, recipe: Recipe) -> None:
    """Check that a recipe's indexes and retriever fit a snapshot.

    Raises:
        UsageError: the indexes do not fit, or the snapshot has no vectors for a representation that
            the recipe names.
    """
    encoded_representations = list_encoded_representations(content)
    if missing_representations := sorted({*recipe.represent} - {*encoded_representations}):
        raise UsageError(
            f"the snapshot has no representation {missing_representations[0]!r}, and add-index "
            "encodes nothing: build it with `reindex`, or leave "
            f"[represent.{missing_representations[0]}] out"
        )
    check_indexes_and_retrievers(recipe, encoded_representations, content.indexes)


def _add_recipe_indexes(content: Content, chosen_indexes: dict[str, IndexRecipe], retriever: str) -> Content:
    """Add the indexes to the recipe of the content, and set its default retriever if given."""
    indexes = {
        **(content.recipe.get("index") or {}),
        **{name: asdict(index_recipe) for name, index_recipe in chosen_indexes.items()},
    }
    default_retriever = retriever or content.retriever
    return replace(content, recipe={**content.recipe, "index": indexes}, retriever=default_retriever)


@deployment_flow("reencode")
def reencode(snapshot: str, store: Url, encoder: Url, ref: str, beam_options: Sequence[str] = ()) -> BuildOutcome:
    """Encode the passages of a snapshot with `encoder`, publish the result, and move `ref` to it.

    Args:
        snapshot: a ref, ref@number, an id, or a unique prefix of one.
        store: URL or folder of the store.
        encoder: the passage encoder: a folder, a hub name, or `model:NAME`.
        ref: the ref to move to the new snapshot; the gate accepts another vector space.
        beam_options: options of Beam and of its runner, as on their own command lines.

    Raises:
        GateRefusedError: the snapshot is published, but the ref did not move; the message says why.
        BookwheelError: a stage failed; finished work is recorded.
    """
    opened_store, clock = Store.open(store), StageClock("reencode")
    opened_store.refs.require_exclusive_creation()
    job_settings = JobSettings.new(opened_store.url, beam_options)
    # keeps `gc` from deleting new and reused files
    with opened_store.intents.hold(job_settings.run):
        base_manifest = opened_store.snapshots.get(opened_store.snapshots.resolve_trusted(snapshot))
        recipe = read_reencode_recipe(base_manifest.content)
        with clock("look"):
            chunk_results, _ = read_results(opened_store, base_manifest.content, job_settings)
            encoding = prepare_encoder(opened_store, encoder, recipe.encode)
        dimensions = {EMBEDDINGS: encoding.space.dim}
        stale_indexes = list_stale_indexes(base_manifest.content, recipe)
        plans = plan_indexes(stale_indexes, chunk_results, dimensions, get_worker_memory(beam_options))
        with clock("embed") as on_progress:
            embeddings = embed_parts(chunk_results, encoding, recipe.dtype_of(EMBEDDINGS), job_settings, on_progress)
        assemble_content = partial(replace_indexes, replace_embeddings(base_manifest.content, encoding, embeddings))
        provenance = build_reencoded_provenance(base_manifest, encoding)
        dump_url = str(provenance.get("dump", ""))
        build_inputs = encoder, chunk_results, {EMBEDDINGS: embeddings}, plans, assemble_content, provenance
        return finish_build(Build(opened_store, job_settings, clock, recipe, ref, dump_url, *build_inputs))


@stage
def embed_parts(
    chunk_results: Sequence[ChunkResult],
    encoding: StoredEncoder,
    dtype: Dtype,
    job_settings: JobSettings,
    on_progress: OnProgress,
) -> list[EmbedResult]:
    """Encode every part's passages."""
    tasks = [EmbedTask.create(chunk_result, encoding, dtype) for chunk_result in chunk_results]
    return embed.run(tasks, job_settings, on_progress)
