"""A model behind an HTTP API: what it writes and costs, and one clear sentence for every way to fail."""

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
from tests.fixtures.chat_server import chat_server
from tests.fixtures.scripted_server import (
    STREAM,
    WHOLE,
    Scripted,
    Step,
    event,
    hangs,
    likely,
    replies,
    scripted,
    streams,
)
from tests.fixtures.tiny_generators import save_llama

KEY = "sk-not-to-be-told-0123456789"
QUICK = ChatSettings(backoff_seconds=0.001, tries=3, whole_seconds=30.0, first_seconds=20.0)
ASKED = [Prompt("Answer in few words.", "who is the king?"), Prompt("", "what is the capital of the river?")]
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
REFUSED = {"error": {"message": f"Incorrect API key provided: {KEY}.\nSee the page.", "code": "invalid_api_key"}}
LONG = {"error": {"message": "This model's maximum context length is 512 tokens.", "code": "context_length_exceeded"}}


def written(server: Scripted, settings: ChatSettings = QUICK, **how: Any) -> Any:
    writer = EndpointWriter("tiny", settings, Endpoint(server.url, KEY))
    try:
        return writer.write(ASKED[:1], **how)[0]
    finally:
        writer.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), chat=True)


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[str]:
    with chat_server(model) as url:
        yield url


def test_a_real_server_writes_what_its_model_does(served: str, model: Path) -> None:
    settings = replace(QUICK, max_new_tokens=12, tokenizer=model / "tokenizer.json", prices=TokenPrices(2.0, 8.0))
    writer = EndpointWriter(str(model), settings, Endpoint(served))
    pieces: dict[int, list[str]] = {0: [], 1: []}
    found = writer.write(ASKED, on_text=lambda place, text: pieces[place].append(text))
    writer.close()
    tokenizer, causal = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    for place, (prompt, one) in enumerate(zip(ASKED, found, strict=True)):
        roles = [("system", prompt.system)] * bool(prompt.system) + [("user", prompt.user)]
        chat = [{"role": role, "content": text} for role, text in roles]
        tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        whole = causal.generate(**tokens, max_new_tokens=12, do_sample=False)[0]
        new = whole[tokens["input_ids"].shape[1] :]
        plain = tokenizer.decode(new, skip_special_tokens=True)
        assert one.text.rstrip(UNFINISHED) == plain.rstrip(UNFINISHED)  # the server does not send half a character
        assert "".join(pieces[place]) == one.text
        read = tokens["input_ids"].numel()
        assert (one.usage.prompt_tokens, one.usage.estimated) == (read, False)
        assert one.usage.cost == pytest.approx((2.0 * read + 8.0 * one.usage.new_tokens) / 1e6)
        assert one.ended == (int(new[-1]) == tokenizer.eos_token_id)
        assert sum(writer.count_tokens([prompt.system, prompt.user])) <= read <= writer.max_prompt_tokens


def test_what_is_sent_and_read() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 2}
    weighed = likely("two", -0.5), likely(" words", -0.25)
    with scripted(streams(b": hello\r\n\r\n", *weighed, event("", "length", usage=usage))) as server:
        found = written(server, replace(QUICK, logprobs=True, seed=3))
    assert (found.text, found.ended, found.log_likelihood) == ("two words", False, -0.75)
    assert (found.usage.prompt_tokens, found.usage.new_tokens, found.usage.cost) == (7, 2, None)
    (sent,) = server.bodies
    assert sent["messages"] == [
        {"role": "system", "content": ASKED[0].system},
        {"role": "user", "content": ASKED[0].user},
    ]
    assert (sent["model"], sent["temperature"], sent["seed"], sent["max_tokens"]) == ("tiny", 0.0, 3, 4096)
    assert server.heads[0].startswith("POST /v1/chat/completions ")
    assert f"Bearer {KEY}" in server.heads[0]


@pytest.mark.parametrize(
    ("reason", "written_tokens", "told"), [("stop", 3, -0.75), ("stop", 4, None), ("length", 3, None)]
)
def test_a_likelihood_is_that_of_every_token_but_the_end_or_none(
    reason: str, written_tokens: int, told: float | None
) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": written_tokens}
    with scripted(streams(likely("two", -0.5), likely(" words", -0.25), event("", reason, usage=usage))) as server:
        assert written(server, replace(QUICK, logprobs=True)).log_likelihood == told


@pytest.mark.parametrize("sizes", [[1] * 60, [7, 9, 30], [60]])
def test_an_endpoint_that_repeats_the_key_is_not_repeated(sizes: list[int]) -> None:
    text, cuts = f"Bearer {KEY}, sk-not-to", list(accumulate(sizes, initial=0))
    events = [event(text[start:end]) for start, end in pairwise(cuts) if text[start:end]]
    shown: list[str] = []
    with scripted(streams(*events, event("", "stop"))) as server:
        found = written(server, on_text=lambda place, piece: shown.append(piece))
    assert found.text == "".join(shown) == "Bearer ***, sk-not-to"


def test_an_endpoint_that_does_not_stream_is_read_whole_and_its_tokens_are_estimated() -> None:
    body = {"choices": [{"message": {"content": "été"}, "finish_reason": "stop"}]}
    with scripted(replies(200, body)) as server:
        found = written(server)
    assert (found.text, found.ended) == ("été", True)
    assert (found.usage.estimated, found.usage.new_tokens) == (True, 5)


@pytest.mark.parametrize(
    "step",
    [
        replies(429, {"error": {"message": "slow down"}}, Retry_After="0"),
        replies(503, b"<html>"),
        replies(500, {"detail": "oops"}),
        streams(*WHOLE[:1]),  # cut; nobody was told of it
        lambda connection: connection.close(),
        streams(b'data: {"error": {"message": "out of memory"}}\n\n'),
    ],
)
def test_what_passes_is_tried_again(step: Step) -> None:
    with scripted(step, step, streams(*WHOLE)) as server:
        assert written(server).text == "two words"
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("step", "tries", "kind", "words"),
    [
        (replies(401, REFUSED), 1, EndpointError, "does not accept the key (401): set OPENAI_API_KEY"),
        (replies(403, b""), 1, EndpointError, "does not accept the key (403)"),
        (replies(404, {"error": {"message": "no such model"}}), 1, EndpointError, "has no model tiny"),
        (replies(400, LONG), 1, PromptTooLongError, "the prompt is longer than tiny"),
        (replies(413, b""), 1, PromptTooLongError, "accepts: give fewer passages"),
        (replies(400, {"error": "top_p is odd"}), 1, EndpointError, "refused the request (400) (top_p is odd)"),
        (replies(429, {"error": {"code": "insufficient_quota"}}), 1, EndpointError, "no budget left"),
        (replies(429, b"", Retry_After="3600"), 1, EndpointError, "is busy (429): ask again later"),
        (replies(502, REFUSED), 3, EndpointError, "failed (502) (Incorrect API key provided: ***. See the page)"),
        (replies(307, b"", Location="http://elsewhere.example/v1"), 1, EndpointError, "redirects to elsewhere.example"),
        (replies(307, b"", Location="http://[bad/x"), 1, EndpointError, "redirects to an invalid address"),
        (streams(event("a", ["stop"])), 1, EndpointError, "finish_reason is not a text"),  # type: ignore[arg-type]
        (replies(200, b"<html>welcome</html>"), 1, EndpointError, "sent a reply that is not a chat completion"),
        (replies(200, b'{"choices": [7]}'), 1, EndpointError, "sent a reply that is not a chat completion"),
        (streams(b"data: what?\n\n"), 1, EndpointError, "sent a reply that is not a chat completion"),
        (
            streams(event("\x1b[2J", content=1).replace(b'"\\u001b[2J"', b"5")),
            1,
            EndpointError,
            "content is not a text",
        ),
        (streams(*WHOLE[:2]), 3, EndpointError, "ended its answer half-way"),
        (
            streams(b'data: {"error": {"message": "maximum context length"}}\n\n'),
            1,
            PromptTooLongError,
            "the prompt is longer",
        ),
        (streams(*[event("x" * 1000)] * 20, *WHOLE), 1, EndpointError, "sent more than 9000 bytes"),
        (replies(200, b" " * 9001), 1, EndpointError, "sent more than 9000 bytes"),
        (hangs(), 3, EndpointError, "sent no text within 0.2 s"),
        (hangs(STREAM, b": wait\n\n"), 3, EndpointError, "sent no text within 0.2 s"),
    ],
)
def test_each_failure_is_one_sentence_without_the_key(step: Step, tries: int, kind: type, words: str) -> None:
    settings = replace(QUICK, first_seconds=0.2 if "no text" in words else 20.0, max_reply_bytes=9000)
    with scripted(step) as server, pytest.raises(BookwheelError, match=r"^[^\n]+$") as failed:
        written(server, settings)
    assert type(failed.value) is kind
    assert words in str(failed.value)
    assert KEY not in str(failed.value)
    assert len(server.bodies) == tries


def test_a_stream_that_was_shown_is_not_begun_again() -> None:
    with scripted(streams(*WHOLE[:1]), streams(*WHOLE)) as server:
        shown: list[str] = []
        with pytest.raises(EndpointError, match="ended its answer half-way"):
            written(server, on_text=lambda place, text: shown.append(text))
    assert (shown, len(server.bodies)) == (["two"], 1)


def test_bytes_that_come_too_slowly_end_with_the_whole_time() -> None:
    settings = replace(QUICK, whole_seconds=0.3)
    with scripted(hangs(STREAM, event("one"))) as server, pytest.raises(EndpointError, match="no whole answer within"):
        written(server, settings)
    assert len(server.bodies) == 1


def test_nobody_listens() -> None:
    with scripted(streams(*WHOLE)) as server:
        pass
    with pytest.raises(EndpointError, match="cannot be reached"):
        written(server)


def test_stop_closes_the_stream() -> None:
    stopped = threading.Event()
    with scripted(hangs(STREAM, event("one"))) as server, pytest.raises(StoppedError):
        written(server, should_stop=stopped.is_set, on_text=lambda place, text: stopped.set())
    assert server.left.is_set()  # it read the end of the connection


def test_so_many_at_once_and_in_order() -> None:
    together, most = 0, 0
    lock, full = threading.Lock(), threading.Barrier(2, timeout=300)

    def step(connection: Any) -> None:
        nonlocal together, most
        with lock:
            together += 1
            most = max(most, together)
        full.wait()  # two are always under way
        with lock:
            together -= 1
        streams(*WHOLE)(connection)

    with scripted(step) as server:
        writer = EndpointWriter("tiny", replace(QUICK, concurrency=2), Endpoint(server.url))
        found = writer.write([Prompt("", str(number)) for number in range(6)])
        writer.close()
    assert [one.text for one in found] == ["two words"] * 6
    assert most == 2


def test_a_prompt_without_room_is_refused_before_it_is_sent() -> None:
    with (
        scripted(streams(*WHOLE)) as server,
        pytest.raises(UsageError, match="longer than the 28 that openai:tiny has"),
    ):
        written(server, replace(QUICK, context=80))
    assert server.bodies == []


def test_likelihoods_of_given_texts_are_refused() -> None:
    writer = EndpointWriter("tiny", QUICK, Endpoint("http://localhost:1"))
    with pytest.raises(UsageError, match="openai:tiny gives no likelihood"):
        writer.log_likelihood(ASKED, ["a", "b"])
    writer.close()


def test_the_key_decides_nothing_and_is_shown_nowhere() -> None:
    place = Endpoint("http://localhost:1", KEY)
    settings = (QUICK, QUICK, replace(QUICK, max_new_tokens=9))
    places = (place, replace(place, key="another"), place)
    one, other, third = (EndpointWriter("tiny", *each) for each in zip(settings, places, strict=True))
    assert one.decides == other.decides
    assert KEY not in f"{one.decides} {one.endpoint!r} {one.settings!r}"
    assert one.decides != third.decides
    for writer in (one, other, third):
        writer.close()


def test_what_was_drawn_is_no_answer_for_a_later_time() -> None:
    place = Endpoint("http://localhost:1")
    settings = (QUICK, QUICK, *[replace(QUICK, temperature=0.5)] * 2)
    one, other, drawn, again = writers = [EndpointWriter("tiny", each, place) for each in settings]
    assert one.decides == other.decides
    assert drawn.decides == drawn.decides != again.decides
    for writer in writers:
        writer.close()


def test_no_model_is_loaded_here() -> None:
    told = "import sys, rag_model.reading.writers.endpoint; print({'torch', 'transformers'} & {*sys.modules})"
    run = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
