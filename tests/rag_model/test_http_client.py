"""The error for wrong proxies and certificates in the environment is one sentence."""

import httpx
import pytest

from rag_model.client import Client
from rag_model.errors import UsageError
from rag_model.http_client import create_http_client


@pytest.mark.parametrize(
    ("variable", "value"),
    [("HTTP_PROXY", "ftp://me:hush@host"), ("NO_PROXY", "[::"), ("SSL_CERT_FILE", "missing.pem")],
)
def test_unusable_proxies_and_certificates_are_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv(variable, value)
    for kind in (httpx.Client, httpx.AsyncClient):
        with pytest.raises(UsageError, match=r"^the proxy or the certificates [^\n]+ or SSL_CERT_DIR$") as error:
            create_http_client(kind)
        assert "hush" not in str(error.value)


@pytest.mark.parametrize("host", ["a..b", "a" * 70])
def test_a_name_that_cannot_be_looked_up_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match="the service's URL cannot be read"):
        Client(f"http://{host}")
