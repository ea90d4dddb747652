"""Streamed answers: the passages, the text and the whole reply; and the errors that end a stream early."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rag_model.generate.transformer import Seq2SeqGenerator
from rag_model.serving.http.app import accepts_event_stream
from rag_model.serving.monitoring.observer import Observer
from tests.fixtures.event_stream import stream_answer
from tests.fixtures.paused_generator import PausedDecoding
from tests.fixtures.serving import HttpService, Library, make_settings, round_floats, run_service, wait_until

QUESTIONS = ["who was the king of the river?", "Où est 東京 🗼?"]


class Replies(Observer):
    def __init__(self) -> None:
        self.statuses: list[int] = []

    def on_reply(self, verb: str, status: int, n_questions: int, seconds: float) -> None:
        self.statuses.append(status)


@pytest.fixture(scope="module")
def replies() -> Replies:
    return Replies()


@pytest.fixture(scope="module")
def service(
    shared_library: Library, model: Path, tmp_path_factory: pytest.TempPathFactory, replies: Replies
) -> Iterator[HttpService]:
    settings = make_settings(max_questions=4)
    with run_service(
        shared_library.url, tmp_path_factory.mktemp("dest"), settings, replies, model=str(model)
    ) as service:
        yield service


@pytest.mark.parametrize("requested_by", ["body", "header"])
def test_stream_has_the_passages_the_text_and_the_unstreamed_reply(service: HttpService, requested_by: str) -> None:
    request = {"questions": QUESTIONS, "k": 3}
    unstreamed = service.client.post("/answer", json=request).json()
    headers = {"Accept": "text/event-stream"} if requested_by == "header" else {}
    streamed_request = {**request, "stream": True} if requested_by == "body" else request
    reply = service.client.post("/answer", json=streamed_request, headers=headers)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-store"
    blocks = [dict(line.split(": ", 1) for line in block.splitlines()) for block in reply.text.split("\n\n") if block]
    names = [block["event"] for block in blocks]
    values = [httpx.Response(200, text=block["data"]).json() for block in blocks]
    assert names[0] == "passages"
    assert names[-1] == "answer"
    assert set(names[1:-1]) == {"text"}
    assert values[-1] == round_floats(unstreamed)
    assert all(values[0][key] == unstreamed[key] for key in ("snapshot", "model"))
    for position, answer in enumerate(unstreamed["answers"]):
        first = values[0]["answers"][position]
        assert first["question"] == answer["question"]
        assert first["passages"] == round_floats(
            [{key: p[key] for key in p if key not in {"weight", "posterior"}} for p in answer["passages"]]
        )
        assert "".join(value["text"] for value in values[1:-1] if value["answer"] == position) == answer["answer"]


def test_the_body_decides_before_the_header(service: HttpService) -> None:
    request = {"questions": QUESTIONS[:1], "stream": False}
    reply = service.client.post("/answer", json=request, headers={"Accept": "text/event-stream"})
    assert reply.json()["answers"]


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"questions": ["a"], "k": 41}, 400, "holds 40 passages"),
        ({"questions": ["a"], "stream": 1}, 422, "stream"),
        ({"questions": ["a"] * 5}, 400, "up to 4"),
        ({"questions": ["a"], "retriever": "nothing"}, 400, "not served here"),
    ],
)
def test_failure_before_the_first_event_is_a_plain_reply(
    service: HttpService, fields: dict[str, Any], status: int, words: str
) -> None:
    reply = service.client.post("/answer", json={"stream": True, **fields})
    assert (reply.status_code, set(reply.json())) == (status, {"detail"})
    assert words in reply.json()["detail"]


def test_passages_are_sent_before_the_text_is_generated(service: HttpService, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = PausedDecoding(monkeypatch)
    with stream_answer(service.client, questions=QUESTIONS, k=2) as (_, events):
        name, data = next(events)
        assert (name, [len(answer["passages"]) for answer in data["answers"]]) == ("passages", [2, 2])
        assert not generator.resume.is_set()
        generator.resume.set()
        assert [name for name, _ in events][-1] == "answer"


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("text/event-stream", True),
        ("application/json, Text/Event-Stream ; q=0.5", True),
        ("text/event-stream;q=0, application/json", False),
        ("text/event-stream; q=0.000", False),
        ("text/event-streams", False),
        ("*/*", False),
        ("", False),
    ],
)
def test_accept_header_decides_about_streaming(accept: str, expected: bool) -> None:
    assert accepts_event_stream(accept) is expected


def test_a_stream_that_fails_ends_with_an_error(
    service: HttpService, monkeypatch: pytest.MonkeyPatch, replies: Replies
) -> None:
    def fail(*arguments: Any) -> Any:
        raise MemoryError("a secret of the machine")

    monkeypatch.setattr(Seq2SeqGenerator, "step", fail)
    with stream_answer(service.client, questions=QUESTIONS[:1]) as (reply, events):
        stream_events = list(events)
    assert reply.status_code == 200  # The status was sent before the failure.
    assert [name for name, _ in stream_events] == ["passages", "error"]
    assert stream_events[-1][1] == {"status": 500, "detail": "the service could not answer: the service's log says why"}
    wait_until(lambda: replies.statuses[-1:] == [500])  # the reply is counted after its last byte


def test_disconnected_client_stops_the_generation_between_two_tokens(
    service: HttpService, monkeypatch: pytest.MonkeyPatch, replies: Replies
) -> None:
    generator = PausedDecoding(monkeypatch)
    with stream_answer(service.client, questions=QUESTIONS) as (_, events):
        assert next(events)[0] == "passages"
        wait_until(lambda: generator.steps)
    wait_until(lambda: replies.statuses[-1:] == [499])
    generator.resume.set()
    wait_until(lambda: service.service._answer_batcher._active_requests == 0)
    assert generator.steps == 1


def test_stream_that_takes_too_long_ends_with_an_error(
    shared_library: Library, dest: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_service(shared_library.url, dest, make_settings(request_seconds=0.5), model=str(model)) as service:
        generator = PausedDecoding(monkeypatch)
        with stream_answer(service.client, questions=QUESTIONS[:1]) as (_, events):
            stream_events = list(events)
        generator.resume.set()
    assert [name for name, _ in stream_events] == ["passages", "error"]
    assert (stream_events[-1][1]["status"], "within 0.5 s" in stream_events[-1][1]["detail"]) == (504, True)
