"""Settings of an endpoint in environment variables."""

from pathlib import Path

import pytest

from rag_model.errors import UsageError
from rag_model.reading.writers.chat_settings import ChatSettings, TokenPrices


def test_settings_are_read_from_the_environment() -> None:
    settings = ChatSettings.from_environment(
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
    assert (settings.context, settings.prices) == (2048, TokenPrices(0.15, 0.6))
    assert settings.length_field == "max_completion_tokens"
    assert (settings.tokenizer, settings.whole_seconds, settings.max_new_tokens) == (Path("t.json"), 7.5, 20)
    assert (settings.temperature, settings.logprobs) == (None, True)
    assert not ChatSettings.from_environment({"BOOKWHEEL_LLM_LOGPROBS": "0"}).logprobs
    assert ChatSettings.from_environment({"BOOKWHEEL_LLM_TEMPERATURE": "0.5"}).temperature == 0.5
    assert ChatSettings.from_environment({}) == ChatSettings()


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("CONTEXT", "many", "BOOKWHEEL_LLM_CONTEXT is 'many': set it to a number"),
        ("CONTEXT", "42", "leaves no room"),  # 10 tokens for the answer and 32 for the format
        ("TEMPERATURE", "warm", "a number, or `default`"),
        ("CONCURRENCY", "0", "concurrency is 0"),
        ("PRICES", "3", "two prices such as"),
        ("PRICES", "3,-1", "give two numbers of 0 or more"),
        ("WHOLE_SECONDS", "nan", "whole_seconds is nan"),
        ("LOGPROBS", "5", "BOOKWHEEL_LLM_LOGPROBS is '5': set it to yes or no"),
        ("LENGTH_FIELD", "max", "max_tokens or max_completion_tokens"),
    ],
)
def test_invalid_variable_is_refused(variable: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=r"^[^\n]+$") as error:
        ChatSettings.from_environment({f"BOOKWHEEL_LLM_{variable}": text})
    assert message in str(error.value)


def test_only_temperature_0_is_repeatable() -> None:
    assert ChatSettings().is_repeatable
    assert not ChatSettings(temperature=0.7).is_repeatable
    assert not ChatSettings(temperature=None).is_repeatable
