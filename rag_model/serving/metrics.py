"""What a Prometheus server scrapes: how the service does, what it serves, and how good that is.

Counts and times are kept as they come; what is a state (the queue, the snapshot, ages, the windows of `Quality`) is
read at the moment of the scrape. A figure that can't be known is absent. The alarms (`infra/prometheus/alerts.yml`)
and the dashboard (`infra/grafana/bookwheel.json`) live by these names.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from rag_model.serving.edition import Edition, Named
from rag_model.serving.observer import Batch, Observer, Refusal
from rag_model.serving.quality import Quality
from rag_model.serving.settings import ServiceSettings
from rag_model.serving.windows import Figures
from rag_model.store.manifest import Manifest

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_MINUTES = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)
_SHARES = (0.05, 0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_Gauge = tuple[str, str, float | None]  # name, what it says, value


@dataclass(frozen=True, slots=True)
class Served:
    """What the service answers from, and what was promised of it; None: its manifest does not say."""

    snapshot: str
    ref: str
    number: int  # of the ref's move that named it
    index: str
    created: float | None  # Unix time, by its builder's clock
    recall_mean: float | None  # that the gate measured of the index
    recall_p5: float | None

    @classmethod
    def of(cls, manifest: Manifest, named: Named, index: str) -> "Served":
        """Read it from a manifest, which anyone may have written."""
        figures = manifest.metrics.get(index)
        figures = figures if isinstance(figures, dict) else {}
        mean = next((name for name in figures if re.fullmatch(r"recall@\d+", name)), "")
        recalls = _share(figures.get(mean)), _share(figures.get(f"{mean}_p5"))
        return cls(manifest.id, named.ref, named.number, index, _unix(manifest.provenance.get("created_at")), *recalls)


class Metrics(Observer):
    """The metrics of one service, kept as it tells. Safe among threads."""

    def __init__(
        self, settings: ServiceSettings, quality: Quality | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """Watch a service that works as `settings` say; `clock` returns Unix time, in seconds."""
        self._registry = CollectorRegistry()
        self._limits = {"search": settings.queue_questions, "answer": settings.queue_answers}
        self._requests = self._histogram("request_seconds", "Time of a request.", _SECONDS, "verb", "status")
        self._queue = self._histogram("queue_filled_ratio", "How full a request met the queue.", _SHARES, "verb")
        self._sizes = self._histogram("batch_questions", "Questions in a batch.", _SIZES)
        self._encoding = self._histogram("batch_encode_seconds", "Time to encode a batch.", _SECONDS)
        self._searching = self._histogram("batch_search_seconds", "Time to search a batch.", _SECONDS)
        self._taking = self._histogram("swap_seconds", "Time to bring a snapshot that was taken.", _MINUTES)
        self._swaps = self._counter("swaps", "Tries to take a newer snapshot: ok or refused.", "outcome")
        self._looks = self._counter("looks", "Looks at the ref: ok or failed.", "outcome")
        for counter, outcomes in ((self._swaps, ("ok", "refused")), (self._looks, ("ok", "failed"))):
            for outcome in outcomes:
                counter.labels(outcome)  # there from the start, so that the first increase is seen
        self._registry.register(_State(self))
        ProcessCollector(registry=self._registry)
        self.quality, self.clock = quality or Quality(), clock
        self.served: Served | None = None
        self.refusal: Refusal | None = None  # of what the ref names now
        self.seen: float | None = None  # when the ref was read last
        self.editions = 0

    def exposition(self) -> bytes:
        """Return everything in Prometheus' text format, of type `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def asked(self, verb: str, questions: int, waiting: int) -> None:
        """Note how full the queue is."""
        self._queue.labels(verb).observe(waiting / self._limits[verb])

    def replied(self, verb: str, status: int, questions: int, seconds: float) -> None:
        """Note a reply's status and time."""
        self._requests.labels(verb, str(status)).observe(seconds)

    def searched(self, batch: Batch) -> None:
        """Note a batch's size and times, and what was asked and found in the index that is watched."""
        self._sizes.observe(len(batch.questions))
        self._encoding.observe(batch.encode_seconds)
        self._searching.observe(batch.search_seconds)
        watched = [place for place, index in enumerate(batch.indexes) if index == batch.edition.indexes[0]]
        self.quality.saw(
            batch.edition.id,
            [batch.questions[place] for place in watched],
            batch.vectors[watched],
            [batch.ks[place] for place in watched],
            [batch.hits[place] for place in watched],
        )

    def serves(self, edition: Edition, seconds: float) -> None:
        """Note what is served from now on, and watch it."""
        if self.served is not None:
            self._swaps.labels("ok").inc()
        self._taking.observe(seconds)
        self.editions += 1
        self.quality.follow(edition.snapshot, edition.indexes[0], edition.asker.encode_questions)
        self.renamed(edition, edition.named)

    def renamed(self, edition: Edition, named: Named) -> None:
        """Note by which move of the ref it is served."""
        self.served = Served.of(edition.snapshot.manifest, named, edition.indexes[0])
        self.refusal = None

    def freed(self, snapshot: str) -> None:
        """Note that an edition's memory is free."""
        self.editions -= 1

    def refused(self, refusal: Refusal) -> None:
        """Note that the ref names what is not served."""
        self._swaps.labels("refused").inc()
        self.refusal = refusal

    def looked(self, problem: str) -> None:
        """Note whether the store answered."""
        self._looks.labels("failed" if problem else "ok").inc()
        if problem:
            return
        self.seen = self.clock()
        if self.refusal is not None and not self.refusal.snapshot:
            self.refusal = None  # a ref that could not be read: whoever looked says so again if it still can't

    def close(self) -> None:
        """Stop watching."""
        self.quality.close()

    def _histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return Histogram(f"bookwheel_{name}", text, labels, buckets=tuple(buckets), registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"bookwheel_{name}", text, labels, registry=self._registry)


class _State(Collector):
    """What is true at the moment of the scrape."""

    def __init__(self, of: Metrics) -> None:
        self._of = of

    def collect(self) -> Iterator[Metric]:
        of, now = self._of, self._of.clock()
        if of.served is not None:
            names = {"snapshot": of.served.snapshot, "ref": of.served.ref, "index": of.served.index}
            yield InfoMetricFamily("bookwheel_snapshot", "What is served.", value=names)
        if of.refusal is not None:
            names = {"snapshot": of.refusal.snapshot, "ref": of.refusal.ref, "number": str(of.refusal.number)}
            yield InfoMetricFamily("bookwheel_snapshot_refused", "What the ref names and is not served.", value=names)
        yield GaugeMetricFamily("bookwheel_editions", "Editions in memory: one, and those being drained.", of.editions)
        for name, text, value in chain(_ref(of.seen, now), _snapshot(of.served, now), _quality(of.quality.figures())):
            if value is not None:
                yield GaugeMetricFamily(f"bookwheel_{name}", text, value=value)


def _ref(seen: float | None, now: float) -> Iterator[_Gauge]:
    yield "ref_seen_age_seconds", "Time since the store was last asked for the ref and answered.", _age(now, seen)


def _snapshot(served: Served | None, now: float) -> Iterator[_Gauge]:
    if served is not None:
        yield "ref_number", "The ref's move that is served.", served.number
        yield "snapshot_age_seconds", "Time since the snapshot was built.", _age(now, served.created)
        yield "gate_recall_mean_ratio", "The index's recall by its gate, mean.", served.recall_mean
        yield "gate_recall_p5_ratio", "The index's recall by its gate, 5th percentile.", served.recall_p5


def _quality(known: Figures) -> Iterator[_Gauge]:
    if known.collapse is not None:
        given = known.collapse.questions * known.collapse.k
        text = "Different passages of all that the window's different questions were given."
        yield "retrieval_distinct_ratio", text, known.collapse.distinct / given if given else None
        text = "Their entropy: 0 = all questions share their passages, 1 = as even as can be."
        yield "retrieval_spread_ratio", text, known.collapse.spread
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
