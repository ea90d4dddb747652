"""Answers as they grow: the passages, the words, the whole reply; and what ends a stream early."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rag_model.generate.transformer import Seq2SeqGenerator
from rag_model.serving.http.app import accepts_event_stream
from rag_model.serving.monitoring.observer import Observer
from tests.fixtures.event_stream import streamed
from tests.fixtures.paused_generator import Held
from tests.fixtures.serving import Library, Serving, rounded, serving, until, with_limits

ASKED = ["who was the king of the river?", "Où est 東京 🗼?"]


class Replies(Observer):
    def __init__(self) -> None:
        self.statuses: list[int] = []

    def on_reply(self, verb: str, status: int, n_questions: int, seconds: float) -> None:
        self.statuses.append(status)


@pytest.fixture(scope="module")
def replies() -> Replies:
    return Replies()


@pytest.fixture(scope="module")
def served(
    made_library: Library, model: Path, tmp_path_factory: pytest.TempPathFactory, replies: Replies
) -> Iterator[Serving]:
    bounds = with_limits(max_questions=4)
    with serving(made_library.url, tmp_path_factory.mktemp("dest"), bounds, replies, model=str(model)) as found:
        yield found


@pytest.mark.parametrize("by", ["body", "header"])
def test_a_stream_has_the_passages_the_words_and_the_unstreamed_reply(served: Serving, by: str) -> None:
    request = {"questions": ASKED, "k": 3}
    whole = served.client.post("/answer", json=request).json()
    headers = {"Accept": "text/event-stream"} if by == "header" else {}
    given = {**request, "stream": True} if by == "body" else request
    reply = served.client.post("/answer", json=given, headers=headers)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-store"
    blocks = [dict(line.split(": ", 1) for line in block.splitlines()) for block in reply.text.split("\n\n") if block]
    names = [block["event"] for block in blocks]
    values = [httpx.Response(200, text=block["data"]).json() for block in blocks]
    assert names[0] == "passages"
    assert names[-1] == "answer"
    assert set(names[1:-1]) == {"text"}
    assert values[-1] == rounded(whole)
    assert {key: values[0][key] for key in ("snapshot", "model")} == {key: whole[key] for key in ("snapshot", "model")}
    for place, answer in enumerate(whole["answers"]):
        first = values[0]["answers"][place]
        assert first["question"] == answer["question"]
        assert first["passages"] == rounded(
            [{key: one[key] for key in one if key not in {"weight", "posterior"}} for one in answer["passages"]]
        )
        assert "".join(value["text"] for value in values[1:-1] if value["answer"] == place) == answer["answer"]


def test_the_body_decides_before_the_header(served: Serving) -> None:
    request = {"questions": ASKED[:1], "stream": False}
    reply = served.client.post("/answer", json=request, headers={"Accept": "text/event-stream"})
    assert reply.json()["answers"]


@pytest.mark.parametrize(
    ("asked", "status", "words"),
    [
        ({"questions": ["a"], "k": 41}, 400, "holds 40 passages"),
        ({"questions": ["a"], "stream": 1}, 422, "stream"),
        ({"questions": ["a"] * 5}, 400, "up to 4"),
        ({"questions": ["a"], "retriever": "nothing"}, 400, "not served here"),
    ],
)
def test_what_fails_before_the_first_event_is_a_plain_reply(
    served: Serving, asked: dict[str, Any], status: int, words: str
) -> None:
    reply = served.client.post("/answer", json={"stream": True, **asked})
    assert (reply.status_code, set(reply.json())) == (status, {"detail"})
    assert words in reply.json()["detail"]


def test_the_passages_come_before_a_word_is_written(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    with streamed(served.client, questions=ASKED, k=2) as (_, events):
        name, found = next(events)
        assert (name, [len(one["passages"]) for one in found["answers"]]) == ("passages", [2, 2])
        assert not held.go.is_set()
        held.go.set()
        assert [name for name, _ in events][-1] == "answer"


@pytest.mark.parametrize(
    ("accept", "wanted"),
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
def test_a_stream_is_sent_where_it_is_accepted(accept: str, wanted: bool) -> None:
    assert accepts_event_stream(accept) is wanted


def test_a_stream_that_fails_ends_with_an_error(
    served: Serving, monkeypatch: pytest.MonkeyPatch, replies: Replies
) -> None:
    def broken(*given: Any) -> Any:
        raise MemoryError("a secret of the machine")

    monkeypatch.setattr(Seq2SeqGenerator, "step", broken)
    with streamed(served.client, questions=ASKED[:1]) as (reply, events):
        told = list(events)
    assert reply.status_code == 200  # the head was sent before
    assert [name for name, _ in told] == ["passages", "error"]
    assert told[-1][1] == {"status": 500, "detail": "the service could not answer: the service's log says why"}
    until(lambda: replies.statuses[-1:] == [500])  # the reply is counted after its last byte


def test_a_client_that_leaves_stops_the_work_between_two_tokens(
    served: Serving, monkeypatch: pytest.MonkeyPatch, replies: Replies
) -> None:
    held = Held(monkeypatch)
    with streamed(served.client, questions=ASKED) as (_, events):
        assert next(events)[0] == "passages"
        until(lambda: held.steps)
    until(lambda: replies.statuses[-1:] == [499])
    held.go.set()
    until(lambda: served.service._answer_batcher._active_requests == 0)
    assert held.steps == 1


def test_a_stream_that_takes_too_long_says_so(
    shared_library: Library, dest: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(shared_library.url, dest, with_limits(request_seconds=0.5), model=str(model)) as found:
        held = Held(monkeypatch)
        with streamed(found.client, questions=ASKED[:1]) as (_, events):
            told = list(events)
        held.go.set()
    assert [name for name, _ in told] == ["passages", "error"]
    assert (told[-1][1]["status"], "within 0.5 s" in told[-1][1]["detail"]) == (504, True)
