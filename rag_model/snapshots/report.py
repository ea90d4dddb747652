"""Fill the build report with the results of a run, and put the page into the store: `reports/<snapshot id>.html`."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from rag_model.evaluation.reports.build import BuildReport, Stage, render
from rag_model.snapshots.cut_part import CutPart
from rag_model.snapshots.encoded_part import EncodedPart
from rag_model.snapshots.measure import Measured
from rag_model.snapshots.publish import Published
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Manifest

_LISTED = 50  # quarantined pages in the report; the manifest's counts include all


def write_report(
    store: Store,
    manifest: Manifest,
    published: Published,
    measured: Measured,
    counts: Mapping[str, Any],
    passages: Sequence[CutPart],
    embeddings: Mapping[str, Sequence[EncodedPart]],
    seconds: Mapping[str, float],
) -> str:
    """Render a snapshot's report, store it, and return its URL.

    `passages` and, by stage, `embeddings` are the jobs' reports of each part; `seconds` are the stages' times, in
    order.
    """
    made = {"chunk": [cut.made for cut in passages]}
    made |= {stage: [report.made for report in its] for stage, its in embeddings.items()}
    corpus = manifest.content.corpus
    report = BuildReport(
        title=f"{corpus['dbname'] or corpus['kind']} {corpus['newest_revision'][:10]}".strip(),
        snapshot=manifest.id,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        verdict=published.verdict,
        counts={name: value for name, value in counts.items() if name != "dropped"},
        k=measured.k,
        dropped=counts["dropped"],
        quarantined=_quarantined(passages),
        lengths=_lengths(passages),
        curves=measured.curves,
        settings=measured.settings,
        health=measured.health,
        repaired=measured.repaired,
        stages=[_stage(name, spent, made.get(name, ())) for name, spent in seconds.items()],
        sizes=_sizes(manifest),
        lineage=_lineage(manifest),
    )
    path = f"reports/{manifest.id}.html"
    store.files.put(path, render(report).encode())
    return store.files.url_of(path)


def _stage(name: str, seconds: float, made: Sequence[bool]) -> Stage:
    return Stage(name, seconds, sum(made), len(made) - sum(made))


def _quarantined(passages: Sequence[CutPart]) -> list[tuple[str, str, str]]:
    pages = (page for cut in passages for page in cut.facts.quarantined)
    return [(page.page_id, page.title, page.reason) for page in islice(pages, _LISTED)]


def _lengths(passages: Sequence[CutPart]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for cut in passages:
        total.update({int(words): count for words, count in cut.facts.lengths.items()})
    return dict(sorted(total.items()))


def _sizes(manifest: Manifest) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for path, ref in manifest.content.files.items():
        sizes[path.partition("/")[0]] += ref.size
    return dict(sizes)


def _lineage(manifest: Manifest) -> dict[str, str]:
    content, made = manifest.content, manifest.provenance
    lines = {name: str(made[name]) for name in ("created_at", "dump", "encoder", "processor")}
    lines |= {f"note {number}": note for number, note in enumerate(made["notes"], start=1)}
    lines |= {f"recipe {name}".strip(): text for name, text in _settings(content.recipe)}
    if content.space:
        lines["encoder space"] = content.space["digest"]
    lines["parents"] = ", ".join(manifest.parents) or "none"
    return lines | {f"version of {name}": version for name, version in made["versions"].items()}


def _settings(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield each table of a recipe by its dotted name, with its plain settings on one line, without None."""
    plain = {name: value for name, value in table.items() if not isinstance(value, Mapping) and value is not None}
    if plain:
        yield above, ", ".join(f"{name} = {json.dumps(value)}" for name, value in plain.items())
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{above}.{name}" if above else name)
