"""Clients use the proxies and certificates in the environment, and unusable ones give an error of one line."""

import asyncio
import gzip
import os
import ssl
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from rag_model.client import Client
from rag_model.errors import UsageError
from rag_model.http_client import create_http_client, iter_body_async
from tests.fixtures.reply_server import Reply, serve_replies
from tests.rag_model.serving.http.test_certificate import write_certificate


@pytest.mark.parametrize(
    ("variable", "value"),
    [("HTTP_PROXY", "ftp://me:hush@host"), ("NO_PROXY", "[::"), ("SSL_CERT_FILE", "missing.pem")],
)
def test_unusable_proxies_and_certificates_are_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv(variable, value)
    for client_class in (httpx.Client, httpx.AsyncClient):
        with pytest.raises(UsageError, match=r"^the proxy or the certificates [^\n]+ or SSL_CERT_DIR$") as error:
            create_http_client(client_class)
        assert "hush" not in str(error.value)


@pytest.mark.parametrize("host", ["a..b", "a" * 70])
def test_a_name_that_cannot_be_looked_up_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match="the service's URL cannot be read"):
        Client(f"http://{host}")


def test_replaced_certificate_file_is_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trust_file = write_certificate(tmp_path, 1).certificate.rename(tmp_path / "trusted.pem")
    os.utime(trust_file, (1, 1))  # so that the times of the two files differ
    monkeypatch.setenv("SSL_CERT_FILE", str(trust_file))
    server_files = write_certificate(tmp_path, 2)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(server_files.certificate, server_files.key)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            url = f"https://127.0.0.1:{server.server_port}"
            with create_http_client(httpx.Client) as client, pytest.raises(httpx.ConnectError, match="self-signed"):
                client.get(url)
            trust_file.write_bytes(server_files.certificate.read_bytes())
            with create_http_client(httpx.Client) as client:
                assert client.get(url).status_code == HTTPStatus.NOT_IMPLEMENTED
        finally:
            server.shutdown()


def test_async_client_rejects_truncated_gzip() -> None:
    body, headers = gzip.compress(b"words"), {"Content-Encoding": "gzip"}

    async def read(url: str) -> bytes:
        async with create_http_client(httpx.AsyncClient) as client, client.stream("GET", url) as response:
            return b"".join([chunk async for chunk in iter_body_async(response, 100)])

    with serve_replies(Reply(200, body[:-1], headers), Reply(200, body, headers), Reply(200, b"", headers)) as server:
        with pytest.raises(httpx.RemoteProtocolError, match="gzip of the reply is cut off"):
            asyncio.run(read(server.url))
        assert [asyncio.run(read(server.url)) for _ in range(2)] == [b"words", b""]
