"""Rebuild an index snapshot from a dump, check it, publish it, and move the ref if the gate allows it.

Purpose: the scheduled job behind a retrieval index. Each stage is a Beam job over descriptors of parts or shards.
Caching: the store's memo, by exact inputs, and not Prefect's: a run that died is run again and repeats only work that
is not recorded.
Requires: a store that this machine and the workers both reach.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from beam_jobs import chunk, embed
from beam_jobs.embed import EmbedTask
from beam_jobs.launch import Launch, OnProgress
from beam_jobs.workers import worker_memory
from flows.admission import Url
from flows.finish import Build, embed_stage, finish
from flows.outcome import Reindexed
from flows.progress import StageClock
from flows.stage import deployed, stage
from rag_model.corpus.records import Plan
from rag_model.encoders.embed import Dtype
from rag_model.index.plan import IndexPlan
from rag_model.snapshots.chunking import StoredChunker, store_chunker
from rag_model.snapshots.content import assemble
from rag_model.snapshots.cut_part import CutPart
from rag_model.snapshots.encoded_part import EncodedPart
from rag_model.snapshots.encoders import store_encoders
from rag_model.snapshots.encoding import StoredEncoder, store_encoder
from rag_model.snapshots.heritage import Heirloom, inherit, noted, obstacles
from rag_model.snapshots.parent import Parent
from rag_model.snapshots.planning import plan_indexes, plan_parts
from rag_model.snapshots.recipe import Recipe, check_fit
from rag_model.store.store import Store

DEFAULT_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"


@deployed("reindex")
def reindex(
    dump: Url,
    store: Url,
    encoder: Url = DEFAULT_ENCODER,
    recipe: Recipe | None = None,
    ref: str = "latest",
    limit: int | None = None,
    dry_run: bool = False,
    beam_options: Sequence[str] = (),
    base: str | None = None,
) -> Reindexed:
    """Build a snapshot of `dump` in `store` and move `ref` to it.

    Args:
        dump: URL, path or glob of a MediaWiki dump, of JSONL or Parquet documents, or of psgs_w100.tsv.
        store: URL or folder of the store; made if there is none.
        encoder: folder or hub name of the passage encoder.
        recipe: all other settings that decide the snapshot; by default the default recipe.
        ref: the ref to move to the new snapshot.
        limit: read at most this many articles, for a quick test.
        dry_run: plan, report what would be built, and build nothing.
        beam_options: options of Beam and of its runner, as on their own command lines.
        base: the ref whose snapshot it inherits from and is compared with by the gate, and which stays; by default ref.

    Raises:
        GateRefusedError: the snapshot is published, but the ref did not move; the message says why.
        BookwheelError: a stage failed; finished work is recorded.
    """
    recipe, clock = recipe or Recipe(), StageClock()
    check_fit(recipe, recipe.represented())
    if dry_run:
        return Reindexed.of_plan(rehearse(dump, recipe, limit), ref)
    target = Store.open(store, create=True)
    parent = Parent.of(target, base or ref)  # an invalid name or a damaged log is reported before the work
    target.refs.require_exclusion()
    launch = Launch.new(target.url, beam_options)

    with target.intents.held(launch.run):  # keeps `gc` from deleting new and reused files
        with clock("plan"):
            plan = plan_dump(target, dump, recipe, limit, parent)
            encoders = prepare_encoders(target, encoder, recipe)
            chunker = prepare_chunker(target, recipe)
            recipe = replace(recipe, chunk=chunker.recipe)
        with clock("chunk") as tell:
            passages = chunk_parts(target, plan, chunker, parent, launch, tell)
        widths = {name: its.space.dim for name, its in encoders.items()}
        plans = plan_indexes(recipe.index, passages, widths, worker_memory(beam_options), parent)
        embeddings: dict[str, Sequence[EncodedPart]] = {}
        for name, its in encoders.items():
            with clock(embed_stage(name)) as tell:
                embeddings[name] = embed_parts(plan, passages, its, recipe.dtype_of(name), parent, launch, tell)
        plans, heirlooms = inherit_trained(target, parent, plans, plan, embeddings, encoders)
        assembled = partial(assemble, plan, recipe, encoders, passages, embeddings)
        build = Build(target, launch, clock, recipe, ref, dump, encoder, passages, embeddings, plans, assembled)
        before = parent.manifest.content if parent.manifest else None
        return finish(replace(build, heirlooms=heirlooms, base=base, parent=before))


@stage
def rehearse(dump: str, recipe: Recipe, limit: int | None) -> Plan:
    """Plan the parts, and write nothing to the store."""
    with tempfile.TemporaryDirectory(prefix="bookwheel-dry-run-") as nowhere:
        return plan_parts(Store.open(nowhere, create=True), dump, recipe, limit)


@stage
def plan_dump(store: Store, dump: str, recipe: Recipe, limit: int | None, parent: Parent) -> Plan:
    """Plan the parts: the parent's, and new ones for new pages."""
    return plan_parts(store, dump, recipe, limit, parent)


@stage
def prepare_encoder(store: Store, encoder: str, recipe: Recipe) -> StoredEncoder:
    """Put the encoder into the store, for workers and readers."""
    return store_encoder(store, encoder, recipe.encode)


@stage
def prepare_encoders(store: Store, encoder: str, recipe: Recipe) -> dict[str, StoredEncoder]:
    """Put the encoder of each representation into the store, for workers and readers."""
    return store_encoders(store, encoder, recipe)


@stage
def prepare_chunker(store: Store, recipe: Recipe) -> StoredChunker:
    """Put the files that the chunker's settings name into the store, for workers."""
    return store_chunker(store, recipe.chunk)


@stage
def chunk_parts(
    store: Store, plan: Plan, chunker: StoredChunker, parent: Parent, launch: Launch, tell: OnProgress
) -> list[CutPart]:
    """Chunk every part into passages; unchanged articles keep the parent's, and pages taken down have none."""
    return chunk.run(chunk.tasks_of(store, plan, chunker, parent), launch, tell)


@stage
def embed_parts(
    plan: Plan,
    passages: Sequence[CutPart],
    encoding: StoredEncoder,
    dtype: Dtype,
    parent: Parent,
    launch: Launch,
    tell: OnProgress,
) -> list[EncodedPart]:
    """Encode every part's passages; unchanged ones keep the parent's vectors."""
    tasks = [
        EmbedTask.of(cut, encoding, dtype, parent.encoded(part, encoding.space.digest))
        for part, cut in zip(plan.parts, passages, strict=True)
    ]
    return embed.run(tasks, launch, tell)


@stage
def inherit_trained(
    store: Store,
    parent: Parent,
    plans: Mapping[str, IndexPlan],
    plan: Plan,
    embeddings: Mapping[str, Sequence[EncodedPart]],
    encoders: Mapping[str, StoredEncoder],
) -> tuple[dict[str, IndexPlan], dict[str, Heirloom]]:
    """Find the parent's trained files to inherit; note in the plans of other indexes why there is none."""
    told, heirlooms = dict(plans), dict[str, Heirloom]()
    for name, its in plans.items():
        if its.over in encoders:
            space = encoders[its.over].space.digest
            told[name] = noted(its, obstacles(parent, name, its, space))
            heirloom = inherit(store, parent, name, its, space, plan.parts, embeddings[its.over])
            heirlooms |= {name: heirloom} if heirloom else {}
    return told, heirlooms
