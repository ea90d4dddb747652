"""Build a snapshot from a dump, check and publish it, and move the ref if the gate allows it.

Purpose: the scheduled job behind a retrieval index. Each stage is a Beam job over small
descriptions of parts or shards.
Caching: the store's memo, keyed by the exact inputs, instead of Prefect's cache. An interrupted run
that is started again repeats only work that is not recorded.
Requires: a store that this machine and the workers both reach.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from beam_jobs import chunk, embed
from beam_jobs.embed import EmbedTask
from beam_jobs.job_settings import JobSettings, OnProgress
from beam_jobs.workers import get_worker_memory
from flows.command.console import ProgressReporter
from flows.finish import Build, finish_build, get_embed_stage
from flows.outcome import BuildOutcome
from flows.parameters import DumpParameter, RecipeParameter, StoreParameter, Url
from flows.stage import StageClock, deployment_flow, stage
from rag_model.corpus.dump_formats.document_files import find_dump_files
from rag_model.corpus.records import Plan
from rag_model.corpus.source import check_pattern
from rag_model.encoders.embed import Dtype
from rag_model.index.plan import IndexPlan
from rag_model.snapshots.content import assemble_content, build_commits_provenance
from rag_model.snapshots.encoding import StoredChunker, StoredEncoder, store_chunker, store_encoder
from rag_model.snapshots.parent import Parent
from rag_model.snapshots.planning import (
    describe_missing_prose,
    describe_missing_wikidata,
    plan_dry_run,
    plan_indexes,
    plan_parts,
    store_encoders,
)
from rag_model.snapshots.recipe import Recipe, check_indexes_and_retrievers
from rag_model.snapshots.reused_training import (
    ReusedTraining,
    find_reusable_training,
    find_reuse_obstacles,
    note_obstacles,
)
from rag_model.snapshots.stage_results import ChunkResult, EmbedResult
from rag_model.store.store import Store

DEFAULT_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"


@deployment_flow("reindex", takes_turns=True)
def reindex(
    dump: DumpParameter,
    store: StoreParameter,
    encoder: Url = DEFAULT_ENCODER,
    recipe: RecipeParameter = None,
    ref: str = "latest",
    limit: int | None = None,
    dry_run: bool = False,
    beam_options: Sequence[str] = (),
    base: str | None = None,
    rebuild_graphs: bool = False,
) -> BuildOutcome:
    """Build a snapshot of `dump` in `store` and move `ref` to it.

    Args:
        dump: URL, path or glob of a dump; docs/howto/build.md lists the formats.
        store: URL or folder of the store; created if it does not exist.
        encoder: The passage encoder: a folder, a hub name, or `openai:MODEL` behind an endpoint.
        recipe: All other settings that decide the snapshot; by default the default recipe.
        ref: The ref to move to the new snapshot.
        limit: Read at most this many articles, for a quick test.
        dry_run: Plan, report what would be built, and build nothing.
        beam_options: Options of Beam and its runner, such as `--runner=FlinkRunner
            --flink_master=host:8081`; on the command line after `--`.
        base: The ref whose snapshot is the parent, with which the gate compares; this ref is not
            moved. By default `ref`.
        rebuild_graphs: Build every cell of a graph again instead of updating the graphs of the
            parent.

    Raises:
        GateRefusedError: the snapshot is published, but the ref did not move; the message says why.
        BookwheelError: a stage failed; finished work is recorded.
    """
    recipe, clock = recipe or Recipe(), StageClock()
    check_indexes_and_retrievers(recipe, recipe.list_representations())
    if dry_run:
        return BuildOutcome.from_plan(*plan_without_writing(dump, recipe, limit), ref)
    check_pattern(dump)
    if "://" not in dump:
        find_dump_files(dump)  # raises the error of a missing file before a store is created
    opened_store = Store.open(store, create=True)
    # an invalid name or a damaged log is reported before the work
    parent = Parent.from_ref(opened_store, base or ref)
    opened_store.refs.require_exclusive_creation()
    job_settings = JobSettings.new(opened_store.url, beam_options)

    # keeps `gc` from deleting new and reused files
    with opened_store.intents.hold(job_settings.run):
        with clock("plan") as on_progress:
            notes = report_missing_files(opened_store, parent, on_progress)
            plan = plan_dump(opened_store, dump, recipe, limit, parent, on_progress)
            encoders = prepare_encoders(opened_store, encoder, recipe, parent)
            chunker = prepare_chunker(opened_store, recipe.chunk)
            recipe = replace(recipe, chunk=chunker.recipe)
        with clock("chunk") as on_progress:
            tables = read_tables(opened_store, plan, dump, recipe, job_settings, on_progress)
            chunk_results = chunk_parts(opened_store, plan, chunker, parent, job_settings, on_progress, tables)
            # the parent may have expired meanwhile, or have been taken down
            notes = notes or report_missing_files(opened_store, parent, on_progress)
        dimensions = {name: stored_encoder.space.dim for name, stored_encoder in encoders.items()}
        plans = plan_indexes(recipe.index, chunk_results, dimensions, get_worker_memory(beam_options), parent)
        embeddings: dict[str, Sequence[EmbedResult]] = {}
        for name, stored_encoder in encoders.items():
            with clock(get_embed_stage(name)) as on_progress:
                embeddings[name] = embed_parts(
                    plan, chunk_results, stored_encoder, recipe.dtype_of(name), parent, job_settings, on_progress
                )
        plans, reused_trainings = find_reused_trainings(
            opened_store, parent, plans, plan, embeddings, encoders, rebuild_graphs
        )
        assemble_snapshot = partial(assemble_content, plan, recipe, encoders, chunk_results, embeddings)
        site_provenance = {"read_at": plan.read_at, "plan": plan.compute_digest()} if plan.read_at else {}
        provenance = {**site_provenance, **build_commits_provenance(encoders.values())}
        build_arguments = chunk_results, embeddings, plans, assemble_snapshot, provenance, reused_trainings
        build = Build(opened_store, job_settings, clock, recipe, ref, dump, encoder, *build_arguments)
        return finish_build(
            replace(build, base_ref=base, parent=parent.manifest, dropped_files=plan.dropped, notes=notes)
        )


def report_missing_files(store: Store, parent: Parent, on_progress: ProgressReporter) -> list[str]:
    """Say how many files of the parent are missing; return these sentences."""
    sentences = parent.describe_missing_files(store)
    for sentence in sentences:
        on_progress.say(sentence)
    return sentences


plan_without_writing = stage(plan_dry_run, "plan_without_writing")


@stage
def plan_dump(
    store: Store, dump: str, recipe: Recipe, limit: int | None, parent: Parent, on_progress: ProgressReporter
) -> Plan:
    """Plan the parts of the build: the same as the parent's, and new parts for new pages."""
    plan = plan_parts(store, dump, recipe, limit, parent, say=on_progress.say)
    if prose_advice := describe_missing_prose(plan, recipe):
        on_progress.say(prose_advice)
    return plan


prepare_encoder = stage(store_encoder, "prepare_encoder")


@stage
def prepare_encoders(store: Store, encoder: str, recipe: Recipe, parent: Parent) -> dict[str, StoredEncoder]:
    """Put the encoder of each representation into the store, for workers and readers.

    An encoder from the hub is taken at the commit that the parent was built with.
    """
    return store_encoders(store, encoder, recipe, pins=parent.pins)


prepare_chunker = stage(store_chunker, "prepare_chunker")


@stage
def read_tables(
    store: Store, plan: Plan, dump: str, recipe: Recipe, job_settings: JobSettings, on_progress: ProgressReporter
) -> chunk.DumpTables:
    """Read the wiki's templates, with which articles are expanded, and the redirects and Wikidata
    items that the recipe requests.
    """
    if advice := describe_missing_wikidata(dump, plan, recipe):
        on_progress.say(advice)
    return chunk.run_table_jobs(store, plan, dump, recipe.chunk.metadata, job_settings, on_progress)


@stage
def chunk_parts(
    store: Store,
    plan: Plan,
    chunker: StoredChunker,
    parent: Parent,
    job_settings: JobSettings,
    on_progress: OnProgress,
    tables: chunk.DumpTables,
) -> list[ChunkResult]:
    """Chunk every part into passages.

    Unchanged articles keep the passages of the parent; pages that were taken down get no passages.
    """
    return chunk.run(chunk.plan_chunk_tasks(store, plan, chunker, parent, tables), job_settings, on_progress)


@stage
def embed_parts(
    plan: Plan,
    chunk_results: Sequence[ChunkResult],
    encoder: StoredEncoder,
    dtype: Dtype,
    parent: Parent,
    job_settings: JobSettings,
    on_progress: ProgressReporter,
) -> list[EmbedResult]:
    """Encode the passages of every part; unchanged passages keep the vectors of the parent."""
    tasks = [
        EmbedTask.create(chunk_result, encoder, dtype, parent.find_encoded_parts(part, encoder.space.digest))
        for part, chunk_result in zip(plan.parts, chunk_results, strict=True)
    ]
    if sentence := embed.describe_requests(encoder, chunk_results, sum(task.new_passages for task in tasks)):
        on_progress.say(sentence)
    return embed.run(tasks, job_settings, on_progress)


@stage
def find_reused_trainings(
    store: Store,
    parent: Parent,
    index_plans: Mapping[str, IndexPlan],
    corpus_plan: Plan,
    embeddings: Mapping[str, Sequence[EmbedResult]],
    encoders: Mapping[str, StoredEncoder],
    rebuild_graphs: bool,
) -> tuple[dict[str, IndexPlan], dict[str, ReusedTraining]]:
    """Find the parent's trained files to reuse; if an index has none, its plan notes why."""
    updated_plans, reused_trainings = dict(index_plans), dict[str, ReusedTraining]()
    for name, index_plan in index_plans.items():
        if index_plan.over in encoders:
            space = encoders[index_plan.over].space.digest
            updated_plans[name] = note_obstacles(index_plan, find_reuse_obstacles(parent, name, index_plan, space))
            reused_training = find_reusable_training(
                store,
                parent,
                name,
                index_plan,
                space,
                corpus_plan.parts,
                embeddings[index_plan.over],
                rebuild_graphs=rebuild_graphs,
            )
            reused_trainings |= {name: reused_training} if reused_training else {}
    return updated_plans, reused_trainings
