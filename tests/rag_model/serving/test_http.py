"""The HTTP interface: replies equal the results of the library, and each error is one sentence."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rag_model.client import replies
from rag_model.generate.transformer import Seq2SeqGenerator
from rag_model.reading.answer import answer_json
from rag_model.reading.model import open_reader
from rag_model.retrieve.dense import DenseRetriever
from rag_model.serving.http import messages
from rag_model.store.versions.snapshot import Snapshot
from tests.docs.blocks import list_fields, read_exchanges
from tests.fixtures.serving import (
    PASSAGES,
    TIMEOUT,
    HttpService,
    Library,
    SearchGate,
    make_settings,
    round_floats,
    run_service,
    wait_until,
)

JSON = {"Content-Type": "application/json"}
SEARCH = b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
QUESTIONS = ["who was the king of the river?", "Où est 東京 🗼?"]


@pytest.fixture(scope="module")
def service(shared_library: Library, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpService]:
    bounds = make_settings(
        retrievers=("hnsw", "exact"), body_seconds=1.0, max_body_bytes=5000, max_questions=4, max_question_chars=300
    )
    with run_service(shared_library.url, tmp_path_factory.mktemp("dest"), bounds, model=str(model)) as service:
        yield service


@pytest.mark.parametrize("index", ["hnsw", "exact"])
def test_search_reply_equals_the_hits_of_the_retriever(
    index: str, service: HttpService, shared_library: Library
) -> None:
    reply = service.client.post("/search", json={"questions": QUESTIONS, "k": 4, "index": index}).json()
    with Snapshot.open(shared_library.url) as snapshot:
        hit_lists = DenseRetriever.from_snapshot(snapshot, index).search(QUESTIONS, 4)
    results = [
        {"question": q, "hits": [hit.to_json() for hit in hits]} for q, hits in zip(QUESTIONS, hit_lists, strict=True)
    ]
    assert reply == round_floats({"snapshot": shared_library.red, "results": results})


def test_a_default_k_is_capped_by_the_retriever(service: HttpService) -> None:
    for expression, count in (("hnsw", 5), ("hnsw:3", 3), ("rrf(hnsw:1, exact:1)", 2)):
        request = {"questions": QUESTIONS, "retriever": expression}
        results = service.client.post("/search", json=request).json()["results"]
        assert max(len(result["hits"]) for result in results) <= count
        assert service.client.post("/search", json={**request, "k": 3}).status_code == (200 if count >= 3 else 400)
    assert len(service.client.post("/search", json={"questions": QUESTIONS}).json()["results"][0]["hits"]) == 5


def test_answer_reply_equals_the_answers_of_the_reader(
    service: HttpService, shared_library: Library, model: Path
) -> None:
    with Snapshot.open(shared_library.url) as snapshot:
        name, reader = open_reader(snapshot, shared_library.url, str(model), "hnsw")
        for k in (None, 2):
            request = {"questions": QUESTIONS} if k is None else {"questions": QUESTIONS, "k": k}
            reply = service.client.post("/answer", json=request).json()
            answers = [answer_json(answer) for answer in reader.answer(QUESTIONS, k)]
            assert reply == round_floats({"snapshot": shared_library.red, "model": name, "answers": answers})


def test_message_models_describe_the_replies(service: HttpService) -> None:
    search_reply = service.client.post("/search", json={"questions": QUESTIONS}).json()
    answer_reply = service.client.post("/answer", json={"questions": QUESTIONS}).json()
    for kind, reply in (
        (replies.SearchReply, search_reply),
        (replies.AnswerReply, answer_reply),
        (replies.SnapshotReply, service.snapshot()),
    ):
        assert messages.create_model(kind).model_validate(reply).model_dump(mode="json") == reply
    schema = service.client.get("/openapi.json").json()
    assert {"/search", "/answer", "/snapshot", "/healthz", "/readyz"} <= set(schema["paths"])
    body = schema["paths"]["/search"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == {"questions", "k", "index", "retriever", "where"}


def test_examples_on_the_page_of_the_api_have_the_fields_of_real_replies(service: HttpService) -> None:
    checked = set()
    for path, (request, example) in read_exchanges().items():
        if path.startswith("/") and path != "/answer":  # `test_one_prompt.py` checks this example
            if request is None:
                reply = service.client.get(path)
            else:
                served_request = json.loads(json.dumps(request).replace("bm25", "exact"))
                reply = service.client.post(path, json=served_request)
            assert (reply.status_code, path, list_fields(reply.json())) == (200, path, list_fields(example))
            checked.add(path)
    assert checked == {"/search", "/retrieve", "/snapshot", "/healthz", "/readyz"}
    refused = service.client.post("/search", json={"questions": "x"}).json()
    assert refused == read_exchanges()["Problem"][1]


def test_snapshot_reply_describes_what_is_served(service: HttpService, shared_library: Library) -> None:
    assert service.client.get("/healthz").status_code == service.client.get("/readyz").status_code == 200
    state = service.snapshot()
    move = shared_library.store.refs.find_current("latest")
    assert move is not None
    expected = {"snapshot": shared_library.red, "ref": "latest", "number": move.number, "created_at": move.created_at}
    assert expected.items() <= state.items()
    assert (state["passages"], state["refused"], state["store_problem"]) == (PASSAGES, None, None)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "not JSON"),
        (b'{"questions": ["a"', 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b'{"questions": ["\\ud800"]}', 400, ""),
        (b"[]", 422, "the body is not an object: send one such as"),
        (b"{}", 422, "questions is missing: give it"),
        (b'{"questions": "who?"}', 422, "questions is not a list: give one of strings"),
        (b'{"questions": []}', 422, "questions is empty: give at least one"),
        (b'{"questions": [1]}', 422, "questions.0 is not a string: write it in quotes"),
        (b'{"questions": ["a"], "k": "5"}', 422, "k is not a whole number"),
        (b'{"questions": ["a"], "k": true}', 422, "k is not a whole number"),
        (b'{"questions": ["a"], "k": 1e400}', 422, "k is not a whole number"),
        (b'{"questions": ["a"], "k": 41.0}', 400, "holds 40 passages"),
        (b'{"questions": ["a"], "k": 1.5}', 422, "k is not a whole number"),
        (b'{"questions": ["a"], "depth": 5}', 422, "depth is not a field of this request"),
        (b'{"questions": ["a"], "a\\nb": 5}', 422, "a b is not a field of this request"),
        (b'{"questions": ["a"], "url": "http://169.254.169.254/"}', 422, "url"),
        (b'{"questions": ["a"], "k": 0}', 400, "at least 1"),
        (b'{"questions": ["a"], "k": -1}', 400, "at least 1"),
        (b'{"questions": ["a"], "k": 41}', 400, "holds 40 passages"),
        (b'{"questions": ["a"], "k": 101}', 400, "at most 100"),
        (b'{"questions": ["a"], "k": 1000000000000000000000000000000}', 400, "at most 100"),
        (b'{"questions": [" \\n"]}', 400, "question 1 is empty"),
        (b'{"questions": ["a", "b", "c", "d", "e"]}', 400, "up to 4"),
        (b'{"questions": ["' + b"a" * 301 + b'"]}', 400, "301 characters"),
        (b'{"questions": ["a"], "index": "../../etc/passwd"}', 400, "choose one of hnsw, exact"),
        (b"[" * 4000, 400, "not JSON"),
    ],
)
def test_bad_request_is_explained_in_one_sentence(service: HttpService, body: bytes, status: int, words: str) -> None:
    reply = service.client.post("/search", content=body, headers=JSON)
    assert reply.status_code == status, reply.text
    assert set(reply.json()) == {"detail"}
    assert words in reply.json()["detail"]
    assert "\n" not in reply.json()["detail"]
    service.search("who?")


def test_unknown_paths_and_methods_are_refused(service: HttpService) -> None:
    assert service.client.get("/search").status_code == 405
    assert service.client.get("/../../etc/passwd").status_code == 404
    assert service.client.post("/snapshot").status_code == 405


@pytest.mark.parametrize("chunked", [False, True])
def test_huge_body_is_refused_while_it_arrives(service: HttpService, chunked: bool) -> None:
    piece = b"a" * 1000

    def pieces() -> Iterator[bytes]:
        for _ in range(50):
            yield piece

    try:
        reply = service.client.post("/search", content=pieces() if chunked else piece * 50, headers=JSON)
    except httpx.TransportError:
        pass  # The service may close the connection before it has read the whole body.
    else:
        assert reply.status_code == 413
        assert "larger than 5000 bytes" in reply.json()["detail"]
    service.search("who?")


def open_socket(service: HttpService) -> socket.socket:
    host, port = service.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT)


def read_to_end(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def test_slow_body_times_out(service: HttpService) -> None:
    with open_socket(service) as connection:
        connection.sendall(SEARCH + b'{"questions"')
        reply = read_to_end(connection)
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert b"within 1 s" in reply


@pytest.mark.parametrize(("is_reused", "partial_head"), [(False, b""), (False, b"POST /sea"), (True, b"POST /sea")])
def test_idle_connection_is_closed(service: HttpService, is_reused: bool, partial_head: bytes) -> None:
    with open_socket(service) as connection:
        if is_reused:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"alive" in connection.recv(65536)
        connection.sendall(partial_head)
        assert read_to_end(connection) == b""


def test_interrupted_requests_leave_the_service_working(service: HttpService) -> None:
    for partial_request in (b"POST", SEARCH + b'{"quest'):
        with open_socket(service) as connection:
            connection.sendall(partial_request)
    service.search("who?")


def test_garbage_is_answered_with_400(service: HttpService) -> None:
    with open_socket(service) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 \r\n\r\n")
        assert read_to_end(connection).startswith(b"HTTP/1.1 400 ")
    service.search("who?")


def test_without_a_model_there_are_no_answers(shared_library: Library, dest: Path) -> None:
    with run_service(shared_library.url, dest) as service:
        reply = service.client.post("/answer", json={"questions": ["who?"]})
        assert (reply.status_code, reply.json()["detail"].startswith("this service has no model")) == (400, True)


def test_concurrent_questions_are_batched_and_a_full_queue_says_so(shared_library: Library, dest: Path) -> None:
    gate = SearchGate()
    with run_service(shared_library.url, dest, make_settings(queue_questions=6), gate) as service:
        gate.open.clear()
        replies: dict[str, httpx.Response] = {}

        def ask(question: str) -> None:
            replies[question] = service.client.post("/search", json={"questions": [question], "k": len(question)})

        threads = [threading.Thread(target=ask, args=("?" * (1 + number % 3) + f"{number}",)) for number in range(7)]
        threads[0].start()
        assert gate.is_waiting.wait(TIMEOUT)
        for thread in threads[1:]:
            thread.start()
        wait_until(lambda: service.service._search_batcher.queued_questions == 6)
        refused = service.client.post("/search", json={"questions": ["one more"]})
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        assert "6 questions are waiting" in refused.json()["detail"]
        gate.open.set()
        for thread in threads:
            thread.join()
        assert len(gate.batches) == 2
        assert sorted(gate.batches[1]) == sorted(set(replies) - set(gate.batches[0]))
        for question, reply in replies.items():
            (result,) = reply.json()["results"]
            assert (result["question"], len(result["hits"])) == (question, len(question))
            assert result["hits"] == round_floats(service.search(question, k=len(question))["results"][0]["hits"])


def test_late_requests_time_out_and_are_not_searched(shared_library: Library, dest: Path) -> None:
    gate = SearchGate()
    with run_service(shared_library.url, dest, make_settings(request_seconds=0.3), gate) as service:
        gate.open.clear()
        for question in ("held", "never searched"):
            reply = service.client.post("/search", json={"questions": [question]})
            assert (reply.status_code, "within 0.3 s" in reply.json()["detail"]) == (504, True)
        assert service.service._search_batcher.queued_questions == 0
        gate.open.set()
        wait_until(lambda: service.client.post("/search", json={"questions": ["again"]}).status_code == 200)
        assert gate.batches[0] == ["held"]
        assert ["never searched"] not in gate.batches


def test_generation_stops_between_two_tokens_after_the_deadline(
    shared_library: Library, dest: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    go, step = threading.Event(), Seq2SeqGenerator.step

    def wait_and_step(generator: Seq2SeqGenerator, state: Any, tokens: Any) -> Any:
        steps.append(len(tokens))
        assert go.wait(TIMEOUT)
        return step(generator, state, tokens)

    with run_service(shared_library.url, dest, make_settings(request_seconds=0.3), model=str(model)) as service:
        monkeypatch.setattr(Seq2SeqGenerator, "step", wait_and_step)
        assert service.client.post("/answer", json={"questions": QUESTIONS}).status_code == 504
        wait_until(lambda: steps)
        go.set()
        wait_until(lambda: service.service._answer_batcher._active_requests == 0)
        assert len(steps) == 1
        wait_until(lambda: service.client.post("/answer", json={"questions": QUESTIONS}).status_code == 200)
        assert len(steps) > 2


def test_service_is_alive_but_not_ready_before_the_first_snapshot(library: Library, dest: Path) -> None:
    hidden = Path(library.url).rename(Path(library.url).with_name("hidden"))
    with run_service(library.url, dest, ready=False) as service:
        wait_until(lambda: "there is no bookwheel store" in service.client.get("/readyz").text)
        assert service.client.get("/healthz").status_code == 200
        for path, request in (("/search", {"questions": ["a"]}), ("/snapshot", None)):
            reply = service.client.post(path, json=request) if request else service.client.get(path)
            assert (reply.status_code, set(reply.json())) == (503, {"detail"})
        assert service.client.post("/search", json={"questions": ["a"]}).headers["Retry-After"]
        hidden.rename(library.url)
        service.wait_until_served(library.red)
        service.search("who?")


def test_reply_is_json(service: HttpService) -> None:
    reply = service.client.post("/search", json={"questions": ["who?"]})
    assert reply.headers["content-type"] == "application/json"
    assert json.loads(reply.content)["results"][0]["question"] == "who?"
