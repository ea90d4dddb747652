"""An encoder behind an HTTP API returns the vectors of llama.cpp's server, and refuses every bad reply."""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rag_model.encoders.endpoint_encoder import (
    EmbeddingClient,
    EmbedSettings,
    EndpointEncoder,
    write_endpoint_folder,
)
from rag_model.endpoint import Endpoint
from rag_model.errors import EndpointError, InputError, PromptTooLongError, RefusedError, UsageError
from rag_model.snapshots.encoding import EncodeRecipe, store_encoder
from rag_model.store.store import Store
from tests.fixtures.llama_server import run_llama_server
from tests.fixtures.scripted_server import ScriptedServer, Step, hang, respond, serve_script
from tests.fixtures.tiny_generators import ASCII, save_gguf

KEY = "sk-not-to-be-told-0123456789"
TEXTS = [f"Town {number} lies on the river and has {37 * number} people." for number in range(70)]
FAST = EmbedSettings(backoff_seconds=0.001, tries=3, whole_seconds=20.0)


@pytest.fixture(scope="module")
def llama_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = save_gguf(tmp_path_factory.mktemp("gguf"), letters=ASCII)
    with run_llama_server(folder / "tiny.gguf", pooling="mean") as url:
        yield url


@pytest.fixture
def endpoint(llama_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set the base URL of llama.cpp's server in the environment, and return it."""
    monkeypatch.setenv("BOOKWHEEL_EMBED_BASE_URL", llama_url)
    return llama_url


def request_singly(url: str, texts: list[str]) -> tuple[np.ndarray[Any, np.dtype[np.float32]], int]:
    """Return the vectors and the number of tokens by one plain request for each text."""
    bodies = [httpx.post(f"{url}/embeddings", json={"model": "tiny", "input": text}).json() for text in texts]
    tokens = sum(body["usage"]["prompt_tokens"] for body in bodies)
    return np.array([body["data"][0]["embedding"] for body in bodies], np.float32), tokens


def build_reply(vectors: object, **fields: object) -> Step:
    rows = [{"index": index, "embedding": vector} for index, vector in enumerate(vectors)]  # type: ignore[var-annotated,arg-type]
    return respond(200, {"data": rows, **fields})


def embed(server: ScriptedServer, texts: list[str] | None = None) -> Any:
    client = EmbeddingClient("tiny", FAST, Endpoint(server.url, KEY))
    try:
        return client.embed(texts or ["one", "two"])
    finally:
        client.close()


def test_vectors_equal_those_of_single_requests(endpoint: str, tmp_path: Path) -> None:
    write_endpoint_folder("openai:tiny", tmp_path)
    encoder = EndpointEncoder.load(tmp_path)
    expected, expected_tokens = request_singly(endpoint, TEXTS[:35])
    np.testing.assert_allclose(encoder.encode_questions(TEXTS[:35]), expected, atol=1e-3)
    (vectors, counts), (last, _) = encoder.stream([TEXTS[:35], TEXTS[35:]])
    np.testing.assert_allclose(vectors, expected, atol=1e-3)
    assert (vectors.dtype, last.shape) == (np.float32, (35, encoder.dim))
    assert counts.tokens == expected_tokens
    assert encoder.encode_questions([]).shape == (0, encoder.dim)


def test_a_store_keeps_the_space_of_an_endpoint_and_refuses_a_changed_model(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    first = store_encoder(store, "openai:tiny", EncodeRecipe())
    second = store_encoder(store, "openai:tiny", EncodeRecipe())
    assert (first.space, first.passage) == (second.space, second.passage)
    assert first.space.pooling == "endpoint"
    shorter = store_encoder(store, "openai:tiny", EncodeRecipe(spec={"truncate_dim": 8, "question_prompt": "query: "}))
    assert (shorter.space.dim, first.space.dim) == (8, 32)
    other_model = save_gguf(tmp_path, 5, letters=ASCII)
    with run_llama_server(other_model / "tiny.gguf", pooling="mean") as other_url:
        monkeypatch.setenv("BOOKWHEEL_EMBED_BASE_URL", other_url)
        with pytest.raises(RefusedError, match=r"^the model tiny at \S+ has changed: .*openai:tiny#LABEL"):
            store_encoder(store, "openai:tiny", EncodeRecipe())
        relabelled = store_encoder(store, "openai:tiny#2", EncodeRecipe())
    assert relabelled.space.digest != first.space.digest


def test_a_text_that_is_too_long_is_named_without_a_retry(endpoint: str) -> None:
    client = EmbeddingClient("tiny", FAST)
    message = r"^a text of 5,007 characters that begin with 'Danube x.*', is longer .* truncate them$"
    with pytest.raises(PromptTooLongError, match=message):
        client.embed([*TEXTS, "Danube\n" + "x" * 5_000, *TEXTS])
    client.close()


def test_a_request_that_is_too_long_as_a_whole_is_halved() -> None:
    refusal = respond(413, {"error": {"message": "batch is too large"}})
    vectors = [[[1.0, 0.0]], [[0.0, 1.0], [2.0, 0.0]]]
    steps = (build_reply(part, usage={"prompt_tokens": 3}) for part in vectors)
    with serve_script(refusal, *steps) as server:
        received, tokens = embed(server, ["one", "two", "three"])
        assert [body["input"] for body in server.bodies] == [["one", "two", "three"], ["one"], ["two", "three"]]
    assert (received.tolist(), tokens) == ([*vectors[0], *vectors[1]], 6)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (build_reply([[1.0, 2.0]]), "1 vectors for 2 texts"),
        (build_reply([[1.0, 2.0], [1.0]]), "same shape"),
        (build_reply([[1.0, 2.0], [None, 1.0]]), "not a list of numbers"),
        (build_reply([[1.0, 2.0], [1e39, 1.0]]), "not finite"),
        (build_reply([[1.0, 2.0], [0.0, 0.0]]), "a vector is zero"),
        (build_reply([[], []]), "shape"),
        (build_reply([base64.b64encode(b"\0\0\x80?").decode(), "%%%"]), "base64"),
        (respond(200, {"data": [{"index": 1, "embedding": [1.0]}] * 2}), "missing or repeated"),
        (respond(200, {"object": "list"}), "KeyError"),
        (respond(200, b"<html>"), "a reply that is not a list of embeddings"),
        (respond(401, {"error": f"bad key {KEY}"}), "does not accept the key"),
        (respond(404, {}), "no model tiny, or no embeddings at this address"),
        (respond(302, {}, Location="http://elsewhere.example/v1"), "redirects to elsewhere.example"),
        (respond(400, {"error": {"message": "maximum context length is 512 tokens"}}), "cut shorter passages"),
        (respond(500, {}), "ask again later"),
    ],
)
def test_error_of_a_bad_reply_does_not_contain_the_key(reply: Step, message: str) -> None:
    with serve_script(reply) as server, pytest.raises(EndpointError, match=message) as raised:
        embed(server)
    assert KEY not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_busy_endpoint_is_retried_after_the_given_time() -> None:
    vectors = [[1.0, 0.0], [0.0, 1.0]]
    with serve_script(respond(429, {}, Retry_After="0"), build_reply(vectors, usage={"prompt_tokens": 7})) as server:
        received, tokens = embed(server)
    assert (received.tolist(), tokens) == (vectors, 7)
    assert len(server.bodies) == 2


def test_an_endpoint_without_base64_gets_requests_without_it() -> None:
    refusal = respond(400, {"error": {"message": "unknown field encoding_format"}})
    with serve_script(refusal, build_reply([[1.0, 0.0], [0.0, 2.0]])) as server:
        received, _ = embed(server)
    assert received.tolist() == [[1.0, 0.0], [0.0, 2.0]]
    assert ["encoding_format" in body for body in server.bodies] == [True, False]


def test_replies_in_another_order_are_sorted_by_index() -> None:
    rows = [{"index": 1, "embedding": [1.0]}, {"index": 0, "embedding": [3.0]}]
    with serve_script(respond(200, {"data": rows})) as server:
        assert embed(server)[0].tolist() == [[3.0], [1.0]]


def test_endpoint_that_hangs_is_left_after_the_time_limit() -> None:
    settings = EmbedSettings(tries=2, backoff_seconds=0.001, whole_seconds=0.3)
    with serve_script(hang(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{")) as server:
        client = EmbeddingClient("tiny", settings, Endpoint(server.url))
        with pytest.raises(EndpointError, match=r"sent no vectors within 0\.3 s"):
            client.embed(["one"])
        client.close()


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:90])])
def test_a_folder_with_damaged_probes_is_refused(
    endpoint: str, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    write_endpoint_folder("openai:tiny", tmp_path)
    damage(tmp_path / "probes.npy")
    with pytest.raises(InputError, match=r"probes\.npy cannot be read"):
        EndpointEncoder.load(tmp_path)


@pytest.mark.parametrize(
    ("variable", "value"), [("BATCH", "0"), ("BATCH", "1.5"), ("PRICE", "free"), ("WHOLE_SECONDS", "nan")]
)
def test_a_wrong_setting_names_its_variable(variable: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"^BOOKWHEEL_EMBED_{variable} is {value!r}"):
        EmbedSettings.from_environment({f"BOOKWHEEL_EMBED_{variable}": value})


def test_a_name_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names no model"):
        write_endpoint_folder("openai:#2", tmp_path)


def test_record_contains_no_address_and_no_key(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOKWHEEL_EMBED_API_KEY", KEY)
    write_endpoint_folder("openai:tiny", tmp_path)
    record = json.loads((tmp_path / "bookwheel.json").read_text())
    assert record["endpoint"] == {"model": "tiny", "dim": 32}
    assert KEY not in str(record)
    assert "127.0.0.1" not in str(record)
