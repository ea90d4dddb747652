"""Monitor the quality of the served snapshot on live questions.

There are three metrics: whether different questions still get different passages (retrieval
collapse), whether the index finds what exact search finds (recall), and how much live questions
differ from the questions of the evaluation (drift). A metric that cannot be computed is None.

The metrics are computed over sliding windows of recent questions to one snapshot; switching to
another snapshot empties the windows. A repeated question is counted once, because it is not a
retrieval collapse if many users ask the same question. A window stores only the digest of a
question, its vector and the ids of its passages. Only if a sampled question has no vector, its
text is stored until exact search has run; this affects at most 32 questions.

Before an index is published, the gate measures it on sentences of the corpus. But users ask other
questions, so recall is also measured on a sample of live questions. Exact search scans the
memory-mapped embeddings part by part, so a corpus that is larger than memory takes longer, but does
not slow down the service. A text index that prunes postings is compared with its own exhaustive
search.

One thread of the lowest priority does the slow work, and pauses much longer than it works.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from rag_model.errors import BookwheelError, UsageError
from rag_model.evaluation.answers.collapse import CollapseStats, measure_collapse
from rag_model.index.exact_search import ExactIndex, select_top_k
from rag_model.index.files.engine import Metric, Rows, Vectors
from rag_model.index.kind import PruningIndex
from rag_model.index.quality.results import Recalls, compute_p5, compute_recall
from rag_model.reading.answer import Answer
from rag_model.retrieve.hits import Hit
from rag_model.retrieve.indexes import get_representation_type, open_index
from rag_model.serving.runtime import SupervisedThread, set_lowest_priority
from rag_model.store.versions.manifest import embeddings_path
from rag_model.store.versions.snapshot import Snapshot

# Exact search returns k hits and this many more, because hits with the same score as the k-th are
# counted as found.
_EXTRA_RANKS = 10
# minimum number of questions in each of the two samples; with fewer, their distance is mostly noise
MIN_QUESTIONS = 20
MAX_QUESTIONS = 1000  # maximum size of the reference; more would not change the distance
# minimum bandwidth as a share of the squared vector length; more than rounding errors
_MIN_RELATIVE_BANDWIDTH = 1e-5
# maximum number of sampled questions that wait for exact search; one pass over the vectors searches
# for all of them
_QUEUE_LIMIT = 32
QuestionEncodeFunction = Callable[[Sequence[str]], Vectors]
_LOG = logging.getLogger(__name__)
_ENCODE_BATCH = 8  # number of evaluation questions that are encoded between two pauses
_DRIFT_UPDATES = 10  # number of measurements of drift per window of new questions


@dataclass(frozen=True, slots=True)
class SampledQuery:
    """A sampled live question and its hits."""

    question: Vectors | str  # (d,) vector, or text, of the question
    rows: Rows  # (k,) hits, best first; padded with -1


class GroundTruth(Protocol):
    """Interface of the exact search with which an index is compared."""

    def compute_recalls(self, queries: Sequence[SampledQuery], pause: Callable[[], bool]) -> Recalls | None:
        """Return the recall of each question at its own k, in [0, 1]; None if cancelled.

        `pause` is called every few milliseconds; if it returns False, the search stops.

        Raises:
            InputError: A file is damaged, or a vector contains a NaN or an infinity.
        """
        ...


def open_ground_truth(snapshot: Snapshot, index: str, parameters: Mapping[str, Any]) -> GroundTruth | None:
    """Open the exact search for an index; None if files are missing or the kind has no such search.

    Args:
        snapshot: The snapshot.
        index: The index's name.
        parameters: Search parameters that replace those of the snapshot.
    """
    try:
        if get_representation_type(snapshot, index) == "vectors":
            return ExactVectorSearch.from_snapshot(snapshot, index)
        index_reader = open_index(snapshot, index)
    except BookwheelError:
        return None
    return ExhaustiveTextSearch(index_reader, parameters) if isinstance(index_reader, PruningIndex) else None


class ExhaustiveTextSearch:
    """Exact search of a text index: the index itself, searched without pruning."""

    def __init__(self, index: PruningIndex, parameters: Mapping[str, Any]) -> None:
        """Search `index` with `parameters`."""
        self._index, self._parameters = index, parameters

    def compute_recalls(self, queries: Sequence[SampledQuery], pause: Callable[[], bool]) -> Recalls | None:
        """Return each question's share of ranks with the same row as in exhaustive search."""
        query_recalls = []
        for query in queries:
            assert isinstance(query.question, str)
            exact_rows = self._index.search_exhaustively([query.question], len(query.rows), **self._parameters)[0]
            query_recalls.append(float((exact_rows == query.rows).mean()))
            if not pause():
                return None
        return np.array(query_recalls)


class ExactVectorSearch:
    """Exact search over the vectors of a snapshot."""

    def __init__(self, parts: Sequence[ExactIndex]) -> None:
        """Create the search over `parts`, which are in row order; `from_snapshot` opens them."""
        self._parts = parts
        self._first_rows = [0, *accumulate(part.n for part in parts)]

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot, index: str) -> "ExactVectorSearch | None":
        """Open a snapshot's vectors with the metric of `index`; None if it has no vectors.

        Raises:
            BookwheelError: The vectors were not pulled, or cannot be read.
        """
        index_entries = snapshot.manifest.content.indexes
        vector_metric: Metric = (index_entries.get(index) or next(iter(index_entries.values()), {})).get("metric", "ip")
        files = [snapshot.path(embeddings_path(part.name)) for part in snapshot.parts if part.rows]
        return cls([ExactIndex([file], vector_metric) for file in files]) if files else None

    def compute_recalls(self, queries: Sequence[SampledQuery], pause: Callable[[], bool]) -> Recalls | None:
        """Return the recall of each question at its own k, in [0, 1]; None if cancelled.

        All questions are compared in one pass over the vectors. `pause` is called after each part;
        if it returns False, the search stops.

        Raises:
            InputError: A vector contains a NaN or an infinity.
        """
        vectors = np.stack([query.question for query in queries if not isinstance(query.question, str)])
        depth = min(self._first_rows[-1], max(len(query.rows) for query in queries) + _EXTRA_RANKS)
        scores = np.empty((len(queries), 0), np.float32)
        rows = np.empty((len(queries), 0), np.int64)
        for offset, part in zip(self._first_rows, self._parts, strict=False):
            part_scores, part_rows = part.search(vectors, min(depth, part.n))
            scores, rows = select_top_k(np.hstack([scores, part_scores]), np.hstack([rows, part_rows + offset]), depth)
            if not pause():
                return None
        recalls = [
            compute_recall(
                query.rows[None],
                exact_rows[None],
                exact_scores[None],
                len(query.rows),
                partial(self._score, vector),
            )
            for query, vector, exact_rows, exact_scores in zip(queries, vectors, rows, scores, strict=True)
        ]
        return np.concatenate(recalls)

    def _score(self, vector: Vectors, queries: Rows, hit_rows: Rows) -> Vectors:
        """Return the exact scores, (1, k), of the rows, (1, k), for the vector of one question."""
        scores = np.full(hit_rows.shape, -np.inf, np.float32)
        for first_row, part in zip(self._first_rows, self._parts, strict=False):
            is_in_part = (hit_rows >= first_row) & (hit_rows < first_row + part.n)
            if is_in_part.any():
                scores = np.where(
                    is_in_part,
                    part.score(vector[None], np.where(is_in_part, hit_rows - first_row, -1)),
                    scores,
                )
        return scores


class DriftReference:
    """A fixed sample of questions, with which samples of live questions are compared."""

    def __init__(self, vectors: Vectors, bandwidth: float, self_similarity: float) -> None:
        """Store the statistics; `from_vectors` computes them."""
        self._vectors, self._bandwidth, self._self_similarity = vectors, bandwidth, self_similarity

    @classmethod
    def from_vectors(cls, vectors: Vectors) -> Self:
        """Create a reference from (n, d) vectors.

        Raises:
            UsageError: There are fewer than 20 vectors, or all of them are equal.
        """
        if len(vectors) < MIN_QUESTIONS:
            raise UsageError(
                f"{len(vectors)} questions are too few to measure drift against: give at least {MIN_QUESTIONS}"
            )
        squared_distances = _compute_squared_distances(vectors, vectors)
        bandwidth = float(np.median(squared_distances[np.triu_indices(len(vectors), 1)]))
        if bandwidth <= _MIN_RELATIVE_BANDWIDTH * float((vectors * vectors).sum(1).mean()):
            raise UsageError("the evaluation's questions are all alike: give different questions")
        return cls(vectors, bandwidth, _compute_pair_mean(np.exp(-squared_distances / bandwidth)))

    def compute_distance(self, vectors: Vectors) -> float:
        """Return the distance of (m, d) vectors, m >= 2, from the reference.

        It is the unbiased squared maximum mean discrepancy (MMD; Gretton et al. 2012, lemma 6) with
        a Gaussian kernel, whose bandwidth is the median squared distance in the reference (their
        section 8), divided by the reference's variance in the kernel's space:

            (E k(x,x') + E k(y,y') - 2 E k(x,y)) / (1 - E k(x,x'))

        0 means the same distribution; slightly negative values occur by chance. 1 means that the
        two means are one standard deviation apart, whatever the encoder and the number of
        questions. A Fréchet distance would need d² covariances, which a few hundred vectors do not
        determine well, so it is biased upwards (Bińkowski et al. 2018): it is 0.17 between two
        halves of the same set at 384 dimensions, where the MMD is 0.000.
        """
        live_similarity = _compute_pair_mean(np.exp(-_compute_squared_distances(vectors, vectors) / self._bandwidth))
        cross_similarity = float(np.exp(-_compute_squared_distances(self._vectors, vectors) / self._bandwidth).mean())
        return (self._self_similarity + live_similarity - 2 * cross_similarity) / (1 - self._self_similarity)


def _compute_squared_distances(left: Vectors, right: Vectors) -> npt.NDArray[np.float64]:
    """Return (n, m) squared distances."""
    x, y = left.astype(np.float64), right.astype(np.float64)
    squared_distances: npt.NDArray[np.float64] = (x * x).sum(1)[:, None] + (y * y).sum(1)[None] - 2 * (x @ y.T)
    return np.maximum(squared_distances, 0.0, out=squared_distances)


def _compute_pair_mean(kernel: npt.NDArray[np.float64]) -> float:
    """Return the mean of a square matrix without its diagonal: over all pairs of different rows."""
    n = len(kernel)
    return float((kernel.sum() - np.trace(kernel)) / (n * (n - 1)))


_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class MonitorSettings:
    """Sizes of the windows and samples, and how much of a core the monitor may use."""

    window: int = 500  # distinct questions for collapse and drift
    min_samples: int = 50  # with fewer questions or recalls, a metric is absent
    sample_every: int = 20  # every n-th question is repeated by exact search
    samples: int = 200  # size of the window of recalls; the 5th percentile is the tenth lowest
    share: float = 0.05  # maximum share of one core for the monitor's slow work

    def __post_init__(self) -> None:
        if min(self.window, self.min_samples - 1, self.sample_every, self.samples) < 1 or not 0 < self.share <= 1:
            raise UsageError(
                "window, sample_every and samples must be at least 1, min_samples at least 2, and "
                f"share in (0, 1], not {self}"
            )
        if self.min_samples > min(self.window, self.samples):
            raise UsageError(
                f"windows of {self.window} and {self.samples} never hold {self.min_samples}: lower `min_samples`"
            )


@dataclass(frozen=True, slots=True)
class QualityMetrics:
    """The current quality metrics; a metric is None with fewer questions than `min_samples`, or if
    it cannot be measured.
    """

    # collapse by endpoint (`search`, `answer`), since a model may search with its own encoder
    collapse: Mapping[str, CollapseStats] = field(default_factory=dict)
    recall_mean: float | None = None
    recall_p5: float | None = None
    drift: float | None = None  # `DriftReference.compute_distance`


@dataclass(slots=True)
class SlidingWindows:
    """The recent questions to one snapshot. Not thread-safe; `QualityMonitor` uses a lock."""

    settings: MonitorSettings
    corpus: int  # number of passages in the snapshot
    drift: float | None = None
    _vectors: OrderedDict[bytes, Vectors] = field(default_factory=OrderedDict)  # by question digest
    # passage ids by endpoint (`search`, `answer`) and digest of the question
    _passages_by_verb: dict[str, OrderedDict[bytes, list[str]]] = field(default_factory=dict)
    _samples: list[SampledQuery] = field(default_factory=list)
    _recalls: deque[float] = field(default_factory=deque)
    _query_count: int = 0
    _new_count: int = 0  # number of vectors added since `take_vectors`

    def add_passages(self, verb: str, question: str, passages: Sequence[str]) -> None:
        """Add a question and the ids of its passages."""
        self._add_to_window(self._passages_by_verb.setdefault(verb, OrderedDict()), question, list(passages))

    def add_search(
        self,
        question: str,
        vector: Vectors | None,
        k: int,
        hits: Sequence[Hit],
        *,
        sampled: bool = True,
    ) -> None:
        """Add a search to the windows, and every n-th search to the samples.

        Args:
            question: The question.
            vector: Its (d,) vector; None for a text index, for which samples store the text.
            k: Requested number of passages.
            hits: Its hits, best first.
            sampled: Whether the question may be sampled for exact search.
        """
        self.add_passages("search", question, [hit.passage.id for hit in hits])
        if vector is not None:
            self._add_to_window(self._vectors, question, vector)
            self._new_count += 1
        self._query_count += 1
        if sampled and self._query_count % self.settings.sample_every == 0 and len(self._samples) < _QUEUE_LIMIT:
            hit_rows = np.full(k, -1, np.int64)
            hit_rows[: len(hits)] = [hit.row for hit in hits]
            self._samples.append(SampledQuery(question if vector is None else vector, hit_rows))

    def has_new_vectors(self, updates_per_window: int) -> bool:
        """Return whether 1 / `updates_per_window` of a full window was added since `take_vectors`."""
        is_due = self._new_count * updates_per_window >= self.settings.window
        return is_due and len(self._vectors) >= self.settings.min_samples

    def take_vectors(self) -> Vectors:
        """Return the (n, d) vectors in the window, and restart the count of new vectors."""
        self._new_count = 0
        return np.stack(list(self._vectors.values()))

    @property
    def has_samples(self) -> bool:
        """Whether sampled questions wait for exact search."""
        return bool(self._samples)

    def take_samples(self) -> list[SampledQuery]:
        """Remove and return the questions that wait for exact search."""
        sampled_queries, self._samples = self._samples, []
        return sampled_queries

    def add_recalls(self, recalls: Recalls) -> None:
        """Add recalls from exact search, and drop the oldest recalls if the window is full."""
        self._recalls.extend(recalls.tolist())
        while len(self._recalls) > self.settings.samples:
            self._recalls.popleft()

    def compute_metrics(self) -> QualityMetrics:
        """Compute the metrics of the windows."""
        collapse_by_verb = {
            verb: measure_collapse(list(passage_ids.values()), self.corpus)
            for verb, passage_ids in self._passages_by_verb.items()
            if len(passage_ids) >= self.settings.min_samples
        }
        if len(self._recalls) < self.settings.min_samples:
            return QualityMetrics(collapse_by_verb, drift=self.drift)
        recalls = np.array(self._recalls)
        return QualityMetrics(collapse_by_verb, float(recalls.mean()), compute_p5(recalls), self.drift)

    def _add_to_window(self, window: OrderedDict[bytes, _Value], question: str, sample: _Value) -> None:
        question_digest = blake2b(question.encode(errors="replace"), digest_size=16).digest()
        window[question_digest] = sample
        window.move_to_end(question_digest)
        if len(window) > self.settings.window:
            window.popitem(last=False)


@dataclass(slots=True)
class _MonitoringState:
    """The state of the monitoring of one snapshot."""

    snapshot: Snapshot
    # None: the retriever combines several indexes, so exact search cannot measure its recall
    index: str | None
    parameters: Mapping[str, float]  # search parameters
    encode: QuestionEncodeFunction | None  # None: drift is not measured
    windows: SlidingWindows
    unencoded_questions: list[str]  # questions of the evaluation that are not encoded yet
    encoded_questions: list[Vectors] = field(default_factory=list)
    reference: DriftReference | None = None
    ground_truth: GroundTruth | None = None
    is_ground_truth_open: bool = False  # whether `ground_truth` is set; it is None if unavailable
    has_exact_search_failed: bool = False  # only the first failure is logged

    @property
    def has_samples_due(self) -> bool:
        return self.windows.has_samples and (self.ground_truth is not None or not self.is_ground_truth_open)

    @property
    def has_drift_due(self) -> bool:
        return self.reference is not None and self.windows.has_new_vectors(_DRIFT_UPDATES)

    @property
    def has_task(self) -> bool:
        """Whether there is slow work to do."""
        return self.has_samples_due or self.has_drift_due or bool(self.unencoded_questions)


class QualityMonitor:
    """Monitors the quality of one snapshot. Thread-safe; `record_` methods take microseconds."""

    def __init__(self, settings: MonitorSettings | None = None, questions: Sequence[str] = ()) -> None:
        """Start the thread; drift is the distance from `questions`, those of the evaluation.

        Raises:
            UsageError: There are between 1 and 19 questions, which are too few.
        """
        if 0 < len(questions) < MIN_QUESTIONS:
            raise UsageError(
                f"{len(questions)} questions are too few to measure drift against: give at least {MIN_QUESTIONS}"
            )
        self._settings = settings or MonitorSettings()
        self._questions = [
            questions[i] for i in np.linspace(0, len(questions) - 1, min(len(questions), MAX_QUESTIONS)).astype(int)
        ]
        self._condition = threading.Condition()
        self._state: _MonitoringState | None = None
        self._is_closed = False
        self.thread = SupervisedThread("quality", self._run_monitor)
        self.thread.start()

    def start_monitoring(
        self,
        snapshot: Snapshot,
        index: str | None,
        parameters: Mapping[str, float] | None = None,
        *,
        encode: QuestionEncodeFunction | None = None,
    ) -> None:
        """Monitor another snapshot from now on, with empty windows.

        Args:
            snapshot: The snapshot.
            index: The index of the default retriever; with None, as for a fusion, recall is not
                measured.
            parameters: Search parameters that replace those of the snapshot.
            encode: Function that encodes questions; with None, drift is not measured.
        """
        windows = SlidingWindows(self._settings, snapshot.n)
        with self._condition:
            unencoded_questions = list(self._questions) if encode else []
            self._state = _MonitoringState(snapshot, index, parameters or {}, encode, windows, unencoded_questions)
            self._condition.notify()

    def stop_monitoring(self) -> None:
        """Monitor nothing until the next call of `start_monitoring`."""
        with self._condition:
            self._state = None
            self._condition.notify()

    def record_search(
        self,
        snapshot: str,
        questions: Sequence[str],
        vectors: Vectors | None,
        ks: Sequence[int],
        hits: Sequence[Sequence[Hit]],
    ) -> None:
        """Record searches; ignore searches of another snapshot, such as one that is being replaced.

        Args:
            snapshot: Id of the snapshot that was searched.
            questions: The questions.
            vectors: The (n, d) vectors of the questions; None for a text index.
            ks: Requested numbers of passages.
            hits: The hits of each question, best first.
        """
        with self._condition:
            if self._state is None or self._state.snapshot.id != snapshot:
                return
            copied_vectors = [None] * len(questions) if vectors is None else [vector.copy() for vector in vectors]
            for question, vector, k, query_hits in zip(questions, copied_vectors, ks, hits, strict=True):
                self._state.windows.add_search(question, vector, k, query_hits, sampled=self._state.index is not None)
            if self._state.has_task:
                self._condition.notify()

    def record_answers(self, snapshot: str, answers: Sequence[Answer]) -> None:
        """Record answers; ignore answers from other snapshots."""
        with self._condition:
            if self._state is not None and self._state.snapshot.id == snapshot:
                for answer in answers:
                    passage_ids = [support.hit.passage.id for support in answer.support]
                    self._state.windows.add_passages("answer", answer.question, passage_ids)

    def compute_metrics(self) -> QualityMetrics:
        """Compute the current metrics."""
        with self._condition:
            return self._state.windows.compute_metrics() if self._state else QualityMetrics()

    def close(self) -> None:
        """Stop monitoring; the thread ends at the latest after one part of an exact search."""
        with self._condition:
            self._is_closed, self._state = True, None
            self._condition.notify()
        self.thread.join()

    def _run_monitor(self) -> None:
        set_lowest_priority()
        while state := self._wait_for_task():
            try:
                self._run_task(state)
            # Also catch a Rust panic of a native library, because it must not end the thread.
            except BaseException:
                _LOG.exception(
                    "the quality of snapshot %s is not monitored any more",
                    state.snapshot.id[:12],
                )
                with self._condition:
                    self._state = None if self._state is state else self._state
            state = None  # free an old snapshot while waiting

    def _wait_for_task(self) -> _MonitoringState | None:
        """Wait until there is slow work, and return its snapshot; None if the monitor is closed."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_closed or (self._state is not None and self._state.has_task))
            return self._state

    def _run_task(self, state: _MonitoringState) -> None:
        """Do one piece of the slow work, then pause."""
        if state.has_samples_due:
            self._measure_recall(state)
            return
        start_time = time.thread_time()
        if state.has_drift_due and state.reference is not None:
            with self._condition:
                vectors = state.windows.take_vectors()
            state.windows.drift = state.reference.compute_distance(vectors)
        elif state.unencoded_questions and state.encode is not None:
            # The questions are encoded again for each snapshot, since its vector space may be
            # another.
            state.encoded_questions.append(state.encode(state.unencoded_questions[:_ENCODE_BATCH]))
            del state.unencoded_questions[:_ENCODE_BATCH]
            if not state.unencoded_questions:
                state.reference = DriftReference.from_vectors(np.concatenate(state.encoded_questions))
        self._rest_after_work(state, start_time)

    def _measure_recall(self, state: _MonitoringState) -> None:
        """Repeat sampled questions by exact search over all vectors, or over all postings."""
        if not state.is_ground_truth_open and state.index is not None:
            state.ground_truth = open_ground_truth(state.snapshot, state.index, state.parameters)
        with self._condition:
            state.is_ground_truth_open = True
            if state.ground_truth is None:
                state.index = None  # stop sampling
            sampled_queries = state.windows.take_samples()
        start_time = time.thread_time()

        def pause() -> bool:
            nonlocal start_time
            is_current = self._rest_after_work(state, start_time)
            start_time = time.thread_time()
            return is_current

        try:
            recalls = state.ground_truth.compute_recalls(sampled_queries, pause) if state.ground_truth else None
        except BaseException:  # The other metrics do not depend on exact search, so go on without these questions.
            recalls = None
            if not state.has_exact_search_failed:
                _LOG.exception(
                    "exact search of snapshot %s failed: recall is measured without these questions",
                    state.snapshot.id[:12],
                )
            state.has_exact_search_failed = True
        if recalls is not None:
            with self._condition:
                state.windows.add_recalls(recalls)

    def _rest_after_work(self, state: _MonitoringState, start_time: float) -> bool:
        """Pause until the work since `start_time` is within the thread's share of a core.

        `start_time` is the thread's CPU time, since wall-clock time would include waiting for other
        threads. Return False if another snapshot, or none, is monitored now.
        """
        rest_seconds = (time.thread_time() - start_time) * (1 / self._settings.share - 1)
        with self._condition:
            return not self._condition.wait_for(lambda: self._state is not state, rest_seconds)
