"""Write the build report of a run to the store, at `reports/<snapshot id>.html`."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from rag_model.evaluation.reports.build import BuildReport, BuildStage, render_build_report
from rag_model.snapshots.encoding import COMMITS
from rag_model.snapshots.measure import SnapshotMetrics
from rag_model.snapshots.publish import PublishResult
from rag_model.snapshots.stage_results import ChunkResult, EmbedResult
from rag_model.store.store import Store
from rag_model.store.versions.build_history import read_history
from rag_model.store.versions.manifest import Manifest

_MAX_QUARANTINED = 50  # quarantined pages in the report; the manifest's counts include all


def write_report(
    store: Store,
    manifest: Manifest,
    published: PublishResult,
    metrics: SnapshotMetrics,
    counts: Mapping[str, Any],
    passages: Sequence[ChunkResult],
    embeddings: Mapping[str, Sequence[EmbedResult]],
    seconds: Mapping[str, float],
) -> str:
    """Render a snapshot's report, store it, and return its URL.

    `passages` and, by stage, `embeddings` are the results of each part; `seconds` are the stages'
    times in order.
    """
    is_new_by_stage = {"chunk": [result.is_new for result in passages]}
    is_new_by_stage |= {stage: [report.is_new for report in results] for stage, results in embeddings.items()}
    corpus = manifest.content.corpus
    report = BuildReport(
        title=f"{corpus['dbname'] or corpus['kind']} {corpus['newest_revision'][:10]}".strip(),
        snapshot=manifest.id,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        verdict=published.verdict,
        counts={name: value for name, value in counts.items() if name != "dropped"},
        k=metrics.k,
        dropped=counts["dropped"],
        quarantined=_list_quarantined(passages),
        lengths=_sum_lengths(passages),
        curves=metrics.curves,
        settings=metrics.operating_points,
        health=metrics.health,
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


def _list_quarantined(passages: Sequence[ChunkResult]) -> list[tuple[str, str, str]]:
    pages = (page for result in passages for page in result.stats.quarantined)
    return [(page.page_id, page.title, page.reason) for page in islice(pages, _MAX_QUARANTINED)]


def _sum_lengths(passages: Sequence[ChunkResult]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for result in passages:
        total.update({int(words): count for words, count in result.stats.lengths.items()})
    return dict(sorted(total.items()))


def _sum_sizes(manifest: Manifest) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for path, ref in manifest.content.files.items():
        sizes[path.partition("/")[0]] += ref.size
    return dict(sizes)


def _list_lineage(manifest: Manifest) -> dict[str, str]:
    content, provenance = manifest.content, manifest.provenance
    lines = {name: str(provenance[name]) for name in ("created_at", "dump", "encoder", "processor")}
    lines |= {f"note {number}": note for number, note in enumerate(provenance["notes"], start=1)}
    lines |= {f"recipe {name}".strip(): text for name, text in _iter_settings(content.recipe)}
    if content.space:
        lines["encoder space"] = content.space["digest"]
    lines |= {f"commit of {name}": hub_name for name, hub_name in provenance.get(COMMITS, {}).items()}
    lines["parents"] = ", ".join(manifest.parents) or "none"
    return lines | {f"version of {name}": version for name, version in provenance["versions"].items()}


def _iter_settings(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each table of a recipe by its dotted name, with its plain settings on one line, without
    None.
    """
    plain = {name: value for name, value in table.items() if not isinstance(value, Mapping) and value is not None}
    if plain:
        yield prefix, ", ".join(f"{name} = {json.dumps(value)}" for name, value in plain.items())
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _iter_settings(value, f"{prefix}.{name}" if prefix else name)
