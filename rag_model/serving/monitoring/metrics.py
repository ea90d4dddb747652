"""The Prometheus metrics of a service: requests, the served snapshot, and its quality.

Counters and histograms are updated at each event. Gauges, which show the state (the snapshot, ages,
the windows of `QualityMonitor`), are computed at each scrape. A metric whose value is unknown is
not exported. The alerts (`infra/prometheus/alerts.yml`) and the dashboard
(`infra/grafana/bookwheel.json`) use these names.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, get_args

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from rag_model.evaluation.answers.collapse import CollapseStats
from rag_model.evaluation.matching import tokenize
from rag_model.reading.answer import Answer, Memory, TokenUsage
from rag_model.serving.answering.loaded_snapshot import LoadedSnapshot, ServedRef
from rag_model.serving.monitoring.observer import Observer, Refusal, SearchBatch
from rag_model.serving.monitoring.overrides import (
    GIVEN,
    OUTCOMES,
    OverrideCheck,
    OverrideMonitor,
    can_check_overrides,
    classify_outcome,
    create_override_checker,
    is_unsupported,
    list_texts_read,
)
from rag_model.serving.monitoring.probes import ProbeMetrics, ProbeMonitor
from rag_model.serving.monitoring.quality import QualityMetrics, QualityMonitor
from rag_model.serving.runtime import THREAD_NAMES, SupervisedThread
from rag_model.serving.settings import ServiceSettings
from rag_model.serving.workers import WorkerLink
from rag_model.store.versions.build_history import Trend, compute_trends, read_history
from rag_model.store.versions.manifest import Manifest

# (name, help text, value); a gauge is not exported if its value is None
_Gauge = tuple[str, str, float | None]
CONTENT_TYPE = CONTENT_TYPE_LATEST
_STATE_FILE = "state.prom"  # file of the leader's gauges in `WorkerLink.metrics_folder`
_MAX_STATE_SECONDS = 60.0  # older gauges are not exported, because then the leader is not running
# upper bounds of the buckets of histograms, in seconds for times
_TIME_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SWAP_BUCKETS = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)
_SHARE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0)
_BATCH_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class ServedSnapshotInfo:
    """The served snapshot, and the recall that the gate measured, if the manifest has it."""

    snapshot: str
    ref: str
    number: int  # number of the entry in the ref's log
    index: str  # the default retriever: an index or an expression
    created: float | None  # Unix time of the build, by the builder's clock
    recall_mean: float | None
    recall_p5: float | None
    trends: tuple[Trend, ...] = ()  # trends in recent builds

    @classmethod
    def from_manifest(cls, manifest: Manifest, served_ref: ServedRef, index: str) -> "ServedSnapshotInfo":
        """Read the values from a manifest, whose content is not trusted."""
        gate_metrics = manifest.metrics.get(index)
        gate_metrics = gate_metrics if isinstance(gate_metrics, dict) else {}
        recall_name = next((name for name in gate_metrics if re.fullmatch(r"recall@\d+", name)), "")
        recalls = _parse_share(gate_metrics.get(recall_name)), _parse_share(gate_metrics.get(f"{recall_name}_p5"))
        return cls(
            manifest.id,
            served_ref.ref,
            served_ref.number,
            index,
            _parse_unix_time(manifest.provenance.get("created_at")),
            *recalls,
            (*compute_trends(read_history(manifest)),),
        )


@dataclass(frozen=True, slots=True)
class ScrapeState:
    """The state of a service at the time of a scrape; times are Unix times."""

    now: float
    served_snapshot: ServedSnapshotInfo | None
    # why the version that the ref names is not served; None if it is served
    refusal: Refusal | None
    store_seen_at: float | None  # time of the last successful poll of the ref
    quality: QualityMetrics
    probes: ProbeMetrics | None = None

    def iter_metrics(self) -> Iterator[Metric]:
        """Yield the metric families of the state."""
        if (info := self.served_snapshot) is not None:
            names = {"snapshot": info.snapshot, "ref": info.ref, "index": info.index}
            yield InfoMetricFamily("bookwheel_snapshot", "The served snapshot.", value=names)
        if self.refusal is not None:
            refusal = self.refusal
            names = {"snapshot": refusal.snapshot, "ref": refusal.ref, "number": str(refusal.number)}
            yield InfoMetricFamily("bookwheel_snapshot_refused", "The refused version that the ref names.", value=names)
        for name, doc, gauge_value in self._iter_gauges():
            if gauge_value is not None:
                yield GaugeMetricFamily(f"bookwheel_{name}", doc, value=gauge_value)
        yield from _build_trend_metrics(self.served_snapshot.trends if self.served_snapshot else ())
        yield from _build_collapse_metrics(self.quality.collapse)

    def _iter_gauges(self) -> Iterator[_Gauge]:
        doc = "Time since the last successful poll of the ref."
        yield "ref_seen_age_seconds", doc, _compute_age(self.now, self.store_seen_at)
        if (served_snapshot := self.served_snapshot) is not None:
            yield "ref_number", "Number of the served move of the ref.", served_snapshot.number
            yield (
                "snapshot_age_seconds",
                "Time since the snapshot was built.",
                _compute_age(self.now, served_snapshot.created),
            )
            yield "gate_recall_mean_ratio", "Recall in the gate, mean.", served_snapshot.recall_mean
            yield "gate_recall_p5_ratio", "Recall in the gate, 5th percentile.", served_snapshot.recall_p5
        doc = "Recall of sampled questions against exact search,"
        yield "recall_mean_ratio", f"{doc} mean.", self.quality.recall_mean
        yield "recall_p5_ratio", f"{doc} 5th percentile.", self.quality.recall_p5
        doc = "Drift of live questions from the evaluation's: squared MMD over its variance."
        yield "question_drift_ratio", doc, self.quality.drift
        if (probe_metrics := self.probes) is not None:
            doc = "Share of probe questions that the model answers as recorded, without passages."
            yield "probe_same_ratio", doc, probe_metrics.same
            doc = "Change of the recorded answers' log-likelihood under the served model, mean nats a token."
            yield "probe_likelihood_difference_nats", doc, probe_metrics.difference


def _build_trend_metrics(trends: Iterable[Trend]) -> Iterator[Metric]:
    doc = "Median of the last builds over that of earlier ones: recall, distances per query, or cost."
    gauge = GaugeMetricFamily("bookwheel_builds_trend_ratio", doc, labels=["measure", "index"])
    for trend in trends:
        gauge.add_metric([trend.measure, trend.index], trend.ratio)
    if gauge.samples:
        yield gauge


def _build_collapse_metrics(collapse_by_verb: Mapping[str, CollapseStats]) -> Iterator[Metric]:
    doc = "Distinct passages among all hits of the window's distinct questions."
    distinct_metric = GaugeMetricFamily("bookwheel_retrieval_distinct_ratio", doc, labels=["verb"])
    doc = "Entropy of the hits over passages: 0 = all questions share their passages, 1 = uniform."
    spread_metric = GaugeMetricFamily("bookwheel_retrieval_spread_ratio", doc, labels=["verb"])
    for verb, collapse in collapse_by_verb.items():
        distinct_metric.add_metric([verb], collapse.distinct / (collapse.questions * collapse.k) if collapse.k else 0.0)
        spread_metric.add_metric([verb], collapse.spread)
    return iter((distinct_metric, spread_metric))


def _compute_age(now: float, event_time: float | None) -> float | None:
    return None if event_time is None else max(0.0, now - event_time)


def _parse_unix_time(time_text: Any) -> float | None:
    """Return the Unix time of an ISO 8601 string; None for any other value."""
    try:
        time = datetime.fromisoformat(time_text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _parse_share(share: Any) -> float | None:
    return float(share) if isinstance(share, int | float) and 0 <= share <= 1 else None


class ServiceMetrics(Observer):
    """The metrics of one service, updated by its events. Thread-safe."""

    def __init__(
        self,
        settings: ServiceSettings,
        quality: QualityMonitor | None = None,
        clock: Callable[[], float] = time.time,
        link: WorkerLink | None = None,
        probes: ProbeMonitor | None = None,
    ) -> None:
        """Create the metrics of a service; `clock` returns the Unix time in seconds.

        With `link`, counters and histograms include all workers of the service. Metrics of the
        snapshot and its quality come from the leader, whose questions are a random sample of all
        questions.
        """
        self._link = link
        self._is_leader = link is None or link.is_leader
        self._registry = CollectorRegistry()
        self._queue_limits = {"search": settings.queue_questions, "answer": settings.queue_answers}
        self._requests = self._create_histogram(
            "request_seconds", "Time of a request.", _TIME_BUCKETS, "verb", "status"
        )
        doc = "Share of the queue in use when a request entered it."
        self._queue = self._create_histogram("queue_filled_ratio", doc, _SHARE_BUCKETS, "verb")
        self._batch_sizes = self._create_histogram("batch_questions", "Questions in a batch.", _BATCH_SIZE_BUCKETS)
        self._encode_seconds = self._create_histogram("batch_encode_seconds", "Time to encode a batch.", _TIME_BUCKETS)
        self._search_seconds = self._create_histogram("batch_search_seconds", "Time to search a batch.", _TIME_BUCKETS)
        doc = "Time of an answer by stage, as its share of the batch's time; stages add up to the answer."
        self._stages = self._create_histogram("answer_stage_seconds", doc, (*_TIME_BUCKETS, 60.0), "stage")
        self._swap_seconds = self._create_histogram(
            "swap_seconds", "Time to pull, check and open a new snapshot.", _SWAP_BUCKETS
        )
        doc = "Loaded snapshots: the current one, those that requests named, and those being drained."
        self._loaded_snapshots = Gauge("bookwheel_editions", doc, registry=self._registry, multiprocess_mode="livemax")
        self._swaps = self._create_counter("swaps", "Attempts to swap to a new snapshot: ok or refused.", "outcome")
        self._polls = self._create_counter("looks", "Polls of the ref: ok or failed.", "outcome")
        self._deaths = self._create_counter("thread_deaths", "Threads that died and were restarted.", "thread")
        for thread in THREAD_NAMES:
            self._deaths.labels(thread)
        if link is not None and link.is_restarted:
            self._deaths.labels("worker").inc()
        doc = "Answers: given, empty (the model wrote nothing), or abstained (below the threshold)."
        self._answers = self._create_counter("answers", doc, "outcome")
        doc = "Answers given whose words, numbers and names are in none of their passages."
        self._unsupported = self._create_counter("answers_unsupported", doc)
        doc = "Answers given from numbered passages, with or without a citation."
        self._numbered_answers = self._create_counter("answers_numbered", doc, "cited")
        doc = "Tokens that models read and wrote, for answers, override checks and probes."
        self._tokens = self._create_counter("tokens", doc, "use", "kind")
        doc = "Answers given, by the memory that they are from: weights or passages."
        self._memories = self._create_counter("answers_memory", doc, "memory")
        for counter, outcomes in (
            (self._answers, OUTCOMES),
            (self._numbered_answers, ("yes", "no")),
            (self._memories, get_args(Memory)),
            (self._swaps, ("ok", "refused")),
            (self._polls, ("ok", "failed")),
        ):
            for outcome in outcomes:
                # Create the counter, so that 0 is exported and Prometheus sees the first increase.
                counter.labels(outcome)
        self.quality, self._clock = quality or QualityMonitor(), clock
        self.quality.thread.on_thread_death = self.on_thread_death
        self._override_every = settings.override_every
        self.overrides = OverrideMonitor(settings.override_every, self._record_check, settings.request_seconds)
        self.overrides.thread.on_thread_death = self.on_thread_death
        self.probes = probes or ProbeMonitor()
        self.probes.on_usage = partial(self._count_tokens, "probe")
        self.probes.thread.on_thread_death = self.on_thread_death
        # These metrics are not exported until a model is served that can be checked.
        self._sampled_answers: Counter | None = None
        self._override_answers: Counter | None = None
        self._unchecked_answers: Counter | None = None
        self.served_snapshot: ServedSnapshotInfo | None = None
        # why the version that the ref names is not served; None if it is served
        self.refusal: Refusal | None = None
        self.store_seen_at: float | None = None  # time of the last successful poll
        if link is None:
            self._registry.register(_ScrapeCollector(self.collect_state))
            ProcessCollector(registry=self._registry)

    def collect_state(self) -> ScrapeState:
        """Collect the state for a scrape."""
        return ScrapeState(
            self._clock(),
            self.served_snapshot,
            self.refusal,
            self.store_seen_at,
            self.quality.compute_metrics(),
            self.probes.compute_metrics(),
        )

    def render_exposition(self) -> bytes:
        """Return all metrics in the exposition format of `CONTENT_TYPE`."""
        if self._link is None:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(self._link.metrics_folder))  # type: ignore[no-untyped-call]
        registry.register(_ProcessesCollector(self._link))
        state_file = self._link.metrics_folder / _STATE_FILE
        with suppress(OSError):  # the leader may not have written the file yet
            if time.time() - state_file.stat().st_mtime < _MAX_STATE_SECONDS:
                return generate_latest(registry) + state_file.read_bytes()
        return generate_latest(registry)

    def share_state(self) -> None:
        """Write the leader's gauges to a file, which the other workers add to their metrics."""
        if self._link is not None:
            registry = CollectorRegistry()
            registry.register(_ScrapeCollector(self.collect_state))
            new_file = self._link.metrics_folder / f"{_STATE_FILE}.new"
            new_file.write_bytes(generate_latest(registry))
            new_file.replace(self._link.metrics_folder / _STATE_FILE)

    def on_queued(self, verb: str, n_questions: int, waiting: int) -> None:
        """Record the share of the queue that is in use."""
        self._queue.labels(verb).observe(waiting / self._queue_limits[verb])

    def on_reply(self, verb: str, status: int, n_questions: int, seconds: float) -> None:
        """Record a reply's status and time."""
        self._requests.labels(verb, str(status)).observe(seconds)

    def on_search(self, batch: SearchBatch) -> None:
        """Record the size and times of a batch, and monitor the default retriever's hits."""
        self._batch_sizes.observe(len(batch.questions))
        self._encode_seconds.observe(batch.encode_seconds)
        self._search_seconds.observe(batch.search_seconds)
        if batch.retriever == batch.loaded_snapshot.retrievers[0]:
            ks = [batch.loaded_snapshot.choose_depth(k) for k in batch.ks]
            self.quality.record_search(batch.loaded_snapshot.id, batch.questions, batch.vectors, ks, batch.hits)

    def on_answer(self, loaded_snapshot: LoadedSnapshot, answers: Sequence[Answer]) -> None:
        """Record times, outcomes and tokens of answers, and whether passages support them."""
        self.quality.record_answers(loaded_snapshot.id, answers)
        for answer in answers:
            for stage, seconds in answer.seconds.items():
                self._stages.labels(stage).observe(seconds)
            outcome = classify_outcome(answer)
            self._answers.labels(outcome).inc()
            self._count_tokens("answer", answer.usage)
            if outcome == GIVEN:
                self._record_given_answer(loaded_snapshot, answer)

    def on_swap(self, loaded_snapshot: LoadedSnapshot, seconds: float) -> None:
        """Record the new snapshot, and start to monitor its quality."""
        if self._is_leader:
            if self.served_snapshot is not None:
                self._swaps.labels("ok").inc()
            self._swap_seconds.observe(seconds)
            encoder = loaded_snapshot.question_encoder
            encode_questions = None if encoder is None else encoder.encode_questions
            index, search_parameters = loaded_snapshot.monitored_index or (None, {})
            self.quality.start_monitoring(loaded_snapshot.snapshot, index, search_parameters, encode=encode_questions)
            self.probes.start_monitoring(loaded_snapshot.model)
        self.overrides.clear()
        if can_check_overrides(loaded_snapshot.model) and self._sampled_answers is None and self._override_every:
            self._sampled_answers = self._create_counter(
                "answers_sampled", "Answers given from passages that were checked."
            )
            doc = "Sampled answers that no passage supports and that the model also gives without passages."
            self._override_answers = self._create_counter("answers_override", doc)
            doc = "Sampled answers whose check failed; they are not among the checked ones."
            self._unchecked_answers = self._create_counter("answers_unchecked", doc)
        if loaded_snapshot.model is not None:
            # The first call takes half a second; it is made here, so that the first answer does not
            # wait.
            tokenize("")
        self.on_same_snapshot_named(loaded_snapshot, loaded_snapshot.served_ref)

    def on_same_snapshot_named(self, loaded_snapshot: LoadedSnapshot, served_ref: ServedRef) -> None:
        """Record that the ref moved."""
        manifest, retriever = loaded_snapshot.snapshot.manifest, loaded_snapshot.retrievers[0]
        self.served_snapshot = ServedSnapshotInfo.from_manifest(manifest, served_ref, retriever)
        self.refusal = None

    def on_loaded(self, snapshot: str) -> None:
        """Count a snapshot in memory."""
        self._loaded_snapshots.inc()

    def on_freed(self, snapshot: str) -> None:
        """Record that a snapshot's memory is free."""
        self._loaded_snapshots.dec()

    def on_withdrawn(self, snapshot: str) -> None:
        """Record that nothing is served."""
        self.served_snapshot = None
        self.quality.stop_monitoring()
        self.probes.start_monitoring(None)
        self.overrides.clear()

    def on_refused(self, refusal: Refusal) -> None:
        """Record a refused version."""
        self._swaps.labels("refused").inc()
        self.refusal = refusal

    def on_poll(self, problem: str) -> None:
        """Record whether the store answered."""
        self._polls.labels("failed" if problem else "ok").inc()
        if problem:
            return
        self.store_seen_at = self._clock()
        if self.refusal is not None and not self.refusal.snapshot:
            # The record of the ref was unreadable. If it is still unreadable, `on_refused` is
            # called again.
            self.refusal = None

    def on_thread_death(self, thread: str) -> None:
        """Count the deaths of threads."""
        self._deaths.labels(thread).inc()

    @property
    def threads(self) -> Sequence[SupervisedThread]:
        """The threads of the monitors."""
        return (self.quality.thread, self.overrides.thread, self.probes.thread)

    def close(self) -> None:
        """Stop the monitors."""
        self.quality.close()
        self.overrides.close()
        self.probes.close()

    def _record_given_answer(self, loaded_snapshot: LoadedSnapshot, answer: Answer) -> None:
        """Record an answer's source (weights or passages), its citations, and its support."""
        if answer.memory is not None:
            self._memories.labels(answer.memory).inc()
        lacks_support = is_unsupported(answer)
        if lacks_support:
            self._unsupported.inc()
        if answer.context:
            self._numbered_answers.labels("yes" if answer.citations else "no").inc()
        model = loaded_snapshot.model
        if model is not None and can_check_overrides(model) and list_texts_read(answer):
            self.overrides.record_answer(partial(create_override_checker, model), answer, unsupported=lacks_support)

    def _record_check(self, check: OverrideCheck | None) -> None:
        """Record the result of an override check; None if the check failed."""
        if self._sampled_answers is None or self._override_answers is None or self._unchecked_answers is None:
            return
        if check is None:
            self._unchecked_answers.inc()
            return
        self._count_tokens("check", check.usage)
        self._sampled_answers.inc()
        self._override_answers.inc(check.override)

    def _count_tokens(self, purpose: str, usage: TokenUsage | None) -> None:
        """Count the tokens of an answer, an override check, or a round of probe questions."""
        if usage is not None:
            self._tokens.labels(purpose, "read").inc(usage.prompt_tokens)
            self._tokens.labels(purpose, "written").inc(usage.new_tokens)

    def _create_histogram(self, name: str, doc: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return Histogram(f"bookwheel_{name}", doc, labels, buckets=tuple(buckets), registry=self._registry)

    def _create_counter(self, name: str, doc: str, *labels: str) -> Counter:
        return Counter(f"bookwheel_{name}", doc, labels, registry=self._registry)


class _ProcessesCollector(Collector):
    """Sums the kernel's statistics of all processes; shared memory is counted in each process."""

    def __init__(self, link: WorkerLink) -> None:
        self._link = link

    def collect(self) -> Iterator[Metric]:
        total_by_name: dict[str, Metric] = {}
        process_ids = self._link.process_ids
        for process_id in process_ids:
            for metric in ProcessCollector(pid=partial(int, process_id), registry=None).collect():
                value = metric.samples[0].value
                if metric.name not in total_by_name:
                    total_by_name[metric.name] = metric
                    continue
                sample = total_by_name[metric.name].samples[0]
                total_value = min(sample.value, value) if "start_time" in metric.name else sample.value + value
                total_by_name[metric.name].samples[0] = sample._replace(value=total_value)
        yield from total_by_name.values()
        # The supervisor is not a worker.
        yield GaugeMetricFamily("bookwheel_workers", "Running processes that answer.", value=len(process_ids) - 1)


class _ScrapeCollector(Collector):
    def __init__(self, collect_state: Callable[[], ScrapeState]) -> None:
        self._collect_state = collect_state

    def collect(self) -> Iterator[Metric]:
        return self._collect_state().iter_metrics()
