"""What is scraped says what is so: of a service that swaps, is refused, and of manifests that say anything."""

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
from tests.fixtures.serving import Library, serving, until
from tests.fixtures.tiny_rag import save_tiny_rag

NAMED = ServedRef("latest", 7, "0" * 64, "2026-11-01T00:00:00+00:00")


def scraped(metrics: ServiceMetrics) -> dict[str, float]:
    """Return every sample by its name and, sorted, its labels' values."""
    families = text_string_to_metric_families(metrics.render_exposition().decode())
    samples = [sample for family in families for sample in family.samples]
    return {
        " ".join([sample.name, *(sample.labels[key] for key in sorted(sample.labels))]): sample.value
        for sample in samples
    }


def manifest(**said: Any) -> Manifest:
    return Manifest(Content({"kind": "wiki"}, (), {}), **said)


@pytest.fixture
def metrics() -> Iterator[ServiceMetrics]:
    kept = ServiceMetrics(ServiceSettings())
    yield kept
    kept.close()


def test_a_swap_is_seen_as_it_happens(library: Library, dest: Path, metrics: ServiceMetrics) -> None:
    assert not any(name.startswith("bookwheel_snapshot") for name in scraped(metrics))
    with serving(library.url, dest, observer=metrics) as service:
        until(lambda: scraped(metrics).get(f"bookwheel_snapshot_info hnsw latest {library.red}") == 1)
        service.search("who was born?", "where is the river?")
        library.move(library.blue)
        service.until_served(library.blue)
        service.search("who was born?", k=2)
        until(lambda: scraped(metrics)["bookwheel_editions"] == 1)
        seen = scraped(metrics)
        assert seen["bookwheel_snapshot_info hnsw latest " + library.blue] == 1
        assert f"bookwheel_snapshot_info hnsw latest {library.red}" not in seen
        assert seen["bookwheel_ref_number"] == service.snapshot()["number"]
        assert seen["bookwheel_swaps_total ok"] == 1
        assert seen["bookwheel_swaps_total refused"] == 0
        assert seen["bookwheel_request_seconds_count 200 search"] == 2
        assert seen["bookwheel_batch_questions_sum"] == 3
        assert seen["bookwheel_queue_filled_ratio_count search"] == 2
        assert seen["bookwheel_looks_total ok"] > 0
        assert seen["bookwheel_ref_seen_age_seconds"] < 60
        assert seen["process_resident_memory_bytes"] > 0


def test_a_malformed_request_is_counted_by_its_status(library: Library, dest: Path, metrics: ServiceMetrics) -> None:
    with serving(library.url, dest, observer=metrics) as service:
        assert service.client.post("/search", json={"questions": []}).status_code == 422
        assert service.client.post("/search", json={"questions": ["x"], "k": 0}).status_code == 400
        assert service.client.get("/nobody/knows/this").status_code == 404
        seen = scraped(metrics)
        assert seen["bookwheel_request_seconds_count 422 search"] == 1
        assert seen["bookwheel_request_seconds_count 400 search"] == 1
        assert not any("nobody" in name for name in seen)  # labels are few, whatever is asked


def test_what_answers_are_read_from_is_watched_too(library: Library, dest: Path, tmp_path: Path) -> None:
    """A model finds passages with a question encoder of its own, and that is the one that training can spoil."""
    model = save_tiny_rag(tmp_path / "model", library.encoder)
    metrics = ServiceMetrics(ServiceSettings(), QualityMonitor(MonitorSettings(window=8, min_samples=4, samples=8)))
    with serving(library.url, dest, observer=metrics, model=str(model)) as service:
        asked = [f"who was born in city {letter}?" for letter in "abcd"]
        assert service.client.post("/answer", json={"questions": asked}).status_code == 200
        seen = scraped(metrics)
        assert 0 <= seen["bookwheel_retrieval_spread_ratio answer"] <= 1
        assert seen["bookwheel_retrieval_distinct_ratio answer"] >= 0.25
        assert "bookwheel_retrieval_spread_ratio search" not in seen


def refusal(snapshot: str, number: int = 8) -> Refusal:
    return Refusal("latest", number, snapshot, "it is damaged", "2026-11-01T00:00:00+00:00", 1, False)


def test_a_refusal_lasts_until_what_was_refused_is_not_named_any_more(metrics: ServiceMetrics) -> None:
    metrics.on_refused(refusal("f" * 64))
    metrics.on_poll("")
    assert scraped(metrics)["bookwheel_snapshot_refused_info 8 latest " + "f" * 64] == 1
    assert scraped(metrics)["bookwheel_swaps_total refused"] == 1
    metrics.on_refused(refusal(""))  # the ref's own record can't be read
    assert any(name.startswith("bookwheel_snapshot_refused") for name in scraped(metrics))
    metrics.on_poll("the store is gone")
    assert any(name.startswith("bookwheel_snapshot_refused") for name in scraped(metrics))
    metrics.on_poll("")
    assert not any(name.startswith("bookwheel_snapshot_refused") for name in scraped(metrics))
    assert scraped(metrics)["bookwheel_looks_total failed"] == 1


def test_what_a_manifest_says_is_read() -> None:
    figures = {"hnsw": {"recall@20": 0.98, "recall@20_p5": 0.9, "distances": 1200.0}}
    served = ServedSnapshotInfo.from_manifest(
        manifest(metrics=figures, provenance={"created_at": "2026-11-01T00:00:00+00:00"}), NAMED, "hnsw"
    )
    assert (served.recall_mean, served.recall_p5) == (0.98, 0.9)
    assert served.created == 1793491200.0
    assert (
        ServedSnapshotInfo.from_manifest(
            manifest(provenance={"created_at": "2026-11-01T00:00:00"}), NAMED, "hnsw"
        ).created
        == served.created
    )


def test_the_lines_of_the_last_builds_are_read(metrics: ServiceMetrics) -> None:
    recalls, served = [0.98] * 6 + [0.9] * 3, manifest()
    for number, recall in enumerate(recalls):
        provenance = {"history": format_history(served if number else None)}
        content = Content({"kind": "wiki", "number": number}, (), {})
        served = Manifest(content, {"hnsw": {"recall@20": recall}}, provenance=provenance)
    metrics.served = ServedSnapshotInfo.from_manifest(served, NAMED, "hnsw")
    assert scraped(metrics)["bookwheel_builds_trend_ratio hnsw recall"] == pytest.approx(0.9 / 0.98)
    metrics.served = ServedSnapshotInfo.from_manifest(manifest(), NAMED, "hnsw")
    assert not any(name.startswith("bookwheel_builds") for name in scraped(metrics))


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9) | st.just("recall@20"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9) | st.just("recall@20"), inner),
    max_leaves=6,
)


@settings(max_examples=50)
@given(metrics=st.dictionaries(st.sampled_from(["hnsw", "x"]), _JSON), created=_JSON)
def test_a_manifest_may_say_anything(metrics: dict[str, Any], created: Any) -> None:
    served = ServedSnapshotInfo.from_manifest(
        manifest(metrics=metrics, provenance={"created_at": created, "history": [created] * 9}), NAMED, "hnsw"
    )
    assert served.recall_mean is None or 0 <= served.recall_mean <= 1


def test_answers_are_counted_by_what_their_passages_say(library: Library, dest: Path, metrics: ServiceMetrics) -> None:
    found = Hit(
        1, 0.5, 0, Passage("1-0", "1", 1, "T", "", "by Orwell", 0, 2, Passage.hash_of("T", "by Orwell")), "", ""
    )
    entry = ContextEntry(1, "T", "", "", 1, (0,), "by Orwell")
    given = Answer("who?", "Orwell [1].", None, (SupportingPassage(found),), context=(entry,))
    answers = [
        given,
        replace(given, text="Huxley"),
        replace(given, text="", abstained=True),
        replace(given, text=" "),
        Answer(
            "who?", "Huxley", -1.0, (SupportingPassage(CLOSED_BOOK, 1.0, 1.0),)
        ),  # read nothing, so nothing is overridden
    ]
    with serving(library.url, dest, observer=metrics) as service, service.service.slot.acquire() as edition:
        metrics.on_answer(edition, answers)
    seen = {name: value for name, value in scraped(metrics).items() if name.startswith("bookwheel_answers")}
    assert {name: value for name, value in seen.items() if "created" not in name} == {
        "bookwheel_answers_total given": 3,
        "bookwheel_answers_total empty": 1,
        "bookwheel_answers_total abstained": 1,
        "bookwheel_answers_memory_total passages": 2,
        "bookwheel_answers_memory_total weights": 1,
        "bookwheel_answers_unsupported_total": 1,
        "bookwheel_answers_numbered_total yes": 1,
        "bookwheel_answers_numbered_total no": 1,
    }
