"""A service whose model reads all passages in one prompt: a generator in memory, or one behind an endpoint."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from rag_model.client import Client
from rag_model.client.replies import AnswerReply
from rag_model.generate.transformer import CausalGenerator
from rag_model.reading.answer import answer_json
from rag_model.reading.confidence import Threshold
from rag_model.reading.model import open_reader
from rag_model.reading.settings import PromptSettings, ReaderSettings
from rag_model.serving.http import messages
from rag_model.store.versions.snapshot import Snapshot
from tests.docs.blocks import list_fields, read_exchanges
from tests.fixtures.event_stream import streamed
from tests.fixtures.paused_generator import Held
from tests.fixtures.scripted_server import STREAM, WHOLE, Scripted, event, hangs, likely, replies, scripted, streams
from tests.fixtures.serving import Library, Serving, rounded, serving, with_limits
from tests.fixtures.tiny_generators import save_llama

ASKED = ["who was the king?", "Où est 東京 🗼?"]
ONE_PROMPT = ReaderSettings("concat", concat=PromptSettings(instruction="", cite=True, budget=60))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), chat=True)


@pytest.fixture(scope="module")
def served(made_library: Library, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    settings = with_limits(retrievers=("hnsw", "exact"))
    dest = tmp_path_factory.mktemp("dest")
    with serving(made_library.url, dest, settings, model=str(llama), reader_settings=ONE_PROMPT) as found:
        yield found


def test_it_answers_as_the_verb_does_and_says_what_it_read(served: Serving, made_library: Library, llama: Path) -> None:
    reply = served.client.post("/answer", json={"questions": ASKED, "k": 2}).json()
    with Snapshot.open(made_library.url) as snapshot:
        name, reader = open_reader(snapshot, made_library.url, str(llama), "hnsw", ONE_PROMPT)
        answers = json.loads(json.dumps([answer_json(one) for one in reader.answer(ASKED, 2)]))
    assert reply == rounded({"snapshot": made_library.red, "model": name, "answers": answers})
    assert messages.create_model(AnswerReply).model_validate(reply).model_dump(mode="json") == reply
    assert all(one["context"] and one["usage"]["prompt_tokens"] > 60 for one in reply["answers"])


def test_the_example_on_the_page_of_the_api_has_the_fields_of_a_real_reply(served: Serving) -> None:
    request, example = read_exchanges()["/answer"]
    reply = served.client.post("/answer", json=request).json()
    made_up = {name for name in list_fields(example) if name.startswith(".answers.statements.")}
    assert list_fields(example) - made_up == list_fields(reply) - made_up  # a tiny model may write no statement
    assert messages.create_model(AnswerReply).model_validate(example).model_dump(mode="json") == example


def test_words_come_one_by_one_while_the_batch_is_written(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch, CausalGenerator, free=2)
    with streamed(served.client, questions=ASKED, k=2) as (_, events):
        assert next(events)[0] == "passages"
        name, first = next(events)
        assert (name, bool(first["text"]), held.go.is_set()) == ("text", True, False)
        held.go.set()
        told = [("text", first), *events]
    assert told[-1][0] == "answer"
    for place, answer in enumerate(told[-1][1]["answers"]):
        pieces = [one["text"] for name, one in told[:-1] if name == "text" and one["answer"] == place]
        assert "".join(pieces) == answer["answer"]


def test_a_question_without_room_fails_no_other_request(served: Serving) -> None:
    def ask(question: str) -> httpx.Response:
        return served.client.post("/answer", json={"questions": [question], "k": 2})

    with ThreadPoolExecutor(3) as pool:
        long, *short = pool.map(ask, ["é" * 1_500, *ASKED])
    assert (long.status_code, "does not fit" in long.text) == (400, True)
    assert [one.status_code for one in short] == [200] * len(short)


def test_requests_may_compose_retrievers_for_it(served: Serving) -> None:
    reply = served.client.post("/answer", json={"questions": ASKED[:1], "k": 2, "retriever": "rrf(hnsw, exact)"})
    assert len(reply.json()["answers"][0]["passages"]) == 2


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Any:
    def at(server: Scripted) -> dict[str, str]:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("BOOKWHEEL_LLM_TRIES", "1")
        return {"model": "openai:tiny"}

    return at


def test_an_endpoint_is_asked_only_for_questions(shared_library: Library, dest: Path, endpoint: Any) -> None:
    told = (event("two"), event(" words [1]."), event("", "stop"))
    with scripted(streams(*told)) as server, serving(shared_library.url, dest, **endpoint(server)) as found:
        assert server.bodies == []  # not for warming
        assert found.snapshot()["model"] == "openai:tiny"
        with streamed(found.client, questions=ASKED[:1], k=2) as (_, events):
            names = list(events)
    answer = names[-1][1]["answers"][0]
    assert names[0][0] == "passages"
    assert (answer["answer"], answer["citations"], answer["log_likelihood"]) == ("two words [1].", [1], None)
    assert all(one["text"] in server.bodies[0]["messages"][-1]["content"] for one in answer["passages"])


def test_a_refusal_is_a_problem_of_the_reply(shared_library: Library, dest: Path, endpoint: Any) -> None:
    refusal = {"choices": [{"message": {"content": None, "refusal": "No."}, "finish_reason": "stop"}]}
    with (
        scripted(replies(200, refusal)) as server,
        serving(shared_library.url, dest, **endpoint(server)) as found,
        Client(found.url) as client,
    ):
        (answer,) = client.answer(ASKED[:1]).answers
    assert answer.problem is not None
    assert (answer.answer, answer.problem.kind) == ("", "refused")
    assert answer.problem.message == "the model refused to answer (No)"


def test_an_endpoint_s_answers_are_withheld_where_they_are_not_sure(
    shared_library: Library, dest: Path, endpoint: Any
) -> None:
    reading = ReaderSettings(threshold=Threshold("likelihood", -1.0))
    sure, unsure = (streams(likely("two", one), event("", "stop")) for one in (-0.5, -1.5))
    with (
        scripted(sure, unsure) as server,
        serving(shared_library.url, dest, reader_settings=reading, **endpoint(server)) as found,
    ):
        replies = [found.client.post("/answer", json={"questions": [one]}).json() for one in ASKED]
    given = [reply["answers"][0] for reply in replies]
    assert [(one["answer"], one["abstained"]) for one in given] == [("two", False), ("", True)]
    assert [body["logprobs"] for body in server.bodies] == [True, True]


def test_questions_do_not_wait_for_one_that_an_endpoint_is_slow_with(
    shared_library: Library, dest: Path, endpoint: Any
) -> None:
    with (
        scripted(hangs(STREAM, event("one")), streams(*WHOLE)) as server,
        serving(shared_library.url, dest, **endpoint(server)) as found,
        streamed(found.client, questions=["slow?"]) as (_, events),
    ):
        assert [next(events)[0], next(events)[0]] == ["passages", "text"]
        quick = found.client.post("/answer", json={"questions": ["quick?"]}).json()
        assert quick["answers"][0]["answer"] == "two words"
    assert server.left.is_set()


def test_an_endpoint_that_fails_is_no_fault_of_the_question(
    shared_library: Library, dest: Path, endpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    long = {"error": {"message": "This model's maximum context length is 10 tokens"}}
    with (
        scripted(
            replies(401, {"error": {"message": "who are you?"}}), replies(400, long), streams(event("one"))
        ) as server,
        serving(shared_library.url, dest, **endpoint(server)) as found,
    ):
        reply = found.client.post("/answer", json={"questions": ["who?"]})
        assert (reply.status_code, "the model behind the service" in reply.json()["detail"]) == (502, True)
        assert "set OPENAI_API_KEY to a key that may use tiny" in caplog.text
        assert found.search("who?")["results"][0]["hits"]
        reply = found.client.post("/answer", json={"questions": ["who?"]})
        assert (reply.status_code, "ask for fewer passages" in reply.json()["detail"]) == (400, True)
        assert "127.0.0.1" not in reply.text  # where the endpoint is
        assert "set BOOKWHEEL_LLM_CONTEXT" in caplog.text
        with streamed(found.client, questions=["who?"]) as (_, events):
            told = list(events)
    assert [name for name, _ in told] == ["passages", "text", "error"]
    assert told[-1][1]["status"] == 502
