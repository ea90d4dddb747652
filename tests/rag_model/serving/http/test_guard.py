"""Requests are accepted only for an allowed host, from the service's own page, with a token, and as JSON."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rag_model.errors import UsageError
from rag_model.serving.http.guard import BearerTokens, RequestGuard
from tests.fixtures.serving import HttpService, Library, make_settings, run_service, wait_until

FIRST, SECOND = "a" * 32, "b" * 32


@pytest.fixture(scope="module")
def service(shared_library: Library, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpService]:
    with run_service(shared_library.url, tmp_path_factory.mktemp("dest")) as service:
        yield service


def post_search(service: HttpService, path: str = "/search", **headers: str) -> httpx.Response:
    fields = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return service.client.post(path, content=b'{"questions": ["who?"]}', headers=fields)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:9", "[::1]"])
def test_host_names_of_this_machine_are_accepted(host: str, service: HttpService) -> None:
    assert post_search(service, Host=host).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "localhost:x"])
def test_other_host_names_are_refused(host: str, service: HttpService) -> None:
    reply = post_search(service, Host=host)
    assert (reply.status_code, set(reply.json())) == (421, {"detail"})
    assert "--allow-host" in reply.json()["detail"]
    assert service.client.get("/snapshot", headers={"Host": host}).status_code == 421
    assert service.client.get("/healthz", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    ("hosts", "host_headers", "status", "words"),
    [
        (("*",), (b"localhost", b"localhost"), 421, "several Host headers"),
        (("localhost",), (), 400, "names no host"),
        (("localhost",), (b"",), 400, "names no host"),
    ],
)
def test_missing_and_repeated_host_headers_are_refused(
    hosts: tuple[str, ...], host_headers: tuple[bytes, ...], status: int, words: str
) -> None:
    headers = [(b"host", host) for host in host_headers]
    rejection = RequestGuard(make_settings(allowed_hosts=hosts)).find_rejection(
        {"path": "/", "method": "GET", "headers": headers}
    )
    assert rejection is not None
    assert (rejection.status, words in rejection.detail) == (status, True)


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8000", 200),
        ("https://localhost:8000", 200),  # TLS may end before the service
        ("http://localhost:3000", 403),
        ("http://localhost", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("http://[", 403),
    ],
)
def test_only_pages_of_the_same_origin_are_accepted(origin: str, status: int, service: HttpService) -> None:
    assert post_search(service, Host="localhost:8000", Origin=origin).status_code == status


@pytest.mark.parametrize(
    ("hosts", "host", "origin", "allowed"),
    [
        (("*",), "any.example", None, False),  # requests of a page to its own address have no Origin header
        (("*",), "", None, False),
        (("*",), "10.0.0.7:8000", None, True),
        (("*",), "bookwheel:8000", None, True),  # a name in a network of containers
        (("*",), "bookwheel:8000", "http://bookwheel:8000", True),
        (("*", "any.example"), "any.example", None, True),
        (("*",), "any.example", "http://other.example", False),
        (("*",), "evil.example:8399", "http://evil.example:8399", False),  # DNS rebinding
        (("*",), "10.0.0.7:8000", "http://10.0.0.7:8000", True),  # no other site can have an IP address
        (("*",), "[2001:db8::7]:8000", "http://[2001:db8::7]:8000", True),
        (("*",), "10.0.0.7.evil.example", "http://10.0.0.7.evil.example", False),
        (("*",), "10.0.0.7:8000", "http://10.0.0.8:8000", False),
        (("*",), "localhost:8000", "http://localhost:8000", True),
        (("*", "rag.example"), "rag.example:8000", "http://rag.example:8000", True),
        (("*", "rag.example"), "evil.example", "http://evil.example", False),
        (("rag.example",), "rag.example:443", "https://rag.example:443", True),
        (("rag.example",), "localhost", "https://rag.example", True),  # a proxy that forwards its own host name
        (("rag.example",), "other.example", None, False),
        (("rag.example:8443",), "rag.example:8443", None, True),
        (("rag.example:8443",), "rag.example", None, False),
    ],
)
def test_hosts_are_allowed_by_name(hosts: tuple[str, ...], host: str, origin: str | None, allowed: bool) -> None:
    headers = [(b"host", host.encode()), *([(b"origin", origin.encode())] if origin else [])]
    rejection = RequestGuard(make_settings(allowed_hosts=hosts)).find_rejection(
        {"path": "/snapshot", "method": "GET", "headers": headers}
    )
    assert (rejection is None) == allowed


def test_programs_may_use_any_host_name_if_all_are_allowed() -> None:
    headers = [(b"host", b"any.example"), (b"content-type", b"application/json")]
    guard = RequestGuard(make_settings(allowed_hosts=("*",)))
    assert guard.find_rejection({"path": "/search", "method": "POST", "headers": headers}) is None
    assert guard.find_rejection({"path": "/readyz", "method": "GET", "headers": headers}) is None


@pytest.mark.parametrize("name", ["rag.example", "rag-1.example:8443", "a_b", "[::1]:9", "10.0.0.7", "*"])
def test_valid_host_name_is_accepted(name: str) -> None:
    assert make_settings(allowed_hosts=(name,)).allowed_hosts == (name,)


@pytest.mark.parametrize("name", ["http://a.b/", "a b", "", "a.b/c", "::1", "*.a.b", "é.example", "a.b:x", "a,b"])
def test_invalid_host_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not a host name: give --allow-host one such as"):
        make_settings(allowed_hosts=(name,))


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""])
def test_other_content_types_are_refused(kind: str, service: HttpService) -> None:
    reply = post_search(service, Content_Type=kind)
    assert (reply.status_code, "Content-Type: application/json" in reply.json()["detail"]) == (415, True)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_content_type_may_have_parameters(kind: str, service: HttpService) -> None:
    assert post_search(service, Content_Type=kind).status_code == 200


@pytest.mark.parametrize("path", ["/search/", "/snapshot/", "/healthz/"])
def test_paths_with_a_trailing_slash_are_not_redirected(path: str, service: HttpService) -> None:
    reply = post_search(service, path, Host="localhost")
    assert (reply.status_code, "location" in reply.headers) == (404, False)
    assert service.client.get(path).status_code == 404


def test_tokens_are_required_and_reloaded(shared_library: Library, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# of the team\n\n{FIRST}\n")
    tokens = BearerTokens(file)
    with run_service(shared_library.url, tmp_path / "dest", tokens=tokens) as service:
        for headers in ({}, {"Authorization": f"Bearer {SECOND}"}, {"Authorization": f"Basic {FIRST}"}):
            reply = post_search(service, **headers)
            assert (reply.status_code, reply.headers["www-authenticate"][:6]) == (401, "Bearer")
            assert FIRST not in reply.text
        for path in ("/", "/snapshot", "/metrics", "/openapi.json"):
            assert service.client.get(path).status_code == 401
        assert service.client.get("/readyz").status_code == 200
        assert post_search(service, Authorization=f"Bearer {FIRST}").status_code == 200
        assert post_search(service, Authorization=f"bearer {FIRST}").status_code == 200

        (tmp_path / "next").write_text(f"{SECOND}\r\n{'c' * 16}\n")
        (tmp_path / "next").replace(file)
        wait_until(lambda: post_search(service, Authorization=f"Bearer {SECOND}").status_code == 200)
        assert post_search(service, Authorization=f"Bearer {FIRST}").status_code == 401
        assert post_search(service, Authorization=f"Bearer {'c' * 16}").status_code == 200


def test_broken_token_file_leaves_the_tokens_unchanged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "tokens"
    file.write_text(FIRST)
    tokens = BearerTokens(file)
    for damage in (lambda: file.write_text("short"), lambda: file.write_bytes(bytes(range(11, 256))), file.unlink):
        damage()
        tokens._next_check = 0.0
        assert tokens.is_valid(f"Bearer {FIRST}".encode())
        assert "stay valid" in caplog.text
        caplog.clear()


def test_empty_token_file_rejects_every_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "tokens"
    file.write_text(FIRST)
    tokens = BearerTokens(file)
    file.write_text("# none\n")
    tokens._next_check = 0.0
    assert not tokens.is_valid(f"Bearer {FIRST}".encode())
    assert "no request is answered" in caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("\n# none\n", "holds no token"),
        ("# a\nshort", "line 2"),
        ("# é\n" + "é" * 20, "line 2 .*printable ASCII"),
        (f"{FIRST} {SECOND}", "line 1 .*holds a space"),
    ],
)
def test_file_without_a_valid_token_is_refused(text: str | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=words):
        BearerTokens(file)
