"""What the environment says of an endpoint, and what cannot be."""

from pathlib import Path

import pytest

from rag_model.errors import UsageError
from rag_model.reading.writers.chat_settings import ChatSettings, TokenPrices


def test_the_environment_sets_what_belongs_to_the_endpoint() -> None:
    found = ChatSettings.from_environment(
        {
            "BOOKWHEEL_LLM_CONTEXT": "2048",
            "BOOKWHEEL_LLM_PRICES": "0.15, 0.6",
            "BOOKWHEEL_LLM_TOKENIZER": "t.json",
            "BOOKWHEEL_LLM_LENGTH_FIELD": "max_completion_tokens",
            "BOOKWHEEL_LLM_WHOLE_SECONDS": "7.5",
            "BOOKWHEEL_LLM_TEMPERATURE": "default",
            "BOOKWHEEL_LLM_LOGPROBS": "Yes",
        },
        max_new_tokens=20,
    )
    assert (found.context, found.prices, found.length_field) == (2048, TokenPrices(0.15, 0.6), "max_completion_tokens")
    assert (found.tokenizer, found.whole_seconds, found.max_new_tokens) == (Path("t.json"), 7.5, 20)
    assert (found.temperature, found.logprobs) == (None, True)
    assert not ChatSettings.from_environment({"BOOKWHEEL_LLM_LOGPROBS": "0"}).logprobs
    assert ChatSettings.from_environment({"BOOKWHEEL_LLM_TEMPERATURE": "0.5"}).temperature == 0.5
    assert ChatSettings.from_environment({}) == ChatSettings()


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("CONTEXT", "many", "BOOKWHEEL_LLM_CONTEXT is 'many': set it to a number"),
        ("CONTEXT", "42", "leaves no room"),  # 10 are the answer's, 32 the format's
        ("TEMPERATURE", "warm", "a number, or `default`"),
        ("CONCURRENCY", "0", "concurrency is 0"),
        ("PRICES", "3", "two prices such as"),
        ("PRICES", "3,-1", "give two numbers of 0 or more"),
        ("WHOLE_SECONDS", "nan", "whole_seconds is nan"),
        ("LOGPROBS", "5", "BOOKWHEEL_LLM_LOGPROBS is '5': set it to yes or no"),
        ("LENGTH_FIELD", "max", "max_tokens or max_completion_tokens"),
    ],
)
def test_what_cannot_be_is_refused(variable: str, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=r"^[^\n]+$") as refused:
        ChatSettings.from_environment({f"BOOKWHEEL_LLM_{variable}": text})
    assert words in str(refused.value)


def test_only_the_likeliest_tokens_are_repeatable() -> None:
    assert ChatSettings().is_repeatable
    assert not ChatSettings(temperature=0.7).is_repeatable
    assert not ChatSettings(temperature=None).is_repeatable
