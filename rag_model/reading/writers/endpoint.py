"""A writer behind an HTTP API: any model of a chat-completions endpoint, such as OpenAI's, vLLM's
or llama.cpp's.

It needs only an HTTP client. The base URL and the key come from the environment
(`rag_model.endpoint`). The key never appears in a message, a record or a log: if the endpoint
repeats it, it is masked.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rag_model.encoders.files import ENDPOINT_PREFIX
from rag_model.endpoint import Endpoint, EndpointErrors, EventLoopThread, FailedAttemptError
from rag_model.errors import UsageError
from rag_model.reading.answer import AnswerProblem, TokenUsage
from rag_model.reading.reader import StopCheck, TextCallback
from rag_model.reading.writers.chat_client import ChatClient
from rag_model.reading.writers.chat_events import ChatReply
from rag_model.reading.writers.chat_settings import CHAT_TEMPLATE_TOKENS, ChatSettings
from rag_model.reading.writers.writer import Completion, Prompt, describe_missing_answer
from rag_model.tokenizer import explain_tokenizer_errors, load_tokenizer_file

# A server that counts a smaller share of a prompt's tokens has truncated the prompt.
_MIN_READ_SHARE = 0.8


class EndpointWriter:
    """Continues prompts with a chat-completions endpoint. Thread-safe; `close` ends its
    connections.
    """

    def __init__(self, model: str, settings: ChatSettings | None = None, endpoint: Endpoint | None = None) -> None:
        """Prepare requests for `model`, as the endpoint names it; sends nothing.

        Raises:
            UsageError: the address, key or proxy in the environment is invalid, or the model has no
                name.
            InputError: the tokenizer cannot be read.
        """
        if not model.strip():
            raise UsageError("the endpoint's model has no name: give one such as openai:gpt-4o-mini")
        self.model, self.settings = model, settings or ChatSettings.from_environment()
        self.endpoint = endpoint or Endpoint.from_environment()
        tokenizer_file = self.settings.tokenizer
        self._tokenizer: Any = None if tokenizer_file is None else load_tokenizer_file(tokenizer_file)
        self._instance_id = secrets.token_hex(8)
        self._errors = EndpointErrors(self.endpoint, model)
        self._chat = ChatClient(self.endpoint, model, self.settings)
        self._loop = EventLoopThread()

    @property
    def id(self) -> str:
        """The model's name, as a user gives it."""
        return f"{ENDPOINT_PREFIX}{self.model}"

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum tokens of a prompt: the context without the answer and the chat template."""
        return self.settings.context - self.settings.token_limit - CHAT_TEMPLATE_TOKENS

    @property
    def decides(self) -> dict[str, Any]:
        """The settings that determine this writer's answers, for memo keys; without the API key."""
        instance_fields = (
            {} if self.settings.is_repeatable else {"once": self._instance_id}
        )  # a sampled answer must not be reused later
        return {**describe_endpoint(self.model, self.settings, self.endpoint), **instance_fields}

    @explain_tokenizer_errors()
    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of each text with the model's tokenizer; without it one per byte, an
        upper bound.
        """
        if self._tokenizer is None:
            return [len(text.encode("utf-8", "replace")) for text in texts]
        return [len(encoding.ids) for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def write(
        self, prompts: Sequence[Prompt], should_stop: StopCheck | None = None, on_text: TextCallback | None = None
    ) -> list[Completion]:
        """Continue each prompt, in order, several at once; `should_stop` closes the streams.

        Raises:
            UsageError: a prompt is longer than `max_prompt_tokens`, or than the model's context.
            StoppedError: `should_stop` returned True.
            EndpointError: the endpoint failed, and retries did not help.
        """
        self._check_prompt_lengths(prompts)
        try:
            replies = self._loop.run(partial(self._complete_all, prompts, on_text is not None), should_stop, on_text)
        except FailedAttemptError as failed_attempt:
            raise failed_attempt.error from failed_attempt.__cause__
        return [self._to_completion(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)]

    def log_likelihood(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        """Raise an error: a chat endpoint returns the likelihood of its own text, not of a given
        one.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"{self.id} does not tell the likelihood of a given text: use a model in memory for what needs one"
        )

    def close(self) -> None:
        """Cancel all requests and close the connections."""
        self._loop.close(self._chat.close)

    def _check_prompt_lengths(self, prompts: Sequence[Prompt]) -> None:
        longest_prompt = max(self._count_prompt_tokens(prompts), default=0)
        if longest_prompt > self.max_prompt_tokens:
            raise UsageError(
                f"a prompt of {longest_prompt} tokens is longer than {self.id} has room for, "
                f"{self.max_prompt_tokens}: give fewer passages, or set BOOKWHEEL_LLM_CONTEXT, or "
                "BOOKWHEEL_LLM_TOKENIZER for an exact count"
            )

    def _count_prompt_tokens(self, prompts: Sequence[Prompt]) -> list[int]:
        sizes = self.count_tokens([text for prompt in prompts for text in (prompt.system, prompt.user)])
        return [system + user for system, user in zip(sizes[::2], sizes[1::2], strict=True)]

    async def _complete_all(
        self, prompts: Sequence[Prompt], reports_text: bool, put_text: Callable[[int, str], None]
    ) -> list[ChatReply]:
        tasks = [
            asyncio.ensure_future(
                self._chat.complete(_to_messages(prompt), partial(put_text, index) if reports_text else None)
            )
            for index, prompt in enumerate(prompts)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:  # the first failure cancels the others
            for task in tasks:
                task.cancel()

    def _to_completion(self, prompt: Prompt, reply: ChatReply) -> Completion:
        prompt_tokens, new_tokens = reply.usage or self.count_tokens([prompt.system + prompt.user, reply.text])
        prices = self.settings.prices
        usage = TokenUsage(
            prompt_tokens,
            new_tokens,
            None if prices is None else prices.compute_cost(prompt_tokens, new_tokens),
            estimated=reply.usage is None,
        )
        text = reply.text
        problem = self._find_problem(prompt, reply, text)
        return Completion(text if text.strip() else "", usage, reply.ended, reply.log_likelihood, problem)

    def _find_problem(self, prompt: Prompt, reply: ChatReply, text: str) -> AnswerProblem | None:
        """Return the reason why the text is empty or doubtful; None for a good answer."""
        if reply.tools or reply.reason in {"tool_calls", "function_call"}:
            tools = self._errors.quote(", ".join(dict.fromkeys(reply.tools)))
            return AnswerProblem("tool_call", f"the model called a tool{tools} instead of answering")
        if reply.refusal:
            return AnswerProblem("refused", f"the model refused to answer{self._errors.quote(reply.refusal)}")
        if reply.reason == "content_filter":
            return AnswerProblem("filtered", "the endpoint's content filter stopped the answer")
        if text.strip():
            return self._find_truncation(prompt, reply)
        if reply.has_reasoning or not reply.ended:
            return describe_missing_answer(self.settings.token_limit, ended=reply.ended)
        return AnswerProblem("empty", "the model wrote nothing: ask again, or choose another model")

    def _find_truncation(self, prompt: Prompt, reply: ChatReply) -> AnswerProblem | None:
        """Return a problem if the endpoint read much less than the whole prompt, else None."""
        minimum = _count_min_tokens(prompt) if self._tokenizer is None else self._count_prompt_tokens([prompt])[0]
        if reply.usage is None or reply.usage[0] >= _MIN_READ_SHARE * minimum:
            return None
        return AnswerProblem(
            "prompt_truncated",
            f"the endpoint read {reply.usage[0]} tokens of a prompt of at least {minimum}: give its server "
            "a larger context, or set BOOKWHEEL_LLM_CONTEXT to the context that it has",
        )


def _count_min_tokens(prompt: Prompt) -> int:
    """Return a lower bound of a prompt's tokens: one per word, since tokens rarely span words."""
    return len(prompt.system.split()) + len(prompt.user.split())


def describe_endpoint(model: str, settings: ChatSettings, endpoint: Endpoint) -> dict[str, Any]:
    """Return the identity of an endpoint's model: its address, its name and the settings of
    requests.
    """
    return {"endpoint": endpoint.url, "model": model, "settings": settings.decides()}


def _to_messages(prompt: Prompt) -> list[dict[str, str]]:
    system_messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    return [*system_messages, {"role": "user", "content": prompt.user}]
