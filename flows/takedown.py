"""Take pages down: remove them from every snapshot of a store, and record who ordered it and why.

Purpose: pages that must not be kept or served any more (a court's order, a person's request, text
that was never free). The record is written first. From then on no build includes the pages, and no
snapshot with them can be published. Then each snapshot with such a page, whether or not a ref names
it, is built without the page: its rows are removed from passages, vectors and article logs. Graphs
are updated by deletion: a cell loses the page's vectors, their links and their digests, and
centroids near these vectors become means of the remaining vectors. Inverted indexes of words and of
weighted terms are derived from the old indexes, with the same bytes as in a build without the
pages. The jobs of a build make all other indexes again, without reusing a trained file that was
computed from the page's vectors, and measure all indexes. The gate is not applied, since the old
snapshot must be replaced in any case.

The new snapshot replaces the old one. Refs that name the old snapshot move to the new one. Earlier
entries of their logs that name the old snapshot are read as the new one, so that neither `rollback`
nor `ref@number` brings a page back. The old manifest is retired: an error names the replacement if
the old id is used. If no page is left in a snapshot, its refs are deleted. Evaluations of the old
snapshot are deleted, because their rows contain its passages.

`gc` deletes the files: at once with `--grace 0`, otherwise when they are older than the grace
period. This machine's cache removes its copies. The store does not know of copies on other
machines. A service that follows the ref changes to the new snapshot, or serves nothing if there is
none, and deletes its files of the old one. In other pulled folders the next `pull` lists versions
that were taken down, and deletes them with `--keep`. Caches of other machines (`BOOKWHEEL_CACHE`)
have to be cleared. When a later dump with the page is planned, stored files contain the page until
the next `gc`.

Caching: the store's memo records the new indexes. An interrupted run continues when it is run
again; without pages it only continues earlier takedowns.
Requires: a store that this machine and the workers both reach.
"""

import getpass
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from beam_jobs import corpus
from beam_jobs.corpus import RedactTask
from beam_jobs.job_settings import JobSettings, OnProgress
from beam_jobs.workers import get_worker_memory
from flows.finish import Build, build_indexes, group_by_stage
from flows.outcome import TakedownOutcome
from flows.parameters import StoreParameter
from flows.stage import StageClock, deployment_flow, stage
from rag_model.evaluation.gate import check_snapshot
from rag_model.index.plan import IndexPlan
from rag_model.snapshots.content import count_passages, replace_indexes
from rag_model.snapshots.existing import inherit_provenance, read_dimensions, read_snapshot_recipe, read_stage_results
from rag_model.snapshots.measure import SnapshotMetrics
from rag_model.snapshots.mirrors import redact_mirrors
from rag_model.snapshots.parent import Parent
from rag_model.snapshots.planning import plan_indexes
from rag_model.snapshots.publish import PublishResult, summarize_snapshot, write_report
from rag_model.snapshots.reused_training import (
    RedactedRows,
    ReusedTraining,
    find_training_to_redact,
)
from rag_model.snapshots.takedown import (
    AffectedSnapshot,
    RedactResult,
    choose_wiki,
    list_part_blobs,
    list_parts_to_redact,
    list_unsigned_replacements,
    replace_redacted_parts,
    take_down_everywhere,
)
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest
from rag_model.store.versions.snapshot import Snapshot
from rag_model.store.versions.takedowns import Takedown


@deployment_flow("takedown")
def takedown(
    store: StoreParameter,
    pages: Sequence[str] = (),
    wiki: str | None = None,
    reason: str = "",
    beam_options: Sequence[str] = (),
) -> TakedownOutcome:
    """Remove pages from every snapshot of `store`.

    Args:
        store: URL or folder of the store.
        pages: Ids of the pages; none: only continue earlier takedowns.
        wiki: Dbname of the pages' wiki; required if the store has several wikis.
        reason: The reason, for the record.
        beam_options: Options of Beam and its runner, such as `--runner=FlinkRunner
            --flink_master=host:8081`; on the command line after `--`.

    Raises:
        UsageError: the wiki of the pages is ambiguous.
        BookwheelError: a stage failed; run it again to continue.
    """
    opened_store = Store.open(store)
    opened_store.refs.require_exclusive_creation()
    job_settings = JobSettings.new(opened_store.url, beam_options)
    with opened_store.intents.hold(job_settings.run):  # keeps `gc` from deleting new files
        takedown_record = record_takedown(opened_store, pages, wiki, reason)
        redact_mirrors(opened_store)
        result = take_down_everywhere(opened_store, partial(rebuild_without_pages, opened_store, beam_options))
    replacements = result.replacements
    undeleted_ids = {*replacements} & {*opened_store.snapshots.list_ids()}
    return TakedownOutcome(
        takedown_record.number if takedown_record else None,
        replacements,
        result.moves,
        tuple(sorted(undeleted_ids)),
        list_unsigned_replacements(opened_store, replacements.values()),
        result.evaluations,
    )


@stage
def record_takedown(store: Store, pages: Sequence[str], wiki: str | None, reason: str) -> Takedown | None:
    """Record the takedown of pages that no record names yet; return None if there are none."""
    if not pages:
        return None
    wiki_name = choose_wiki(store, pages, wiki)
    new_pages = {*pages} - store.takedowns.list_pages(wiki_name, trusted_only=True)
    return store.takedowns.add(wiki_name, new_pages, reason, _describe_operator()) if new_pages else None


def rebuild_without_pages(store: Store, beam_options: Sequence[str], affected: AffectedSnapshot) -> Manifest | None:
    """Build a snapshot without the pages, and its report; return None if no page would be left."""
    old_manifest, job_settings, clock = affected.manifest, JobSettings.new(store.url, beam_options), StageClock()
    with clock("redact") as on_progress:
        results_by_part = redact_parts(affected, job_settings, on_progress)
    content = replace_redacted_parts(old_manifest.content, results_by_part)
    if not content.parts:
        return None
    build = prepare_takedown_build(store, affected, content, job_settings, clock)
    redacted_trainings = find_trainings_to_redact(store, old_manifest, build.plans, results_by_part)
    build = replace(build, reused_trainings=redacted_trainings)
    manifest, metrics = build_indexes(build)
    store.runs.delete_reports(job_settings.run)
    _write_build_report(build, manifest, metrics)
    return replace(manifest, parents=old_manifest.parents)


@stage
def redact_parts(
    affected: AffectedSnapshot, job_settings: JobSettings, on_progress: OnProgress
) -> dict[str, RedactResult]:
    """Rewrite the parts that contain the pages, without these pages; return the results by part."""
    content, parts = affected.manifest.content, list_parts_to_redact(affected)
    tasks = [RedactTask(affected.pages, tuple(list_part_blobs(content, part).items())) for part in parts]
    redact_results = corpus.redact_parts(tasks, job_settings, on_progress)
    return {part.name: result for part, result in zip(parts, redact_results, strict=True)}


@stage
def find_trainings_to_redact(
    store: Store,
    old_manifest: Manifest,
    plans: Mapping[str, IndexPlan],
    results_by_part: Mapping[str, RedactResult],
) -> dict[str, ReusedTraining]:
    """Return the trained files of indexes that are updated by deletion; others are built again."""
    blobs_by_part = {part.name: list_part_blobs(old_manifest.content, part) for part in old_manifest.content.parts}
    training_by_index = dict[str, ReusedTraining]()
    for name, plan in plans.items():
        redacted_rows = [
            RedactedRows(blobs_by_part[part][plan.over], result.files.get(plan.over))
            for part, result in results_by_part.items()
            if plan.over in blobs_by_part[part]
        ]
        if training := find_training_to_redact(store, old_manifest, name, plan, redacted_rows):
            training_by_index[name] = training
    return training_by_index


@stage
def prepare_takedown_build(
    store: Store, affected: AffectedSnapshot, content: Content, job_settings: JobSettings, clock: StageClock
) -> Build:
    """Plan the build of the snapshot that replaces the affected one."""
    old_manifest = affected.manifest
    recipe, provenance = read_snapshot_recipe(old_manifest.content), inherit_provenance(old_manifest)
    provenance["takedown"] = {"of": old_manifest.id, "pages": list(affected.pages)}
    chunk_results, embeddings = read_stage_results(store, content, partial(corpus.run, job_settings=job_settings))
    with Snapshot.from_manifest(store, old_manifest) as snapshot:
        memory, dimensions = get_worker_memory(job_settings.flags), read_dimensions(snapshot)
        plans = plan_indexes(recipe.index, chunk_results, dimensions, memory, Parent(old_manifest))
    source, encoder = (str(provenance.get(name, "")) for name in ("dump", "encoder"))
    assemble_content = partial(replace_indexes, content)
    build_inputs = source, encoder, chunk_results, embeddings, plans, assemble_content, provenance
    return Build(store, job_settings, clock, recipe, "", *build_inputs, redacted_content=old_manifest.content)


def _write_build_report(build: Build, manifest: Manifest, metrics: SnapshotMetrics) -> None:
    verdict = check_snapshot(build.recipe.gate, summarize_snapshot(manifest), metrics.recalls)
    publish_result = PublishResult(manifest.id, verdict, None)
    counts = count_passages(build.chunk_results, build.embeddings)
    stage_results = build.chunk_results, group_by_stage(build.embeddings)
    write_report(build.store, manifest, publish_result, metrics, counts, *stage_results, build.clock.seconds)


def _describe_operator() -> str:
    """Return USER@HOST, or the host if the user has no name."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # in a container, the user may have no name
        return socket.gethostname()
