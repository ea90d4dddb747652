"""The metrics that Prometheus scrapes: requests and times, what is served, and its quality.

Counts and times are updated at each event; state (the snapshot, ages, the windows of `Quality`) is read at the moment
of the scrape. A figure that is unknown is absent. The alarms (`infra/prometheus/alerts.yml`) and the dashboard
(`infra/grafana/bookwheel.json`) use these names.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from rag_model.evaluation.questions.match import tokens
from rag_model.reading.answer import Answer, Usage
from rag_model.serving.answering.edition import Edition, ServedRef
from rag_model.serving.service_settings import ServiceSettings
from rag_model.serving.threads import THREADS, WatchedThread
from rag_model.serving.watching.grounding import GIVEN, OUTCOMES, is_unsupported, outcome_of, texts_read
from rag_model.serving.watching.memory import Checked, has_memory, memory_of
from rag_model.serving.watching.observer import Batch, Observer, Refusal
from rag_model.serving.watching.overrides import Overrides
from rag_model.serving.watching.quality import Quality
from rag_model.serving.watching.state import Served, State

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_MINUTES = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)
_SHARES = (0.05, 0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


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
        text = "Time of an answer by stage, its share of a batch's; stages add up to the answer."
        self._stages = self._histogram("answer_stage_seconds", text, (*_SECONDS, 60.0), "stage")
        self._taking = self._histogram("swap_seconds", "Time to bring a snapshot that was taken.", _MINUTES)
        text = "Editions in memory: one, and those being drained."
        self._editions = Gauge("bookwheel_editions", text, registry=self._registry)
        self._swaps = self._counter("swaps", "Tries to take a newer snapshot: ok or refused.", "outcome")
        self._looks = self._counter("looks", "Looks at the ref: ok or failed.", "outcome")
        self._deaths = self._counter("thread_deaths", "Threads that died and were started again.", "thread")
        for thread in THREADS:
            self._deaths.labels(thread)
        text = "Answers: given, empty (the model wrote nothing), or abstained (below the threshold)."
        self._answers = self._counter("answers", text, "outcome")
        text = "Answers given of which no passage read holds the words, numbers and names: `supports`."
        self._unsupported = self._counter("answers_unsupported", text)
        self._cited = self._counter("answers_numbered", "Answers given from numbered passages: cited, or not.", "cited")
        text = "Tokens that models read and wrote, for answers and for checks of them, where they are counted."
        self._tokens = self._counter("tokens", text, "use", "kind")
        for counter, outcomes in (
            (self._answers, OUTCOMES),
            (self._cited, ("yes", "no")),
            (self._swaps, ("ok", "refused")),
            (self._looks, ("ok", "failed")),
        ):
            for outcome in outcomes:
                counter.labels(outcome)  # 0 from the start, so that Prometheus sees the first increase
        self.quality, self._clock = quality or Quality(), clock
        self.quality.thread.died = self.died
        self._every = settings.override_every
        self.overrides = Overrides(settings.override_every, self._checked, settings.request_seconds)
        self.overrides.thread.died = self.died
        self._sampled: Counter | None = None  # these are absent until a model serves that can be asked
        self._overriding: Counter | None = None
        self._unchecked: Counter | None = None
        self.served: Served | None = None
        self.refusal: Refusal | None = None  # of what the ref names now
        self.seen: float | None = None  # when the store last answered
        self._registry.register(_Scrape(self.state))
        ProcessCollector(registry=self._registry)

    def state(self) -> State:
        """Return what is true now."""
        return State(self._clock(), self.served, self.refusal, self.seen, self.quality.figures())

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
        """Note a batch's size and times, and what was asked and found by the retriever that is watched."""
        self._sizes.observe(len(batch.questions))
        self._encoding.observe(batch.encode_seconds)
        self._searching.observe(batch.search_seconds)
        if batch.retriever == batch.edition.retrievers[0]:
            self.quality.saw(batch.edition.id, batch.questions, batch.vectors, batch.ks, batch.hits)

    def answered(self, edition: Edition, answers: Sequence[Answer]) -> None:
        """Note which passages answers were read from, and whether they agree with them."""
        self.quality.saw_answers(edition.id, answers)
        for one in answers:
            for stage, seconds in one.seconds.items():
                self._stages.labels(stage).observe(seconds)
            outcome = outcome_of(one)
            self._answers.labels(outcome).inc()
            self._used("answer", one.usage)
            if outcome == GIVEN:
                self._given(edition, one)

    def serves(self, edition: Edition, seconds: float) -> None:
        """Note what is served from now on, and watch it."""
        if self.served is not None:
            self._swaps.labels("ok").inc()
        self._taking.observe(seconds)
        self._editions.inc()
        encode = None if edition.asker is None else edition.asker.encode_questions
        self.quality.follow(edition.snapshot, *(edition.watched or (None, {})), encode=encode)
        self.overrides.forget()
        if has_memory(edition.model) and self._sampled is None and self._every:
            self._sampled = self._counter("answers_sampled", "Answers given from passages that were checked.")
            text = "Of these, unsupported ones that the model is as sure of, or gives again, without the passages."
            self._overriding = self._counter("answers_override", text)
            text = "Sampled answers whose check failed; they are not among the checked ones."
            self._unchecked = self._counter("answers_unchecked", text)
        if edition.model is not None:
            tokens("")  # what it prepares once takes half a second, which the first answer need not wait for
        self.renamed(edition, edition.named)

    def renamed(self, edition: Edition, named: ServedRef) -> None:
        """Note by which move of the ref it is served."""
        self.served = Served.of(edition.snapshot.manifest, named, edition.retrievers[0])
        self.refusal = None

    def freed(self, snapshot: str) -> None:
        """Note that an edition's memory is free."""
        self._editions.dec()

    def withdrawn(self, snapshot: str) -> None:
        """Note that nothing is served."""
        self.served = None
        self.quality.leave()
        self.overrides.forget()

    def refused(self, refusal: Refusal) -> None:
        """Note that the version that the ref names was refused."""
        self._swaps.labels("refused").inc()
        self.refusal = refusal

    def looked(self, problem: str) -> None:
        """Note whether the store answered."""
        self._looks.labels("failed" if problem else "ok").inc()
        if problem:
            return
        self.seen = self._clock()
        if self.refusal is not None and not self.refusal.snapshot:
            self.refusal = None  # the ref could not be read before; if it still cannot, `refused` is called again

    def died(self, thread: str) -> None:
        """Count the deaths of threads."""
        self._deaths.labels(thread).inc()

    @property
    def threads(self) -> Sequence[WatchedThread]:
        """The threads that measure quality, and which memory answers."""
        return (self.quality.thread, self.overrides.thread)

    def close(self) -> None:
        """Stop watching."""
        self.quality.close()
        self.overrides.close()

    def _given(self, edition: Edition, answer: Answer) -> None:
        """Note whether an answer agrees with its passages, and cites them."""
        unsupported = is_unsupported(answer)
        if unsupported:
            self._unsupported.inc()
        if answer.context:
            self._cited.labels("yes" if answer.citations else "no").inc()
        model = edition.model
        if model is not None and has_memory(model) and texts_read(answer):
            self.overrides.saw(partial(memory_of, model), answer, unsupported=unsupported)

    def _checked(self, found: Checked | None) -> None:
        """Note whether a sampled answer overrides its passages, or that its check failed."""
        if self._sampled is None or self._overriding is None or self._unchecked is None:
            return
        if found is None:
            self._unchecked.inc()
            return
        self._used("check", found.usage)
        self._sampled.inc()
        self._overriding.inc(found.override)

    def _used(self, use: str, usage: Usage | None) -> None:
        """Count the tokens of an answer or of a check."""
        if usage is not None:
            self._tokens.labels(use, "read").inc(usage.prompt_tokens)
            self._tokens.labels(use, "written").inc(usage.new_tokens)

    def _histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return Histogram(f"bookwheel_{name}", text, labels, buckets=tuple(buckets), registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"bookwheel_{name}", text, labels, registry=self._registry)


class _Scrape(Collector):
    def __init__(self, state: Callable[[], State]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        return self._state().families()
