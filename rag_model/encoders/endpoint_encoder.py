"""An encoder behind an HTTP API: any model of an OpenAI-compatible `/embeddings`, such as those of
text-embeddings-inference, vLLM, Infinity, Ollama, llama.cpp or a hosted service.

The folder of such an encoder contains no weights, only its record and the vectors of a few probe
texts (`PROBES`). Every process that encodes with the folder first requests the vectors of the probe
texts again, and refuses the model if they have changed. The vector space contains their digest.

The protocol is OpenAI's: POST /embeddings {model, input: [text], encoding_format} returns {data:
[{index, embedding}], usage: {prompt_tokens}}
(https://platform.openai.com/docs/api-reference/embeddings).
"""

import asyncio
import base64
import binascii
import math
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

import httpx
import numpy as np
import numpy.typing as npt

from rag_model.encoders.embed import Precision
from rag_model.encoders.files import ENDPOINT_PREFIX
from rag_model.encoders.space import Space, read_declared_space
from rag_model.encoders.spec import (
    ENDPOINT_KEY,
    ENDPOINT_POOLING,
    PROBES,
    EncoderSpec,
    TextInput,
    find_known_settings,
    read_encoder_spec,
    read_endpoint_record,
    write_encoder_record,
)
from rag_model.encoders.tokens import TokenCounts
from rag_model.endpoint import (
    INVALID_REQUEST_STATUSES,
    Endpoint,
    EndpointErrors,
    EventLoopThread,
    FailedAttemptError,
    create_endpoint_client,
    gather_or_cancel,
    read_reply,
    retry,
)
from rag_model.errors import EndpointError, InputError, PromptTooLongError, RefusedError, UsageError, format_count
from rag_model.http_client import ReplyTooLargeError, parse_retry_after
from rag_model.untrusted_text import escape_controls, parse_json

Vectors = npt.NDArray[np.float32]
_EmbedReply = tuple[Vectors, int]  # (vectors of a request's texts, number of their tokens)
EMBED_PREFIX = "BOOKWHEEL_EMBED_"  # prefix of the environment variables of an encoder's endpoint
# Texts of several scripts, lengths and kinds, so that another model, tokenizer, pooling or prompt
# changes at least one vector.
_PROBE_TEXTS = (
    "Ada Lovelace",
    "Which river flows through Vienna?",
    "The Danube is a river in Europe, the second longest after the Volga.",
    "query: 42 + 17 = 59",
    "Αθήνα is the Greek name of Athens, the capital of Greece.",
    "東京 is written Tokyo in Latin letters.",
    "def add(a, b):\n    return a + b",
    "Moors and marshes, one after another, stretch to the sea. " * 4,
)
PROBES_VERSION = 1  # increase it if `_PROBE_TEXTS` change
# The largest accepted difference to a stored probe vector, relative to its length: .045 is a cosine
# of .999. The same weights in another precision differ by less, and another model differs by more.
_MAX_PROBE_DISTANCE = 0.045
_FAILURE_SECONDS = 2.0  # time for which a failed check of the probe vectors is not repeated
_RECHECK_SECONDS = 600.0  # time between two checks of the probe vectors in one process
_REPLY_BYTES_PER_VALUE = 32  # maximum bytes of one vector component as a decimal number
_MAX_DIM = 1 << 16
# maximum time for a question; shorter than for a corpus, because a user waits
_QUESTION_SECONDS = 30.0
_MAX_QUOTED = 60  # maximum characters of a text that an error message quotes
_UNKNOWN_LENGTH = 1_000_000  # means no limit, because the endpoint truncates or refuses long texts


@dataclass(frozen=True, slots=True)
class EmbedSettings:
    """Settings of requests to an endpoint's `/embeddings`."""

    batch: int = 32  # texts per request; text-embeddings-inference accepts 32 by default
    concurrency: int = 4  # maximum number of concurrent requests of one process
    tries: int = 6  # maximum number of attempts per request, including the first
    backoff_seconds: float = 0.5  # wait before the second attempt; doubled for each later attempt
    connect_seconds: float = 10.0  # maximum time to establish a connection
    whole_seconds: float = 300.0  # maximum time per request, including all attempts and waits
    price: float = 0.0  # price of a million tokens; with 0, no costs are estimated

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read the settings from BOOKWHEEL_EMBED_BATCH, _CONCURRENCY, _TRIES, _BACKOFF_SECONDS,
        _CONNECT_SECONDS, _WHOLE_SECONDS and _PRICE.

        Raises:
            UsageError: a value is not a number, or not above 0.
        """
        settings: dict[str, Any] = {}
        for setting in fields(cls):
            variable = f"{EMBED_PREFIX}{setting.name.upper()}"
            if setting_text := environment.get(variable, "").strip():
                settings[setting.name] = _parse_number(variable, setting_text, type(setting.default))
        return cls(**settings)


def _parse_number(variable: str, text: str, number_type: type) -> Any:
    try:
        number = number_type(text)
    except ValueError:
        number = 0
    if not (math.isfinite(number) and number > 0):
        number_description = "a whole number" if number_type is int else "a number"
        raise UsageError(f"{variable} is {text!r}: set it to {number_description} above 0")
    return number


def write_endpoint_folder(name: str, folder: Path) -> None:
    """Request the probe texts' vectors, and write the record and the probes into `folder`.

    `name` is `openai:MODEL` or `openai:MODEL#LABEL`. The label is not sent to the endpoint. The
    label identifies a version of the model: after the model changed, a new label makes it a new
    encoder.

    Raises:
        EndpointError: the endpoint failed, or its reply has no usable vectors.
        UsageError: the model has no name, or a setting in the environment is invalid.
    """
    model = name.removeprefix(ENDPOINT_PREFIX)
    if not _get_endpoint_model_name(model).strip():
        raise UsageError(f"{name!r} names no model: give one such as openai:text-embedding-3-small")
    client = EmbeddingClient(_get_endpoint_model_name(model))
    try:
        probes = client.embed(_PROBE_TEXTS)[0]
    finally:
        client.close()
    np.save(folder / PROBES, probes)
    known_settings = find_known_settings(_get_endpoint_model_name(model))
    is_normalized = bool(np.allclose(np.linalg.norm(probes, axis=1), 1, atol=1e-3))
    spec = EncoderSpec(
        pooling=ENDPOINT_POOLING, max_length=_UNKNOWN_LENGTH, **({"normalize": is_normalized} | known_settings)
    )
    write_encoder_record(folder, {ENDPOINT_KEY: {"model": model, "dim": probes.shape[1]}, "spec": spec.to_json()})


def _get_endpoint_model_name(model: str) -> str:
    return model.partition("#")[0]


@dataclass(slots=True)
class EndpointEncoder:
    """An encoder that sends requests to an endpoint; create one with `load`. Thread-safe."""

    # The dtype is that of the received vectors; the endpoint's own precision is unknown.
    model: ClassVar[Precision] = Precision("endpoint", "float32")
    folder: Path
    name: str  # name of the model with the prefix, openai:MODEL
    spec: EncoderSpec
    full_dim: int  # dimension of the endpoint's vectors
    probes: Vectors  # (p, full_dim) recorded vectors of the probe texts
    client: "EmbeddingClient"
    _checked_at: float = -math.inf  # time of the last successful check, by the monotonic clock
    _failure: str = ""  # error of the last check, which is raised again until `_retry_at`
    _retry_at: float = -math.inf
    _lock: Any = field(default_factory=threading.Lock)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the record and the probe vectors of a folder; nothing is sent yet.

        Raises:
            InputError: a file is missing or corrupt.
            UsageError: a setting in the environment is invalid.
        """
        record = read_endpoint_record(folder)
        model = record["model"]
        try:
            probes = np.load(folder / PROBES, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"probe vectors {folder / PROBES} cannot be read ({error}): reindex") from error
        if probes.shape != (len(_PROBE_TEXTS), record["dim"]) or probes.dtype != np.float32:
            raise InputError(f"the record of encoder {folder} does not fit its probes: reindex")
        spec = read_encoder_spec(folder)
        client = EmbeddingClient(_get_endpoint_model_name(model))
        return cls(folder, f"{ENDPOINT_PREFIX}{model}", spec, int(probes.shape[1]), probes, client)

    @property
    def dim(self) -> int:
        """Dimension of a vector."""
        return self.spec.truncate_dim or self.full_dim

    @property
    def window(self) -> int:
        """Number of texts that are requested together: one batch for each concurrent request."""
        return self.client.settings.batch * self.client.settings.concurrency

    def space(self) -> Space:
        """Return the vector space that the folder declares.

        Raises:
            InputError: the folder declares no space, or a file is corrupt.
        """
        if (space := read_declared_space(self.folder)) is None:
            raise InputError(f"encoder {self.folder} has no vector space: reindex with {self.name}")
        return space

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        """Return the (n, d) float32 vectors of questions, in order.

        Raises:
            EndpointError: the endpoint failed, and retries within half a minute did not help.
            RefusedError: the model has changed.
        """
        return self._encode([self.spec.format_question(text) for text in questions], _QUESTION_SECONDS)[0]

    def encode_passages(self, titles: Sequence[str], texts: Sequence[str]) -> Vectors:
        """Return the (n, d) float32 vectors of passages, in order.

        Raises:
            EndpointError: the endpoint failed, and retries did not help.
            RefusedError: the model has changed.
        """
        return self._encode(list(map(self.spec.format_passage, titles, texts)))[0]

    def stream(
        self, windows: Iterable[Sequence[TextInput]], *, batch_invariant: bool = False
    ) -> Iterator[tuple[Vectors, TokenCounts]]:
        """Yield the (n, d) float32 vectors of each window, and the token counts from the endpoint.

        `batch_invariant` has no effect, because an endpoint does not guarantee identical vectors.

        Raises:
            EndpointError: the endpoint failed, and retries did not help.
            RefusedError: the model has changed.
        """
        for window in windows:
            vectors, n_tokens = self._encode(window)
            yield vectors, TokenCounts(n_tokens, 0)

    def check_probes(self, whole_seconds: float | None = None) -> None:
        """Check that the endpoint's model still computes the recorded vectors of the probe texts.

        For `whole_seconds`, see `EmbeddingClient.embed`.

        Raises:
            EndpointError: the endpoint failed, and retries did not help.
            RefusedError: a vector differs.
        """
        vectors, _ = self.client.embed(_PROBE_TEXTS, whole_seconds)
        host = self.client.endpoint.host
        mismatch_advice = (
            f"serve the former model again, or name it {self.name.partition('#')[0]}#LABEL with a "
            "label of your choice and reindex, which embeds all passages again"
        )
        if vectors.shape != self.probes.shape:
            raise RefusedError(
                f"the model {self.client.model} at {host} now has {vectors.shape[1]} dimensions, "
                f"not {self.full_dim}, so its vectors are not comparable: {mismatch_advice}"
            )
        probe_norms = np.maximum(np.linalg.norm(self.probes, axis=1), 1e-12)
        distance = float((np.linalg.norm(vectors - self.probes, axis=1) / probe_norms).max())
        if not distance <= _MAX_PROBE_DISTANCE:
            raise RefusedError(
                f"the model {self.client.model} at {host} has changed: the vector of a probe text "
                f"differs by {distance:.3f} of its length, and {_MAX_PROBE_DISTANCE} is the most "
                f"that other hardware may cause: {mismatch_advice}"
            )

    def _check_probes_or_reraise(self, whole_seconds: float | None) -> None:
        """Check the probe vectors; soon after a failed check, raise its error again without a
        request.
        """
        if time.monotonic() < self._retry_at:
            raise EndpointError(self._failure)
        try:
            self.check_probes(whole_seconds)
        except EndpointError as error:
            self._failure, self._retry_at = str(error), time.monotonic() + _FAILURE_SECONDS
            raise
        self._checked_at = time.monotonic()

    def _encode(self, texts: Sequence[TextInput], whole_seconds: float | None = None) -> tuple[Vectors, int]:
        with self._lock:
            if time.monotonic() - self._checked_at > _RECHECK_SECONDS:
                self._check_probes_or_reraise(whole_seconds)
        vectors, n_tokens = self.client.embed(
            [text if isinstance(text, str) else " ".join(text) for text in texts], whole_seconds
        )
        if not len(texts):
            vectors = np.empty((0, self.full_dim), np.float32)
        if vectors.shape[1] != self.full_dim:
            self.check_probes(whole_seconds)
            raise EndpointError(
                f"the endpoint at {self.client.endpoint.host} sent vectors of {vectors.shape[1]} "
                f"dimensions, and {self.full_dim} to other requests: check its servers"
            )
        vectors = vectors[:, : self.dim]
        if self.spec.normalize:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return np.ascontiguousarray(vectors, np.float32), n_tokens


class EmbeddingClient:
    """A client that requests embeddings from one model of an endpoint. Thread-safe."""

    def __init__(self, model: str, settings: EmbedSettings | None = None, endpoint: Endpoint | None = None) -> None:
        """Prepare requests for the model that the endpoint calls `model`; nothing is sent yet.

        Raises:
            UsageError: the address, key, proxy or a setting in the environment is invalid.
        """
        self.model, self.settings = model, settings or EmbedSettings.from_environment()
        self.endpoint = endpoint or Endpoint.from_environment(prefix=EMBED_PREFIX)
        self._errors = EndpointErrors(
            self.endpoint,
            model,
            product="embeddings",
            one_product="a list of embeddings",
            length_advice="cut shorter passages, or let the server truncate them",
        )
        self._encoding_format = "base64"  # a third of the size of decimal numbers
        # If a reply contained Retry-After, all requests wait until this time of the event loop.
        self._resume_time = 0.0
        self._loop: EventLoopThread | None = None
        self._client: httpx.AsyncClient | None = None
        self._slots: asyncio.Semaphore | None = None
        self._finalizer: weakref.finalize[..., EmbeddingClient] | None = None
        self._start_lock = threading.Lock()

    def embed(self, texts: Sequence[str], whole_seconds: float | None = None) -> tuple[Vectors, int]:
        """Return the (n, d) float32 vectors of texts, in order, and the number of their tokens
        (0 if the endpoint does not count them).

        `whole_seconds` is the maximum time per request with its retries, by default the time in
        the settings.

        Raises:
            EndpointError: a request failed, and retries did not help; or a reply is invalid.
            UsageError: the environment names neither an address nor a key.
        """
        if not len(texts):
            return np.empty((0, 0), np.float32), 0
        if self.endpoint.is_default and not self.endpoint.key:
            # Without an address, texts would be sent to OpenAI, which refuses requests without a
            # key.
            raise UsageError(
                f"no endpoint is set for the encoder {self.model}: set {EMBED_PREFIX}BASE_URL, or "
                "OPENAI_API_KEY for OpenAI's API"
            )
        settings = self.settings
        if whole_seconds is not None:
            settings = replace(settings, whole_seconds=min(whole_seconds, settings.whole_seconds))
        batch_starts = range(0, len(texts), settings.batch)
        requests = (self._embed_batch(list(texts[start : start + settings.batch]), settings) for start in batch_starts)
        try:
            replies = [*chain(*self._ensure_started().run(lambda _: gather_or_cancel(requests)))]
        except FailedAttemptError as failed_attempt:
            raise failed_attempt.error from failed_attempt.__cause__
        reply_dims = {vectors.shape[1] for vectors, _ in replies}
        if len(reply_dims) > 1:
            raise EndpointError(
                f"the endpoint at {self.endpoint.host} sent vectors of "
                f"{' and '.join(map(str, sorted(reply_dims)))} dimensions: check its servers"
            )
        return np.concatenate([vectors for vectors, _ in replies]), sum(n_tokens for _, n_tokens in replies)

    def close(self) -> None:
        """Close the connections, which are also closed if the client is garbage-collected."""
        if self._finalizer is not None:
            self._finalizer()

    def _ensure_started(self) -> EventLoopThread:
        """Return the thread that sends the requests; the first call starts it.

        The constructor does not start the thread, because the thread would not run in a worker that
        is forked later.
        """
        with self._start_lock:
            if self._loop is None:
                connect_seconds = self.settings.connect_seconds
                self._client = create_endpoint_client(self.endpoint, "application/json", connect_seconds)
                self._slots = asyncio.Semaphore(self.settings.concurrency)
                self._loop = EventLoopThread()
                self._finalizer = weakref.finalize(self, _close_connections, self._loop, self._client)
            return self._loop

    async def _embed_batch(self, batch: list[str], settings: EmbedSettings) -> list[_EmbedReply]:
        """Request the vectors of a batch; a batch that is too long for the server is halved.

        Halving ends at a single text, which the error then names.
        """
        assert self._slots is not None
        try:
            async with self._slots:
                timeout_error = self._errors.timeout_error("sent no vectors", settings.whole_seconds)
                return [await retry(settings, partial(self._attempt_batch, batch), timeout_error)]
        except FailedAttemptError as failed_attempt:
            if len(batch) == 1 or not isinstance(failed_attempt.error, PromptTooLongError):
                raise
        half_size = len(batch) // 2
        first_replies = await self._embed_batch(batch[:half_size], settings)
        return first_replies + await self._embed_batch(batch[half_size:], settings)

    async def _attempt_batch(self, batch: list[str]) -> _EmbedReply:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._resume_time - loop.time()))
        try:
            status, body, wait_seconds = await self._post_batch(batch)
            if status in INVALID_REQUEST_STATUSES and self._encoding_format and b"encoding_format" in body:
                self._encoding_format = ""  # the endpoint does not support this field
                status, body, wait_seconds = await self._post_batch(batch)
        except ReplyTooLargeError as error:
            raise self._errors.reply_size_error(self._compute_reply_limit(batch)) from error
        except httpx.DecodingError as error:
            raise self._errors.protocol_error(error) from error
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError) as error:
            raise self._errors.network_error(error) from error
        if not 200 <= status < 300:
            if wait_seconds is not None:
                self._resume_time = max(self._resume_time, loop.time() + wait_seconds)
            raise self._errors.with_input_name(_describe_input(batch[0])).status_error(status, body, wait_seconds)
        try:
            return _parse_reply(body, len(batch))
        except (ArithmeticError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._errors.protocol_error(f"{type(error).__name__}: {error}") from error

    async def _post_batch(self, batch: list[str]) -> tuple[int, bytes, float | None]:
        """Return the status and the body of the reply, and its Retry-After in seconds."""
        assert self._client is not None
        request_body = {"model": self.model, "input": batch}
        if self._encoding_format:
            request_body["encoding_format"] = self._encoding_format
        request = self._client.build_request("POST", f"{self.endpoint.url}/embeddings", json=request_body)
        response = await self._client.send(request, stream=True)
        try:
            if response.is_redirect:
                raise self._errors.redirect_error(response.headers.get("location", ""))
            body = await read_reply(response, self._compute_reply_limit(batch))
            return response.status_code, body, parse_retry_after(response.headers.get("retry-after"))
        finally:
            await response.aclose()

    @staticmethod
    def _compute_reply_limit(batch: Sequence[str]) -> int:
        return len(batch) * _MAX_DIM * _REPLY_BYTES_PER_VALUE


def _describe_input(text: str) -> str:
    """Describe, for an error message, a text that is too long for the server."""
    beginning = escape_controls(" ".join(text[:_MAX_QUOTED].split()))
    return f"a text of {len(text):,} characters that begin with {beginning!r},"


def _close_connections(loop: EventLoopThread, client: httpx.AsyncClient) -> None:
    # Garbage collection may run this in the event loop's thread, which cannot wait for itself.
    if not loop.is_current_thread:
        loop.close(client.aclose)


def _parse_reply(body: bytes, n_texts: int) -> tuple[Vectors, int]:
    """Return ((n_texts, d) vectors of a reply in the order of the texts, number of tokens).

    Raises:
        ValueError, LookupError, TypeError: the reply is not a list of `n_texts` finite vectors of
            one dimension.
    """
    reply = parse_json(body)
    reply_entries = reply["data"]
    if len(reply_entries) != n_texts:
        raise ValueError(f"{len(reply_entries)} vectors for {n_texts} texts")
    vectors_by_row: dict[int, Vectors] = {}
    for entry_position, entry in enumerate(reply_entries):
        vectors_by_row[int(entry.get("index", entry_position))] = _parse_vector(entry["embedding"])
    if sorted(vectors_by_row) != [*range(n_texts)]:
        raise ValueError("the `index` of a vector is missing or repeated")
    vectors = np.stack([vectors_by_row[row] for row in range(n_texts)])
    if vectors.ndim != 2 or not 0 < vectors.shape[1] <= _MAX_DIM:
        raise ValueError(f"the vectors have the shape {vectors.shape}")
    if not np.isfinite(vectors).all():
        raise ValueError("a vector is not finite")
    if not vectors.any(axis=1).all():
        raise ValueError("a vector is zero")
    n_tokens = (reply.get("usage") or {}).get("prompt_tokens")
    return vectors, n_tokens if isinstance(n_tokens, int) and n_tokens > 0 else 0


def _parse_vector(embedding: Any) -> Vectors:
    if isinstance(embedding, str):
        try:
            return np.frombuffer(base64.b64decode(embedding, validate=True), "<f4").astype(np.float32)
        except binascii.Error as error:
            raise ValueError(f"a vector is not valid Base64 ({error})") from error
    if not isinstance(embedding, list) or not all(type(component) in {int, float} for component in embedding):
        raise TypeError("a vector is not a list of numbers")
    with np.errstate(over="ignore"):  # the caller refuses an infinite number
        return np.array(embedding).astype(np.float32)


def describe_endpoint_use(name: str, n_passages: int, words_per_passage: float, price: float | None = None) -> str:
    """Describe the tokens and cost of embedding passages, given their mean number of words.

    The estimate assumes that a token is three quarters of a word. `price` is the price of a million
    tokens, by default BOOKWHEEL_EMBED_PRICE.

    >>> describe_endpoint_use("openai:small", 1_000_000, 90, 0.02)
    'openai:small embeds 1,000,000 passages, about 120,000,000 tokens, for about 2.40'
    >>> describe_endpoint_use("openai:small", 10, 90, 0.0)
    'openai:small embeds 10 passages, about 1,200 tokens'
    """
    n_tokens = round(n_passages * words_per_passage * 4 / 3)
    price = EmbedSettings.from_environment().price if price is None else price
    cost = f", for about {n_tokens * price / 1e6:,.2f}" if price else ""
    return f"{name} embeds {format_count(n_passages, 'passage')}, about {n_tokens:,} tokens{cost}"
