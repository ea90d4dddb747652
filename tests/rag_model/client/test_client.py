"""The client of a real service: replies, retries, and errors for the replies of other servers."""

import gzip
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from zstandard import ZstdCompressor

from rag_model.client import Client, ClientSettings
from rag_model.client.client import TOKEN_VARIABLE
from rag_model.errors import ServiceError, UsageError
from rag_model.retrieve.factory import open_retriever
from rag_model.serving.http.guard import BearerTokens
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.reply_server import Reply, serve_replies
from tests.fixtures.scripted_server import respond, serve_script
from tests.fixtures.serving import PASSAGES, HttpService, Library, SearchGate, make_settings, run_service, wait_until

QUICK = ClientSettings(first_pause=0.0)
QUESTIONS = ["who was the king of the river?", "Où est 東京 🗼?"]
SEARCH_REPLY = b'{"snapshot": "s", "results": [{"question": "q", "hits": []}], "more": 1}'


@pytest.fixture(scope="module")
def service(shared_library: Library, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpService]:
    settings = make_settings(retrievers=("hnsw", "exact"), max_question_chars=300)
    with run_service(shared_library.url, tmp_path_factory.mktemp("dest"), settings, model=str(model)) as service:
        yield service


@pytest.fixture
def client(service: HttpService) -> Iterator[Client]:
    with Client(service.url) as client:
        yield client


@pytest.mark.parametrize("retriever", ["hnsw", "rrf(hnsw, exact)"])
def test_search_gives_the_hits_of_the_retriever(retriever: str, client: Client, shared_library: Library) -> None:
    reply = client.search(QUESTIONS, 4, retriever)
    with Snapshot.open(shared_library.url) as snapshot:
        hit_lists = open_retriever(snapshot, retriever).search(QUESTIONS, 4)
    assert (reply.snapshot, [result.question for result in reply.results]) == (shared_library.red, QUESTIONS)
    for result, hits in zip(reply.results, hit_lists, strict=True):
        assert [(hit.id, hit.text, hit.licence) for hit in result.hits] == [
            (hit.passage.id, hit.passage.text, hit.licence) for hit in hits
        ]
        for reply_hit, hit in zip(result.hits, hits, strict=True):
            assert reply_hit.score == pytest.approx(hit.score, abs=1e-4)
            assert [leg.leg for leg in reply_hit.legs] == [leg.leg for leg in hit.visible_legs]


def test_answers_equal_the_json_of_the_service(client: Client, service: HttpService) -> None:
    reply = client.answer(QUESTIONS, 3)
    reply_json = service.client.post("/answer", json={"questions": QUESTIONS, "k": 3}).json()
    assert (reply.snapshot, reply.model) == (reply_json["snapshot"], reply_json["model"])
    for answer, expected in zip(reply.answers, reply_json["answers"], strict=True):
        fields = answer.question, answer.answer, answer.ended
        assert fields == (expected["question"], expected["answer"], expected["ended"])
        assert sum(passage.posterior or 0 for passage in answer.passages) == pytest.approx(1, abs=1e-3)
        assert [passage.id for passage in answer.passages] == [passage["id"] for passage in expected["passages"]]


def test_citations_and_context_of_an_answer_are_read() -> None:
    hit = dict.fromkeys(("id", "page_id", "title", "section", "text", "url", "licence"), "")
    texts = dict.fromkeys(("title", "section", "url"), "")
    entry = {**texts, "number": 1, "places": [0], "text": "t", "revision": 3, "cut": False}
    answer_fields = {
        **{"question": "q", "answer": "a [1]", "ended": True, "log_likelihood": None, "citations": [1]},
        **{"passages": [{**hit, "rank": 1, "score": 1, "weight": None, "posterior": None}], "context": [entry]},
    }
    body = json.dumps({"snapshot": "s", "model": "m", "answers": [answer_fields]}).encode()
    with serve_replies(Reply(200, body)) as server, Client(server.url) as client:
        (answer,) = client.answer(["q"]).answers
    assert (answer.citations, answer.context[0].places, answer.passages[0].score) == ((1,), (0,), 1.0)
    assert (answer.passages[0].weight, answer.log_likelihood) == (None, None)
    assert (answer.context[0].revision, answer.context[0].revised, answer.passages[0].revised) == (3, None, None)


def test_snapshot_describes_the_service(client: Client, shared_library: Library) -> None:
    state = client.snapshot()
    assert (state.snapshot, state.ref, state.number) == (shared_library.red, "latest", 3)
    assert (state.passages, state.retrievers, state.refused) == (PASSAGES, ("hnsw", "exact"), None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"questions": ["a"], "k": 0}, "at least 1"),
        ({"questions": ["a"], "k": 1000}, "at most 100"),
        ({"questions": ["a"], "k": 1.5}, "k is not a whole number"),
        ({"questions": ["a"], "k": float("nan")}, "cannot be sent"),
        ({"questions": [" "]}, "question 1 is empty"),
        ({"questions": []}, "questions is empty"),
        ({"questions": ["a" * 301]}, "301 characters"),
        ({"questions": ["a"], "retriever": "rrf(hnsw"}, "not closed"),
        ({"questions": ["\ud800"]}, "cannot be sent"),
        ({"questions": [b"a"]}, "cannot be sent"),
        ({"questions": "who?"}, "give a list"),
    ],
)
def test_invalid_request_raises_the_message_of_the_service(client: Client, arguments: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
        client.search(**arguments)
    assert "\n" not in str(error.value)


def test_client_retries_at_a_full_queue_after_retry_after(
    shared_library: Library, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, pauses = SearchGate(), list[float]()
    settings = make_settings(queue_questions=1, batch_questions=1)
    with run_service(shared_library.url, dest, settings, gate) as service:
        gate.open.clear()
        searches = [threading.Thread(target=service.search, args=("who?",)) for _ in range(2)]

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            gate.open.set()
            for thread in searches:
                thread.join()

        searches[0].start()
        assert gate.is_waiting.wait(300)
        searches[1].start()
        wait_until(lambda: service.service._search_batcher.queued_questions)
        with Client(service.url, settings=QUICK, pause=pause) as client:
            assert client.search(["who?"], 2).snapshot == shared_library.red
    assert pauses == [1.0]


def test_client_waits_for_a_service_without_an_open_snapshot(shared_library: Library, dest: Path) -> None:
    pauses = list[float]()
    with run_service(shared_library.url, dest, make_settings(poll_seconds=3600.0)) as service:
        service.service.slot.close()

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            service.service.follower.poll()

        with Client(service.url, settings=QUICK, pause=pause) as client:
            assert client.search(["who?"], 2).snapshot == shared_library.red
    assert pauses == [2.0]


def test_unreachable_service_is_tried_five_times(shared_library: Library) -> None:
    with serve_replies(Reply(200, SEARCH_REPLY)) as closed_server:
        url = closed_server.url
    pauses = list[float]()
    with Client(url, settings=QUICK, pause=pauses.append) as client, pytest.raises(ServiceError) as error:
        client.search(["who?"])
    assert f"{url} cannot be reached in 5 tries" in str(error.value)
    assert len(pauses) == 4


def test_incomplete_reply_is_requested_again() -> None:
    replies = Reply(200, SEARCH_REPLY, missing_bytes=10), Reply(200, SEARCH_REPLY)
    with serve_replies(*replies) as server, Client(server.url, settings=QUICK) as client:
        assert client.search(["q"]).results[0].question == "q"
    assert len(server.request_headers) == 2


@pytest.mark.parametrize("token_source", ["environment", "argument"])
def test_token_authorizes_the_client(
    token_source: str, shared_library: Library, dest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "0123456789abcdef" * 2
    (tmp_path / "tokens").write_text(f"{token}\n")
    with run_service(shared_library.url, dest, tokens=BearerTokens(tmp_path / "tokens")) as service:
        with Client(service.url) as unauthorized, pytest.raises(UsageError, match=TOKEN_VARIABLE):
            unauthorized.snapshot()
        if token_source == "environment":
            monkeypatch.setenv(TOKEN_VARIABLE, token)
        with Client(service.url, token if token_source == "argument" else None) as authorized:
            assert authorized.snapshot().snapshot == shared_library.red


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(200, b"<html>"), "did not send a bookwheel reply"),
        (Reply(200, b"[]"), "the reply is not an object"),
        (Reply(200, b'{"snapshot": "s"}'), "results is missing"),
        (Reply(200, b'{"snapshot": 1, "results": []}'), "snapshot is not of type str"),
        (
            Reply(200, b'{"snapshot": "s", "results": [{"question": "q", "hits": [3]}]}'),
            r"results\[0\].hits\[0\] is not",
        ),
        (Reply(302, headers={"Location": "http://127.0.0.1:1/"}), "replied with 302"),
        (Reply(404, b'{"detail": "Not Found"}'), "replied with 404"),
        (Reply(500, b'{"detail": "its log says why"}'), "replied with 500: its log says why"),
        (Reply(504, b'{"detail": "no answer in time"}'), "replied with 504: no answer in time"),
        (Reply(503, b"<html>"), "replied with 503 in 5 tries: it gives no reason"),
        (Reply(429, b'{"detail": "full"}', {"Retry-After": "3600"}), "replied with 429 in 1 try: full"),
        (Reply(429, b"", {"Retry-After": "Fri, 31 Dec 9999 23:59:59 GMT"}), "replied with 429 in 1 try"),
        (Reply(429, b"", {"Retry-After": "soon"}), "replied with 429 in 5 tries"),
        (Reply(429, b"", {"Retry-After": "-1"}), "replied with 429 in 5 tries"),
        (Reply(200, b"x" * 5, {"Content-Encoding": "gzip"}), "its gzip is corrupt"),
    ],
)
def test_reply_of_another_server_is_explained_in_one_sentence(reply: Reply, words: str) -> None:
    with (
        serve_replies(reply) as server,
        Client(server.url, settings=QUICK) as client,
        pytest.raises(ServiceError, match=words) as error,
    ):
        client.search(["q"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000",
        "ftp://host",
        "http://",
        "http://me:word@host",
        "http://host?a=b",
        "http://h:99999",
        "http://[",
        "http://a\nb",
    ],
)
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as error:
        Client(url)
    assert "word" not in str(error.value)


@pytest.mark.parametrize("token", ["zwei worte", "schlüssel", "a\nb"])
def test_token_that_fits_no_header_is_refused(token: str) -> None:
    with pytest.raises(UsageError, match="token contains"):
        Client("http://localhost:8000", token)


@pytest.mark.parametrize(
    "fields", [{"tries": 0}, {"reply_seconds": 0.0}, {"first_pause": -1.0}, {"max_pause": float("nan")}]
)
def test_invalid_settings_are_refused(fields: dict) -> None:
    with pytest.raises(UsageError, match=next(iter(fields))):
        ClientSettings(**fields)


def test_silent_service_times_out_without_a_retry() -> None:
    settings = ClientSettings(reply_seconds=0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts connections, and never replies
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with Client(url, settings=settings) as client, pytest.raises(ServiceError, match=r"nothing for 0\.05 s"):
            client.search(["q"])


def test_client_imports_neither_faiss_nor_torch() -> None:
    code = (
        "import sys, rag_model.client; print([m for m in ('faiss', 'numpy', 'torch', 'fastapi') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("encoding", ["gzip", "identity", "zstd"])
def test_reply_that_is_too_large_is_refused(encoding: str) -> None:
    body = b'{"detail": "' + b"0" * (32 << 20)
    compress = {"gzip": gzip.compress, "identity": bytes, "zstd": ZstdCompressor().compress}[encoding]
    words = "encoded as zstd" if encoding == "zstd" else "more than 1048576 bytes"
    with serve_script(respond(200, compress(body), Content_Encoding=encoding)) as server:
        settings = ClientSettings(tries=1, max_reply_bytes=1 << 20)
        with Client(server.url, settings=settings) as client, pytest.raises(ServiceError, match=words):
            client.search(["q"])
    assert "\r\nAccept-Encoding: gzip\r\n" in server.heads[0]
