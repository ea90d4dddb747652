"""The service's face: replies as the verbs give them, and one clear sentence for everything else."""

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
    PATIENCE,
    Gate,
    Library,
    Serving,
    rounded,
    serving,
    until,
    with_limits,
)

JSON = {"Content-Type": "application/json"}
HEAD = b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
ASKED = ["who was the king of the river?", "Où est 東京 🗼?"]


@pytest.fixture(scope="module")
def served(made_library: Library, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    bounds = with_limits(
        retrievers=("hnsw", "exact"), body_seconds=1.0, max_body_bytes=5000, max_questions=4, max_question_chars=300
    )
    with serving(made_library.url, tmp_path_factory.mktemp("dest"), bounds, model=str(model)) as found:
        yield found


@pytest.mark.parametrize("index", ["hnsw", "exact"])
def test_search_replies_as_the_verb_does(index: str, served: Serving, made_library: Library) -> None:
    reply = served.client.post("/search", json={"questions": ASKED, "k": 4, "index": index}).json()
    with Snapshot.open(made_library.url) as snapshot:
        found = DenseRetriever.from_snapshot(snapshot, index).search(ASKED, 4)
    hits = [[hit.to_json() for hit in some] for some in found]
    results = [{"question": q, "hits": some} for q, some in zip(ASKED, hits, strict=True)]
    assert reply == rounded({"snapshot": made_library.red, "results": results})


def test_a_default_k_is_capped_by_the_retriever(served: Serving) -> None:
    for expression, count in (("hnsw", 5), ("hnsw:3", 3), ("rrf(hnsw:1, exact:1)", 2)):
        request = {"questions": ASKED, "retriever": expression}
        results = served.client.post("/search", json=request).json()["results"]
        assert max(len(result["hits"]) for result in results) <= count
        assert served.client.post("/search", json={**request, "k": 3}).status_code == (200 if count >= 3 else 400)
    assert len(served.client.post("/search", json={"questions": ASKED}).json()["results"][0]["hits"]) == 5


def test_answer_replies_as_the_verb_does(served: Serving, made_library: Library, model: Path) -> None:
    with Snapshot.open(made_library.url) as snapshot:
        name, reader = open_reader(snapshot, made_library.url, str(model), "hnsw")
        for k in (None, 2):
            request = {"questions": ASKED} if k is None else {"questions": ASKED, "k": k}
            reply = served.client.post("/answer", json=request).json()
            answers = [answer_json(one) for one in reader.answer(ASKED, k)]
            assert reply == rounded({"snapshot": made_library.red, "model": name, "answers": answers})


def test_the_models_describe_what_is_sent(served: Serving) -> None:
    found = served.client.post("/search", json={"questions": ASKED}).json()
    answered = served.client.post("/answer", json={"questions": ASKED}).json()
    for kind, reply in (
        (replies.SearchReply, found),
        (replies.AnswerReply, answered),
        (replies.SnapshotReply, served.snapshot()),
    ):
        assert messages.create_model(kind).model_validate(reply).model_dump(mode="json") == reply
    schema = served.client.get("/openapi.json").json()
    assert {"/search", "/answer", "/snapshot", "/healthz", "/readyz"} <= set(schema["paths"])
    body = schema["paths"]["/search"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == {"questions", "k", "index", "retriever", "where"}


def test_examples_on_the_page_of_the_api_have_the_fields_of_real_replies(served: Serving) -> None:
    checked = set()
    for path, (request, example) in read_exchanges().items():
        if path.startswith("/") and path != "/answer":  # `test_one_prompt.py` has that one
            if request is None:
                reply = served.client.get(path)
            else:
                here = json.loads(json.dumps(request).replace("bm25", "exact"))
                reply = served.client.post(path, json=here)
            assert (reply.status_code, path, list_fields(reply.json())) == (200, path, list_fields(example))
            checked.add(path)
    assert checked == {"/search", "/retrieve", "/snapshot", "/healthz", "/readyz"}
    refused = served.client.post("/search", json={"questions": "x"}).json()
    assert refused == read_exchanges()["Problem"][1]


def test_the_state_is_told(served: Serving, made_library: Library) -> None:
    assert served.client.get("/healthz").status_code == served.client.get("/readyz").status_code == 200
    told = served.snapshot()
    move = made_library.store.refs.find_current("latest")
    assert move is not None
    expected = {"snapshot": made_library.red, "ref": "latest", "number": move.number, "created_at": move.created_at}
    assert expected.items() <= told.items()
    assert (told["passages"], told["refused"], told["store_problem"]) == (PASSAGES, None, None)


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
def test_a_bad_request_is_told_in_one_sentence(served: Serving, body: bytes, status: int, words: str) -> None:
    reply = served.client.post("/search", content=body, headers=JSON)
    assert reply.status_code == status, reply.text
    assert set(reply.json()) == {"detail"}
    assert words in reply.json()["detail"]
    assert "\n" not in reply.json()["detail"]
    served.search("who?")


def test_what_is_not_there_is_not_there(served: Serving) -> None:
    assert served.client.get("/search").status_code == 405
    assert served.client.get("/../../etc/passwd").status_code == 404
    assert served.client.post("/snapshot").status_code == 405


@pytest.mark.parametrize("chunked", [False, True])
def test_a_huge_body_is_refused_while_it_comes(served: Serving, chunked: bool) -> None:
    piece = b"a" * 1000

    def pieces() -> Iterator[bytes]:
        for _ in range(50):
            yield piece

    try:
        reply = served.client.post("/search", content=pieces() if chunked else piece * 50, headers=JSON)
    except httpx.TransportError:
        pass  # it was turned away before it had sent all
    else:
        assert reply.status_code == 413
        assert "larger than 5000 bytes" in reply.json()["detail"]
    served.search("who?")


def raw(served: Serving) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def all_of(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_slow_body_is_given_up(served: Serving) -> None:
    with raw(served) as connection:
        connection.sendall(HEAD + b'{"questions"')
        reply = all_of(connection)
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert b"within 1 s" in reply


@pytest.mark.parametrize("before", [b"", b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"])
def test_a_slow_head_is_given_up(served: Serving, before: bytes) -> None:
    with raw(served) as connection:
        if before:
            connection.sendall(before)
            assert b"alive" in connection.recv(65536)
        connection.sendall(b"POST /sea")
        assert all_of(connection) == b""


def test_a_connection_without_a_word_is_given_up(served: Serving) -> None:
    with raw(served) as connection:
        assert all_of(connection) == b""


def test_a_cut_request_leaves_nothing_behind(served: Serving) -> None:
    for sent in (b"POST", HEAD + b'{"quest'):
        with raw(served) as connection:
            connection.sendall(sent)
    served.search("who?")


def test_garbage_is_answered_with_400(served: Serving) -> None:
    with raw(served) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 \r\n\r\n")
        assert all_of(connection).startswith(b"HTTP/1.1 400 ")
    served.search("who?")


def test_without_a_model_there_are_no_answers(shared_library: Library, dest: Path) -> None:
    with serving(shared_library.url, dest) as found:
        reply = found.client.post("/answer", json={"questions": ["who?"]})
        assert (reply.status_code, reply.json()["detail"].startswith("this service has no model")) == (400, True)


def test_concurrent_questions_are_batched_and_a_full_queue_says_so(shared_library: Library, dest: Path) -> None:
    gate = Gate()
    with serving(shared_library.url, dest, with_limits(queue_questions=6), gate) as found:
        gate.open.clear()
        replies: dict[str, httpx.Response] = {}

        def ask(question: str) -> None:
            replies[question] = httpx.post(
                f"{found.url}/search", json={"questions": [question], "k": len(question)}, timeout=PATIENCE
            )

        threads = [threading.Thread(target=ask, args=("?" * (1 + number % 3) + f"{number}",)) for number in range(7)]
        threads[0].start()
        assert gate.held.wait(PATIENCE)
        for thread in threads[1:]:
            thread.start()
        until(lambda: found.service._search_batcher.queued_questions == 6)
        refused = found.client.post("/search", json={"questions": ["one more"]})
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
            assert result["hits"] == rounded(found.search(question, k=len(question))["results"][0]["hits"])


def test_what_is_late_is_given_up_and_not_worked_on(shared_library: Library, dest: Path) -> None:
    gate = Gate()
    with serving(shared_library.url, dest, with_limits(request_seconds=0.3), gate) as found:
        gate.open.clear()
        for question in ("held", "never searched"):
            reply = found.client.post("/search", json={"questions": [question]})
            assert (reply.status_code, "within 0.3 s" in reply.json()["detail"]) == (504, True)
        assert found.service._search_batcher.queued_questions == 0
        gate.open.set()
        until(lambda: found.client.post("/search", json={"questions": ["again"]}).status_code == 200)
        assert gate.batches[0] == ["held"]
        assert ["never searched"] not in gate.batches


def test_an_answer_that_nobody_waits_for_is_given_up_between_two_tokens(
    shared_library: Library, dest: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    go, step = threading.Event(), Seq2SeqGenerator.step

    def held(generator: Seq2SeqGenerator, state: Any, tokens: Any) -> Any:
        steps.append(len(tokens))
        assert go.wait(PATIENCE)
        return step(generator, state, tokens)

    with serving(shared_library.url, dest, with_limits(request_seconds=0.3), model=str(model)) as found:
        monkeypatch.setattr(Seq2SeqGenerator, "step", held)
        assert found.client.post("/answer", json={"questions": ASKED}).status_code == 504
        until(lambda: steps)
        go.set()
        until(lambda: found.service._answer_batcher._active_requests == 0)
        assert len(steps) == 1
        until(lambda: found.client.post("/answer", json={"questions": ASKED}).status_code == 200)
        assert len(steps) > 2


def test_before_the_first_snapshot_it_is_alive_and_not_ready(library: Library, dest: Path) -> None:
    hidden = Path(library.url).rename(Path(library.url).with_name("hidden"))
    with serving(library.url, dest, ready=False) as found:
        until(lambda: "there is no bookwheel store" in found.client.get("/readyz").text)
        assert found.client.get("/healthz").status_code == 200
        for path, asked in (("/search", {"questions": ["a"]}), ("/snapshot", None)):
            reply = found.client.post(path, json=asked) if asked else found.client.get(path)
            assert (reply.status_code, set(reply.json())) == (503, {"detail"})
        assert found.client.post("/search", json={"questions": ["a"]}).headers["Retry-After"]
        hidden.rename(library.url)
        found.until_served(library.red)
        found.search("who?")


def test_a_reply_is_what_json_can_say(served: Serving) -> None:
    reply = served.client.post("/search", json={"questions": ["who?"]})
    assert reply.headers["content-type"] == "application/json"
    assert json.loads(reply.content)["results"][0]["question"] == "who?"
