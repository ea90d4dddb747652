"""The state of a service at the moment of a scrape: what it serves, since when, and its quality."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric

from rag_model.evaluation.answers.collapse import Collapse
from rag_model.serving.answering.edition import ServedRef
from rag_model.serving.watching.observer import Refusal
from rag_model.serving.watching.windows import Figures
from rag_model.store.versions.manifest import Manifest

_Gauge = tuple[str, str, float | None]  # name, what it says, value; None: it can't be known, and is left out


@dataclass(frozen=True, slots=True)
class Served:
    """The snapshot that is served, and its recall by the gate; None: not in its manifest."""

    snapshot: str
    ref: str
    number: int  # of the ref's move that named it
    index: str  # the first retriever: an index, or an expression
    created: float | None  # Unix time, by its builder's clock
    recall_mean: float | None  # that the gate measured of the index
    recall_p5: float | None

    @classmethod
    def of(cls, manifest: Manifest, named: ServedRef, index: str) -> "Served":
        """Read it from a manifest, which anyone may have written."""
        figures = manifest.metrics.get(index)
        figures = figures if isinstance(figures, dict) else {}
        mean = next((name for name in figures if re.fullmatch(r"recall@\d+", name)), "")
        recalls = _share(figures.get(mean)), _share(figures.get(f"{mean}_p5"))
        return cls(manifest.id, named.ref, named.number, index, _unix(manifest.provenance.get("created_at")), *recalls)


@dataclass(frozen=True, slots=True)
class State:
    """What a service is like now; times are Unix times."""

    now: float
    served: Served | None
    refusal: Refusal | None  # of what the ref names
    seen: float | None  # when the store was last asked for the ref and answered
    figures: Figures

    def families(self) -> Iterator[Metric]:
        """Yield it as Prometheus takes it."""
        if self.served is not None:
            names = {"snapshot": self.served.snapshot, "ref": self.served.ref, "index": self.served.index}
            yield InfoMetricFamily("bookwheel_snapshot", "What is served.", value=names)
        if self.refusal is not None:
            names = {"snapshot": self.refusal.snapshot, "ref": self.refusal.ref, "number": str(self.refusal.number)}
            yield InfoMetricFamily("bookwheel_snapshot_refused", "The refused version that the ref names.", value=names)
        for name, text, value in chain(self._gauges(), _snapshot(self.served, self.now), _quality(self.figures)):
            if value is not None:
                yield GaugeMetricFamily(f"bookwheel_{name}", text, value=value)
        yield from _collapse(self.figures.collapse)

    def _gauges(self) -> Iterator[_Gauge]:
        yield "ref_seen_age_seconds", "Time since the store last said what the ref names.", _age(self.now, self.seen)


def _snapshot(served: Served | None, now: float) -> Iterator[_Gauge]:
    if served is not None:
        yield "ref_number", "The ref's move that is served.", served.number
        yield "snapshot_age_seconds", "Time since the snapshot was built.", _age(now, served.created)
        yield "gate_recall_mean_ratio", "The index's recall by its gate, mean.", served.recall_mean
        yield "gate_recall_p5_ratio", "The index's recall by its gate, 5th percentile.", served.recall_p5


def _collapse(measured: Mapping[str, Collapse]) -> Iterator[Metric]:
    text = "Different passages of all that the window's different questions were given."
    distinct = GaugeMetricFamily("bookwheel_retrieval_distinct_ratio", text, labels=["verb"])
    text = "Their entropy: 0 = all questions share their passages, 1 = as even as can be."
    spread = GaugeMetricFamily("bookwheel_retrieval_spread_ratio", text, labels=["verb"])
    for verb, one in measured.items():
        distinct.add_metric([verb], one.distinct / (one.questions * one.k) if one.k else 0.0)
        spread.add_metric([verb], one.spread)
    return iter((distinct, spread))


def _quality(known: Figures) -> Iterator[_Gauge]:
    yield "recall_mean_ratio", "What sampled questions were given of exact search's, mean.", known.recall_mean
    yield "recall_p5_ratio", "What sampled questions were given of exact search's, 5th percentile.", known.recall_p5
    text = "How far questions lie from the evaluation's: squared MMD over its variance."
    yield "question_drift_ratio", text, known.drift


def _age(now: float, then: float | None) -> float | None:
    return None if then is None else max(0.0, now - then)


def _unix(value: Any) -> float | None:
    """Return the Unix time of an ISO 8601 text; None of anything else."""
    try:
        read = datetime.fromisoformat(value)
        return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _share(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value <= 1 else None
