"""llama.cpp's own server, where this machine has one: it writes, counts and weighs as the same model does in memory."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rag_model.endpoint import Endpoint
from rag_model.errors import PromptTooLongError, StoppedError
from rag_model.generate.decoding import DecodingSettings
from rag_model.generate.load import load_generator
from rag_model.reading.writers.chat_settings import ChatSettings
from rag_model.reading.writers.endpoint import EndpointWriter
from rag_model.reading.writers.local import LocalWriter
from rag_model.reading.writers.writer import Prompt
from tests.fixtures.llama_server import llama_server
from tests.fixtures.tiny_generators import ASCII, save_gguf

ASKED = [
    Prompt("Answer in few words.", "who is the king?"),
    *(Prompt("", f"who was king {number}?") for number in range(5)),
]
LONGEST = 6  # tokens of an answer
SETTINGS = ChatSettings(max_new_tokens=LONGEST, context=256, logprobs=True, concurrency=1, tries=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(tmp_path_factory.mktemp("gguf"), chat=True, letters=ASCII)


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[str]:
    with llama_server(model / "tiny.gguf", context=256) as url:
        yield url


@pytest.fixture
def writer(served: str) -> Iterator[EndpointWriter]:
    asked = EndpointWriter("tiny", SETTINGS, Endpoint(served))
    yield asked
    asked.close()


def test_it_writes_counts_and_weighs_as_the_model_in_memory(writer: EndpointWriter, model: Path) -> None:
    pieces: dict[int, list[str]] = {place: [] for place in range(len(ASKED))}
    found = writer.write(ASKED, on_text=lambda place, text: pieces[place].append(text))
    generator = load_generator(model, device="cpu")
    beside = LocalWriter(generator, "tiny", DecodingSettings(max_new_tokens=LONGEST)).write(ASKED)  # type: ignore[arg-type]
    for place, (one, other) in enumerate(zip(found, beside, strict=True)):
        assert one.text.strip() == other.text
        assert "".join(pieces[place]) == one.text
        assert (one.usage, one.ended) == (other.usage, other.ended)
    told = [
        pair for pair in zip(found, beside, strict=True) if pair[0].log_likelihood is not None and not pair[0].ended
    ]
    assert told  # of a token without a text, as the end, it tells no likelihood
    for one, other in told:
        assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=0.05)


def test_a_prompt_that_it_cannot_read_is_one_sentence(served: str) -> None:
    writer = EndpointWriter("tiny", replace(SETTINGS, context=32_768), Endpoint(served))
    with pytest.raises(PromptTooLongError, match=r"^[^\n]+set BOOKWHEEL_LLM_CONTEXT to the tokens of its context$"):
        writer.write([Prompt("", "the river " * 200)])
    writer.close()


def test_what_nobody_waits_for_is_given_up(served: str) -> None:
    stopped = threading.Event()
    writer = EndpointWriter("tiny", replace(SETTINGS, max_new_tokens=180), Endpoint(served))
    with pytest.raises(StoppedError):
        writer.write(ASKED, should_stop=stopped.is_set, on_text=lambda place, text: stopped.set())
    assert writer.write(ASKED[:1])[0].text  # its one slot is free again
    writer.close()
