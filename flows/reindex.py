"""Rebuild an index snapshot from a dump, check it, publish it, and move the ref if the gate agrees.

Purpose: the scheduled job behind a retrieval index. Each stage is a Beam job over descriptors of parts or shards.
Caching: the store's memo, which knows exact inputs, and none of Prefect's: a run that died is run again and redoes only
what was not recorded.
Requires: a store that this machine and the workers both reach.
"""

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial

from prefect import flow

from beam_jobs import chunk, embed, index
from beam_jobs.chunk import ChunkTask
from beam_jobs.embed import EmbedTask
from beam_jobs.index import IndexBuild
from beam_jobs.job import Facts, Launch, OnProgress
from beam_jobs.options import worker_memory
from flows import artifacts
from flows.outcome import GateRefusedError, Reindexed
from flows.progress import StageClock
from flows.stage import stage
from rag_model.build.content import BuiltIndex, assemble, counts, provenance, vectors_of
from rag_model.build.encoding import StoredEncoder, store_encoder
from rag_model.build.measure import Measured, measure
from rag_model.build.parent import Parent
from rag_model.build.planning import plan_parts
from rag_model.build.publish import Published, publish, vitals
from rag_model.build.recipe import Recipe
from rag_model.build.report import write_report
from rag_model.build.sizing import plan_indexes
from rag_model.build.tuning import tune_searches
from rag_model.corpus.records import Plan
from rag_model.evaluation.gate import judge
from rag_model.index.recipe import IndexPlan
from rag_model.store.manifest import Content, Manifest
from rag_model.store.snapshot import Snapshot
from rag_model.store.store import Store

DEFAULT_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"


@flow(name="reindex", persist_result=False)
def reindex(
    dump: str,
    store: str,
    encoder: str = DEFAULT_ENCODER,
    recipe: Recipe | None = None,
    ref: str = "latest",
    limit: int | None = None,
    dry_run: bool = False,
    beam_options: Sequence[str] = (),
) -> Reindexed:
    """Build a snapshot of `dump` in `store` and move `ref` to it.

    Args:
        dump: URL, path or glob of a MediaWiki dump, of JSONL or Parquet documents, or of psgs_w100.tsv.
        store: URL or folder of the store; made if there is none.
        encoder: folder or hub name of the passage encoder.
        recipe: everything else that decides the snapshot; the default recipe if none is given.
        ref: the name that shall mean the new snapshot.
        limit: read only so many articles, for a quick look.
        dry_run: plan, say what would be built, and build nothing.
        beam_options: options of Beam and of its runner, as on their own command lines.

    Raises:
        GateRefusedError: the snapshot is published, but the ref did not move; the sentence says why.
        BookwheelError: a stage failed; what was finished is recorded.
    """
    recipe, clock = recipe or Recipe(), StageClock()
    if dry_run:
        return Reindexed.of_plan(rehearse(dump, recipe, limit), ref)
    target = Store.open(store, create=True)
    parent = Parent.of(target, ref)  # a name that cannot be, or a damaged log, is told before the work, not after it
    target.refs.require_exclusion()
    launch = Launch.new(target.url, beam_options)

    with target.intents.held(launch.run):  # so that no `gc` takes what is made, or may be reused
        with clock("plan"):
            plan = plan_dump(target, dump, recipe, limit, parent)
            encoding = prepare_encoder(target, encoder, recipe)
        with clock("chunk") as tell:
            passages = chunk_parts(plan, recipe, parent, launch, tell)
        plans = plan_indexes(recipe.index, passages, encoding.space.dim, worker_memory(beam_options))
        with clock("embed") as tell:
            embeddings = embed_parts(plan, passages, encoding, recipe, parent, launch, tell)
        with clock("train") as tell:
            indexes = train_indexes(target, plans, embeddings, launch, tell)
        with clock("scatter") as tell:
            indexes = scatter_vectors(indexes, launch, tell)
        with clock("shard") as tell:
            indexes = build_shards(indexes, launch, tell)
        with clock("merge") as tell:
            built = merge_shards(indexes, launch, tell)
        assembled = partial(assemble, plan, recipe, encoding, passages, embeddings)
        with clock("tune"):
            built = tune_indexes(target, assembled(built), built, recipe)
        content = assembled(built)
        with clock("gate"):
            measured = measure_indexes(target, Manifest(content), built, recipe)
        manifest = Manifest(content, measured.metrics(), provenance=provenance(dump, encoder, built, clock.seconds))
        published = publish_snapshot(target, manifest, measured, recipe, ref)
        target.runs.clear(launch.run)

    counted = counts(passages, embeddings)
    reports = {"chunk": passages, "embed": embeddings}
    page = write_report(target, manifest, published, measured, counted, reports, clock.seconds)
    outcome = Reindexed.of(published, ref, counted, measured.metrics(), clock.seconds, page)
    artifacts.show(outcome)
    if published.move is None:
        raise GateRefusedError(outcome, published.verdict.reason)
    return outcome


@stage
def rehearse(dump: str, recipe: Recipe, limit: int | None) -> Plan:
    """Decide the parts and keep nothing."""
    with tempfile.TemporaryDirectory(prefix="bookwheel-dry-run-") as nowhere:
        return plan_parts(Store.open(nowhere, create=True), dump, recipe, limit)


@stage
def plan_dump(store: Store, dump: str, recipe: Recipe, limit: int | None, parent: Parent) -> Plan:
    """Decide the parts: the parent's, and new ones for new pages."""
    return plan_parts(store, dump, recipe, limit, parent)


@stage
def prepare_encoder(store: Store, encoder: str, recipe: Recipe) -> StoredEncoder:
    """Put the encoder where workers and readers find it."""
    return store_encoder(store, encoder, recipe.encode)


@stage
def chunk_parts(plan: Plan, recipe: Recipe, parent: Parent, launch: Launch, tell: OnProgress) -> list[Facts]:
    """Cut every part into passages; articles that are as they were keep the parent's."""
    tasks = [ChunkTask(part, plan.siteinfo, recipe.chunk, parent.cut(part)) for part in plan.parts]
    return chunk.run(tasks, launch, tell)


@stage
def embed_parts(
    plan: Plan,
    passages: Sequence[Facts],
    encoding: StoredEncoder,
    recipe: Recipe,
    parent: Parent,
    launch: Launch,
    tell: OnProgress,
) -> list[Facts]:
    """Encode every part's passages; those that are as they were keep the parent's vectors."""
    tasks = [
        EmbedTask.of(cut, encoding, recipe.encode.dtype, parent.encoded(part, encoding.space.digest))
        for part, cut in zip(plan.parts, passages, strict=True)
    ]
    return embed.run(tasks, launch, tell)


@stage
def train_indexes(
    store: Store, plans: Mapping[str, IndexPlan], embeddings: Sequence[Facts], launch: Launch, tell: OnProgress
) -> list[IndexBuild]:
    """Learn what the workers of each index share."""
    builds = [index.start(store, name, plan, vectors_of(embeddings)) for name, plan in plans.items()]
    return index.train(builds, launch, tell)


@stage
def scatter_vectors(indexes: Sequence[IndexBuild], launch: Launch, tell: OnProgress) -> list[IndexBuild]:
    """Sort every part's vectors by the shard that they go to."""
    return index.scatter(indexes, launch, tell)


@stage
def build_shards(indexes: Sequence[IndexBuild], launch: Launch, tell: OnProgress) -> list[IndexBuild]:
    """Build every shard of every index."""
    return index.build_shards(indexes, launch, tell)


@stage
def merge_shards(indexes: Sequence[IndexBuild], launch: Launch, tell: OnProgress) -> list[BuiltIndex]:
    """Join each index's shards."""
    return index.merge(indexes, launch, tell)


@stage
def tune_indexes(store: Store, draft: Content, built: Sequence[BuiltIndex], recipe: Recipe) -> list[BuiltIndex]:
    """Set the search of those with a recall target."""
    return tune_searches(store, draft, built, recipe.gate)


@stage
def measure_indexes(store: Store, manifest: Manifest, built: Sequence[BuiltIndex], recipe: Recipe) -> Measured:
    """Compare every index with exact search, and look into its file."""
    with Snapshot.of(store, manifest) as snapshot:
        return measure(snapshot, recipe.gate, {index.name: index.facts for index in built})


@stage
def publish_snapshot(store: Store, manifest: Manifest, measured: Measured, recipe: Recipe, ref: str) -> Published:
    """Write the manifest, ask the gate, and move the ref if it agrees."""
    return publish(store, manifest, ref, partial(judge, recipe.gate, vitals(manifest), measured.found))
