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
from tests.fixtures.event_stream import stream_answer
from tests.fixtures.paused_generator import PausedDecoding
from tests.fixtures.scripted_server import (
    ANSWER_EVENTS,
    STREAM,
    ScriptedServer,
    hang,
    make_event,
    make_token,
    respond,
    send,
    serve_script,
)
from tests.fixtures.serving import HttpService, Library, make_settings, round_floats, run_service
from tests.fixtures.tiny_generators import save_llama

QUESTIONS = ["who was the king?", "Où est 東京 🗼?"]
ONE_PROMPT = ReaderSettings("concat", concat=PromptSettings(instruction="", cite=True, budget=60))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), chat=True)


@pytest.fixture(scope="module")
def service(shared_library: Library, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpService]:
    settings = make_settings(retrievers=("hnsw", "exact"))
    dest = tmp_path_factory.mktemp("dest")
    with run_service(shared_library.url, dest, settings, model=str(llama), reader_settings=ONE_PROMPT) as service:
        yield service


def test_reply_equals_the_answers_of_the_reader(service: HttpService, shared_library: Library, llama: Path) -> None:
    reply = service.client.post("/answer", json={"questions": QUESTIONS, "k": 2}).json()
    with Snapshot.open(shared_library.url) as snapshot:
        name, reader = open_reader(snapshot, shared_library.url, str(llama), "hnsw", ONE_PROMPT)
        answers = json.loads(json.dumps([answer_json(answer) for answer in reader.answer(QUESTIONS, 2)]))
    assert reply == round_floats({"snapshot": shared_library.red, "model": name, "answers": answers})
    assert messages.create_model(AnswerReply).model_validate(reply).model_dump(mode="json") == reply
    assert all(answer["context"] and answer["usage"]["prompt_tokens"] > 60 for answer in reply["answers"])


def test_example_on_the_api_page_has_the_fields_of_a_real_reply(service: HttpService) -> None:
    request, example = read_exchanges()["/answer"]
    reply = service.client.post("/answer", json=request).json()
    statement_fields = {name for name in list_fields(example) if name.startswith(".answers.statements.")}
    # A tiny model may write no statement.
    assert list_fields(example) - statement_fields == list_fields(reply) - statement_fields
    assert messages.create_model(AnswerReply).model_validate(example).model_dump(mode="json") == example


def test_text_is_streamed_while_the_batch_is_generated(service: HttpService, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = PausedDecoding(monkeypatch, CausalGenerator, free_steps=2)
    with stream_answer(service.client, questions=QUESTIONS, k=2) as (_, events):
        assert next(events)[0] == "passages"
        name, first = next(events)
        assert (name, bool(first["text"]), generator.resume.is_set()) == ("text", True, False)
        generator.resume.set()
        stream_events = [("text", first), *events]
    assert stream_events[-1][0] == "answer"
    for position, answer in enumerate(stream_events[-1][1]["answers"]):
        pieces = [data["text"] for name, data in stream_events[:-1] if name == "text" and data["answer"] == position]
        assert "".join(pieces) == answer["answer"]


def test_question_that_does_not_fit_fails_no_other_request(service: HttpService) -> None:
    def ask(question: str) -> httpx.Response:
        return service.client.post("/answer", json={"questions": [question], "k": 2})

    with ThreadPoolExecutor(3) as pool:
        long_reply, *other_replies = pool.map(ask, ["é" * 1_500, *QUESTIONS])
    assert (long_reply.status_code, "does not fit" in long_reply.text) == (400, True)
    assert [reply.status_code for reply in other_replies] == [200] * len(other_replies)


def test_requests_may_compose_retrievers(service: HttpService) -> None:
    reply = service.client.post("/answer", json={"questions": QUESTIONS[:1], "k": 2, "retriever": "rrf(hnsw, exact)"})
    assert len(reply.json()["answers"][0]["passages"]) == 2


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Any:
    def configure_endpoint(server: ScriptedServer) -> dict[str, str]:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("BOOKWHEEL_LLM_TRIES", "1")
        return {"model": "openai:tiny"}

    return configure_endpoint


def test_endpoint_is_called_only_for_questions(shared_library: Library, dest: Path, endpoint: Any) -> None:
    answer_events = (make_event("two"), make_event(" words [1]."), make_event("", "stop"))
    with (
        serve_script(send(*answer_events)) as server,
        run_service(shared_library.url, dest, **endpoint(server)) as service,
    ):
        assert server.bodies == []  # The warm-up does not call the endpoint.
        assert service.snapshot()["model"] == "openai:tiny"
        with stream_answer(service.client, questions=QUESTIONS[:1], k=2) as (_, events):
            stream_events = list(events)
    answer = stream_events[-1][1]["answers"][0]
    assert stream_events[0][0] == "passages"
    assert (answer["answer"], answer["citations"], answer["log_likelihood"]) == ("two words [1].", [1], None)
    assert all(passage["text"] in server.bodies[0]["messages"][-1]["content"] for passage in answer["passages"])


def test_refusal_of_the_model_is_a_problem_in_the_reply(shared_library: Library, dest: Path, endpoint: Any) -> None:
    refusal = {"choices": [{"message": {"content": None, "refusal": "No."}, "finish_reason": "stop"}]}
    with (
        serve_script(respond(200, refusal)) as server,
        run_service(shared_library.url, dest, **endpoint(server)) as service,
        Client(service.url) as client,
    ):
        (answer,) = client.answer(QUESTIONS[:1]).answers
    assert answer.problem is not None
    assert (answer.answer, answer.problem.kind) == ("", "refused")
    assert answer.problem.message == "the model refused to answer (No)"


def test_unlikely_answers_of_an_endpoint_are_withheld(shared_library: Library, dest: Path, endpoint: Any) -> None:
    settings = ReaderSettings(threshold=Threshold("likelihood", -1.0))
    likely_answer, unlikely_answer = (send(make_token("two", log_p), make_event("", "stop")) for log_p in (-0.5, -1.5))
    with (
        serve_script(likely_answer, unlikely_answer) as server,
        run_service(shared_library.url, dest, reader_settings=settings, **endpoint(server)) as service,
    ):
        replies = [service.client.post("/answer", json={"questions": [question]}).json() for question in QUESTIONS]
    answers = [reply["answers"][0] for reply in replies]
    assert [(answer["answer"], answer["abstained"]) for answer in answers] == [("two", False), ("", True)]
    assert [body["logprobs"] for body in server.bodies] == [True, True]


def test_questions_do_not_wait_for_a_slow_one_at_the_endpoint(
    shared_library: Library, dest: Path, endpoint: Any
) -> None:
    with (
        serve_script(hang(STREAM, make_event("one")), send(*ANSWER_EVENTS)) as server,
        run_service(shared_library.url, dest, **endpoint(server)) as service,
        stream_answer(service.client, questions=["slow?"]) as (_, events),
    ):
        assert [next(events)[0], next(events)[0]] == ["passages", "text"]
        quick = service.client.post("/answer", json={"questions": ["quick?"]}).json()
        assert quick["answers"][0]["answer"] == "two words"
    assert server.all_ended.is_set()


def test_failing_endpoint_is_a_bad_gateway_and_long_prompt_a_bad_request(
    shared_library: Library, dest: Path, endpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    too_long = {"error": {"message": "This model's maximum context length is 10 tokens"}}
    with (
        serve_script(
            respond(401, {"error": {"message": "who are you?"}}), respond(400, too_long), send(make_event("one"))
        ) as server,
        run_service(shared_library.url, dest, **endpoint(server)) as service,
    ):
        reply = service.client.post("/answer", json={"questions": ["who?"]})
        assert (reply.status_code, "the model behind the service" in reply.json()["detail"]) == (502, True)
        assert "set OPENAI_API_KEY to a key that may use tiny" in caplog.text
        assert service.search("who?")["results"][0]["hits"]
        reply = service.client.post("/answer", json={"questions": ["who?"]})
        assert (reply.status_code, "ask for fewer passages" in reply.json()["detail"]) == (400, True)
        assert "127.0.0.1" not in reply.text  # the address of the endpoint
        assert "set BOOKWHEEL_LLM_CONTEXT" in caplog.text
        with stream_answer(service.client, questions=["who?"]) as (_, events):
            stream_events = list(events)
    assert [name for name, _ in stream_events] == ["passages", "text", "error"]
    assert stream_events[-1][1]["status"] == 502
