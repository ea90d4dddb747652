"""Publish a snapshot: write its files, then its manifest, and move the ref if the gate passes.

A publisher that loses a race for the ref tries again with the winner's snapshot as the parent, and
the gate judges again. An intent that names every file protects the files from deletion until the
ref has moved. A page that was taken down is never published: takedowns are read before the manifest
is written and again afterwards. A takedown first writes its record and *then* looks for snapshots,
so the publisher sees the takedown's record, or the takedown sees the manifest.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from rag_model.errors import RefConflictError, StoreError
from rag_model.evaluation.gate import GateVerdict, SnapshotSummary
from rag_model.evaluation.reports.build import BuildReport, BuildStage, render_build_report
from rag_model.snapshots.encoding import COMMITS
from rag_model.snapshots.measure import SnapshotMetrics
from rag_model.snapshots.stage_results import ChunkResult, EmbedResult
from rag_model.store.store import Store
from rag_model.store.upkeep.retire import find_pages, get_wiki_name
from rag_model.store.upkeep.verify import protect_files
from rag_model.store.versions.build_history import read_history
from rag_model.store.versions.manifest import Manifest
from rag_model.store.versions.refs import RefMove

_MAX_ATTEMPTS = 100  # maximum number of consecutive lost races; each takes a few small reads
# maximum number of quarantined pages in the report; the manifest's counts include all
_MAX_QUARANTINED = 50
_MAX_UNKNOWN_TEMPLATES = 20  # maximum number of names of unknown templates in the report


@dataclass(frozen=True, slots=True)
class PublishResult:
    """A published snapshot, the gate's verdict, and the move of the ref."""

    snapshot: str
    verdict: GateVerdict
    move: RefMove | None  # None if the gate refused the snapshot


def summarize_snapshot(manifest: Manifest) -> SnapshotSummary:
    """Return the properties of a snapshot that the gate compares."""
    space, read_at = manifest.content.space, manifest.provenance.get("read_at")
    return SnapshotSummary(
        passages=manifest.content.n,
        space=None if space is None else space["digest"],
        # For a followed site, use the time at which it was read, because its newest page may have
        # been deleted.
        newest_revision=str(read_at or manifest.content.corpus.get("newest_revision") or ""),
    )


def publish(
    store: Store,
    manifest: Manifest,
    ref: str,
    judge: Callable[[SnapshotSummary | None], GateVerdict],
    base_ref: str | None = None,
) -> PublishResult:
    """Write a manifest, then move `ref` to its snapshot if `judge`, the gate, accepts it.

    `judge` gets the summary of the current snapshot of `base_ref` (default: `ref`), or None if
    there is none. `base_ref` does not move. A ref that already names the snapshot does not move
    either, so a rerun does not change its history.

    Raises:
        RefConflictError: other writers won many races in a row.
        StoreError: a file of the snapshot is missing, a page in it was taken down, or the store
            cannot exclude a second writer, or cannot be written.
    """
    with protect_files(store, f"snapshot {manifest.id[:12]}", f"snapshots/{manifest.id}.json", manifest.content):
        return _publish(store, manifest, ref, judge, base_ref or ref)


def publish_replacement(store: Store, snapshot: str, manifest: Manifest) -> list[RefMove]:
    """Write a manifest that replaces a snapshot, move the refs of that snapshot, and return the
    moves.

    No person inspects the replacement, so it is signed only if the replaced snapshot has a trusted
    signature.

    Raises:
        StoreError: for the same reasons as `publish`.
    """
    with protect_files(store, f"snapshot {manifest.id[:12]}", f"snapshots/{manifest.id}.json", manifest.content):
        _write_manifest(store, manifest, sign=store.snapshots.has_trusted_signature(snapshot))
        return replace_snapshot(store, snapshot, manifest.id)


def replace_snapshot(store: Store, snapshot: str, replacement: str) -> list[RefMove]:
    """Record the replacement of a snapshot, move its refs, and return the moves.

    `replacement` is the id of an existing snapshot, or "" to delete the refs. An interrupted
    earlier run is resumed. A move is signed only if the ref's previous move, the snapshot and the
    replacement are signed.

    Raises:
        StoreError: the store cannot be written.
    """
    store.takedowns.record_replacement(snapshot, replacement)
    newer_replacement = store.takedowns.find_replacement(snapshot)
    moves: list[RefMove] = []
    can_be_trusted = (
        all(map(store.snapshots.has_trusted_signature, (snapshot, newer_replacement))) if newer_replacement else False
    )
    while newer_replacement and (naming_refs := store.refs.list_refs_to(snapshot)):
        for ref, ref_number in naming_refs:
            with suppress(RefConflictError):  # the enclosing loop lists the refs again
                note = f"takedown in {snapshot[:12]}"
                sign = can_be_trusted and store.refs.has_trusted_signature(ref, ref_number)
                moves.append(store.refs.move(ref, newer_replacement, ref_number, note, sign=sign))
    return moves


def _write_manifest(store: Store, manifest: Manifest, *, sign: bool = True) -> str:
    """Write a manifest, unless its snapshot has a page that was taken down; remove the manifest if
    one of its pages is taken down meanwhile.
    """
    wiki_id, path = get_wiki_name(manifest.content), f"snapshots/{manifest.id}.json"
    removed_pages = store.takedowns.list_pages(wiki_id)
    _refuse_removed_pages(store, manifest, removed_pages)
    is_new_manifest = store.files.find(path) is None
    store.snapshots.publish(manifest, sign=sign)
    try:
        _refuse_removed_pages(store, manifest, store.takedowns.list_pages(wiki_id) - removed_pages)
    except StoreError:
        if is_new_manifest:
            store.files.remove(path)
        raise
    return manifest.id


def _refuse_removed_pages(store: Store, manifest: Manifest, pages: Collection[str]) -> None:
    if occurrences := find_pages(store, manifest.content, pages):
        raise StoreError(
            f"snapshot {manifest.id[:12]} cannot be published in {store.url}: page "
            f"{occurrences[0].page} in it ({occurrences[0].title!r}) was taken down meanwhile: run "
            "the same command again to leave it out"
        )


def _publish(
    store: Store, manifest: Manifest, ref: str, judge: Callable[[SnapshotSummary | None], GateVerdict], base_ref: str
) -> PublishResult:
    base_move = store.refs.find_current(base_ref)
    parent_ids = (base_move.snapshot,) if base_move and base_move.snapshot != manifest.id else ()
    snapshot = _write_manifest(store, replace(manifest, parents=parent_ids))
    for _ in range(_MAX_ATTEMPTS):
        current_move, parent_move = store.refs.find_current(ref), store.refs.find_current(base_ref)
        try:
            parent_summary = summarize_snapshot(store.snapshots.get(parent_move.snapshot)) if parent_move else None
        except StoreError:
            if store.refs.find_current(base_ref) == parent_move:
                raise
            continue  # the ref has moved, and its earlier snapshot has expired
        verdict = judge(parent_summary)
        if not verdict.passed:
            return PublishResult(snapshot, verdict, None)
        if current_move is not None and current_move.snapshot == snapshot:
            return PublishResult(snapshot, verdict, current_move)
        try:
            return PublishResult(
                snapshot, verdict, store.refs.move(ref, snapshot, current_move.number if current_move else 0)
            )
        except RefConflictError:
            continue
    raise RefConflictError(
        f"ref {ref} in {store.url} was moved by other writers {_MAX_ATTEMPTS} times in a row: try again"
    )


def write_report(
    store: Store,
    manifest: Manifest,
    publish_result: PublishResult,
    metrics: SnapshotMetrics,
    counts: Mapping[str, Any],
    chunk_results: Sequence[ChunkResult],
    embed_results: Mapping[str, Sequence[EmbedResult]],
    seconds: Mapping[str, float],
) -> str:
    """Render a snapshot's report, store it, and return its URL.

    `embed_results` maps stages to their results; `seconds` maps all stages to their durations, in
    order.
    """
    is_new_by_stage = {"chunk": [result.is_new for result in chunk_results]}
    is_new_by_stage |= {stage: [report.is_new for report in results] for stage, results in embed_results.items()}
    corpus = manifest.content.corpus
    report = BuildReport(
        title=f"{corpus['dbname'] or corpus['kind']} {corpus['newest_revision'][:10]}".strip(),
        snapshot=manifest.id,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        verdict=publish_result.verdict,
        counts={name: count for name, count in counts.items() if name != "dropped"},
        k=metrics.k,
        dropped=counts["dropped"],
        unknown_templates=_count_unknown_templates(chunk_results),
        language=corpus.get("language", ""),
        quarantined=_list_quarantined_pages(chunk_results),
        lengths=_sum_lengths(chunk_results),
        measurements=metrics.measurements,
        build_metrics=metrics.build_metrics,
        stages=[
            _build_stage(name, stage_seconds, is_new_by_stage.get(name, ())) for name, stage_seconds in seconds.items()
        ],
        sizes=_sum_sizes(manifest),
        lineage=_list_lineage(manifest),
        history=read_history(manifest),
    )
    path = f"reports/{manifest.id}.html"
    store.files.write(path, render_build_report(report).encode())
    return store.files.url_of(path)


def _build_stage(name: str, seconds: float, is_new: Sequence[bool]) -> BuildStage:
    return BuildStage(name, seconds, sum(is_new), len(is_new) - sum(is_new))


def _count_unknown_templates(chunk_results: Sequence[ChunkResult]) -> dict[str, int]:
    """Return the most used templates that the cleaner does not know, and how many articles use
    each.
    """
    count_by_template = Counter[str]()
    for result in chunk_results:
        count_by_template.update(result.stats.unknown_templates)
    return dict(count_by_template.most_common(_MAX_UNKNOWN_TEMPLATES))


def _list_quarantined_pages(chunk_results: Sequence[ChunkResult]) -> list[tuple[str, str, str]]:
    pages = (page for result in chunk_results for page in result.stats.quarantined)
    return [(page.page_id, page.title, page.reason) for page in islice(pages, _MAX_QUARANTINED)]


def _sum_lengths(chunk_results: Sequence[ChunkResult]) -> dict[int, int]:
    length_counts: Counter[int] = Counter()
    for result in chunk_results:
        length_counts.update({int(n_words): n for n_words, n in result.stats.lengths.items()})
    return dict(sorted(length_counts.items()))


def _sum_sizes(manifest: Manifest) -> dict[str, int]:
    bytes_by_folder: Counter[str] = Counter()
    for path, blob in manifest.content.files.items():
        bytes_by_folder[path.partition("/")[0]] += blob.size
    return dict(bytes_by_folder)


def _list_lineage(manifest: Manifest) -> dict[str, str]:
    content, provenance = manifest.content, manifest.provenance
    lineage = {name: str(provenance[name]) for name in ("created_at", "dump", "encoder", "processor")}
    lineage |= {f"note {i}": note for i, note in enumerate(provenance["notes"], start=1)}
    lineage |= {f"recipe {name}".strip(): text for name, text in _iter_settings(content.recipe)}
    if content.space:
        lineage["encoder space"] = content.space["digest"]
    lineage |= {f"commit of {name}": hub_name for name, hub_name in provenance.get(COMMITS, {}).items()}
    lineage["parents"] = ", ".join(manifest.parents) or "none"
    return lineage | {f"version of {name}": version for name, version in provenance["versions"].items()}


def _iter_settings(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name of each table of a recipe, and its settings other than None as a
    line.
    """
    plain_settings = {
        name: setting for name, setting in table.items() if not isinstance(setting, Mapping) and setting is not None
    }
    if plain_settings:
        yield prefix, ", ".join(f"{name} = {json.dumps(setting)}" for name, setting in plain_settings.items())
    for name, setting in table.items():
        if isinstance(setting, Mapping):
            yield from _iter_settings(setting, f"{prefix}.{name}" if prefix else name)
