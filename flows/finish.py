"""Finish a build: build the indexes, apply the gate, publish the snapshot, move the ref.

The passages and vectors may come from a dump, from another snapshot, or from files.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from beam_jobs import corpus, gate, index
from beam_jobs.index_work import IndexInProgress
from beam_jobs.job_settings import JobSettings, OnProgress
from beam_jobs.workers import is_local
from flows import artifacts
from flows.outcome import BuildOutcome
from flows.stage import StageClock, stage
from rag_model.errors import BookwheelError, GateRefusedError, StoreError
from rag_model.evaluation.gate import check_snapshot
from rag_model.index.plan import IndexPlan
from rag_model.snapshots.content import (
    BuiltIndex,
    build_provenance,
    count_passages,
    describe_mixed_precisions,
    list_precisions,
    list_row_files,
)
from rag_model.snapshots.measure import SnapshotMetrics, measure_snapshot
from rag_model.snapshots.parent import Parent
from rag_model.snapshots.parent_index import ParentIndex
from rag_model.snapshots.publish import PublishResult, publish, summarize_snapshot, write_report
from rag_model.snapshots.range_digests import DigestTask, add_range_digests, list_range_tasks
from rag_model.snapshots.recipe import Recipe
from rag_model.snapshots.reused_training import SHARDS, ReusedTraining
from rag_model.snapshots.stage_results import ChunkResult, EmbedResult
from rag_model.store.store import Store
from rag_model.store.versions.build_history import HISTORY, format_history, list_warnings, read_history
from rag_model.store.versions.manifest import EMBEDDINGS, Content, Manifest
from rag_model.store.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Build:
    """A build after its passages have been chunked and encoded; input of `finish_build`."""

    store: Store
    job_settings: JobSettings
    clock: StageClock
    recipe: Recipe
    ref: str  # the ref to move
    source: str  # URL or path of the dump or passages
    encoder: str  # the encoder, as the user named it
    chunk_results: Sequence[ChunkResult]  # the chunk job's result for each part
    embeddings: Mapping[str, Sequence[EmbedResult]]  # the embed job's results by representation
    plans: Mapping[str, IndexPlan]  # by name, the plans of the indexes that have to be built
    # returns the snapshot's content with the given indexes
    assemble_content: Callable[[Sequence[BuiltIndex]], Content]
    # Provenance entries of a snapshot that is derived from another.
    derived_provenance: Mapping[str, Any] = field(default_factory=dict)
    # By index, the trained file of the parent that may be reused.
    reused_trainings: Mapping[str, ReusedTraining] = field(default_factory=dict)
    # indexes of other programs, whose files are in the store already
    ready_indexes: Sequence[BuiltIndex] = ()
    base_ref: str | None = None  # the ref whose snapshot the gate compares with; None: `ref`
    # the parent, whose inverted indexes are updated instead of built again
    parent: Manifest | None = None
    # by reason, how many files of an input folder were left out
    dropped_files: Mapping[str, int] = field(default_factory=dict)
    # sentences to record in the provenance, such as that files of the parent are missing
    notes: Sequence[str] = ()
    # In a takedown, the content of the old snapshot, which has the pages; new inverted indexes are
    # derived from its indexes.
    redacted_content: Content | None = None

    @property
    def parent_content(self) -> Content | None:
        """The content of the parent."""
        return self.parent.content if self.parent else None


def finish_build(build: Build) -> BuildOutcome:
    """Build and measure the indexes, publish the snapshot, and move the ref if the gate allows it.

    Raises:
        GateRefusedError: the snapshot is published, but the ref did not move; the message says why.
        BookwheelError: a stage failed; finished work is recorded.
    """
    manifest, metrics = build_indexes(build)
    if parent_manifest := Parent.from_ref(build.store, build.base_ref or build.ref).manifest:
        for base_content in _list_delta_bases(build.store, parent_manifest, manifest):
            try_to_write_deltas(build, base_content, manifest.content)
    publish_result = publish_snapshot(build, manifest, metrics)
    build.store.runs.delete_reports(build.job_settings.run)
    outcome = report_build(build, manifest, publish_result, metrics)
    if publish_result.move is None:
        raise GateRefusedError(
            f"snapshot {manifest.id[:12]} is published but {build.ref} did not move: "
            f"{publish_result.verdict.reason}; see {outcome.report}",
            outcome,
        )
    return outcome


def build_indexes(build: Build) -> tuple[Manifest, SnapshotMetrics]:
    """Build and measure the indexes.

    Return the manifest of the snapshot, which is not published yet, and the measurements.

    Raises:
        BookwheelError: a stage failed; finished work is recorded.
    """
    store, job_settings, clock = build.store, build.job_settings, build.clock
    parent_indexes = find_parent_indexes(build)
    with clock("train") as on_progress:
        indexes = train_indexes(build, parent_indexes, on_progress)
    with clock("scatter") as on_progress:
        indexes = scatter_vectors(indexes, job_settings, on_progress)
    with clock("shard") as on_progress:
        indexes = build_shards(indexes, job_settings, on_progress)
    with clock("merge") as on_progress:
        built_indexes = [*build.ready_indexes, *merge_shards(indexes, job_settings, on_progress)]
    with clock("tune") as on_progress:
        draft_content = build.assemble_content(built_indexes)
        tune_arguments = store, job_settings, on_progress, draft_content, built_indexes, build.recipe.gate
        built_indexes = tune_indexes(*tune_arguments, parent=build.parent_content)
    content = build.assemble_content(built_indexes)
    if range_tasks := list_range_tasks(content):
        with clock("ranges") as on_progress:
            content = digest_ranges(build, content, range_tasks, on_progress)
    parent_provenance = build.parent.provenance if build.parent else {}
    precisions = list_precisions(build.embeddings, parent_provenance)
    precision_notes = describe_mixed_precisions(build.embeddings, parent_provenance)
    with clock("gate") as on_progress:
        for note in precision_notes:
            on_progress.say(note)
        metrics = measure_indexes(build, Manifest(content), built_indexes, on_progress)
    all_notes = [*build.notes, *precision_notes]
    new_provenance = build_provenance(build.source, build.encoder, built_indexes, clock.seconds, precisions, all_notes)
    new_provenance["embedded"] = count_passages(build.chunk_results, build.embeddings)["embedded"]
    # The clock does not measure the CPU time of workers on other machines, so none is recorded.
    new_provenance["cpu"] = dict(clock.cpu) if is_local(job_settings.flags) else {}
    new_provenance[HISTORY] = format_history(build.parent)
    # Indexes that this build does not rebuild keep the shard lists of the parent.
    shards_by_index = {
        name: shard_list
        for name, shard_list in {**build.derived_provenance.get(SHARDS, {}), **new_provenance[SHARDS]}.items()
        if name in content.indexes
    }
    provenance = {**new_provenance, **build.derived_provenance, SHARDS: shards_by_index}
    return Manifest(content, metrics.metrics(), provenance=provenance), metrics


def _list_delta_bases(store: Store, parent: Manifest, manifest: Manifest) -> list[Content]:
    """Return the contents of the snapshots that clients may update from.

    If the build yields the parent again, these are the snapshots before the parent, whose deltas
    may be missing.
    """
    if parent.id != manifest.id:
        return [parent.content]
    base_contents: list[Content] = []
    for base_id in parent.parents:
        with suppress(StoreError):  # the older snapshot has expired
            base_contents.append(store.snapshots.get(base_id).content)
    return base_contents


def try_to_write_deltas(build: Build, parent_content: Content, content: Content) -> None:
    """Write the deltas of changed files, if possible.

    A failure does not stop the build; clients then pull whole files.
    """
    with build.clock("deltas") as on_progress:
        try:
            write_deltas(parent_content, content, build.job_settings, on_progress)
        # Arrow reports some errors as ValueError
        except (BookwheelError, OSError, ValueError, MemoryError) as error:
            on_progress.say(f"not written, so clients pull whole files: {error}")


def get_embed_stage(representation: str) -> str:
    """Return the name of the stage that encodes a representation."""
    return "embed" if representation == EMBEDDINGS else f"embed {representation}"


def group_by_stage(embeddings: Mapping[str, Sequence[EmbedResult]]) -> dict[str, Sequence[EmbedResult]]:
    """Return the embed job's results by stage name instead of by representation."""
    return {get_embed_stage(name): embed_results for name, embed_results in embeddings.items()}


def report_build(build: Build, manifest: Manifest, result: PublishResult, metrics: SnapshotMetrics) -> BuildOutcome:
    """Write the report and the artifacts of a published snapshot, and return the outcome."""
    counts = count_passages(build.chunk_results, build.embeddings, build.dropped_files)
    seconds = build.clock.seconds
    stage_results = build.chunk_results, group_by_stage(build.embeddings)
    report = write_report(build.store, manifest, result, metrics, counts, *stage_results, seconds)
    number, gate = result.move.number if result.move else None, asdict(result.verdict)
    warnings = list_warnings(read_history(manifest))
    outcome = BuildOutcome(manifest.id, build.ref, number, counts, metrics.metrics(), gate, seconds, report, warnings)
    artifacts.show_build(outcome)
    return outcome


def find_parent_indexes(build: Build) -> dict[str, ParentIndex]:
    """Return, by name, the indexes of the parent from which new indexes are derived.

    Also write the deltas of passages, because deriving an index needs them.
    """
    base = build.parent_content or build.redacted_content
    if base is None:
        return {}
    draft = build.assemble_content(())
    find_parent_index = partial(ParentIndex.find, build.store, base, draft)
    parent_indexes = {name: index for name, plan in build.plans.items() if (index := find_parent_index(name, plan))}
    if parent_indexes and build.parent_content:
        try_to_write_deltas(build, build.parent_content, draft)
    return parent_indexes


@stage
def train_indexes(
    build: Build, parent_indexes: Mapping[str, ParentIndex], on_progress: OnProgress
) -> list[IndexInProgress]:
    """Derive indexes from the parent's where possible; train others, or reuse trained files."""
    store, job_settings = build.store, build.job_settings
    row_files, reused_trainings = list_row_files(build.chunk_results, build.embeddings), build.reused_trainings
    index_builds = [
        index.start_index(store, name, plan, row_files[plan.over], reused_trainings.get(name), parent_indexes.get(name))
        for name, plan in build.plans.items()
    ]
    return index.train(index.derive(index_builds, job_settings), job_settings, on_progress)


scatter_vectors = stage(index.scatter, "scatter_vectors")
build_shards = stage(index.build_shards, "build_shards")
merge_shards = stage(index.merge, "merge_shards")
write_deltas = stage(corpus.write_deltas, "write_deltas")
tune_indexes = stage(gate.tune_indexes, "tune_indexes")


@stage
def digest_ranges(build: Build, content: Content, tasks: Mapping[str, DigestTask], on_progress: OnProgress) -> Content:
    """Add the digests that verify byte ranges when large files are read from the store in parts."""
    run_tasks = partial(corpus.run, job_settings=build.job_settings)
    return add_range_digests(build.store, content, tasks, run_tasks, on_progress)


@stage
def measure_indexes(
    build: Build, manifest: Manifest, built_indexes: Sequence[BuiltIndex], on_progress: OnProgress
) -> SnapshotMetrics:
    """Compare every index with exact search, check its file, and search the questions of the gate.

    The exact neighbours are computed by updating those of the parent.
    """
    merge_stats_by_index, gate_recipe = {index.name: index.stats for index in built_indexes}, build.recipe.gate
    with Snapshot.from_manifest(build.store, manifest) as snapshot:
        gate_arguments = build.store, build.job_settings, on_progress, snapshot, gate_recipe
        measurements = gate.measure_indexes(*gate_arguments, parent=build.parent_content)
        return measure_snapshot(snapshot, gate_recipe, measurements, merge_stats_by_index)


@stage
def publish_snapshot(build: Build, manifest: Manifest, metrics: SnapshotMetrics) -> PublishResult:
    """Write the manifest, apply the gate, and move the ref if the snapshot passes the gate."""
    judge_snapshot = partial(
        check_snapshot,
        build.recipe.gate,
        summarize_snapshot(manifest),
        metrics.recalls,
        scores=metrics.retriever_scores,
    )
    return publish(build.store, manifest, build.ref, judge_snapshot, build.base_ref)
