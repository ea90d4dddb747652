"""Make a snapshot from existing passages and vectors: index, check and publish them.

Purpose: to import a corpus from another system without encoding it again.
Caching: the store's memo; a killed import continues with the first part that is not recorded.
Requires: a store that this machine and the workers both reach; the vectors' files on this machine.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from beam_jobs.job import run_job
from beam_jobs.launch import Launch, OnProgress
from beam_jobs.tasks import run_task
from beam_jobs.workers import is_local, worker_memory
from flows.finish import Build, finish_build
from flows.outcome import BuildOutcome
from flows.parameter_checks import Url
from flows.progress import StageClock
from flows.reindex import prepare_encoder
from flows.stage import deployment_flow, stage
from rag_model.errors import UsageError
from rag_model.index.files.intake import inspect_vectors
from rag_model.snapshots.content import build_commits_provenance
from rag_model.snapshots.imported import (
    ImportedParts,
    ImportTask,
    build_imported_content,
    check_encoder,
    collect_parts,
    import_in_sequence,
    import_part,
    list_sources,
    plan_import,
)
from rag_model.snapshots.planning import plan_indexes
from rag_model.snapshots.recipe import Recipe, check_indexes_and_retrievers
from rag_model.store.store import Store
from rag_model.store.versions.manifest import EMBEDDINGS

_TASK_BYTES = 768 << 20  # of a process that imports a part
_PASSAGE_SECONDS, _VECTOR_BYTES_PER_SECOND = 4e-5, 5e8


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
        vectors: `.npy`, Parquet or faiss Flat files or folders of them; row i belongs to passage i.
            None: the files of passages have them.
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
            imported = split_corpus(target, passages, vectors, launch, on_progress)
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
                build_commits_provenance([encoding]),
            )
        )


@stage
def split_corpus(
    store: Store, passages: str, vectors: Sequence[str], launch: Launch, on_progress: OnProgress
) -> ImportedParts:
    """Split passages and vectors into parts.

    Workers of this machine read the parts of Parquet files; other files of passages are read once,
    from the first to the last.
    """
    vector_input = inspect_vectors([Path(path) for path in vectors or list_sources(passages)])
    tasks = plan_import(store, passages, vector_input)
    if tasks[0].passages and is_local(launch.flags):
        part_launch = launch.for_tasks(_TASK_BYTES)
        reports = run_job("import", import_part, tasks, part_launch, on_progress, _estimate_seconds, memoised=True)
    else:
        in_sequence = None if tasks[0].passages else import_in_sequence(store, passages, tasks)
        reports = []
        for task in tasks:
            # `run_task` turns errors of disk and memory into readable messages
            reports.append(run_task(import_part if in_sequence is None else lambda *_: next(in_sequence), task, store))
            on_progress(len(reports), len(tasks))
        for _ in in_sequence or ():  # its end checks that no passages are left
            pass
    return collect_parts(store, passages, reports, vector_input.dtype.name)


def _estimate_seconds(task: ImportTask) -> float:
    return task.rows * (_PASSAGE_SECONDS + 4 * task.dim / _VECTOR_BYTES_PER_SECOND)
