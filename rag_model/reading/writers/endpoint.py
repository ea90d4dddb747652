"""A writer behind an HTTP API: any model that a chat-completions endpoint serves, as OpenAI's, vLLM's or llama.cpp's.

Nothing is installed or loaded here but an HTTP client. The base URL and the key come from the environment
(`chat.place`), and the key is in no message, no record and no log: where the endpoint repeats it, it is taken out.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rag_model.errors import UsageError
from rag_model.reading.answer import Usage
from rag_model.reading.reader import Stop, Tell
from rag_model.reading.writers.chat.events import Reply
from rag_model.reading.writers.chat.loop import Loop
from rag_model.reading.writers.chat.place import Place
from rag_model.reading.writers.chat.problems import FailedTryError
from rag_model.reading.writers.chat.request import Chat
from rag_model.reading.writers.chat.settings import AROUND, ChatSettings
from rag_model.reading.writers.writer import ENDPOINT, Prompt, Written
from rag_model.tokenizer import load_tokenizer_file


class EndpointWriter:
    """Continues prompts by a chat-completions endpoint. Safe among threads; `close` ends its connections."""

    def __init__(self, model: str, settings: ChatSettings | None = None, place: Place | None = None) -> None:
        """Prepare to ask `model`, as the endpoint names it; nothing is asked yet.

        Raises:
            UsageError: the environment names no usable address, key or proxy, or the model has no name.
            InputError: the tokenizer cannot be read.
        """
        if not model.strip():
            raise UsageError("the endpoint's model has no name: give one such as openai:gpt-4o-mini")
        self.model, self.settings = model, settings or ChatSettings.of()
        self.place = place or Place.of()
        file = self.settings.tokenizer
        self._tokenizer: Any = None if file is None else load_tokenizer_file(file)
        self._once = secrets.token_hex(8)
        self._chat = Chat(self.place, model, self.settings)
        self._loop = Loop()

    @property
    def id(self) -> str:
        """Return the model's name, as a user gives it."""
        return f"{ENDPOINT}{self.model}"

    @property
    def room(self) -> int:
        """Return the maximum tokens of a prompt: the context without the answer and the chat's own format."""
        return self.settings.context - self.settings.max_new_tokens - AROUND

    @property
    def decides(self) -> dict[str, Any]:
        """Return what determines this writer's answers, for memo keys; the key to the endpoint does not."""
        once = {} if self.settings.repeatable else {"once": self._once}  # what is drawn is no answer for a later time
        return {**decided_by(self.model, self.settings, self.place), **once}

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the tokens of each text by the model's tokenizer; without it one a byte, which none exceeds."""
        if self._tokenizer is None:
            return [len(text.encode("utf-8", "replace")) for text in texts]
        return [len(one.ids) for one in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def write(self, prompts: Sequence[Prompt], stop: Stop | None = None, tell: Tell | None = None) -> list[Written]:
        """Continue each prompt, in order, several at once; `stop` closes the streams.

        Raises:
            UsageError: a prompt is longer than `room`, or than the model reads.
            StoppedError: `stop` was true.
            EndpointError: the endpoint failed, and trying again did not help.
        """
        self._check(prompts)
        try:
            replies = self._loop.run(partial(self._all, prompts, tell is not None), stop, tell)
        except FailedTryError as failed:
            raise failed.error from failed.__cause__
        return [self._written(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)]

    def log_likelihood(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        """Refuse: a chat endpoint tells the likelihood of what it writes, and not of a given text.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"{self.id} does not tell the likelihood of a given text: use a model in memory for what needs one"
        )

    def close(self) -> None:
        """Give up what is being written, and close the connections."""
        self._loop.close(self._chat.close)

    def _check(self, prompts: Sequence[Prompt]) -> None:
        sizes = self.count([text for prompt in prompts for text in (prompt.system, prompt.user)])
        longest = max((system + user for system, user in zip(sizes[::2], sizes[1::2], strict=True)), default=0)
        if longest > self.room:
            raise UsageError(
                f"a prompt of {longest} tokens is longer than {self.id} has room for, {self.room}: give fewer "
                "passages, or set BOOKWHEEL_LLM_CONTEXT, or BOOKWHEEL_LLM_TOKENIZER for an exact count"
            )

    async def _all(self, prompts: Sequence[Prompt], grows: bool, put: Callable[[int, str], None]) -> list[Reply]:
        tasks = [
            asyncio.ensure_future(self._chat.complete(_messages(prompt), partial(put, place) if grows else None))
            for place, prompt in enumerate(prompts)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:  # the first that fails ends the others
            for task in tasks:
                task.cancel()

    def _written(self, prompt: Prompt, reply: Reply) -> Written:
        read, new = reply.usage or self.count([prompt.system + prompt.user, reply.text])
        prices = self.settings.prices
        usage = Usage(read, new, None if prices is None else prices.of(read, new), estimated=reply.usage is None)
        return Written(reply.text, usage, reply.ended, reply.log_likelihood)


def decided_by(model: str, settings: ChatSettings, place: Place) -> dict[str, Any]:
    """Return what tells an endpoint's model from others: its address, its name, and how it is asked."""
    return {"endpoint": place.url, "model": model, "settings": settings.decides()}


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    return [*system, {"role": "user", "content": prompt.user}]
