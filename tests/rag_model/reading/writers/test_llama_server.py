"""llama.cpp's server, if installed, gives the texts, token counts and likelihoods of the same model in memory."""

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
from tests.fixtures.llama_server import run_llama_server
from tests.fixtures.tiny_generators import ASCII, save_gguf

PROMPTS = [
    Prompt("Answer in few words.", "who is the king?"),
    *(Prompt("", f"who was king {number}?") for number in range(5)),
]
MAX_TOKENS = 6  # tokens of an answer
SETTINGS = ChatSettings(max_new_tokens=MAX_TOKENS, context=256, logprobs=True, concurrency=1, tries=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(tmp_path_factory.mktemp("gguf"), chat=True, letters=ASCII)


@pytest.fixture(scope="module")
def server_url(model: Path) -> Iterator[str]:
    with run_llama_server(model / "tiny.gguf", context=256) as url:
        yield url


@pytest.fixture
def writer(server_url: str) -> Iterator[EndpointWriter]:
    endpoint_writer = EndpointWriter("tiny", SETTINGS, Endpoint(server_url))
    yield endpoint_writer
    endpoint_writer.close()


def test_completions_equal_those_of_the_model_in_memory(writer: EndpointWriter, model: Path) -> None:
    pieces: dict[int, list[str]] = {row: [] for row in range(len(PROMPTS))}
    completions = writer.write(PROMPTS, on_text=lambda row, text: pieces[row].append(text))
    generator = load_generator(model, device="cpu")
    expected = LocalWriter(generator, "tiny", DecodingSettings(max_new_tokens=MAX_TOKENS)).write(PROMPTS)  # type: ignore[arg-type]
    for row, (completion, reference) in enumerate(zip(completions, expected, strict=True)):
        assert completion.text.strip() == reference.text
        assert "".join(pieces[row]) == completion.text
        assert (completion.usage, completion.ended) == (reference.usage, reference.ended)
    pairs = zip(completions, expected, strict=True)
    with_likelihood = [pair for pair in pairs if pair[0].log_likelihood is not None and not pair[0].ended]
    assert with_likelihood  # tokens without a text, such as the end token, have none
    for completion, reference in with_likelihood:
        assert completion.log_likelihood == pytest.approx(reference.log_likelihood, abs=0.05)


def test_prompt_that_is_too_long_is_refused(server_url: str) -> None:
    writer = EndpointWriter("tiny", replace(SETTINGS, context=32_768), Endpoint(server_url))
    with pytest.raises(PromptTooLongError, match=r"^[^\n]+set BOOKWHEEL_LLM_CONTEXT to the tokens of its context$"):
        writer.write([Prompt("", "the river " * 200)])
    writer.close()


def test_stopped_request_frees_the_slot(server_url: str) -> None:
    stopped = threading.Event()
    writer = EndpointWriter("tiny", replace(SETTINGS, max_new_tokens=180), Endpoint(server_url))
    with pytest.raises(StoppedError):
        writer.write(PROMPTS, should_stop=stopped.is_set, on_text=lambda row, text: stopped.set())
    assert writer.write(PROMPTS[:1])[0].text  # the only slot is free again
    writer.close()
