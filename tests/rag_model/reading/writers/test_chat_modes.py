"""Replies of endpoints other than a plain answer: reasoning, refusals, tool calls, unusual last events."""

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from zstandard import ZstdCompressor

from rag_model.endpoint import Endpoint
from rag_model.errors import EndpointError
from rag_model.reading.writers.chat_settings import ChatSettings
from rag_model.reading.writers.endpoint import EndpointWriter
from rag_model.reading.writers.writer import Completion, Prompt, ReasoningFilter, remove_reasoning
from tests.fixtures.scripted_server import STREAM, Step, make_event, make_token, respond, send, serve_script
from tests.fixtures.work_counters import measure_peaks

ANSWER = "George Orwell"
QUICK = ChatSettings(backoff_seconds=0.001, tries=1, whole_seconds=30.0, first_seconds=20.0)
PROMPT = Prompt("Answer in few words.", "who wrote animal farm?")
USAGE = {"prompt_tokens": 40, "completion_tokens": 50, "total_tokens": 90}
END = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Mode:
    """The deltas of a reply, and the expected completion."""

    deltas: tuple[dict[str, Any], ...]
    reason: str = "stop"
    text: str = ANSWER
    problem: str | None = None
    last: dict[str, Any] | None = None  # an event after the last delta


def build_mode(*pieces: str, **expected: Any) -> Mode:
    return Mode(tuple({"content": piece} for piece in pieces), **expected)


TOOL = {"index": 0, "id": "1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
ORWELL = {"content": ANSWER}
MODES = {
    "plain": build_mode("George", " Orwell", last={"choices": [], "usage": USAGE}),
    "usage_no_choices": Mode((ORWELL,), last={"id": "x", "usage": USAGE}),
    "choices_null": Mode((ORWELL,), last={"choices": None, "usage": USAGE}),
    "last_event_is_no_completion": Mode((ORWELL,), last={"timings": {"predicted_ms": 3}}),
    "usage_is_infinite": Mode((ORWELL,), last={"choices": [], "usage": {**USAGE, "completion_tokens": 10**400}}),
    "think": build_mode("<think>\nOkay, who", " wrote it? [1] says Orwell.\n</think>\n\nGeorge Orwell"),
    "think_empty": build_mode("<think>\n\n</think>\n\n", ANSWER),
    "think_split": build_mode("\n<", "th", "ink>so</th", "ink", ">", "\n", "George", " Orwell"),
    "think_unopened": build_mode("Okay, who wrote it?", " [1] says Orwell.\n</think>\n\n", ANSWER),
    "think_cut": build_mode("<think>\nOkay, who wrote", " it?", reason="length", text="", problem="reasoning"),
    "think_alone": build_mode("<think>Orwell?</think>", text="", problem="reasoning"),
    "mistral": build_mode("[THINK]Hm.[/THINK]", ANSWER),
    "harmony": build_mode(
        "<|channel|>analysis<|message|>We need to answer.<|end|><|start|>assistant",
        "<|channel|>final<|message|>George Orwell<|return|>",
    ),
    "harmony_cut": build_mode("<|channel|>analysis<|message|>We", reason="length", text="", problem="reasoning"),
    "harmony_without_marks": build_mode("analysisWe need to answer.assistantfinal", ANSWER),
    "no_reasoning": build_mode("<thinner> is no tag", text="<thinner> is no tag"),
    "reasoning_only": Mode(
        ({"content": None, "reasoning_content": "Okay,"}, {"content": None, "reasoning_content": " who"}),
        reason="length",
        text="",
        problem="reasoning",
    ),
    "reasoning_then": Mode(({"content": None, "reasoning": "Okay"}, ORWELL)),
    "parts": Mode(
        ({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]},
         {"content": [{"type": "text", "text": ANSWER}]}),
    ),
    "refusal": Mode(({"content": None, "refusal": "I can't help with that."},), text="", problem="refused"),
    "filtered": Mode(({"content": ""},), reason="content_filter", text="", problem="filtered"),
    "tool": Mode(({"content": None, "tool_calls": [TOOL]},), reason="tool_calls", text="", problem="tool_call"),
    "function": Mode(
        ({"content": None, "function_call": {"name": "search"}},), reason="stop", text="", problem="tool_call"
    ),
    "empty": Mode(({"content": ""},), text="", problem="empty"),
    "blank": Mode(({"content": "\n \n"},), text="", problem="empty"),
    "length": Mode(({"content": ""},), reason="length", text="", problem="reasoning"),
    "prompt_truncated": Mode(
        (ORWELL,), last={"choices": [], "usage": {**USAGE, "prompt_tokens": 3}}, problem="prompt_truncated"
    ),
}  # fmt: skip


def stream_mode(mode: Mode) -> Step:
    events = [chunk(delta) for delta in mode.deltas]
    last = [f"data: {json.dumps(mode.last)}\n\n".encode()] if mode.last else []
    return send(*events, chunk({}, mode.reason), *last, END)


def chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


def reply_whole(mode: Mode) -> Step:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for delta in mode.deltas:
        for name, value in delta.items():
            message[name] = value if message.get(name) is None else message[name] + (value or type(message[name])())
    usage = {"usage": mode.last["usage"]} if mode.last and "usage" in mode.last else {}
    return respond(200, {"choices": [{"index": 0, "message": message, "finish_reason": mode.reason}], **usage})


def write(*steps: Step, settings: ChatSettings = QUICK, prompt: Prompt = PROMPT, **options: Any) -> Completion:
    with serve_script(*steps) as server:
        writer = EndpointWriter("tiny", settings, Endpoint(server.url))
        try:
            return writer.write([prompt], **options)[0]
        finally:
            writer.close()


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("name", MODES)
def test_reasoning_is_removed_and_a_missing_answer_has_a_problem(name: str, streamed: bool) -> None:
    mode, pieces = MODES[name], []
    completion = write(
        stream_mode(mode) if streamed else reply_whole(mode), on_text=lambda _, piece: pieces.append(piece)
    )
    assert completion.text == mode.text
    assert (completion.problem and completion.problem.kind) == mode.problem
    if not {"think_unopened", "harmony_without_marks", "harmony", "blank"} & {name}:
        assert "".join(pieces) == mode.text
    assert completion.usage.new_tokens < 10**6


def test_refusal_and_tool_call_are_quoted() -> None:
    refusal = write(stream_mode(MODES["refusal"])).problem
    assert refusal
    assert refusal.message == "the model refused to answer (I can't help with that)"
    tool_call = write(stream_mode(MODES["tool"])).problem
    assert tool_call
    assert tool_call.message == "the model called a tool (search) instead of answering"


def test_streams_are_closed_if_a_reply_ends_early() -> None:
    """Python prints a warning if a pending generator is destroyed."""
    code = (
        "import sys; from rag_model.endpoint import Endpoint; "
        "from rag_model.reading.writers.chat_settings import ChatSettings; "
        "from rag_model.reading.writers.endpoint import EndpointWriter; "
        "from rag_model.reading.writers.writer import Prompt; "
        "writer = EndpointWriter('tiny', ChatSettings(tries=1), Endpoint(sys.argv[1]))\n"
        "for _ in range(3):\n"
        "    try: writer.write([Prompt('', 'who?')])\n"
        "    except Exception as error: print(type(error).__name__)\n"
        "writer.close()"
    )
    with serve_script(
        respond(200, b"<html>"), respond(500, b"<html>"), send(make_event("a"), b"data: {\n\n")
    ) as server:
        run = subprocess.run([sys.executable, "-c", code, server.url], capture_output=True, text=True, check=True)
    assert (run.stdout.split(), run.stderr) == (["EndpointError"] * 3, "")


def test_events_need_no_empty_lines() -> None:
    events = make_event("George"), make_event(" Orwell"), make_event("", "stop"), END
    lines = b"".join(event.rstrip() + b"\n" for event in events)
    assert write(send(lines)).text == ANSWER


@pytest.mark.parametrize("rest", [b"data: {oops\n\n", b'data: {"error": "late"}\n\n', b"x" * (9 << 20)])
def test_data_after_the_finish_reason_is_ignored(rest: bytes) -> None:
    assert write(send(make_event(ANSWER), make_event("", "stop"), rest)).text == ANSWER


def test_answer_with_reasoning_has_no_likelihood() -> None:
    settings = ChatSettings(logprobs=True)
    completion = write(send(make_token("George", -0.5), make_event("", "stop")), settings=settings)
    assert completion.log_likelihood == -0.5
    with_reasoning = write(
        send(make_token("<think>", -0.1), make_token("</think>Orwell", -0.2), make_event("", "stop")), settings=settings
    )
    assert (with_reasoning.text, with_reasoning.log_likelihood) == ("Orwell", None)


@pytest.mark.parametrize("log_p", ["-1e400", str(-(10**400)), '"low"', "[]"])
def test_likelihood_that_is_no_number_is_refused(log_p: str) -> None:
    body = f'{{"choices": [{{"delta": {{"content": "a"}}, "logprobs": {{"content": [{{"logprob": {log_p}}}]}}}}]}}'
    with pytest.raises(EndpointError, match=r"^the endpoint at \S+ sent a reply that is not a chat completion"):
        write(send(f"data: {body}\n\n".encode(), END))


def test_refused_field_is_left_out_or_renamed() -> None:
    refusals = (
        respond(422, {"detail": [{"loc": ["body", "stream_options"], "msg": "Extra inputs are not permitted"}]}),
        respond(400, {"error": {"message": "Use 'max_completion_tokens' instead.", "param": "max_tokens"}}),
    )
    with serve_script(*refusals, send(make_event(ANSWER), make_event("", "stop"))) as server:
        writer = EndpointWriter("tiny", QUICK, Endpoint(server.url))
        assert [completion.text for completion in writer.write([PROMPT])] == [ANSWER]
        assert [completion.text for completion in writer.write([PROMPT])] == [ANSWER]
        writer.close()
    assert [("stream_options" in body, "max_tokens" in body) for body in server.bodies] == [
        (True, True), (False, True), (False, False), (False, False)
    ]  # fmt: skip
    assert server.bodies[-1]["max_completion_tokens"] == 4096


def test_token_limit_has_room_for_reasoning() -> None:
    assert [ChatSettings(context=context).token_limit for context in (512, 8192, 32768, 10**6)] == [
        128, 2048, 4096, 4096
    ]  # fmt: skip
    assert ChatSettings(max_new_tokens=20_000, context=10**5).reply_limit == 20_000 * 1024


def build_bombs() -> Iterator[tuple[str, bytes, str]]:
    zeros = b'data: {"x": "' + b"0" * (32 << 20)
    yield "zstd", ZstdCompressor().compress(zeros), "encoded as zstd"
    yield "br", b"\x00" * 99, "encoded as br"
    yield "deflate", b"\x00" * 99, "encoded as deflate"
    yield "gzip", gzip.compress(zeros), "sent more than"
    yield "gzip", b"no gzip", "its gzip is corrupt"


def refuse_reply(encoding: str, body: bytes, message: str) -> None:
    for status in (200, 500):
        expected = message if status == 200 or message != "sent more than" else "failed"
        with pytest.raises(EndpointError, match=expected):
            write(respond(status, body, Content_Encoding=encoding))


def test_memory_of_a_compressed_reply_is_bounded() -> None:
    *_, warm_up = cases = [partial(refuse_reply, *bomb) for bomb in build_bombs()]
    _, *peaks = measure_peaks(warm_up, *cases)
    assert max(peaks) < 24 << 20, peaks  # several times the limit of 4 MiB for a reply


def test_gzip_is_requested_and_decoded() -> None:
    body = gzip.compress(make_event("George")) + gzip.compress(make_event(" Orwell") + make_event("", "stop"))
    with serve_script(send(body, head=STREAM.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n"))) as server:
        writer = EndpointWriter("tiny", QUICK, Endpoint(server.url))
        assert writer.write([PROMPT])[0].text == ANSWER
        writer.close()
    assert "\r\nAccept-Encoding: gzip\r\n" in server.heads[0]


@pytest.mark.parametrize("name", [name for name, mode in MODES.items() if mode.deltas[0].get("content")])
def test_reasoning_is_removed_for_any_split_of_the_text(name: str) -> None:
    content = [delta["content"] for delta in MODES[name].deltas]
    if not all(isinstance(piece, str) for piece in content):
        return
    text = "".join(content)
    unsplit = ReasoningFilter()
    expected = unsplit.feed(text) + unsplit.finish()
    by_character = ReasoningFilter()
    assert "".join(map(by_character.feed, text)) + by_character.finish() == expected
    assert remove_reasoning(text)[0].strip() == MODES[name].text
