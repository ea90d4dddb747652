"""POST /retrieve: the requests of search agents in training, answered in fair batches from one snapshot."""

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
from tests.fixtures.serving import TIMEOUT, HttpService, Library, make_settings, run_service, wait_until

QUERIES = [f"who was the king of river number {number}?" for number in range(50)]


@pytest.fixture(scope="module")
def service(shared_library: Library, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpService]:
    limits = make_settings(
        retrievers=("hnsw", "exact"), batch_questions=8, queue_questions=16, max_question_chars=300, max_queries=60
    )
    with run_service(shared_library.url, tmp_path_factory.mktemp("dest"), limits) as service:
        yield service


def retrieve(service: HttpService, queries: list[str], topk: int = 3, url: str = "/retrieve") -> dict[str, Any]:
    """Send a request like those of the clients of Search-R1 and verl."""
    reply = service.client.post(url, json={"queries": queries, "topk": topk, "return_scores": True})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_more_queries_than_the_queue_holds_get_the_hits_of_search(service: HttpService) -> None:
    reply = retrieve(service, QUERIES)
    singles = [service.search(query)["results"][0]["hits"] for query in QUERIES]
    assert [[document["document"]["id"] for document in documents] for documents in reply["result"]] == [
        [hit["id"] for hit in hits] for hits in singles
    ]
    document, hit = reply["result"][0][0], singles[0][0]
    assert document["document"] == {"id": hit["id"], "contents": f"{hit['title']}\n{hit['text']}"}
    assert document["score"] == pytest.approx(hit["score"], rel=1e-3)
    assert reply["snapshot"] == service.snapshot()["snapshot"]


def test_documents_without_scores(service: HttpService) -> None:
    scored = retrieve(service, QUERIES[:2])["result"]
    reply = service.client.post("/retrieve", json={"queries": QUERIES[:2], "topk": 3}).json()
    assert reply["result"] == [[document["document"] for document in documents] for documents in scored]


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/msgpack"}])
def test_messagepack_body_with_one_query(service: HttpService, headers: dict[str, str]) -> None:
    body = msgspec.msgpack.encode({"query": QUERIES[0], "topk": 3, "return_scores": True})
    reply = service.client.post("/retrieve", content=body, headers=headers)
    assert reply.headers["content-type"] == "application/msgpack"
    assert [document["document"] for document in msgspec.msgpack.decode(reply.content)["result"]] == [
        document["document"] for document in retrieve(service, QUERIES[:1])["result"][0]
    ]


def test_a_query_without_text_or_too_long_does_not_fail_the_others(service: HttpService) -> None:
    reply = retrieve(service, ["", QUERIES[0], " \u200b", QUERIES[0] + "x" * 1000])
    assert [len(documents) for documents in reply["result"]] == [0, 3, 0, 3]


def test_the_url_chooses_the_retriever(service: HttpService) -> None:
    exact = service.client.post("/search", json={"questions": QUERIES[:1], "k": 3, "retriever": "exact"}).json()
    reply = retrieve(service, QUERIES[:1], url="/retrieve?retriever=exact")
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
        ("/retrieve", {"queries": ["a"], "query": "a"}, 422, "either queries"),
        ("/retrieve", {"queries": [1]}, 422, "not a string"),
        ("/retrieve", {"queries": ["a"], "depth": 1}, 422, "depth"),
        ("/retrieve?index=hnsw", {"queries": ["a"]}, 400, "'index'"),
        ("/retrieve?retriever=ivf", {"queries": ["a"]}, 400, "ivf"),
        ("/retrieve?snapshot=latest", {"queries": ["a"]}, 400, "'latest'"),
        ("/retrieve?snapshot=latest@99", {"queries": ["a"]}, 410, "latest@99"),
        (f"/retrieve?snapshot={'0' * 64}", {"queries": ["a"]}, 410, "0" * 64),
    ],
)
def test_invalid_request_gets_one_sentence(
    service: HttpService, url: str, body: dict[str, Any], status: int, words: str
) -> None:
    reply = service.client.post(url, json=body)
    assert (reply.status_code, words in reply.json()["detail"]) == (status, True), reply.text


@pytest.mark.parametrize("body", [b"\xc1", b"\x81", b"\x91" * 100_000, b"", b"{}", b'{"queries": ["a"]}'])
def test_invalid_messagepack_gets_one_sentence(service: HttpService, body: bytes) -> None:
    reply = service.client.post("/retrieve", content=body, headers={"content-type": "application/msgpack"})
    assert reply.status_code in (400, 422)
    assert reply.json()["detail"].count("\n") == 0


def test_requests_of_other_pages_are_refused(service: HttpService) -> None:
    body = msgspec.msgpack.encode({"query": "a"})
    text_reply = service.client.post("/retrieve", content=body, headers={"content-type": "text/plain"})
    foreign_reply = service.client.post("/retrieve", content=body, headers={"origin": "https://example.com"})
    assert (text_reply.status_code, foreign_reply.status_code) == (415, 403)


def test_a_body_of_ten_megabytes_is_refused(service: HttpService) -> None:
    assert service.client.post("/retrieve", json={"queries": ["a" * (10 << 20)]}).status_code == 413


def test_single_queries_are_answered_while_a_large_request_runs(
    shared_library: Library, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large request shares no batch, queue or thread with them, and leaves one of two cores free."""
    # On a busy machine the client may pause for longer than a core is reserved after its request.
    monkeypatch.setattr("rag_model.serving.service._RESERVE_SECONDS", TIMEOUT)
    with run_service(
        shared_library.url, dest, make_settings(batch_questions=4, max_queries=5000, workers=2)
    ) as service:
        batcher = service.service._chunk_batcher
        niceness = {os.getpriority(os.PRIO_PROCESS, thread._thread.native_id or 0) for thread in batcher.threads}
        assert min(niceness) > os.getpriority(os.PRIO_PROCESS, 0)
        service.search("who was the king?")
        with ThreadPoolExecutor() as pool:
            large = pool.submit(service.client.post, "/retrieve", json={"queries": QUERIES})
            queued_counts = []
            while not large.done():
                service.search("who was the king?")
                assert service.service._search_batcher.queued_questions == 0
                queued_counts.append(batcher.queued_questions)
            assert len(large.result().json()["result"]) == len(QUERIES)
        assert len(queued_counts) > 10
        assert max(queued_counts) <= 1  # The chunks of the large request have one query each.
        with pytest.raises(httpx.ReadTimeout):
            service.client.post("/retrieve", json={"queries": QUERIES * 24}, timeout=httpx.Timeout(TIMEOUT, read=0.2))
        # The queries of a client that disconnects leave the queue.
        wait_until(lambda: service.service._chunk_batcher.is_idle)
        service.search("who was the king?")


def collect_colours(reply: dict[str, Any]) -> set[str]:
    return {document["contents"].split()[0] for documents in reply["result"] for document in documents}


def test_request_can_pin_a_snapshot_while_the_ref_moves(library: Library, dest: Path) -> None:
    limits = make_settings(pinned_snapshots=1, pin_seconds=TIMEOUT, batch_questions=4)
    with run_service(library.url, dest, limits) as service:

        def ask(snapshot: str) -> httpx.Response:
            return service.client.post(f"/retrieve?snapshot={snapshot}", json={"queries": QUERIES[:10], "topk": 2})

        assert ask(library.red).json()["snapshot"] == library.red
        library.move(library.blue)
        service.wait_until_served(library.blue)
        pinned_reply = ask(library.red).json()
        assert (pinned_reply["snapshot"], collect_colours(pinned_reply)) == (library.red, {"red"})
        current_reply = service.client.post("/retrieve", json={"queries": QUERIES[:10]}).json()
        assert (current_reply["snapshot"], collect_colours(current_reply)) == (library.blue, {"blue"})
        refused_reply = ask(library.blue)
        assert (refused_reply.status_code, refused_reply.headers["retry-after"]) == (503, "2")
        assert library.red in refused_reply.json()["detail"]


def scrape_loaded_count(metrics: ServiceMetrics) -> float:
    return next(
        float(line.split()[1])
        for line in metrics.render_exposition().decode().splitlines()
        if line.startswith("bookwheel_editions ")
    )


def test_earlier_snapshot_is_opened_on_request(library: Library, dest: Path) -> None:
    library.move(library.blue)
    limits = make_settings(pin_seconds=0.5)
    metrics = ServiceMetrics(limits)
    with run_service(library.url, dest, limits, observer=metrics) as service:

        def ask() -> httpx.Response:
            return service.client.post("/retrieve?snapshot=latest@1", json={"queries": QUERIES[:10], "topk": 2})

        wait_until(lambda: ask().status_code == 200)
        reply = ask().json()
        assert (reply["snapshot"], collect_colours(reply)) == (library.red, {"red"})
        assert service.service.slot.loaded_count == scrape_loaded_count(metrics) == 2
        wait_until(lambda: service.service.slot.loaded_count == 1)  # `pin_seconds` after the last request
        wait_until(lambda: scrape_loaded_count(metrics) == 1)
        (Path(library.url) / "snapshots" / f"{library.red}.json").unlink()  # as `expire` does
        wait_until(lambda: ask().status_code == 410)
        assert "latest@1" in ask().json()["detail"]


def test_no_reply_mixes_snapshots_while_the_ref_moves(library: Library, dest: Path) -> None:
    done, replies = threading.Event(), list[httpx.Response]()
    with run_service(library.url, dest, make_settings(poll_seconds=0.01, workers=2, batch_questions=4)) as service:

        def ask() -> None:
            with httpx.Client(base_url=service.url, timeout=TIMEOUT) as client:
                while not done.is_set():
                    replies.append(client.post("/retrieve", json={"queries": QUERIES, "topk": 2}))

        with ThreadPoolExecutor() as pool:
            clients = [pool.submit(ask) for _ in range(2)]
            for snapshot in (library.blue, library.red, library.blue):
                reply_count = len(replies)
                library.move(snapshot)
                service.wait_until_served(snapshot)
                wait_until(lambda before=reply_count: len(replies) > before + 2)
            done.set()
        for future in clients:
            future.result()
    assert {reply.status_code for reply in replies} == {200}
    assert all(collect_colours(reply.json()) == {library.colour(reply.json()["snapshot"])} for reply in replies)
    assert {reply.json()["snapshot"] for reply in replies} == {library.red, library.blue}


def test_unknown_snapshot_takes_no_pinned_slot(library: Library, dest: Path) -> None:
    """The current snapshot, which is open in any case, takes no slot either."""
    library.move(library.blue)
    with run_service(library.url, dest, make_settings(pinned_snapshots=1, pin_seconds=TIMEOUT)) as service:

        def ask(snapshot: str) -> int:
            url = f"/retrieve?snapshot={snapshot}"
            return service.client.post(url, json={"queries": QUERIES[:1], "topk": 1}).status_code

        current = f"latest@{service.snapshot()['number']}"
        assert ask(current) == 200
        wait_until(lambda: ask("latest@99") == 410)
        wait_until(lambda: ask("latest@1") == 200)
        assert ask(current) == 200
