"""Make a snapshot from existing passages and vectors: they are indexed, checked and published as in a build.

Purpose: to import a corpus from another system without encoding it again.
Caching: the store's memo, from the first index job on.
Requires: a store that this machine and the workers both reach; the vectors' files on this machine.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from prefect import flow

from beam_jobs.launch import Launch, OnProgress
from beam_jobs.workers import worker_memory
from flows.admission import Url, admitted
from flows.finish import Build, finish
from flows.outcome import Reindexed
from flows.progress import StageClock
from flows.reindex import prepare_encoder
from flows.stage import stage
from rag_model.errors import UsageError
from rag_model.index.files.intake import look
from rag_model.snapshots.adopt import Adopted, adopt, check_encoder, content_of
from rag_model.snapshots.planning import plan_indexes
from rag_model.snapshots.recipe import Recipe, check_fit
from rag_model.store.store import Store
from rag_model.store.versions.paths import EMBEDDINGS


@flow(name="import", persist_result=False)
@admitted
def adopt_library(
    passages: Url,
    vectors: Sequence[str],
    store: Url,
    encoder: Url,
    recipe: Recipe | None = None,
    ref: str = "latest",
    beam_options: Sequence[str] = (),
) -> Reindexed:
    """Publish a snapshot of existing passages and vectors in `store` and move `ref` to it.

    Args:
        passages: path, URL or glob of `psgs_w100.tsv`, JSONL or Parquet with `id`, `title` and `text`.
        vectors: `.npy` or Parquet files or folders of them; row i belongs to passage i.
        store: URL or folder of the store; made if there is none.
        encoder: folder or hub name of the encoder that made the vectors; some of them are checked.
        recipe: the indexes and the gate; its other settings are not used.
        ref: the ref to move to the new snapshot.
        beam_options: options of Beam and of its runner, as on their own command lines.

    Raises:
        GateRefusedError: the snapshot is published, but the ref did not move; the message says why.
        RefusedError: the vectors are not the encoder's.
        BookwheelError: a stage failed; finished work is recorded.
    """
    recipe, clock = recipe or Recipe(), StageClock()
    if recipe.represent:
        raise UsageError(
            f"import takes the vectors of one encoder: leave [represent.{next(iter(recipe.represent))}] out"
        )
    check_fit(recipe, {EMBEDDINGS: "vectors"})
    target = Store.open(store, create=True)
    target.refs.require_exclusion()
    launch = Launch.new(target.url, beam_options)

    with target.intents.held(launch.run):  # keeps `gc` from deleting new files
        encoding = prepare_encoder(target, encoder, recipe)
        with clock("adopt") as tell:
            adopted = take_in(target, passages, vectors, tell)
        with clock("check"):
            check_encoder(target, adopted, encoding)
        cut, encoded = adopted.passages, {EMBEDDINGS: adopted.embeddings}
        plans = plan_indexes(recipe.index, cut, {EMBEDDINGS: encoding.space.dim}, worker_memory(beam_options))
        assembled = partial(content_of, adopted, recipe, encoding)
        return finish(Build(target, launch, clock, recipe, ref, passages, encoder, cut, encoded, plans, assembled))


@stage
def take_in(store: Store, passages: str, vectors: Sequence[str], tell: OnProgress) -> Adopted:
    """Split passages and vectors into parts."""
    intake = look([Path(path) for path in vectors])
    adopted = adopt(store, passages, intake)
    tell(len(adopted.passages), len(adopted.passages))
    return adopted
