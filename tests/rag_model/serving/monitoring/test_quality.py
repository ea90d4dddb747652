"""Metrics over windows of live questions: correct for known inputs, and absent for too few questions."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from rag_model.encoders.encoder import Encoder
from rag_model.errors import UsageError
from rag_model.index.files.engine import Vectors
from rag_model.index.postings.base_kind import MAX_TERMS
from rag_model.retrieve.dense import DenseRetriever, IndexRetriever
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.hits import Hit
from rag_model.serving.monitoring.quality import MonitorSettings, QualityMetrics, QualityMonitor
from rag_model.store.pulling.pull import pull
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.serving import wait_until
from tests.fixtures.tiny import save_bert
from tests.fixtures.tiny_snapshot import publish_tiny

N = 120
SETTINGS = MonitorSettings(window=60, min_samples=20, sample_every=2, samples=40, share=1.0)
THINGS = ["river", "king", "city", "music", "war", "theory"]
_DRAW = random.Random(0)
QUESTIONS = [f"who wrote the {_DRAW.choice(THINGS)} of {''.join(_DRAW.sample('abcdefghij', 6))}?" for _ in range(200)]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def tiny(bert: Path) -> Encoder:
    return Encoder.load(bert, "question", threads=1, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def store(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store.open(str(tmp_path_factory.mktemp("store")), create=True)
    articles = {f"{THINGS[i % 6]} {i}": f"the {THINGS[i % 6]} was born in {i} and {i * 7}" for i in range(N)}
    publish_tiny(store, bert, articles, tmp_path_factory.mktemp("work"), bm25=True)
    return store


@pytest.fixture(scope="module")
def snapshot(store: Store) -> Snapshot:
    return Snapshot.from_store(store)


@pytest.fixture
def quality() -> Iterator[QualityMonitor]:
    quality = QualityMonitor(SETTINGS, QUESTIONS[:100])
    yield quality
    quality.close()


def ask(quality: QualityMonitor, snapshot: Snapshot, encoder: Encoder, questions: Sequence[str], k: int = 3) -> None:
    vectors = encoder.encode_questions(questions)
    record_search(quality, snapshot, questions, vectors, DenseRetriever(snapshot).search_vectors(vectors, k), k)


def record_search(
    quality: QualityMonitor,
    snapshot: Snapshot,
    questions: Sequence[str],
    vectors: Vectors,
    hits: list[list[Hit]],
    k: int,
) -> None:
    quality.record_search(snapshot.id, questions, vectors, [k] * len(questions), hits)


def until(quality: QualityMonitor, condition: Callable[[QualityMetrics], bool]) -> QualityMetrics:
    """Wait until the metrics of the background thread fulfil a condition."""
    deadline = time.monotonic() + 300
    while not condition(metrics := quality.compute_metrics()):
        assert time.monotonic() < deadline, metrics
        time.sleep(0.01)
    return metrics


def test_healthy_service_has_all_metrics(quality: QualityMonitor, snapshot: Snapshot, tiny: Encoder) -> None:
    quality.start_monitoring(snapshot, "hnsw", encode=tiny.encode_questions)
    ask(quality, snapshot, tiny, QUESTIONS[100:])
    metrics = until(quality, lambda metrics: metrics.recall_mean is not None and metrics.drift is not None)
    assert metrics.recall_mean is not None
    assert metrics.recall_mean > 0.98
    assert metrics.recall_p5 is not None
    assert metrics.drift is not None
    assert abs(metrics.drift) < 0.05
    assert metrics.collapse["search"].questions == SETTINGS.window
    assert metrics.collapse["search"].describe_collapse() == ""


def test_too_few_questions_give_no_metrics(quality: QualityMonitor, snapshot: Snapshot, tiny: Encoder) -> None:
    assert quality.compute_metrics() == QualityMetrics()
    quality.start_monitoring(snapshot, "hnsw", encode=tiny.encode_questions)
    ask(quality, snapshot, tiny, QUESTIONS[: SETTINGS.min_samples - 1])
    assert quality.compute_metrics() == QualityMetrics()


def test_one_repeated_question_is_no_collapse(quality: QualityMonitor, snapshot: Snapshot, tiny: Encoder) -> None:
    quality.start_monitoring(snapshot, "hnsw", encode=tiny.encode_questions)
    ask(quality, snapshot, tiny, QUESTIONS[:40])
    collapse = quality.compute_metrics().collapse
    ask(quality, snapshot, tiny, QUESTIONS[:1] * 300)
    assert collapse
    assert quality.compute_metrics().collapse == collapse


def test_low_recall_is_measured(quality: QualityMonitor, snapshot: Snapshot, tiny: Encoder) -> None:
    quality.start_monitoring(snapshot, "hnsw", encode=tiny.encode_questions)
    vectors = tiny.encode_questions(QUESTIONS[:100])
    hits = DenseRetriever(snapshot).search_vectors(vectors, 6)
    without_best = [ranked[1:4] for ranked in hits]
    record_search(quality, snapshot, QUESTIONS[:100], vectors, without_best, 3)
    metrics = until(quality, lambda metrics: metrics.recall_mean is not None)
    assert metrics.recall_mean == pytest.approx(2 / 3, abs=0.05)


def test_missing_hits_count_as_misses(quality: QualityMonitor, snapshot: Snapshot, tiny: Encoder) -> None:
    quality.start_monitoring(snapshot, "hnsw", encode=tiny.encode_questions)
    vectors = tiny.encode_questions(QUESTIONS[:100])
    hits = DenseRetriever(snapshot).search_vectors(vectors, 4)
    record_search(quality, snapshot, QUESTIONS[:100], vectors, [ranked[:1] for ranked in hits], 4)
    metrics = until(quality, lambda metrics: metrics.recall_mean is not None)
    assert metrics.recall_mean == pytest.approx(0.25, abs=0.03)


def test_drift_of_questions_is_measured(quality: QualityMonitor, snapshot: Snapshot, tiny: Encoder) -> None:
    quality.start_monitoring(snapshot, "hnsw", encode=tiny.encode_questions)
    ask(quality, snapshot, tiny, QUESTIONS[:60])
    first_drift = until(quality, lambda metrics: metrics.drift is not None).drift
    ask(quality, snapshot, tiny, [f"{i}{i}{i}.{i}" for i in range(100)])
    assert first_drift is not None
    until(quality, lambda metrics: metrics.drift is not None and metrics.drift > first_drift + 0.2)


def test_swap_resets_the_windows_and_ignores_the_old_snapshot(
    quality: QualityMonitor, snapshot: Snapshot, tiny: Encoder, bert: Path, tmp_path: Path
) -> None:
    quality.start_monitoring(snapshot, "hnsw", encode=tiny.encode_questions)
    ask(quality, snapshot, tiny, QUESTIONS[:60])
    assert quality.compute_metrics().collapse
    store = Store.open(str(tmp_path / "store"), create=True)
    other_snapshot = publish_tiny(store, bert, {"a": "of a", "b": "of b"}, tmp_path)
    quality.start_monitoring(other_snapshot, "hnsw", encode=tiny.encode_questions)
    assert quality.compute_metrics() == QualityMetrics()
    ask(quality, snapshot, tiny, QUESTIONS[:60])
    assert quality.compute_metrics() == QualityMetrics()


def test_snapshot_without_vectors_has_all_metrics_but_recall(
    quality: QualityMonitor, store: Store, tiny: Encoder, tmp_path: Path
) -> None:
    pull(store, "latest", tmp_path, select=lambda path: not path.startswith("embeddings/"))
    with Snapshot.from_folder(tmp_path) as bare:
        quality.start_monitoring(bare, "hnsw", encode=tiny.encode_questions)
        ask(quality, bare, tiny, QUESTIONS[100:])
        metrics = until(quality, lambda metrics: metrics.drift is not None)
        assert metrics.recall_mean is None
        assert metrics.collapse


@pytest.mark.parametrize(("skipped", "recall"), [(0, 1.0), (1, 0.0)])
def test_recall_of_bm25_is_measured(quality: QualityMonitor, snapshot: Snapshot, skipped: int, recall: float) -> None:
    retriever = open_retriever(snapshot, "bm25(b=.9)")
    assert isinstance(retriever, IndexRetriever)
    quality.start_monitoring(snapshot, retriever.index, retriever.parameters)
    # Without the first hit, all ranks differ.
    hits = [ranked[skipped:] for ranked in retriever.search(QUESTIONS[:100], 3)]
    quality.record_search(snapshot.id, QUESTIONS[:100], None, [3] * 100, hits)
    metrics = until(quality, lambda metrics: metrics.recall_mean is not None)
    assert metrics.recall_mean == recall


def test_failed_exact_search_drops_only_its_questions(
    quality: QualityMonitor, snapshot: Snapshot, caplog: pytest.LogCaptureFixture
) -> None:
    quality.start_monitoring(snapshot, "bm25")
    for number in range(2):
        too_long = " ".join(f"{number}x{term}" for term in range(MAX_TERMS + 1))
        quality.record_search(
            snapshot.id, [too_long] * SETTINGS.sample_every, None, [3] * SETTINGS.sample_every, [[], []]
        )
        wait_until(lambda: quality._state is None or not quality._state.windows.has_samples)
    questions = QUESTIONS[:100]
    quality.record_search(
        snapshot.id, questions, None, [3] * 100, open_retriever(snapshot, "bm25").search(questions, 3)
    )
    wait_until(lambda: quality._state is None or quality.compute_metrics().recall_mean is not None)
    metrics = quality.compute_metrics()
    assert (metrics.recall_mean, metrics.collapse["search"].questions) == (1, SETTINGS.window)
    assert caplog.text.count("exact search of snapshot") == 1


def test_without_evaluation_questions_there_is_no_drift(snapshot: Snapshot, tiny: Encoder) -> None:
    quality = QualityMonitor(SETTINGS)
    try:
        quality.start_monitoring(snapshot, "hnsw", encode=tiny.encode_questions)
        ask(quality, snapshot, tiny, QUESTIONS)
        assert until(quality, lambda metrics: metrics.recall_mean is not None).drift is None
    finally:
        quality.close()


def test_broken_encoder_ends_the_monitoring_of_its_snapshot_only(
    quality: QualityMonitor, snapshot: Snapshot, tiny: Encoder, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(questions: Sequence[str]) -> Vectors:
        raise OSError("gone")

    quality.start_monitoring(snapshot, "hnsw", encode=fail)
    deadline = time.monotonic() + 300
    while "is not monitored any more" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ask(quality, snapshot, tiny, QUESTIONS)
    assert quality.compute_metrics() == QualityMetrics()
    quality.start_monitoring(snapshot, "hnsw", encode=tiny.encode_questions)
    ask(quality, snapshot, tiny, QUESTIONS)
    until(quality, lambda metrics: metrics.drift is not None)


def test_texts_of_questions_are_not_stored(quality: QualityMonitor, snapshot: Snapshot) -> None:
    secret_question = "a secret question"
    hits = DenseRetriever(snapshot).search_vectors(np.eye(1, snapshot.dim, dtype=np.float32), 3)
    quality.start_monitoring(snapshot, "hnsw", encode=None)
    record_search(quality, snapshot, [secret_question], np.eye(1, snapshot.dim, dtype=np.float32), hits, 3)
    assert secret_question not in repr(quality._state)


def test_settings_without_enough_samples_are_refused() -> None:
    for wrong in ({"window": 0}, {"min_samples": 1}, {"share": 0.0}, {"share": 1.5}, {"min_samples": 51, "window": 50}):
        with pytest.raises(UsageError):
            MonitorSettings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at least 20"):
        QualityMonitor(SETTINGS, QUESTIONS[:3])
