"""The exported metrics of a service that swaps or refuses snapshots, and of manifests with any content."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from rag_model.corpus.records import Passage
from rag_model.reading.answer import CLOSED_BOOK, Answer, ContextEntry, SupportingPassage
from rag_model.retrieve.hits import Hit
from rag_model.serving.answering.loaded_snapshot import ServedRef
from rag_model.serving.monitoring.metrics import ServedSnapshotInfo, ServiceMetrics
from rag_model.serving.monitoring.observer import Refusal
from rag_model.serving.monitoring.quality import MonitorSettings, QualityMonitor
from rag_model.serving.settings import ServiceSettings
from rag_model.store.versions.build_history import format_history
from rag_model.store.versions.manifest import Content, Manifest
from tests.fixtures.serving import Library, run_service, wait_until
from tests.fixtures.tiny_rag import save_tiny_rag

SERVED_REF = ServedRef("latest", 7, "0" * 64, "2026-11-01T00:00:00+00:00")


def read_metrics(metrics: ServiceMetrics) -> dict[str, float]:
    """Return the value of each sample by its name and its label values, in the order of the label names."""
    families = text_string_to_metric_families(metrics.render_exposition().decode())
    samples = [sample for family in families for sample in family.samples]
    return {
        " ".join([sample.name, *(sample.labels[key] for key in sorted(sample.labels))]): sample.value
        for sample in samples
    }


def create_manifest(**fields: Any) -> Manifest:
    return Manifest(Content({"kind": "wiki"}, (), {}), **fields)


@pytest.fixture
def metrics() -> Iterator[ServiceMetrics]:
    metrics = ServiceMetrics(ServiceSettings())
    yield metrics
    metrics.close()


def test_metrics_follow_a_swap(library: Library, dest: Path, metrics: ServiceMetrics) -> None:
    assert not any(name.startswith("bookwheel_snapshot") for name in read_metrics(metrics))
    with run_service(library.url, dest, observer=metrics) as service:
        wait_until(lambda: read_metrics(metrics).get(f"bookwheel_snapshot_info hnsw latest {library.red}") == 1)
        service.search("who was born?", "where is the river?")
        library.move(library.blue)
        service.wait_until_served(library.blue)
        service.search("who was born?", k=2)
        wait_until(lambda: read_metrics(metrics)["bookwheel_editions"] == 1)
        samples = read_metrics(metrics)
        assert samples["bookwheel_snapshot_info hnsw latest " + library.blue] == 1
        assert f"bookwheel_snapshot_info hnsw latest {library.red}" not in samples
        assert samples["bookwheel_ref_number"] == service.snapshot()["number"]
        assert samples["bookwheel_swaps_total ok"] == 1
        assert samples["bookwheel_swaps_total refused"] == 0
        assert samples["bookwheel_request_seconds_count 200 search"] == 2
        assert samples["bookwheel_batch_questions_sum"] == 3
        assert samples["bookwheel_queue_filled_ratio_count search"] == 2
        assert samples["bookwheel_looks_total ok"] > 0
        assert samples["bookwheel_ref_seen_age_seconds"] < 60
        assert samples["process_resident_memory_bytes"] > 0


def test_invalid_request_is_counted_by_its_status(library: Library, dest: Path, metrics: ServiceMetrics) -> None:
    with run_service(library.url, dest, observer=metrics) as service:
        assert service.client.post("/search", json={"questions": []}).status_code == 422
        assert service.client.post("/search", json={"questions": ["x"], "k": 0}).status_code == 400
        assert service.client.get("/unknown/path").status_code == 404
        samples = read_metrics(metrics)
        assert samples["bookwheel_request_seconds_count 422 search"] == 1
        assert samples["bookwheel_request_seconds_count 400 search"] == 1
        assert not any("unknown" in name for name in samples)  # Requests cannot create labels.


def test_retrieval_for_answers_is_monitored(library: Library, dest: Path, tmp_path: Path) -> None:
    """A RAG model retrieves with its own question encoder, which a training can spoil."""
    model = save_tiny_rag(tmp_path / "model", library.encoder)
    metrics = ServiceMetrics(ServiceSettings(), QualityMonitor(MonitorSettings(window=8, min_samples=4, samples=8)))
    with run_service(library.url, dest, observer=metrics, model=str(model)) as service:
        questions = [f"who was born in city {letter}?" for letter in "abcd"]
        assert service.client.post("/answer", json={"questions": questions}).status_code == 200
        samples = read_metrics(metrics)
        assert 0 <= samples["bookwheel_retrieval_spread_ratio answer"] <= 1
        assert samples["bookwheel_retrieval_distinct_ratio answer"] >= 0.25
        assert "bookwheel_retrieval_spread_ratio search" not in samples


def create_refusal(snapshot: str, number: int = 8) -> Refusal:
    return Refusal("latest", number, snapshot, "it is damaged", "2026-11-01T00:00:00+00:00", 1, False)


def test_refusal_is_exported_until_the_ref_moves(metrics: ServiceMetrics) -> None:
    metrics.on_refused(create_refusal("f" * 64))
    metrics.on_poll("")
    assert read_metrics(metrics)["bookwheel_snapshot_refused_info 8 latest " + "f" * 64] == 1
    assert read_metrics(metrics)["bookwheel_swaps_total refused"] == 1
    metrics.on_refused(create_refusal(""))  # The record of the ref's move cannot be read.
    assert any(name.startswith("bookwheel_snapshot_refused") for name in read_metrics(metrics))
    metrics.on_poll("the store is gone")
    assert any(name.startswith("bookwheel_snapshot_refused") for name in read_metrics(metrics))
    metrics.on_poll("")
    assert not any(name.startswith("bookwheel_snapshot_refused") for name in read_metrics(metrics))
    assert read_metrics(metrics)["bookwheel_looks_total failed"] == 1


def test_recall_and_creation_time_are_read_from_the_manifest() -> None:
    figures = {"hnsw": {"recall@20": 0.98, "recall@20_p5": 0.9, "distances": 1200.0}}
    info = ServedSnapshotInfo.from_manifest(
        create_manifest(metrics=figures, provenance={"created_at": "2026-11-01T00:00:00+00:00"}), SERVED_REF, "hnsw"
    )
    assert (info.recall_mean, info.recall_p5) == (0.98, 0.9)
    assert info.created == 1793491200.0
    assert (
        ServedSnapshotInfo.from_manifest(
            create_manifest(provenance={"created_at": "2026-11-01T00:00:00"}), SERVED_REF, "hnsw"
        ).created
        == info.created
    )


def test_trends_of_the_last_builds_are_exported(metrics: ServiceMetrics) -> None:
    recalls, last_build = [0.98] * 6 + [0.9] * 3, create_manifest()
    for number, recall in enumerate(recalls):
        provenance = {"history": format_history(last_build if number else None)}
        content = Content({"kind": "wiki", "number": number}, (), {})
        last_build = Manifest(content, {"hnsw": {"recall@20": recall}}, provenance=provenance)
    metrics.served_snapshot = ServedSnapshotInfo.from_manifest(last_build, SERVED_REF, "hnsw")
    assert read_metrics(metrics)["bookwheel_builds_trend_ratio hnsw recall"] == pytest.approx(0.9 / 0.98)
    metrics.served_snapshot = ServedSnapshotInfo.from_manifest(create_manifest(), SERVED_REF, "hnsw")
    assert not any(name.startswith("bookwheel_builds") for name in read_metrics(metrics))


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9) | st.just("recall@20"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9) | st.just("recall@20"), inner),
    max_leaves=6,
)


@settings(max_examples=50)
@given(metrics=st.dictionaries(st.sampled_from(["hnsw", "x"]), _JSON), created=_JSON)
def test_any_json_in_a_manifest_is_tolerated(metrics: dict[str, Any], created: Any) -> None:
    provenance = {"created_at": created, "history": [created] * 9}
    manifest = create_manifest(metrics=metrics, provenance=provenance)
    info = ServedSnapshotInfo.from_manifest(manifest, SERVED_REF, "hnsw")
    assert info.recall_mean is None or 0 <= info.recall_mean <= 1


def test_answers_are_counted_by_their_origin_and_support(library: Library, dest: Path, metrics: ServiceMetrics) -> None:
    hit = Hit(1, 0.5, 0, Passage("1-0", "1", 1, "T", "", "by Orwell", 0, 2, Passage.hash_of("T", "by Orwell")), "", "")
    entry = ContextEntry(1, "T", "", "", 1, (0,), "by Orwell")
    answer = Answer("who?", "Orwell [1].", None, (SupportingPassage(hit),), context=(entry,))
    answers = [
        answer,
        replace(answer, text="Huxley"),
        replace(answer, text="", abstained=True),
        replace(answer, text=" "),
        Answer("who?", "Huxley", -1.0, (SupportingPassage(CLOSED_BOOK, 1.0, 1.0),)),  # It has no passages to override.
    ]
    with run_service(library.url, dest, observer=metrics) as service, service.service.slot.acquire() as snapshot:
        metrics.on_answer(snapshot, answers)
    samples = {name: value for name, value in read_metrics(metrics).items() if name.startswith("bookwheel_answers")}
    assert {name: value for name, value in samples.items() if "created" not in name} == {
        "bookwheel_answers_total given": 3,
        "bookwheel_answers_total empty": 1,
        "bookwheel_answers_total abstained": 1,
        "bookwheel_answers_memory_total passages": 2,
        "bookwheel_answers_memory_total weights": 1,
        "bookwheel_answers_unsupported_total": 1,
        "bookwheel_answers_numbered_total yes": 1,
        "bookwheel_answers_numbered_total no": 1,
    }
