"""The address of an endpoint: each gets only its own key, and none contains a secret."""

import pytest

from rag_model.endpoint import Endpoint
from rag_model.errors import UsageError

OPENAI = {"OPENAI_BASE_URL": "http://one/v1/", "OPENAI_API_KEY": "first"}
BOOKWHEEL = {"BOOKWHEEL_LLM_BASE_URL": "http://two:8000/v1"}


def test_each_address_gets_its_own_key() -> None:
    assert Endpoint.from_environment({}) == Endpoint("https://api.openai.com/v1")
    assert Endpoint.from_environment(OPENAI) == Endpoint("http://one/v1", "first")
    both = {**OPENAI, **BOOKWHEEL}
    assert Endpoint.from_environment(both) == Endpoint("http://two:8000/v1", "", "BOOKWHEEL_LLM_API_KEY")
    endpoint = Endpoint.from_environment({**both, "BOOKWHEEL_LLM_API_KEY": "second"})
    assert (endpoint.key, endpoint.host) == ("second", "two:8000")
    assert "second" not in repr(endpoint)


@pytest.mark.parametrize(
    "url",
    [
        "http://me:hush@host/v1",
        "https://host/v1?key=hush",
        "http://host:hush/v1",
        "ftp://host/v1",
        "host/v1",
        "http:///v1",
        "http://host:99999/v1",
        "http://[::1/v1",
        "http://a..b/v1",
        "http://xn--/v1",
        "http://h/\udcff",
    ],
)
def test_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"base URL.* such as http://localhost:8000/v1") as error:
        Endpoint.from_environment({"OPENAI_BASE_URL": url})
    assert "hush" not in str(error.value)
    assert ("and OPENAI_API_KEY to the key" in str(error.value)) == ("hush" in url)


def test_key_with_a_space_is_refused_without_showing_it() -> None:
    with pytest.raises(UsageError, match="OPENAI_API_KEY contains a space") as error:
        Endpoint.from_environment({"OPENAI_API_KEY": "two words"})
    assert "words" not in str(error.value)
