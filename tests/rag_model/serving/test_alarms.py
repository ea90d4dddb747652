"""Each alert fires for a real service in the matching state; Prometheus' own promtool evaluates the rules."""

import json
import random
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rag_model.reading.answer import Answer, ContextEntry, SupportingPassage
from rag_model.retrieve.retriever import Queries
from rag_model.store.store import Store
from rag_model.store.versions.build_history import Trend
from rag_model.store.versions.moves import tag
from tests.fixtures.alert_rules import DASHBOARD, assert_firing, find_metric_names, iter_dashboard_queries, read_rules
from tests.fixtures.serving import make_settings, wait_until
from tests.fixtures.tiny import save_bert
from tests.fixtures.tiny_snapshot import publish_tiny
from tests.fixtures.watched_service import EVALUATED, LIVE, MonitoredService, publish_monitored, serve_monitored

SETTINGS = make_settings(queue_questions=64)
MODEL_METRICS = ("answers_override", "answers_sampled", "answers_unchecked", "tokens")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def shared_store(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store that no test changes."""
    return publish_monitored(tmp_path_factory.mktemp("published"), bert)


@pytest.fixture
def store(shared_store: Store, tmp_path: Path) -> Store:
    return Store.open(str(shutil.copytree(shared_store.files.local_path(""), tmp_path / "store")))


@pytest.fixture
def service(store: Store, tmp_path: Path) -> Iterator[MonitoredService]:
    with serve_monitored(store.url, tmp_path / "served", SETTINGS, EVALUATED) as service:
        yield service


@pytest.fixture(scope="module")
def shared_service(shared_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MonitoredService]:
    """A healthy service, for tests that only record events."""
    with serve_monitored(shared_store.url, tmp_path_factory.mktemp("shared"), SETTINGS, EVALUATED) as service:
        service.scrape_when_measured()
        yield service


def test_healthy_service_fires_no_alert_and_exports_all_watched_metrics(
    service: MonitoredService, tmp_path: Path
) -> None:
    first_scrape = service.scrape_when_measured()
    service.search(LIVE)
    second_scrape = service.scrape()
    assert_firing(tmp_path, first_scrape, second_scrape)
    text = second_scrape.decode()
    watched_metrics = {name for rule in read_rules() for name in find_metric_names(rule["expr"])}
    panels = iter_dashboard_queries(json.loads(DASHBOARD.read_text()))
    watched_metrics |= {name for expression in panels for name in find_metric_names(expression)}
    absent = {name for name in watched_metrics if f"\n{name}" not in text}
    model_metrics = {f"bookwheel_{name}_total" for name in MODEL_METRICS}  # No model is served here.
    model_metrics |= {"bookwheel_probe_same_ratio", "bookwheel_probe_likelihood_difference_nats"}
    # Nothing was refused, and the snapshot has no builds before it.
    assert absent == {"bookwheel_snapshot_refused_info", "bookwheel_builds_trend_ratio", *model_metrics}


def test_service_without_a_snapshot_fires_an_alert(store: Store, tmp_path: Path) -> None:
    with serve_monitored(store.url, tmp_path / "served", SETTINGS, ref="unknown", ready=False) as service:
        text = service.scrape()
        assert_firing(tmp_path, text, text, "BookwheelEmpty")


def test_dead_thread_fires_an_alert(shared_service: MonitoredService, tmp_path: Path) -> None:
    first_scrape = shared_service.scrape()
    shared_service.service.observer.on_thread_death("follower")
    assert_firing(tmp_path, first_scrape, shared_service.scrape(), "BookwheelThreadDied")


def test_slow_searches_fire_an_alert(shared_service: MonitoredService, tmp_path: Path) -> None:
    first_scrape = shared_service.scrape()
    for _ in range(20):
        shared_service.metrics.on_reply("search", 200, 1, 4.0)
    assert_firing(tmp_path, first_scrape, shared_service.scrape(), "BookwheelSlow")


def test_full_queue_fires_alerts(service: MonitoredService, tmp_path: Path) -> None:
    first_scrape = service.scrape_when_measured()
    service.metrics.gate.open.clear()
    sizes = (1, 60, 1, 1, 1, 1)
    clients = [threading.Thread(target=service.post, args=(LIVE[:size],)) for size in sizes]
    clients[0].start()
    wait_until(service.metrics.gate.is_waiting.is_set)
    for number, thread in enumerate(clients[1:]):
        thread.start()
        wait_until(partial(has_queued, service, 60 + number))
    assert service.post(LIVE[:1]) == 429
    service.metrics.gate.open.set()
    for thread in clients:
        thread.join()
    assert_firing(tmp_path, first_scrape, service.scrape(), "BookwheelQueueFull", "BookwheelRefusing")


def test_searches_that_time_out_fire_an_alert(store: Store, tmp_path: Path) -> None:
    short_deadline = replace(SETTINGS, request_seconds=0.5)
    with serve_monitored(store.url, tmp_path / "served", short_deadline) as service:
        first_scrape = service.scrape()
        service.metrics.gate.open.clear()
        wait_until(lambda: service.post(LIVE[:1]) == 504)
        assert_firing(tmp_path, first_scrape, service.scrape(), "BookwheelFailing")


def test_unreachable_store_fires_an_alert(service: MonitoredService, tmp_path: Path, store: Store) -> None:
    first_scrape = service.scrape_when_measured()
    (tmp_path / "store").rename(tmp_path / "gone")
    wait_until(lambda: service.service.follower.problem)
    service.clock.offset = 1800
    service.search(LIVE[:60])  # The service still answers.
    assert_firing(tmp_path, first_scrape, service.scrape(), "BookwheelStoreUnreachable")


def test_old_snapshot_fires_an_alert(service: MonitoredService, tmp_path: Path) -> None:
    first_scrape = service.scrape_when_measured()
    service.clock.offset = 40 * 86400.0
    last_poll = service.metrics.store_seen_at
    wait_until(lambda: service.metrics.store_seen_at != last_poll)
    assert_firing(tmp_path, first_scrape, service.scrape(), "BookwheelStale")


def test_worse_builds_fire_an_alert(shared_service: MonitoredService, tmp_path: Path) -> None:
    first_scrape, served = shared_service.scrape(), shared_service.metrics.served_snapshot
    assert served is not None
    shared_service.metrics.served_snapshot = replace(served, trends=(Trend("recall", "hnsw", 0.98, 0.9),))
    assert_firing(tmp_path, first_scrape, shared_service.scrape(), "BookwheelBuildsLeaveBand")
    shared_service.metrics.served_snapshot = served


def test_damaged_snapshot_fires_an_alert(service: MonitoredService, tmp_path: Path, store: Store, bert: Path) -> None:
    first_scrape = service.scrape_when_measured()
    damaged = publish_tiny(store, bert, {"a": "of a", "b": "of b"}, tmp_path)
    index_file = damaged.manifest.content.files["index/hnsw.faiss"]
    (tmp_path / "store" / index_file.path).write_bytes(b"x" * index_file.size)
    wait_until(lambda: service.metrics.refusal)
    refused_scrape = service.scrape()
    assert_firing(tmp_path, first_scrape, refused_scrape, "BookwheelSnapshotRefused")
    assert service.post(LIVE[:1]) == 200
    tag(store, service.service.slot.served_ref.snapshot, "latest")  # type: ignore[union-attr]
    wait_until(lambda: service.metrics.refusal is None)
    assert_firing(tmp_path, first_scrape, service.scrape())


def test_collapsed_retrieval_fires_alerts(service: MonitoredService, tmp_path: Path) -> None:
    first_scrape = service.scrape_when_measured()
    long = " ".join(["who"] * 70)  # the encoder reads 64 tokens
    service.search([f"{long} {number}" for number in range(60)])
    wait_until(lambda: service.read_metric("bookwheel_question_drift_ratio") > 0.5)
    assert_firing(tmp_path, first_scrape, service.scrape(), "BookwheelRetrievalCollapsed", "BookwheelQuestionsDrifted")


def test_drifted_questions_fire_an_alert(service: MonitoredService, tmp_path: Path) -> None:
    first_scrape = service.scrape_when_measured()
    draw = random.Random(0)
    service.search([f"{draw.randrange(10**6)}.{draw.randrange(10**6)}" for _ in range(60)])
    wait_until(lambda: service.read_metric("bookwheel_question_drift_ratio") > 0.1)
    assert_firing(tmp_path, first_scrape, service.scrape(), "BookwheelQuestionsDrifted")


@pytest.mark.parametrize(
    ("text", "alarm"), [("a whale", "BookwheelUnsupported"), ("", "BookwheelUnanswered"), ("of", "BookwheelUncited")]
)
def test_answers_without_support_fire_an_alert(
    shared_service: MonitoredService, tmp_path: Path, text: str, alarm: str
) -> None:
    first_scrape = shared_service.scrape()
    with shared_service.service.slot.acquire() as snapshot:
        (hits,) = snapshot.search(Queries(LIVE[:1]), 1)
        has_citations = alarm == "BookwheelUncited"
        context = (ContextEntry(1, "", "", "", 0, (0,), hits[0].passage.text),) if has_citations else ()
        answer_text = hits[0].passage.text.split()[0] if has_citations else text
        answer = Answer("?", answer_text, None, (SupportingPassage(hits[0]),), context=context)
        cited = [replace(answer, text=f"{answer_text} [1]")] * 40 if has_citations else []
        shared_service.metrics.on_answer(snapshot, [answer] * 200 + cited)
    assert_firing(tmp_path, first_scrape, shared_service.scrape(), alarm)


def test_index_with_low_recall_fires_alerts(bert: Path, tmp_path: Path) -> None:
    store = publish_monitored(tmp_path, bert, mismatched=True)
    with serve_monitored(store.url, tmp_path / "served", SETTINGS, EVALUATED) as service:
        text = service.scrape_when_measured()
        assert_firing(tmp_path, text, text, "BookwheelRecallFell", "BookwheelRecallUneven")


def has_queued(service: MonitoredService, questions: int) -> bool:
    return service.service._search_batcher.queued_questions == questions
