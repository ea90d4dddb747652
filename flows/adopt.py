"""Make a snapshot from existing passages and vectors: index, check and publish them.

Purpose: to import a corpus from another system without encoding it again.
Caching: the store's memo, from the first index job on.
Requires: a store that this machine and the workers both reach; the vectors' files on this machine.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from beam_jobs.launch import Launch, OnProgress
from beam_jobs.workers import worker_memory
from flows.finish import Build, finish_build
from flows.outcome import BuildOutcome
from flows.parameter_checks import Url
from flows.progress import StageClock
from flows.reindex import prepare_encoder
from flows.stage import deployment_flow, stage
from rag_model.errors import UsageError
from rag_model.index.files.intake import inspect_vectors
from rag_model.snapshots.imported import ImportedParts, build_imported_content, check_encoder, import_parts
from rag_model.snapshots.planning import plan_indexes
from rag_model.snapshots.recipe import Recipe, check_indexes_and_retrievers
from rag_model.store.store import Store
from rag_model.store.versions.manifest import EMBEDDINGS


@deployment_flow("import", takes_turns=True)
def adopt_library(
    passages: Url,
    vectors: Sequence[str],
    store: Url,
    encoder: Url,
    recipe: Recipe | None = None,
    ref: str = "latest",
    beam_options: Sequence[str] = (),
) -> BuildOutcome:
    """Publish a snapshot of existing passages and vectors in `store` and move `ref` to it.

    Args:
        passages: path, URL or glob of passages or documents, in a format that `reindex` accepts.
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
    check_indexes_and_retrievers(recipe, {EMBEDDINGS: "vectors"})
    target = Store.open(store, create=True)
    target.refs.require_exclusive_creation()
    launch = Launch.new(target.url, beam_options)

    with target.intents.hold(launch.run):  # keeps `gc` from deleting new files
        encoding = prepare_encoder(target, encoder, recipe)
        with clock("adopt") as on_progress:
            imported = split_corpus(target, passages, vectors, on_progress)
        with clock("check"):
            check_encoder(target, imported, encoding)
        chunk_results, embed_results = imported.passages, {EMBEDDINGS: imported.embeddings}
        plans = plan_indexes(recipe.index, chunk_results, {EMBEDDINGS: encoding.space.dim}, worker_memory(beam_options))
        assemble_content = partial(build_imported_content, imported, recipe, encoding)
        return finish_build(
            Build(
                target,
                launch,
                clock,
                recipe,
                ref,
                passages,
                encoder,
                chunk_results,
                embed_results,
                plans,
                assemble_content,
            )
        )


@stage
def split_corpus(store: Store, passages: str, vectors: Sequence[str], on_progress: OnProgress) -> ImportedParts:
    """Split passages and vectors into parts."""
    vector_input = inspect_vectors([Path(path) for path in vectors])
    imported = import_parts(store, passages, vector_input)
    on_progress(len(imported.passages), len(imported.passages))
    return imported
