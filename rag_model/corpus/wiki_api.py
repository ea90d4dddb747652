"""A polite client of a MediaWiki site's API (`api.php`).

The client uses one connection and sends one request at a time. Every request has `maxlag`: a site
whose databases lag behind refuses the request, which is then sent again later (`http_client`). The
size of replies is limited, redirects to other servers are refused, and credentials come from the
environment only.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self
from urllib.parse import urljoin, urlsplit

import httpx

from rag_model.errors import InputError, UsageError, format_error
from rag_model.http_client import (
    BUSY_STATUSES,
    MAX_REDIRECTS,
    BusyError,
    ReplyTooLargeError,
    follow_redirect,
    is_encrypted_or_local,
    open_polite_client,
    parse_retry_after,
    read_body,
    retry,
)
from rag_model.secrets import refuse_secret
from rag_model.untrusted_text import parse_json

# Environment variables with the account on a wiki.
USER = "BOOKWHEEL_WIKI_USER"  # name of a bot password, as Name@Bot
PASSWORD = "BOOKWHEEL_WIKI_PASSWORD"
TOKEN = "BOOKWHEEL_WIKI_TOKEN"  # OAuth 2 access token, instead of user and password
HOST = "BOOKWHEEL_WIKI_HOST"  # the only host to which the account is sent

IDS_PER_REQUEST = 50  # MediaWiki's limit of ids or titles in a request without a bot's rights
MAX_REPLY_BYTES = 64 << 20  # eight times MediaWiki's own maximum for a result
_MAX_LAG = 5  # seconds, as recommended by https://www.mediawiki.org/wiki/Manual:Maxlag_parameter
_DATABASE_CODES = {f"internal_api_error_DB{problem}Error" for problem in ("Query", "Connection")}
_BUSY_CODES = {"maxlag", "ratelimited", "readonly", *_DATABASE_CODES}
_LOGIN_CODES = {"assertuserfailed", "assertnameduserfailed", "assertbotfailed"}
Reply = dict[str, Any]


class _NoApiError(InputError):
    """A reply is not from MediaWiki's API; `reason` is the message without its advice."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason}: {advice}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class _Account:
    user: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)


def _read_account(host: str) -> _Account:
    """Return the account in the environment if it belongs to `host`, otherwise an empty account.

    Other hosts must not get the credentials, because the users of a web form can name any host.

    Raises:
        UsageError: The account is incomplete.
    """
    user, password, token = (os.environ.get(name, "") for name in (USER, PASSWORD, TOKEN))
    if bool(user) != bool(password):
        raise UsageError(f"only one of {USER} and {PASSWORD} is set: set both, or neither")
    account_host = os.environ.get(HOST, "").lower()
    if (user or token) and not account_host:
        raise UsageError(f"an account of a wiki is set without its host: set {HOST}, such as to {host}")
    if account_host != host:
        return _Account()
    return _Account(token=token) if token else _Account(user, password)


class WikiClient:
    """A connection to the API of one site; close it, or use it as a context manager."""

    def __init__(self, url: str, sleep: Callable[[float], None] = time.sleep, api_path: str = "") -> None:
        """Read the credentials from the environment; nothing is requested yet.

        Args:
            url: `mediawiki+https://` and the address of the site, or of its `api.php`.
            sleep: function that waits for some seconds before another attempt.
            api_path: where an earlier client found `api.php`, relative to `url`.

        Raises:
            UsageError: The URL is invalid or may contain a secret, or credentials are incomplete or
                would be sent unencrypted.
        """
        refuse_secret(url)
        url_parts = urlsplit(url[len("mediawiki+") :])
        if (
            not url.lower().startswith(("mediawiki+https:", "mediawiki+http:"))
            or not url_parts.hostname
            or url_parts.query
            or url_parts.fragment
        ):
            raise UsageError(f"{url} is not a wiki's address: give one such as mediawiki+https://wiki.example.org/")
        host, self._is_encrypted = url_parts.netloc.lower(), url_parts.scheme.lower() == "https"
        if not is_encrypted_or_local(url_parts.scheme, host):
            raise UsageError(
                f"{url} would be read without encryption: give mediawiki+https://{url_parts.netloc}{url_parts.path}"
            )
        self.url = f"{url_parts.scheme.lower()}://{host}{url_parts.path}"
        self.requests = 0
        self._sleep = sleep
        root_url = self.url if self.url.endswith("/") else f"{self.url}/"
        candidate_urls = (urljoin(root_url, name) for name in (api_path, "w/api.php", "api.php") if name)
        self._api_urls = (self.url,) if url_parts.path.endswith(".php") else tuple(dict.fromkeys(candidate_urls))
        account = _read_account(host)
        self._user, self._password = account.user, account.password
        self._has_account, token = bool(account.user or account.token), account.token
        self._http = open_polite_client(**({"Authorization": f"Bearer {token}"} if token else {}))
        self._needs_login = bool(self._user)
        self._has_answered = False

    @property
    def api_path(self) -> str:
        """Where `api.php` was found, relative to the site's address; empty if that is unknown."""
        return self._api_urls[0].removeprefix(self.url).lstrip("/") if len(self._api_urls) == 1 else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def query(self, **parameters: Any) -> Reply:
        """Return the reply of one request of `action=query`.

        Raises:
            InputError: The site refuses the request, or its reply is not from MediaWiki's API.
            UnreachableError: The site cannot be reached, or asks to wait for too long.
        """
        return self.request({"action": "query", **parameters})

    def query_all(self, **parameters: Any) -> Iterator[Reply]:
        """Yield the `query` object of each reply, until the site has no more results.

        Raises:
            InputError: As for `query`, or the site repeats its reply.
        """
        continuation: dict[str, str] = {}
        while True:
            reply = self.query(**parameters, **continuation)
            yield check_object(reply.get("query", {}), self.url) | {"curtimestamp": reply.get("curtimestamp")}
            if "continue" not in reply:
                return
            continue_fields = check_object(reply["continue"], self.url).items()
            next_continuation = {str(name): str(value) for name, value in continue_fields}
            if next_continuation == continuation or not next_continuation:
                raise InputError(f"{self.url} keeps returning the same results: check that it is a MediaWiki site")
            continuation = next_continuation

    def request(self, parameters: Mapping[str, Any]) -> Reply:
        """Return the reply to any action; log-ins, purges and texts are sent by POST.

        Raises:
            InputError: As for `query`.
            UnreachableError: As for `query`.
        """
        for _ in range(2):
            if self._needs_login:
                self._log_in()
            reply = self._call(parameters, assert_login=self._has_account)
            error_code = self._get_error_code(reply)
            if error_code not in _LOGIN_CODES or not self._user:
                break
            self._needs_login = True  # the login session has ended
        if error_code:
            raise self._build_refusal_error(error_code, reply)
        return reply

    def _call(self, parameters: Mapping[str, Any], *, assert_login: bool = False) -> Reply:
        """Return the reply of `api.php`, which is in the folder `w` of the site or at its root.

        The first request finds out in which of the two folders it is.
        """
        api_errors: list[_NoApiError] = []
        for url in self._api_urls:
            try:
                send_request = partial(self._send, url, parameters, assert_login=assert_login)
                reply = retry(url, send_request, lambda: self._has_answered, self._sleep)
            except _NoApiError as error:
                if len(self._api_urls) == 1:
                    raise
                api_errors.append(error)
                continue
            self._api_urls = (url,)
            return reply
        raise InputError(
            f"{self.url} has no API of MediaWiki at w/api.php or api.php ({api_errors[0].reason}): give the "
            f"address of its api.php, such as mediawiki+{self.url.rstrip('/')}/wiki/api.php"
        ) from api_errors[0]

    def _send(self, url: str, parameters: Mapping[str, Any], *, assert_login: bool) -> Reply:
        fields = {
            "format": "json",
            "formatversion": "2",
            "maxlag": str(_MAX_LAG),
            **({"assert": "user"} if assert_login else {}),
            **{name: _join_values(value) for name, value in parameters.items()},
        }
        is_post = any(name in fields for name in ("lgtoken", "text")) or fields["action"] == "purge"
        for _ in range(MAX_REDIRECTS):
            self.requests += 1
            arguments: dict[str, Any] = {"data": fields} if is_post else {"params": fields}
            request = self._http.stream("POST" if is_post else "GET", url, **arguments)
            with self._explain_errors(url), request as response:
                self._has_answered = True
                if response.is_redirect and not is_post:
                    # The next request adds the parameters again.
                    url = follow_redirect(url, response).partition("?")[0]
                    continue
                if response.status_code in BUSY_STATUSES:
                    raise BusyError(
                        f"HTTP {response.status_code}", parse_retry_after(response.headers.get("retry-after"))
                    )
                if response.status_code != 200:
                    raise _NoApiError(
                        f"{url} answers HTTP {response.status_code}",
                        "check the address, and that you may read the wiki",
                    )
                return self._parse_reply(url, read_body(response, MAX_REPLY_BYTES), response)
        raise InputError(f"{url} redirects more than {MAX_REDIRECTS} times: give the address that it leads to")

    def _parse_reply(self, url: str, body: bytes, response: httpx.Response) -> Reply:
        try:
            reply = parse_json(body)
        except ValueError as error:
            content_type = response.headers.get("content-type", "no type")[:40]
            advice = "give the address of a wiki's api.php"
            raise _NoApiError(f"{url} answers {content_type} instead of JSON", advice) from error
        reply = check_object(reply, url)
        code = self._get_error_code(reply)
        if code in _BUSY_CODES:
            raise BusyError(code, parse_retry_after(response.headers.get("retry-after")))
        return reply

    def _get_error_code(self, reply: Reply) -> str:
        """Return the code of an error in a reply; empty if there is none."""
        error = reply.get("error")
        return "" if error is None else str(check_object(error, self.url).get("code"))[:60]

    def _build_refusal_error(self, code: str, reply: Reply) -> InputError:
        error_info = " ".join(str(reply["error"].get("info", "")).split())[:200]
        is_denied = code in {"readapidenied", "permissiondenied", "mwoauth-invalid-authorization", *_LOGIN_CODES}
        account_advice = f"set {USER} and {PASSWORD} to a bot password, or {TOKEN} to an OAuth token, that may read it"
        advice = account_advice if is_denied else "check the wiki"
        return InputError(f"{self.url} refuses the request ({code}: {error_info}): {advice}")

    def _log_in(self) -> None:
        """Log in with a bot password.

        Raises:
            InputError: The site does not accept it.
        """
        token_reply = self._call({"action": "query", "meta": "tokens", "type": "login"})
        token = check_object(check_object(token_reply.get("query"), self.url).get("tokens"), self.url).get("logintoken")
        fields = {"action": "login", "lgname": self._user, "lgpassword": self._password, "lgtoken": str(token)}
        login_reply = check_object(self._call(fields).get("login", {}), self.url)
        if login_reply.get("result") != "Success":
            raise InputError(
                f"{self.url} does not accept the account in {USER} ({str(login_reply.get('result'))[:40]}: "
                f"{str(login_reply.get('reason', ''))[:200]}): set {USER} and {PASSWORD} to a bot password of the wiki"
            )
        self._needs_login = False

    @contextmanager
    def _explain_errors(self, url: str) -> Iterator[None]:
        try:
            yield
        except ReplyTooLargeError as error:
            raise InputError(f"{url} sends a reply of more than {MAX_REPLY_BYTES >> 20} MiB: check the wiki") from error
        except (httpx.DecodingError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise InputError(f"{url} cannot be read ({format_error(error)}): check the address") from error


def check_object(value: Any, url: str) -> Reply:
    """Return a value of a reply, which must be a JSON object.

    Raises:
        InputError: The value is not a JSON object.
    """
    if not isinstance(value, dict):
        raise InputError(f"{url} answers {value!r:.40} where MediaWiki's API has an object: check the wiki")
    return value


def _join_values(parameter: Any) -> str:
    if isinstance(parameter, str | int):
        return str(parameter)
    texts = [str(item) for item in parameter]
    # No title contains `|`, but a malicious reply could smuggle one into the next request.
    return "\x1f" + "\x1f".join(texts) if any("|" in text for text in texts) else "|".join(texts)
