"""A model behind an HTTP API: its answers, its costs, and an error message for every failure."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rag_model.endpoint import Endpoint
from rag_model.errors import BookwheelError, EndpointError, PromptTooLongError, StoppedError, UsageError
from rag_model.reading.writers.chat_settings import ChatSettings, TokenPrices
from rag_model.reading.writers.endpoint import EndpointWriter
from rag_model.reading.writers.writer import Prompt
from tests.fixtures.chat_server import run_chat_server
from tests.fixtures.scripted_server import (
    ANSWER_EVENTS,
    STREAM,
    ScriptedServer,
    Step,
    hang,
    make_event,
    make_token,
    respond,
    send,
    serve_script,
)
from tests.fixtures.tiny_generators import save_llama

KEY = "sk-not-to-be-told-0123456789"
QUICK = ChatSettings(backoff_seconds=0.001, tries=3, whole_seconds=30.0, first_seconds=20.0)
PROMPTS = [Prompt("Answer in few words.", "who is the king?"), Prompt("", "what is the capital of the river?")]
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
REFUSED = {"error": {"message": f"Incorrect API key provided: {KEY}.\nSee the page.", "code": "invalid_api_key"}}
LONG = {"error": {"message": "This model's maximum context length is 512 tokens.", "code": "context_length_exceeded"}}


def write(server: ScriptedServer, settings: ChatSettings = QUICK, **options: Any) -> Any:
    writer = EndpointWriter("tiny", settings, Endpoint(server.url, KEY))
    try:
        return writer.write(PROMPTS[:1], **options)[0]
    finally:
        writer.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), chat=True)


@pytest.fixture(scope="module")
def server_url(model: Path) -> Iterator[str]:
    with run_chat_server(model) as url:
        yield url


def test_answers_of_a_server_equal_those_of_its_model(server_url: str, model: Path) -> None:
    settings = replace(QUICK, max_new_tokens=12, tokenizer=model / "tokenizer.json", prices=TokenPrices(2.0, 8.0))
    writer = EndpointWriter(str(model), settings, Endpoint(server_url))
    pieces: dict[int, list[str]] = {0: [], 1: []}
    completions = writer.write(PROMPTS, on_text=lambda row, text: pieces[row].append(text))
    writer.close()
    tokenizer, causal = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    for row, (prompt, completion) in enumerate(zip(PROMPTS, completions, strict=True)):
        roles = [("system", prompt.system)] * bool(prompt.system) + [("user", prompt.user)]
        chat = [{"role": role, "content": text} for role, text in roles]
        tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        sequence = causal.generate(**tokens, max_new_tokens=12, do_sample=False)[0]
        new_tokens = sequence[tokens["input_ids"].shape[1] :]
        text = tokenizer.decode(new_tokens, skip_special_tokens=True)
        # The server does not send incomplete characters.
        assert completion.text.rstrip(UNFINISHED) == text.rstrip(UNFINISHED)
        assert "".join(pieces[row]) == completion.text
        prompt_tokens = tokens["input_ids"].numel()
        assert (completion.usage.prompt_tokens, completion.usage.estimated) == (prompt_tokens, False)
        assert completion.usage.cost == pytest.approx((2.0 * prompt_tokens + 8.0 * completion.usage.new_tokens) / 1e6)
        assert completion.ended == (int(new_tokens[-1]) == tokenizer.eos_token_id)
        assert sum(writer.count_tokens([prompt.system, prompt.user])) <= prompt_tokens <= writer.max_prompt_tokens


def test_request_has_the_settings_and_the_reply_is_read() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 2}
    events = make_token("two", -0.5), make_token(" words", -0.25)
    with serve_script(send(b": hello\r\n\r\n", *events, make_event("", "length", usage=usage))) as server:
        completion = write(server, replace(QUICK, logprobs=True, seed=3))
    assert (completion.text, completion.ended, completion.log_likelihood) == ("two words", False, -0.75)
    assert (completion.usage.prompt_tokens, completion.usage.new_tokens, completion.usage.cost) == (7, 2, None)
    (request,) = server.bodies
    assert request["messages"] == [
        {"role": "system", "content": PROMPTS[0].system},
        {"role": "user", "content": PROMPTS[0].user},
    ]
    assert (request["model"], request["temperature"], request["seed"], request["max_tokens"]) == ("tiny", 0.0, 3, 4096)
    assert server.heads[0].startswith("POST /v1/chat/completions ")
    assert f"Bearer {KEY}" in server.heads[0]


@pytest.mark.parametrize(
    ("reason", "written_tokens", "expected"), [("stop", 3, -0.75), ("stop", 4, None), ("length", 3, None)]
)
def test_likelihood_needs_every_token_except_the_end(reason: str, written_tokens: int, expected: float | None) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": written_tokens}
    with serve_script(
        send(make_token("two", -0.5), make_token(" words", -0.25), make_event("", reason, usage=usage))
    ) as server:
        assert write(server, replace(QUICK, logprobs=True)).log_likelihood == expected


@pytest.mark.parametrize("sizes", [[1] * 60, [7, 9, 30], [60]])
def test_key_in_a_reply_is_masked(sizes: list[int]) -> None:
    text, cuts = f"Bearer {KEY}, sk-not-to", list(accumulate(sizes, initial=0))
    events = [make_event(text[start:end]) for start, end in pairwise(cuts) if text[start:end]]
    pieces: list[str] = []
    with serve_script(send(*events, make_event("", "stop"))) as server:
        completion = write(server, on_text=lambda row, piece: pieces.append(piece))
    assert completion.text == "".join(pieces) == "Bearer ***, sk-not-to"


def test_reply_without_a_stream_or_usage_is_read_and_its_tokens_estimated() -> None:
    body = {"choices": [{"message": {"content": "été"}, "finish_reason": "stop"}]}
    with serve_script(respond(200, body)) as server:
        completion = write(server)
    assert (completion.text, completion.ended) == ("été", True)
    assert (completion.usage.estimated, completion.usage.new_tokens) == (True, 5)


@pytest.mark.parametrize(
    "step",
    [
        respond(429, {"error": {"message": "slow down"}}, Retry_After="0"),
        respond(503, b"<html>"),
        respond(500, {"detail": "oops"}),
        send(*ANSWER_EVENTS[:1]),  # cut off before any text was shown
        lambda connection: connection.close(),
        send(b'data: {"error": {"message": "out of memory"}}\n\n'),
    ],
)
def test_temporary_failures_are_tried_again(step: Step) -> None:
    with serve_script(step, step, send(*ANSWER_EVENTS)) as server:
        assert write(server).text == "two words"
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("step", "tries", "kind", "message"),
    [
        (respond(401, REFUSED), 1, EndpointError, "does not accept the key (401): set OPENAI_API_KEY"),
        (respond(403, b""), 1, EndpointError, "does not accept the key (403)"),
        (respond(404, {"error": {"message": "no such model"}}), 1, EndpointError, "has no model tiny"),
        (respond(400, LONG), 1, PromptTooLongError, "the prompt is longer than tiny"),
        (respond(413, b""), 1, PromptTooLongError, "accepts: give fewer passages"),
        (respond(400, {"error": "top_p is odd"}), 1, EndpointError, "refused the request (400) (top_p is odd)"),
        (respond(429, {"error": {"code": "insufficient_quota"}}), 1, EndpointError, "no budget left"),
        (respond(429, b"", Retry_After="3600"), 1, EndpointError, "is busy (429): ask again later"),
        (respond(502, REFUSED), 3, EndpointError, "failed (502) (Incorrect API key provided: ***. See the page)"),
        (respond(307, b"", Location="http://elsewhere.example/v1"), 1, EndpointError, "redirects to elsewhere.example"),
        (respond(307, b"", Location="http://[bad/x"), 1, EndpointError, "redirects to an invalid address"),
        (send(make_event("a", ["stop"])), 1, EndpointError, "finish_reason is not a text"),  # type: ignore[arg-type]
        (respond(200, b"<html>welcome</html>"), 1, EndpointError, "sent a reply that is not a chat completion"),
        (respond(200, b'{"choices": [7]}'), 1, EndpointError, "sent a reply that is not a chat completion"),
        (send(b"data: what?\n\n"), 1, EndpointError, "sent a reply that is not a chat completion"),
        (
            send(make_event("\x1b[2J", content=1).replace(b'"\\u001b[2J"', b"5")),
            1,
            EndpointError,
            "content is not a text",
        ),
        (send(*ANSWER_EVENTS[:2]), 3, EndpointError, "ended its answer half-way"),
        (
            send(b'data: {"error": {"message": "maximum context length"}}\n\n'),
            1,
            PromptTooLongError,
            "the prompt is longer",
        ),
        (send(*[make_event("x" * 1000)] * 20, *ANSWER_EVENTS), 1, EndpointError, "sent more than 9000 bytes"),
        (respond(200, b" " * 9001), 1, EndpointError, "sent more than 9000 bytes"),
        (hang(), 3, EndpointError, "sent no text within 0.2 s"),
        (hang(STREAM, b": wait\n\n"), 3, EndpointError, "sent no text within 0.2 s"),
    ],
)
def test_failure_is_one_line_without_the_key(step: Step, tries: int, kind: type, message: str) -> None:
    settings = replace(QUICK, first_seconds=0.2 if "no text" in message else 20.0, max_reply_bytes=9000)
    with serve_script(step) as server, pytest.raises(BookwheelError, match=r"^[^\n]+$") as error:
        write(server, settings)
    assert type(error.value) is kind
    assert message in str(error.value)
    assert KEY not in str(error.value)
    assert len(server.bodies) == tries


def test_stream_that_was_shown_is_not_tried_again() -> None:
    with serve_script(send(*ANSWER_EVENTS[:1]), send(*ANSWER_EVENTS)) as server:
        pieces: list[str] = []
        with pytest.raises(EndpointError, match="ended its answer half-way"):
            write(server, on_text=lambda row, text: pieces.append(text))
    assert (pieces, len(server.bodies)) == (["two"], 1)


def test_slow_reply_ends_with_the_time_limit() -> None:
    settings = replace(QUICK, whole_seconds=0.3)
    with (
        serve_script(hang(STREAM, make_event("one"))) as server,
        pytest.raises(EndpointError, match="no whole answer within"),
    ):
        write(server, settings)
    assert len(server.bodies) == 1


def test_unreachable_endpoint_is_refused() -> None:
    with serve_script(send(*ANSWER_EVENTS)) as server:
        pass
    with pytest.raises(EndpointError, match="cannot be reached"):
        write(server)


def test_stop_request_closes_the_stream() -> None:
    stopped = threading.Event()
    with serve_script(hang(STREAM, make_event("one"))) as server, pytest.raises(StoppedError):
        write(server, should_stop=stopped.is_set, on_text=lambda row, text: stopped.set())
    assert server.all_ended.is_set()  # the server read the end of the connection


def test_concurrent_requests_are_limited_and_answers_in_order() -> None:
    running, max_running = 0, 0
    lock, both_running = threading.Lock(), threading.Barrier(2, timeout=300)

    def step(connection: Any) -> None:
        nonlocal running, max_running
        with lock:
            running += 1
            max_running = max(max_running, running)
        both_running.wait()  # two requests are always running
        with lock:
            running -= 1
        send(*ANSWER_EVENTS)(connection)

    with serve_script(step) as server:
        writer = EndpointWriter("tiny", replace(QUICK, concurrency=2), Endpoint(server.url))
        completions = writer.write([Prompt("", str(number)) for number in range(6)])
        writer.close()
    assert [completion.text for completion in completions] == ["two words"] * 6
    assert max_running == 2


def test_prompt_without_room_is_not_sent() -> None:
    with (
        serve_script(send(*ANSWER_EVENTS)) as server,
        pytest.raises(UsageError, match="longer than the 28 that openai:tiny has"),
    ):
        write(server, replace(QUICK, context=80))
    assert server.bodies == []


def test_likelihoods_of_texts_are_refused() -> None:
    writer = EndpointWriter("tiny", QUICK, Endpoint("http://localhost:1"))
    with pytest.raises(UsageError, match="openai:tiny gives no likelihood"):
        writer.log_likelihood(PROMPTS, ["a", "b"])
    writer.close()


def test_key_is_not_part_of_the_identity_and_never_shown() -> None:
    endpoint = Endpoint("http://localhost:1", KEY)
    settings = (QUICK, QUICK, replace(QUICK, max_new_tokens=9))
    endpoints = (endpoint, replace(endpoint, key="another"), endpoint)
    first, other_key, longer = (EndpointWriter("tiny", *each) for each in zip(settings, endpoints, strict=True))
    assert first.decides == other_key.decides
    assert KEY not in f"{first.decides} {first.endpoint!r} {first.settings!r}"
    assert first.decides != longer.decides
    for writer in (first, other_key, longer):
        writer.close()


def test_sampling_writers_have_different_identities() -> None:
    endpoint = Endpoint("http://localhost:1")
    settings = (QUICK, QUICK, *[replace(QUICK, temperature=0.5)] * 2)
    first, second, sampling, other_sampling = writers = [EndpointWriter("tiny", each, endpoint) for each in settings]
    assert first.decides == second.decides
    assert sampling.decides == sampling.decides != other_sampling.decides
    for writer in writers:
        writer.close()


def test_writer_imports_no_torch() -> None:
    code = "import sys, rag_model.reading.writers.endpoint; print({'torch', 'transformers'} & {*sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
