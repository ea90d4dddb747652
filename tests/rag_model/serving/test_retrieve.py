"""POST /retrieve: what trainings of search agents send, answered in fair batches from one snapshot."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from rag_model.serving.monitoring.metrics import ServiceMetrics
from tests.fixtures.serving import PATIENCE, Library, Serving, serving, until, with_limits

QUERIES = [f"who was the king of river number {number}?" for number in range(50)]


@pytest.fixture(scope="module")
def served(made_library: Library, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    limits = with_limits(
        retrievers=("hnsw", "exact"), batch_questions=8, queue_questions=16, max_question_chars=300, max_queries=60
    )
    with serving(made_library.url, tmp_path_factory.mktemp("dest"), limits) as service:
        yield service


def retrieve(served: Serving, queries: list[str], topk: int = 3, url: str = "/retrieve") -> dict[str, Any]:
    """Send what Search-R1's and verl's clients send."""
    reply = served.client.post(url, json={"queries": queries, "topk": topk, "return_scores": True})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_more_queries_than_the_queue_holds_get_the_hits_of_search(served: Serving) -> None:
    reply = retrieve(served, QUERIES)
    singles = [served.search(query)["results"][0]["hits"] for query in QUERIES]
    assert [[document["document"]["id"] for document in documents] for documents in reply["result"]] == [
        [hit["id"] for hit in hits] for hits in singles
    ]
    first, hit = reply["result"][0][0], singles[0][0]
    assert first["document"] == {"id": hit["id"], "contents": f"{hit['title']}\n{hit['text']}"}
    assert first["score"] == pytest.approx(hit["score"], rel=1e-3)
    assert reply["snapshot"] == served.snapshot()["snapshot"]


def test_without_scores_the_documents_stand_alone(served: Serving) -> None:
    scored = retrieve(served, QUERIES[:2])["result"]
    reply = served.client.post("/retrieve", json={"queries": QUERIES[:2], "topk": 3}).json()
    assert reply["result"] == [[document["document"] for document in documents] for documents in scored]


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/msgpack"}])
def test_gems_client_sends_messagepack_and_one_query(served: Serving, headers: dict[str, str]) -> None:
    body = msgspec.msgpack.encode({"query": QUERIES[0], "topk": 3, "return_scores": True})
    reply = served.client.post("/retrieve", content=body, headers=headers)
    assert reply.headers["content-type"] == "application/msgpack"
    assert [document["document"] for document in msgspec.msgpack.decode(reply.content)["result"]] == [
        document["document"] for document in retrieve(served, QUERIES[:1])["result"][0]
    ]


def test_a_query_without_text_or_too_long_does_not_fail_the_others(served: Serving) -> None:
    reply = retrieve(served, ["", QUERIES[0], " \u200b", QUERIES[0] + "x" * 1000])
    assert [len(documents) for documents in reply["result"]] == [0, 3, 0, 3]


def test_the_url_chooses_the_retriever(served: Serving) -> None:
    exact = served.client.post("/search", json={"questions": QUERIES[:1], "k": 3, "retriever": "exact"}).json()
    reply = retrieve(served, QUERIES[:1], url="/retrieve?retriever=exact")
    assert [document["document"]["id"] for document in reply["result"][0]] == [
        hit["id"] for hit in exact["results"][0]["hits"]
    ]


@pytest.mark.parametrize(
    ("url", "body", "status", "words"),
    [
        ("/retrieve", {"queries": QUERIES + QUERIES}, 400, "100 queries"),
        ("/retrieve", {"queries": QUERIES, "topk": 101}, 400, "topk is 101"),
        ("/retrieve", {"queries": QUERIES, "topk": 0}, 400, "topk is 0"),
        ("/retrieve", {"queries": []}, 422, "queries"),
        ("/retrieve", {}, 422, "queries"),
        ("/retrieve", {"queries": ["a"], "query": "a"}, 422, "queries"),
        ("/retrieve", {"queries": [1]}, 422, "not a string"),
        ("/retrieve", {"queries": ["a"], "depth": 1}, 422, "depth"),
        ("/retrieve?index=hnsw", {"queries": ["a"]}, 400, "'index'"),
        ("/retrieve?retriever=ivf", {"queries": ["a"]}, 400, "ivf"),
        ("/retrieve?snapshot=latest", {"queries": ["a"]}, 400, "'latest'"),
        ("/retrieve?snapshot=latest@99", {"queries": ["a"]}, 410, "latest@99"),
        (f"/retrieve?snapshot={'0' * 64}", {"queries": ["a"]}, 410, "0" * 64),
    ],
)
def test_a_wrong_request_gets_one_sentence(
    served: Serving, url: str, body: dict[str, Any], status: int, words: str
) -> None:
    reply = served.client.post(url, json=body)
    assert (reply.status_code, words in reply.json()["detail"]) == (status, True), reply.text


@pytest.mark.parametrize("body", [b"\xc1", b"\x81", b"\x91" * 100_000, b"", b"{}", b'{"queries": ["a"]}'])
def test_a_body_that_is_no_messagepack_gets_one_sentence(served: Serving, body: bytes) -> None:
    reply = served.client.post("/retrieve", content=body, headers={"content-type": "application/msgpack"})
    assert reply.status_code in (400, 422)
    assert reply.json()["detail"].count("\n") == 0


def test_a_form_of_another_page_is_refused(served: Serving) -> None:
    body = msgspec.msgpack.encode({"query": "a"})
    declared = served.client.post("/retrieve", content=body, headers={"content-type": "text/plain"})
    foreign = served.client.post("/retrieve", content=body, headers={"origin": "https://example.com"})
    assert (declared.status_code, foreign.status_code) == (415, 403)


def test_a_body_of_ten_megabytes_is_refused(served: Serving) -> None:
    assert served.client.post("/retrieve", json={"queries": ["a" * (10 << 20)]}).status_code == 413


def test_single_queries_are_answered_while_a_large_request_runs(
    made_library: Library, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share no batch, queue or thread with it, and it leaves one of two cores free."""
    # On a busy machine the client may pause for longer than a core is reserved after its request.
    monkeypatch.setattr("rag_model.serving.service._RESERVE_SECONDS", PATIENCE)
    with serving(made_library.url, dest, with_limits(batch_questions=4, max_queries=5000, workers=2)) as served:
        many = QUERIES * 8
        batcher = served.service._chunk_batcher
        niceness = {os.getpriority(os.PRIO_PROCESS, thread._thread.native_id or 0) for thread in batcher.threads}
        assert min(niceness) > os.getpriority(os.PRIO_PROCESS, 0)
        served.search("who was the king?")
        with ThreadPoolExecutor() as pool:
            large = pool.submit(httpx.post, f"{served.url}/retrieve", json={"queries": many}, timeout=PATIENCE)
            queued_counts = []
            while not large.done():
                served.search("who was the king?")
                assert served.service._search_batcher.queued_questions == 0
                queued_counts.append(batcher.queued_questions)
            assert len(large.result().json()["result"]) == len(many)
        assert len(queued_counts) > 10
        assert max(queued_counts) <= 1  # of the large request, whose chunks have one query
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{served.url}/retrieve", json={"queries": many * 4}, timeout=httpx.Timeout(PATIENCE, read=0.2))
        # A client that leaves half-way takes its queries out of the queue.
        until(lambda: served.service._chunk_batcher.is_idle)
        served.search("who was the king?")


def colours(reply: dict[str, Any]) -> set[str]:
    return {document["contents"].split()[0] for documents in reply["result"] for document in documents}


def test_a_training_keeps_its_snapshot_while_the_ref_moves(library: Library, dest: Path) -> None:
    limits = with_limits(pinned_snapshots=1, pin_seconds=PATIENCE, batch_questions=4)
    with serving(library.url, dest, limits) as served:

        def ask(snapshot: str) -> httpx.Response:
            return served.client.post(f"/retrieve?snapshot={snapshot}", json={"queries": QUERIES[:10], "topk": 2})

        assert ask(library.red).json()["snapshot"] == library.red
        library.move(library.blue)
        served.until_served(library.blue)
        pinned = ask(library.red).json()
        assert (pinned["snapshot"], colours(pinned)) == (library.red, {"red"})
        current = served.client.post("/retrieve", json={"queries": QUERIES[:10]}).json()
        assert (current["snapshot"], colours(current)) == (library.blue, {"blue"})
        refused = ask(library.blue)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert library.red in refused.json()["detail"]


def scrape_loaded(metrics: ServiceMetrics) -> float:
    return next(
        float(line.split()[1])
        for line in metrics.render_exposition().decode().splitlines()
        if line.startswith("bookwheel_editions ")
    )


def test_an_earlier_snapshot_is_opened_when_it_is_asked_for(library: Library, dest: Path) -> None:
    library.move(library.blue)
    limits = with_limits(pin_seconds=0.5)
    metrics = ServiceMetrics(limits)
    with serving(library.url, dest, limits, observer=metrics) as served:

        def ask() -> httpx.Response:
            return served.client.post("/retrieve?snapshot=latest@1", json={"queries": QUERIES[:10], "topk": 2})

        until(lambda: ask().status_code == 200)
        reply = ask().json()
        assert (reply["snapshot"], colours(reply)) == (library.red, {"red"})
        assert served.service.slot.loaded_count == scrape_loaded(metrics) == 2
        until(lambda: served.service.slot.loaded_count == 1)  # nobody asks for it any more
        until(lambda: scrape_loaded(metrics) == 1)
        (Path(library.url) / "snapshots" / f"{library.red}.json").unlink()  # as `expire` does
        until(lambda: ask().status_code == 410)
        assert "latest@1" in ask().json()["detail"]


def test_no_reply_mixes_snapshots_while_the_ref_moves(library: Library, dest: Path) -> None:
    done, replies = threading.Event(), list[httpx.Response]()
    with serving(library.url, dest, with_limits(poll_seconds=0.01, workers=2, batch_questions=4)) as served:

        def ask() -> None:
            with httpx.Client(base_url=served.url, timeout=PATIENCE) as client:
                while not done.is_set():
                    replies.append(client.post("/retrieve", json={"queries": QUERIES, "topk": 2}))

        with ThreadPoolExecutor() as pool:
            asking = [pool.submit(ask) for _ in range(2)]
            for snapshot in (library.blue, library.red, library.blue):
                asked = len(replies)
                library.move(snapshot)
                served.until_served(snapshot)
                until(lambda before=asked: len(replies) > before + 2)
            done.set()
        for future in asking:
            future.result()
    assert {reply.status_code for reply in replies} == {200}
    assert all(colours(reply.json()) == {library.colour(reply.json()["snapshot"])} for reply in replies)
    assert {reply.json()["snapshot"] for reply in replies} == {library.red, library.blue}


def test_a_snapshot_that_does_not_exist_keeps_no_other_one_out(library: Library, dest: Path) -> None:
    """Nor does the current one, which is open in any case."""
    library.move(library.blue)
    with serving(library.url, dest, with_limits(pinned_snapshots=1, pin_seconds=PATIENCE)) as served:

        def ask(snapshot: str) -> int:
            url = f"/retrieve?snapshot={snapshot}"
            return served.client.post(url, json={"queries": QUERIES[:1], "topk": 1}).status_code

        current = f"latest@{served.snapshot()['number']}"
        assert ask(current) == 200
        until(lambda: ask("latest@99") == 410)
        until(lambda: ask("latest@1") == 200)
        assert ask(current) == 200
