"""The windows over live questions: right where something is known, silent where nothing is."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from rag_model.encoders.encoder import Encoder
from rag_model.errors import UsageError
from rag_model.index.files.engine import Vectors
from rag_model.retrieve.dense import DenseRetriever, IndexRetriever
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.hits import Hit
from rag_model.serving.monitoring.quality import MonitorSettings, QualityMetrics, QualityMonitor
from rag_model.store.pulling.pull import pull
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
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
    publish_tiny(store, bert, articles, tmp_path_factory.mktemp("work"), words=True)
    return store


@pytest.fixture(scope="module")
def snapshot(store: Store) -> Snapshot:
    return Snapshot.from_store(store)


@pytest.fixture
def quality() -> Iterator[QualityMonitor]:
    watching = QualityMonitor(SETTINGS, QUESTIONS[:100])
    yield watching
    watching.close()


def ask(quality: QualityMonitor, snapshot: Snapshot, encoder: Encoder, questions: Sequence[str], k: int = 3) -> None:
    vectors = encoder.encode_questions(questions)
    served(quality, snapshot, questions, vectors, DenseRetriever(snapshot).search_vectors(vectors, k), k)


def served(
    quality: QualityMonitor,
    snapshot: Snapshot,
    questions: Sequence[str],
    vectors: Vectors,
    hits: list[list[Hit]],
    k: int,
) -> None:
    quality.record_search(snapshot.id, questions, vectors, [k] * len(questions), hits)


def until(quality: QualityMonitor, seen: Callable[[QualityMetrics], bool]) -> QualityMetrics:
    """Wait for the thread behind the figures."""
    deadline = time.monotonic() + 300
    while not seen(figures := quality.compute_metrics()):
        assert time.monotonic() < deadline, figures
        time.sleep(0.01)
    return figures


def test_a_healthy_service_has_figures_of_everything(
    quality: QualityMonitor, snapshot: Snapshot, tiny: Encoder
) -> None:
    quality.start_monitoring(snapshot, "hnsw", encode=tiny.encode_questions)
    ask(quality, snapshot, tiny, QUESTIONS[100:])
    figures = until(quality, lambda seen: seen.recall_mean is not None and seen.drift is not None)
    assert figures.recall_mean is not None
    assert figures.recall_mean > 0.98
    assert figures.recall_p5 is not None
    assert figures.drift is not None
    assert abs(figures.drift) < 0.05
    assert figures.collapse["search"].questions == SETTINGS.window
    assert figures.collapse["search"].describe_collapse() == ""


def test_nothing_is_said_of_too_few(quality: QualityMonitor, snapshot: Snapshot, tiny: Encoder) -> None:
    assert quality.compute_metrics() == QualityMetrics()
    quality.start_monitoring(snapshot, "hnsw", encode=tiny.encode_questions)
    ask(quality, snapshot, tiny, QUESTIONS[: SETTINGS.min_samples - 1])
    assert quality.compute_metrics() == QualityMetrics()


def test_many_people_asking_one_thing_are_no_collapse(
    quality: QualityMonitor, snapshot: Snapshot, tiny: Encoder
) -> None:
    quality.start_monitoring(snapshot, "hnsw", encode=tiny.encode_questions)
    ask(quality, snapshot, tiny, QUESTIONS[:40])
    before = quality.compute_metrics().collapse
    ask(quality, snapshot, tiny, QUESTIONS[:1] * 300)
    assert before
    assert quality.compute_metrics().collapse == before


def test_an_index_that_misses_is_seen(quality: QualityMonitor, snapshot: Snapshot, tiny: Encoder) -> None:
    quality.start_monitoring(snapshot, "hnsw", encode=tiny.encode_questions)
    vectors = tiny.encode_questions(QUESTIONS[:100])
    deep = DenseRetriever(snapshot).search_vectors(vectors, 6)
    served(quality, snapshot, QUESTIONS[:100], vectors, [hits[1:4] for hits in deep], 3)  # the best is lost
    figures = until(quality, lambda seen: seen.recall_mean is not None)
    assert figures.recall_mean == pytest.approx(2 / 3, abs=0.05)


def test_passages_that_are_not_found_count_as_missed(
    quality: QualityMonitor, snapshot: Snapshot, tiny: Encoder
) -> None:
    quality.start_monitoring(snapshot, "hnsw", encode=tiny.encode_questions)
    vectors = tiny.encode_questions(QUESTIONS[:100])
    hits = DenseRetriever(snapshot).search_vectors(vectors, 4)
    served(quality, snapshot, QUESTIONS[:100], vectors, [some[:1] for some in hits], 4)
    figures = until(quality, lambda seen: seen.recall_mean is not None)
    assert figures.recall_mean == pytest.approx(0.25, abs=0.03)


def test_other_questions_are_seen(quality: QualityMonitor, snapshot: Snapshot, tiny: Encoder) -> None:
    quality.start_monitoring(snapshot, "hnsw", encode=tiny.encode_questions)
    ask(quality, snapshot, tiny, QUESTIONS[:60])
    same = until(quality, lambda seen: seen.drift is not None).drift
    ask(quality, snapshot, tiny, [f"{i}{i}{i}.{i}" for i in range(100)])
    assert same is not None
    until(quality, lambda seen: seen.drift is not None and seen.drift > same + 0.2)


def test_a_swap_begins_the_windows_anew_and_the_old_edition_is_not_heard(
    quality: QualityMonitor, snapshot: Snapshot, tiny: Encoder, bert: Path, tmp_path: Path
) -> None:
    quality.start_monitoring(snapshot, "hnsw", encode=tiny.encode_questions)
    ask(quality, snapshot, tiny, QUESTIONS[:60])
    assert quality.compute_metrics().collapse
    other = publish_tiny(Store.open(str(tmp_path / "store"), create=True), bert, {"a": "of a", "b": "of b"}, tmp_path)
    quality.start_monitoring(other, "hnsw", encode=tiny.encode_questions)
    assert quality.compute_metrics() == QualityMetrics()
    ask(quality, snapshot, tiny, QUESTIONS[:60])
    assert quality.compute_metrics() == QualityMetrics()


def test_a_snapshot_without_vectors_has_no_recall_and_all_else(
    quality: QualityMonitor, store: Store, tiny: Encoder, tmp_path: Path
) -> None:
    pull(store, "latest", tmp_path, select=lambda path: not path.startswith("embeddings/"))
    with Snapshot.from_folder(tmp_path) as bare:
        quality.start_monitoring(bare, "hnsw", encode=tiny.encode_questions)
        ask(quality, bare, tiny, QUESTIONS[100:])
        figures = until(quality, lambda seen: seen.drift is not None)
        assert figures.recall_mean is None
        assert figures.collapse


@pytest.mark.parametrize(("lost", "recall"), [(0, 1.0), (1, 0.0)])
def test_words_are_found_exactly_or_it_is_seen(
    quality: QualityMonitor, snapshot: Snapshot, lost: int, recall: float
) -> None:
    retriever = open_retriever(snapshot, "bm25(b=.9)")
    assert isinstance(retriever, IndexRetriever)
    quality.start_monitoring(snapshot, retriever.index, retriever.parameters)
    hits = [some[lost:] for some in retriever.search(QUESTIONS[:100], 3)]  # without the first, all ranks are others
    quality.record_search(snapshot.id, QUESTIONS[:100], None, [3] * 100, hits)
    figures = until(quality, lambda seen: seen.recall_mean is not None)
    assert figures.recall_mean == recall


def test_without_evaluation_questions_there_is_no_drift(snapshot: Snapshot, tiny: Encoder) -> None:
    quality = QualityMonitor(SETTINGS)
    try:
        quality.start_monitoring(snapshot, "hnsw", encode=tiny.encode_questions)
        ask(quality, snapshot, tiny, QUESTIONS)
        assert until(quality, lambda seen: seen.recall_mean is not None).drift is None
    finally:
        quality.close()


def test_an_encoder_that_breaks_ends_the_watch_of_that_edition_alone(
    quality: QualityMonitor, snapshot: Snapshot, tiny: Encoder, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(questions: Sequence[str]) -> Vectors:
        raise OSError("gone")

    quality.start_monitoring(snapshot, "hnsw", encode=broken)
    deadline = time.monotonic() + 300
    while "is not monitored any more" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ask(quality, snapshot, tiny, QUESTIONS)
    assert quality.compute_metrics() == QualityMetrics()
    quality.start_monitoring(snapshot, "hnsw", encode=tiny.encode_questions)
    ask(quality, snapshot, tiny, QUESTIONS)
    until(quality, lambda seen: seen.drift is not None)


def test_no_text_of_a_question_is_kept(quality: QualityMonitor, snapshot: Snapshot) -> None:
    secret = "a secret that nobody should find"
    hits = DenseRetriever(snapshot).search_vectors(np.eye(1, snapshot.dim, dtype=np.float32), 3)
    quality.start_monitoring(snapshot, "hnsw", encode=None)
    served(quality, snapshot, [secret], np.eye(1, snapshot.dim, dtype=np.float32), hits, 3)
    assert secret not in repr(quality._monitored)


def test_settings_that_could_say_nothing_are_refused() -> None:
    for wrong in ({"window": 0}, {"min_samples": 1}, {"share": 0.0}, {"share": 1.5}, {"min_samples": 51, "window": 50}):
        with pytest.raises(UsageError):
            MonitorSettings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at least 20"):
        QualityMonitor(SETTINGS, QUESTIONS[:3])
