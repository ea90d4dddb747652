"""Each alarm is tripped by a real service that got into that state; Prometheus' own promtool judges."""

import json
import random
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
from tests.fixtures.alert_rules import DASHBOARD, assert_firing, expressions_of, metrics_in, rules
from tests.fixtures.serving import until, with_limits
from tests.fixtures.tiny import save_bert
from tests.fixtures.tiny_snapshot import publish_tiny
from tests.fixtures.watched_service import EVALUATED, LIVE, Watched, publish_watched, watched

SETTINGS = with_limits(queue_questions=64)
OF_MODELS = ("answers_override", "answers_sampled", "answers_unchecked", "tokens")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def store(bert: Path, tmp_path: Path) -> Store:
    return publish_watched(tmp_path, bert)


@pytest.fixture
def library(store: Store, tmp_path: Path) -> Iterator[Watched]:
    with watched(store.url, tmp_path / "served", SETTINGS, EVALUATED) as service:
        yield service


def test_a_healthy_service_trips_none_and_exports_all_that_is_watched(library: Watched, tmp_path: Path) -> None:
    before = library.healthy()
    library.search(LIVE)
    after = library.scrape()
    assert_firing(tmp_path, before, after)
    text = after.decode()
    asked = {name for rule in rules() for name in metrics_in(rule["expr"])}
    asked |= {name for one in expressions_of(json.loads(DASHBOARD.read_text())) for name in metrics_in(one)}
    missing = {name for name in asked if f"\n{name}" not in text}
    of_models = {f"bookwheel_{own}_total" for own in OF_MODELS}  # no model serves here
    of_models |= {"bookwheel_probe_same_ratio", "bookwheel_probe_likelihood_difference_nats"}
    # Nothing was refused, and the snapshot has no builds before it.
    assert missing == {"bookwheel_snapshot_refused_info", "bookwheel_builds_trend_ratio", *of_models}


def test_a_service_that_has_nothing_to_serve(store: Store, tmp_path: Path) -> None:
    with watched(store.url, tmp_path / "served", SETTINGS, ref="nobody", ready=False) as service:
        text = service.scrape()
        assert_firing(tmp_path, text, text, "BookwheelEmpty")


def test_a_thread_that_dies(library: Watched, tmp_path: Path) -> None:
    before = library.healthy()
    library.service.observer.on_thread_death("follower")
    assert_firing(tmp_path, before, library.scrape(), "BookwheelThreadDied")


def test_slow_searches(library: Watched, tmp_path: Path) -> None:
    before = library.healthy()
    for _ in range(20):
        library.metrics.on_reply("search", 200, 1, 4.0)
    assert_firing(tmp_path, before, library.scrape(), "BookwheelSlow")


def test_a_queue_that_is_full_and_refuses(library: Watched, tmp_path: Path) -> None:
    before = library.healthy()
    library.metrics.gate.open.clear()
    sizes = (1, 60, 1, 1, 1, 1)
    asking = [threading.Thread(target=library.post, args=(LIVE[:size],)) for size in sizes]
    asking[0].start()
    until(library.metrics.gate.held.is_set)
    for number, thread in enumerate(asking[1:]):
        thread.start()
        until(partial(queued, library, 60 + number))
    assert library.post(LIVE[:1]) == 429
    library.metrics.gate.open.set()
    for thread in asking:
        thread.join()
    assert_firing(tmp_path, before, library.scrape(), "BookwheelQueueFull", "BookwheelRefusing")


def test_searches_that_are_not_done_in_time(store: Store, tmp_path: Path) -> None:
    hasty = replace(SETTINGS, request_seconds=0.5)
    with watched(store.url, tmp_path / "served", hasty) as library:
        before = library.scrape()
        library.metrics.gate.open.clear()
        until(lambda: library.post(LIVE[:1]) == 504)
        assert_firing(tmp_path, before, library.scrape(), "BookwheelFailing")


def test_a_store_that_is_gone(library: Watched, tmp_path: Path, store: Store) -> None:
    before = library.healthy()
    (tmp_path / "store").rename(tmp_path / "gone")
    until(lambda: library.service.follower.problem)
    library.clock.later = 1800
    library.search(LIVE[:60])  # serves on
    assert_firing(tmp_path, before, library.scrape(), "BookwheelStoreUnreachable")


def test_a_snapshot_of_two_months_ago(library: Watched, tmp_path: Path) -> None:
    before = library.healthy()
    library.clock.later = 40 * 86400.0
    looks = library.metrics.store_seen_at
    until(lambda: library.metrics.store_seen_at != looks)
    assert_firing(tmp_path, before, library.scrape(), "BookwheelStale")


def test_builds_that_became_worse(library: Watched, tmp_path: Path) -> None:
    before, served = library.healthy(), library.metrics.served
    assert served is not None
    library.metrics.served = replace(served, trends=(Trend("recall", "hnsw", 0.98, 0.9),))
    assert_firing(tmp_path, before, library.scrape(), "BookwheelBuildsLeaveBand")


def test_a_new_snapshot_that_is_damaged(library: Watched, tmp_path: Path, store: Store, bert: Path) -> None:
    before = library.healthy()
    other = publish_tiny(store, bert, {"a": "of a", "b": "of b"}, tmp_path)
    broken = other.manifest.content.files["index/hnsw.faiss"]
    (tmp_path / "store" / broken.path).write_bytes(b"x" * broken.size)
    until(lambda: library.metrics.refusal)
    after = library.scrape()
    assert_firing(tmp_path, before, after, "BookwheelSnapshotRefused")
    assert library.post(LIVE[:1]) == 200
    tag(store, library.service.slot.served_ref.snapshot, "latest")  # type: ignore[union-attr]
    until(lambda: library.metrics.refusal is None)
    assert_firing(tmp_path, before, library.scrape())


def test_retrieval_that_has_collapsed(library: Watched, tmp_path: Path) -> None:
    before = library.healthy()
    long = " ".join(["who"] * 70)  # the encoder reads 64 tokens
    library.search([f"{long} {number}" for number in range(60)])
    until(lambda: library.value("bookwheel_question_drift_ratio") > 0.5)
    assert_firing(tmp_path, before, library.scrape(), "BookwheelRetrievalCollapsed", "BookwheelQuestionsDrifted")


def test_questions_about_other_things(library: Watched, tmp_path: Path) -> None:
    before = library.healthy()
    draw = random.Random(0)
    library.search([f"{draw.randrange(10**6)}.{draw.randrange(10**6)}" for _ in range(60)])
    until(lambda: library.value("bookwheel_question_drift_ratio") > 0.1)
    assert_firing(tmp_path, before, library.scrape(), "BookwheelQuestionsDrifted")


@pytest.mark.parametrize(
    ("text", "alarm"), [("a whale", "BookwheelUnsupported"), ("", "BookwheelUnanswered"), ("of", "BookwheelUncited")]
)
def test_answers_that_do_not_agree_with_their_passages(library: Watched, tmp_path: Path, text: str, alarm: str) -> None:
    before = library.healthy()
    with library.service.slot.acquire() as edition:
        (hits,) = edition.search(Queries(LIVE[:1]), 1)
        entry = ContextEntry(1, "", "", "", 0, (0,), hits[0].passage.text)
        said = text and (hits[0].passage.text.split()[0] if alarm == "BookwheelUncited" else text)
        one = Answer(
            "?", said, None, (SupportingPassage(hits[0]),), context=(entry,) if alarm == "BookwheelUncited" else ()
        )
        cited = [replace(one, text=f"{said} [1]")] * 40 if alarm == "BookwheelUncited" else []
        library.metrics.on_answer(edition, [one] * 200 + cited)
    assert_firing(tmp_path, before, library.scrape(), alarm)


def test_an_index_that_is_blind(bert: Path, tmp_path: Path) -> None:
    store = publish_watched(tmp_path, bert, blind=True)
    with watched(store.url, tmp_path / "served", SETTINGS, EVALUATED) as library:
        text = library.healthy()
        assert_firing(tmp_path, text, text, "BookwheelRecallFell", "BookwheelRecallUneven")


def queued(library: Watched, questions: int) -> bool:
    return library.service._search_batcher.queued_questions == questions
