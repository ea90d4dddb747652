"""Make a snapshot from existing passages and vectors: build and check indexes, and publish it.

Purpose: to import a corpus from another system without encoding it again.
Caching: the store's memo; a killed import continues with the first part that is not recorded.
Requires: a store that this machine and the workers both reach; the vectors' files on this machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from beam_jobs.job import run_job
from beam_jobs.job_settings import JobSettings, OnProgress
from beam_jobs.tasks import run_task
from beam_jobs.workers import get_worker_memory, is_local
from flows.finish import Build, finish_build
from flows.outcome import BuildOutcome
from flows.parameters import RecipeParameter, StoreParameter, Url
from flows.reindex import prepare_encoder
from flows.stage import StageClock, deployment_flow, stage
from rag_model.errors import InputError, UsageError
from rag_model.index.files.intake import inspect_vectors
from rag_model.index.files.vectors import open_vectors
from rag_model.index.ready import ReadyIndex
from rag_model.index.recipe import IndexRecipe
from rag_model.retrieve.indexes import list_row_files
from rag_model.snapshots.content import BuiltIndex, build_commits_provenance
from rag_model.snapshots.imported import (
    ImportedParts,
    ImportTask,
    build_imported_content,
    check_encoder,
    collect_parts,
    import_in_sequence,
    import_part,
    list_urls,
    plan_import,
)
from rag_model.snapshots.planning import plan_indexes
from rag_model.snapshots.recipe import Recipe, check_indexes_and_retrievers
from rag_model.store.store import Store
from rag_model.store.versions.manifest import EMBEDDINGS, Content, Manifest
from rag_model.store.versions.snapshot import Snapshot

_TASK_BYTES = 768 << 20  # bytes of memory of a process that imports one part
# core seconds to import a passage, and bytes of vectors that one core imports per second
_PASSAGE_SECONDS, _VECTOR_BYTES_PER_SECOND = 4e-5, 5e8


@deployment_flow("import", takes_turns=True)
def import_library(
    passages: Url,
    vectors: Sequence[str],
    store: StoreParameter,
    encoder: Url,
    recipe: Annotated[RecipeParameter, Parameter(help="A TOML file with indexes and a gate.")] = None,
    ref: str = "latest",
    index_files: Annotated[Sequence[str], Parameter(name="--index-file")] = (),
    beam_options: Sequence[str] = (),
) -> BuildOutcome:
    """Publish a snapshot of existing passages and vectors in `store` and move `ref` to it.

    Args:
        passages: Path, URL or glob of passages or documents, in a format that `reindex` accepts.
        vectors: `.npy`, Parquet or faiss Flat files or folders of them; row i belongs to passage i.
            By default the files of passages contain them.
        store: URL or folder of the store; created if it does not exist.
        encoder: Folder or hub name of the encoder that made the vectors; a sample of the vectors is
            checked.
        recipe: The indexes and the gate; its other settings are not used. By default the default
            recipe, or only the indexes of `index_files`.
        ref: The ref to move to the new snapshot.
        index_files: NAME=FILE of faiss HNSW, IVF or Flat files that become the indexes of these
            names; id i is passage i.
        beam_options: Options of Beam and its runner, such as `--runner=FlinkRunner
            --flink_master=host:8081`; on the command line after `--`.

    Raises:
        GateRefusedError: the snapshot is published, but the ref did not move; the message says why.
        RefusedError: the encoder gives other vectors, or an index file was built over other
            vectors.
        BookwheelError: a stage failed; finished work is recorded.
    """
    recipe, clock = recipe or (Recipe(index={}) if index_files else Recipe()), StageClock()
    if recipe.represent:
        raise UsageError(
            f"import takes the vectors of one encoder: leave [represent.{next(iter(recipe.represent))}] out"
        )
    index_by_name = inspect_index_files(index_files, passages, vectors)
    recipe = add_ready_indexes(recipe, index_by_name)
    check_indexes_and_retrievers(recipe, {EMBEDDINGS: "vectors"})
    opened_store = Store.open(store, create=True)
    opened_store.refs.require_exclusive_creation()
    job_settings = JobSettings.new(opened_store.url, beam_options)

    with opened_store.intents.hold(job_settings.run):  # keeps `gc` from deleting new files
        encoding = prepare_encoder(opened_store, encoder, recipe.encode)
        with clock("import") as on_progress:
            imported_parts = split_corpus(opened_store, passages, vectors, job_settings, on_progress)
        with clock("check"):
            check_encoder(opened_store, imported_parts, encoding)
        chunk_results, embed_results = imported_parts.passages, {EMBEDDINGS: imported_parts.embeddings}
        new_indexes = {name: index_recipe for name, index_recipe in recipe.index.items() if name not in index_by_name}
        dimensions, memory = {EMBEDDINGS: encoding.space.dim}, get_worker_memory(beam_options)
        plans = plan_indexes(new_indexes, chunk_results, dimensions, memory)
        assemble_content = partial(build_imported_content, imported_parts, recipe, encoding)
        ready_indexes = store_index_files(opened_store, assemble_content(()), recipe, [*index_by_name.values()])
        provenance = build_commits_provenance([encoding])
        build_inputs = passages, encoder, chunk_results, embed_results, plans, assemble_content, provenance
        build = Build(opened_store, job_settings, clock, recipe, ref, *build_inputs, ready_indexes=ready_indexes)
        return finish_build(build)


def inspect_index_files(index_files: Sequence[str], passages: str, vectors: Sequence[str]) -> dict[str, ReadyIndex]:
    """Inspect the index files, given as NAME=FILE, before the corpus is read; return them by name.

    Raises:
        InputError: a file is damaged, its type of index cannot be searched, or the number or
            dimension of its vectors is not that of `vectors`.
        UsageError: a value is not NAME=FILE, or a name is given twice.
    """
    index_by_name: dict[str, ReadyIndex] = {}
    for index_option in index_files:
        name, equals_sign, path = index_option.partition("=")
        if not (name and equals_sign and path):
            raise UsageError(f"the index file {index_option!r} is not NAME=FILE: give for example hnsw=wiki.faiss")
        if name in index_by_name:
            raise UsageError(f"two index files are named {name}: give each its own name")
        index_by_name[name] = ReadyIndex.inspect(name, Path(path))
    if index_by_name:
        vector_input = inspect_vectors([Path(path) for path in vectors or list_urls(passages)])
        for file in index_by_name.values():
            file.check_size(vector_input.n, vector_input.d)
    return index_by_name


def add_ready_indexes(recipe: Recipe, index_by_name: Mapping[str, ReadyIndex]) -> Recipe:
    """Return the recipe with an additional index for each file whose name it does not contain.

    Raises:
        UsageError: a file's index does not match the recipe's index of the same name.
    """
    indexes = dict(recipe.index)
    for name, file in index_by_name.items():
        file.check_recipe(indexes.setdefault(name, IndexRecipe(file.factory, file.metric)))
    return replace(recipe, index=indexes)


@stage
def store_index_files(store: Store, draft: Content, recipe: Recipe, files: Sequence[ReadyIndex]) -> list[BuiltIndex]:
    """Compare index files with the vectors of the draft, and put them into the store.

    Raises:
        RefusedError: a file was built over other vectors, or in another order.
        InputError: passages that were taken down are in the file.
    """
    if not files:
        return []
    with Snapshot.from_manifest(store, Manifest(draft)) as snapshot:
        vectors = open_vectors(list_row_files(snapshot, EMBEDDINGS))
        for file in files:
            if file.n != vectors.n:  # `check_size` has found all input passages in the file
                raise InputError(
                    f"{file.path} has the vectors of passages that were taken down in {store.url}: "
                    "leave it out, and name the index in a recipe, which builds it without them"
                )
            file.check_vectors(vectors)
    return [
        BuiltIndex(file.name, file.plan(recipe.index[file.name]), store.blobs.put_file(file.path)) for file in files
    ]


@stage
def split_corpus(
    store: Store, passages: str, vectors: Sequence[str], job_settings: JobSettings, on_progress: OnProgress
) -> ImportedParts:
    """Split passages and vectors into parts.

    Workers of this machine read the parts of Parquet files; other files of passages are read once,
    from the first to the last.
    """
    vector_input = inspect_vectors([Path(path) for path in vectors or list_urls(passages)])
    tasks = plan_import(store, passages, vector_input)
    if tasks[0].passages and is_local(job_settings.flags):
        task_settings = job_settings.for_tasks(_TASK_BYTES)
        reports = run_job("import", import_part, tasks, task_settings, on_progress, _estimate_seconds, memoised=True)
    else:
        sequential_parts = None if tasks[0].passages else import_in_sequence(store, passages, tasks)
        reports = []
        for task in tasks:
            # `run_task` turns errors of disk and memory into readable messages
            reports.append(
                run_task(import_part if sequential_parts is None else lambda *_: next(sequential_parts), task, store)
            )
            on_progress(len(reports), len(tasks))
        for _ in sequential_parts or ():  # reading to the end checks that no passages are left over
            pass
    return collect_parts(store, passages, reports, vector_input.dtype.name)


def _estimate_seconds(task: ImportTask) -> float:
    return task.rows * (_PASSAGE_SECONDS + 4 * task.dim / _VECTOR_BYTES_PER_SECOND)
