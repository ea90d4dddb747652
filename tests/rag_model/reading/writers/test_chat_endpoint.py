"""Where an endpoint is: each address gets its own key alone, and no address holds a secret."""

import pytest

from rag_model.endpoint import Endpoint
from rag_model.errors import UsageError

OPENAI = {"OPENAI_BASE_URL": "http://one/v1/", "OPENAI_API_KEY": "first"}
OWN = {"BOOKWHEEL_LLM_BASE_URL": "http://two:8000/v1"}


def test_each_address_gets_its_own_key() -> None:
    assert Endpoint.from_environment({}) == Endpoint("https://api.openai.com/v1")
    assert Endpoint.from_environment(OPENAI) == Endpoint("http://one/v1", "first")
    assert Endpoint.from_environment({**OPENAI, **OWN}) == Endpoint("http://two:8000/v1", "", "BOOKWHEEL_LLM_API_KEY")
    own = Endpoint.from_environment({**OPENAI, **OWN, "BOOKWHEEL_LLM_API_KEY": "second"})
    assert (own.key, own.host) == ("second", "two:8000")
    assert "second" not in repr(own)


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
def test_what_is_no_address_of_an_endpoint_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"base URL.* such as http://localhost:8000/v1") as refused:
        Endpoint.from_environment({"OPENAI_BASE_URL": url})
    assert "hush" not in str(refused.value)
    assert ("and OPENAI_API_KEY to the key" in str(refused.value)) == ("hush" in url)


def test_a_key_that_no_header_can_hold_is_refused_unsaid() -> None:
    with pytest.raises(UsageError, match="OPENAI_API_KEY contains a space") as refused:
        Endpoint.from_environment({"OPENAI_API_KEY": "two words"})
    assert "words" not in str(refused.value)
