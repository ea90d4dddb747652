"""The client against a real service: what it gives, and when it asks again; against other servers: what it says."""

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
from tests.fixtures.reply_server import Reply, foreign
from tests.fixtures.scripted_server import replies, scripted
from tests.fixtures.serving import PASSAGES, Gate, Library, Serving, serving, until, with_limits

QUICK = ClientSettings(first_pause=0.0)
ASKED = ["who was the king of the river?", "Où est 東京 🗼?"]
HITS = b'{"snapshot": "s", "results": [{"question": "q", "hits": []}], "more": 1}'


@pytest.fixture(scope="module")
def served(made_library: Library, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    bounds = with_limits(retrievers=("hnsw", "exact"), max_question_chars=300)
    with serving(made_library.url, tmp_path_factory.mktemp("dest"), bounds, model=str(model)) as found:
        yield found


@pytest.fixture
def client(served: Serving) -> Iterator[Client]:
    with Client(served.url) as found:
        yield found


@pytest.mark.parametrize("retriever", ["hnsw", "rrf(hnsw, exact)"])
def test_search_gives_what_the_library_finds(retriever: str, client: Client, made_library: Library) -> None:
    reply = client.search(ASKED, 4, retriever)
    with Snapshot.open(made_library.url) as snapshot:
        found = open_retriever(snapshot, retriever).search(ASKED, 4)
    assert (reply.snapshot, [result.question for result in reply.results]) == (made_library.red, ASKED)
    for result, hits in zip(reply.results, found, strict=True):
        assert [(hit.id, hit.text, hit.licence) for hit in result.hits] == [
            (hit.passage.id, hit.passage.text, hit.licence) for hit in hits
        ]
        for one, other in zip(result.hits, hits, strict=True):
            assert one.score == pytest.approx(other.score, abs=1e-4)
            assert [leg.leg for leg in one.legs] == [leg.leg for leg in other.visible_legs]


def test_answers_are_as_the_service_sends_them(client: Client, served: Serving) -> None:
    reply = client.answer(ASKED, 3)
    sent = served.client.post("/answer", json={"questions": ASKED, "k": 3}).json()
    assert (reply.snapshot, reply.model) == (sent["snapshot"], sent["model"])
    for answer, other in zip(reply.answers, sent["answers"], strict=True):
        assert (answer.question, answer.answer, answer.ended) == (other["question"], other["answer"], other["ended"])
        assert sum(passage.posterior or 0 for passage in answer.passages) == pytest.approx(1, abs=1e-3)
        assert [passage.id for passage in answer.passages] == [one["id"] for one in other["passages"]]


def test_an_answer_that_cites_is_read_with_its_context() -> None:
    hit = dict.fromkeys(("id", "page_id", "title", "section", "text", "url", "licence"), "")
    entry = {
        "number": 1,
        "title": "",
        "section": "",
        "url": "",
        "places": [0],
        "text": "t",
        "revision": 3,
        "cut": False,
    }
    answer = {
        **{"question": "q", "answer": "a [1]", "ended": True, "log_likelihood": None, "citations": [1]},
        **{"passages": [{**hit, "rank": 1, "score": 1, "weight": None, "posterior": None}], "context": [entry]},
    }
    sent = json.dumps({"snapshot": "s", "model": "m", "answers": [answer]}).encode()
    with foreign(Reply(200, sent)) as server, Client(server.url) as client:
        (read,) = client.answer(["q"]).answers
    assert (read.citations, read.context[0].places, read.passages[0].score) == ((1,), (0,), 1.0)
    assert (read.passages[0].weight, read.log_likelihood) == (None, None)
    assert (read.context[0].revision, read.context[0].revised, read.passages[0].revised) == (3, None, None)


def test_the_snapshot_is_told(client: Client, made_library: Library) -> None:
    told = client.snapshot()
    assert (told.snapshot, told.ref, told.number) == (made_library.red, "latest", 3)
    assert (told.passages, told.retrievers, told.refused) == (PASSAGES, ("hnsw", "exact"), None)


@pytest.mark.parametrize(
    ("asked", "words"),
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
def test_a_wrong_request_is_told_in_the_services_words(client: Client, asked: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words) as told:
        client.search(**asked)
    assert "\n" not in str(told.value)


def test_a_full_queue_is_asked_again_after_the_pause_that_it_names(
    made_library: Library, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, pauses = Gate(), list[float]()
    bounds = with_limits(queue_questions=1, batch_questions=1)
    with serving(made_library.url, dest, bounds, gate) as found:
        gate.open.clear()
        first = [threading.Thread(target=found.search, args=("who?",)) for _ in range(2)]

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            gate.open.set()
            for thread in first:
                thread.join()

        first[0].start()
        assert gate.held.wait(300)
        first[1].start()
        until(lambda: found.service._search_batcher.queued_questions)
        with Client(found.url, settings=QUICK, pause=pause) as client:
            assert client.search(["who?"], 2).snapshot == made_library.red
    assert pauses == [1.0]


def test_a_service_that_has_not_opened_its_snapshot_yet_is_waited_for(made_library: Library, dest: Path) -> None:
    pauses = list[float]()
    with serving(made_library.url, dest, with_limits(poll_seconds=3600.0)) as found:
        found.service.slot.close()

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            found.service.follower.poll()

        with Client(found.url, settings=QUICK, pause=pause) as client:
            assert client.search(["who?"], 2).snapshot == made_library.red
    assert pauses == [2.0]


def test_a_service_that_starts_meanwhile_is_found(made_library: Library) -> None:
    with foreign(Reply(200, HITS)) as gone:
        url = gone.url
    pauses = list[float]()
    with Client(url, settings=QUICK, pause=pauses.append) as client, pytest.raises(ServiceError) as told:
        client.search(["who?"])
    assert f"{url} cannot be reached in 5 tries" in str(told.value)
    assert len(pauses) == 4


def test_a_reply_that_is_cut_off_is_asked_for_again() -> None:
    with foreign(Reply(200, HITS, claims=10), Reply(200, HITS)) as server, Client(server.url, settings=QUICK) as client:
        assert client.search(["q"]).results[0].question == "q"
    assert len(server.asked) == 2


@pytest.mark.parametrize("secret", ["from the environment", "given"])
def test_a_token_opens_the_door(
    secret: str, made_library: Library, dest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "0123456789abcdef" * 2
    (tmp_path / "tokens").write_text(f"{token}\n")
    with serving(made_library.url, dest, tokens=BearerTokens(tmp_path / "tokens")) as found:
        with Client(found.url) as stranger, pytest.raises(UsageError, match=TOKEN_VARIABLE):
            stranger.snapshot()
        if secret != "given":
            monkeypatch.setenv(TOKEN_VARIABLE, token)
        with Client(found.url, token if secret == "given" else None) as known:
            assert known.snapshot().snapshot == made_library.red


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
def test_another_server_is_told_in_one_sentence(reply: Reply, words: str) -> None:
    with (
        foreign(reply) as server,
        Client(server.url, settings=QUICK) as client,
        pytest.raises(ServiceError, match=words) as told,
    ):
        client.search(["q"])
    assert "\n" not in str(told.value)


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
def test_what_is_no_address_of_a_service_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as told:
        Client(url)
    assert "word" not in str(told.value)


@pytest.mark.parametrize("token", ["zwei worte", "schlüssel", "a\nb"])
def test_a_token_that_no_header_can_hold_is_refused(token: str) -> None:
    with pytest.raises(UsageError, match="token contains"):
        Client("http://localhost:8000", token)


@pytest.mark.parametrize(
    "wrong", [{"tries": 0}, {"reply_seconds": 0.0}, {"first_pause": -1.0}, {"max_pause": float("nan")}]
)
def test_settings_that_cannot_work_are_refused(wrong: dict) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        ClientSettings(**wrong)


def test_a_service_that_is_silent_is_given_up_without_another_try() -> None:
    settings = ClientSettings(reply_seconds=0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are taken, and nothing is read
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Client(url, settings=settings) as client, pytest.raises(ServiceError, match=r"nothing for 0\.05 s"):
            client.search(["q"])


def test_it_needs_neither_faiss_nor_torch() -> None:
    code = (
        "import sys, rag_model.client; print([m for m in ('faiss', 'numpy', 'torch', 'fastapi') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("encoding", ["gzip", "identity", "zstd"])
def test_a_reply_of_any_size_takes_no_more_memory_than_its_bound(encoding: str) -> None:
    body = b'{"detail": "' + b"0" * (32 << 20)
    compress = {"gzip": gzip.compress, "identity": bytes, "zstd": ZstdCompressor().compress}[encoding]
    words = "encoded as zstd" if encoding == "zstd" else "more than 1048576 bytes"
    with scripted(replies(200, compress(body), Content_Encoding=encoding)) as server:
        settings = ClientSettings(tries=1, max_reply_bytes=1 << 20)
        with Client(server.url, settings=settings) as client, pytest.raises(ServiceError, match=words):
            client.search(["q"])
    assert "\r\nAccept-Encoding: gzip\r\n" in server.heads[0]
