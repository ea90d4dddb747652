"""Encode the passages of a snapshot with another encoder, and publish the result.

Purpose: the index of a training whose passage encoder learns. It is rebuilt during the training and
at its end. Passages and inverted indexes stay; the stages of `reindex` build vectors and the
indexes over them.
Caching: the store's memo; an interrupted run repeats only work that is not recorded.
Requires: a store that this machine and the workers both reach.
"""

from collections.abc import Sequence
from functools import partial

from beam_jobs import embed
from beam_jobs.embed import EmbedTask
from beam_jobs.launch import Launch, OnProgress
from beam_jobs.workers import worker_memory
from flows.add_index import read_results
from flows.finish import Build, finish_build
from flows.outcome import BuildOutcome
from flows.parameters import Url
from flows.reindex import prepare_encoder
from flows.stage import StageClock, deployment_flow, stage
from rag_model.encoders.embed import Dtype
from rag_model.snapshots.content import with_indexes
from rag_model.snapshots.encoding import StoredEncoder
from rag_model.snapshots.existing import (
    build_reencoded_provenance,
    list_stale_indexes,
    read_reencode_recipe,
    replace_embeddings,
)
from rag_model.snapshots.planning import plan_indexes
from rag_model.snapshots.stage_results import ChunkResult, EmbedResult
from rag_model.store.store import Store
from rag_model.store.versions.manifest import EMBEDDINGS


@deployment_flow("reencode")
def reencode(snapshot: str, store: Url, encoder: Url, ref: str, beam_options: Sequence[str] = ()) -> BuildOutcome:
    """Publish a snapshot with another's passages and vectors of `encoder`; move `ref` to it.

    Args:
        snapshot: a ref, ref@number, an id, or a unique prefix of one.
        store: URL or folder of the store.
        encoder: the passage encoder: a folder, a hub name, or `model:NAME`.
        ref: the ref to move to the new snapshot; the gate lets the encoder space change.
        beam_options: options of Beam and of its runner, as on their own command lines.

    Raises:
        GateRefusedError: the snapshot is published, but the ref did not move; the message says why.
        BookwheelError: a stage failed; finished work is recorded.
    """
    target, clock = Store.open(store), StageClock("reencode")
    target.refs.require_exclusive_creation()
    launch = Launch.new(target.url, beam_options)
    with target.intents.hold(launch.run):  # keeps `gc` from deleting new and reused files
        old = target.snapshots.get(target.snapshots.resolve_trusted(snapshot))
        recipe = read_reencode_recipe(old.content)
        with clock("look"):
            passages, _ = read_results(target, old.content, launch)
            encoding = prepare_encoder(target, encoder, recipe)
        widths = {EMBEDDINGS: encoding.space.dim}
        plans = plan_indexes(list_stale_indexes(old.content, recipe), passages, widths, worker_memory(beam_options))
        with clock("embed") as on_progress:
            embeddings = embed_parts(passages, encoding, recipe.dtype_of(EMBEDDINGS), launch, on_progress)
        assemble_content = partial(with_indexes, replace_embeddings(old.content, encoding, embeddings))
        provenance = build_reencoded_provenance(old, encoding)
        build_arguments = passages, {EMBEDDINGS: embeddings}, plans, assemble_content, provenance
        return finish_build(
            Build(target, launch, clock, recipe, ref, str(provenance.get("dump", "")), encoder, *build_arguments)
        )


@stage
def embed_parts(
    passages: Sequence[ChunkResult], encoding: StoredEncoder, dtype: Dtype, launch: Launch, on_progress: OnProgress
) -> list[EmbedResult]:
    """Encode every part's passages."""
    return embed.run([EmbedTask.of(chunk_result, encoding, dtype) for chunk_result in passages], launch, on_progress)
