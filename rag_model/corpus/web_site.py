"""Mirror the HTML pages in a web site's sitemap to a folder, which is then read as the dump.

`sitemap+https://docs.example.org/sitemap.xml` names a sitemap or an index of sitemaps
(https://www.sitemaps.org/protocol.html). The file of a page is named by the path of the page's
address, so the page has the same id as in a folder of HTML files. The version of each page
(`lastmod`, `ETag`, `Last-Modified`) is stored beside the folder. A later run requests only pages
whose `lastmod` changed or is missing, and the server does not send unchanged pages again. An
interrupted run continues where it stopped. A page that cannot be read is dropped and counted; it
does not stop a run.

The client is polite (`http_client`): it has one connection, obeys `robots.txt` with its
`Crawl-delay`, and sends nothing to other servers. The size of replies and the numbers of sitemaps
and pages are limited.
"""

import fcntl
import json
import logging
import os
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit
from urllib.robotparser import RobotFileParser

import httpx
from lxml import etree

from rag_model.atomic_write import atomic_write
from rag_model.corpus.dump_formats.document_files import DroppedFileError
from rag_model.corpus.dump_formats.markup_files import decode_charset, find_charset
from rag_model.digest import digest_json
from rag_model.errors import InputError, ResourceError, UnreachableError, UsageError, format_error
from rag_model.http_client import (
    BUSY_STATUSES,
    MAX_REDIRECTS,
    MAX_TRIES,
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

PREFIX = "sitemap+"
# environment variable for the folder of the mirrors; default `~/.cache/bookwheel/sites`
FOLDER_VARIABLE = "BOOKWHEEL_SITES"
MAX_PAGE_BYTES = 8 << 20  # the same limit as for an HTML file in a folder
# Limits of a site; the protocol allows sitemaps of 50 MB.
_MAX_SITEMAP_BYTES, _MAX_SITEMAPS, _MAX_PAGES = 50 << 20, 1_000, 1_000_000
_MAX_ROBOTS_BYTES = 512 << 10
# Number and share of pages with HTTP 500; if both are exceeded, the site is considered down.
_MAX_FAILED_PAGES, _MAX_FAILED_SHARE = 20, 0.1
# An unfinished run stops only after more failures, since the first pages may be a broken section.
_STOP_AFTER_FAILED_PAGES = 50
# Few attempts suffice: the cause is probably a bug, since a busy server would send `Retry-After`.
_SERVER_ERROR, _MAX_ERROR_TRIES = "HTTP 500", 4
_MAX_DELAY = 60.0  # maximum seconds between two requests, even if `Crawl-delay` is longer
_log = logging.getLogger(__name__)
_SAVE_INTERVAL = 100  # pages between two saves of their versions
_FRESH_SECONDS = 600.0  # a process reads a site again only after this time
_PAGE_TYPES = "text/html", "application/xhtml+xml"
_HTML_ENDING = re.compile(r"\.(?:html?|xhtml)$", re.IGNORECASE)
# Maximum bytes of a file name and of a path; file systems allow 255 and 4,096.
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 200, 1_000


@dataclass(frozen=True, slots=True)
class _PageVersion:
    """The version of a page as the server declared it; an empty field was not declared."""

    lastmod: str = ""
    etag: str = ""
    modified: str = ""


@dataclass(frozen=True, slots=True)
class SiteFiles:
    """The folder of a site's pages, and the number of dropped pages by reason."""

    folder: Path
    dropped: Mapping[str, int]


class _UnusablePageError(InputError):
    """A page cannot be read; `reason` is the drop reason under which it is counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


_recent_files: dict[str, tuple[float, SiteFiles]] = {}  # address -> time of reading, and the result


def mirror_site(url: str, sleep: Callable[[float], None] = time.sleep) -> SiteFiles:
    """Update the folder of a site's pages, unless this process did so in the last minutes.

    Raises:
        InputError: The sitemap is invalid, or `robots.txt` forbids it.
        UnreachableError: The site cannot be reached; a later run continues.
        ResourceError: The folder cannot be written.
        UsageError: The address is invalid, may contain a secret, or would be read unencrypted.
    """
    last_read, files = _recent_files.get(url, (0.0, None))
    if files is None or time.monotonic() - last_read > _FRESH_SECONDS:
        with _SiteClient(url, sleep) as client:
            try:
                files = client.mirror()
            except OSError as error:
                raise ResourceError(
                    f"cannot write the pages of {url} into {client.folder} ({error.strerror or error}): free space, or "
                    f"set {FOLDER_VARIABLE} to another folder, and run it again"
                ) from error
        _recent_files[url] = time.monotonic(), files
    return files


class _SiteClient:
    """A connection to one web site."""

    def __init__(self, url: str, sleep: Callable[[float], None]) -> None:
        refuse_secret(url)
        self._url = url[len(PREFIX) :]
        self._origin, self._start_path = _split_address(self._url)
        if not self._origin or "#" in self._url:
            raise UsageError(
                f"{url} is not the address of a sitemap: give one such as {PREFIX}https://example.org/sitemap.xml"
            )
        scheme, _, host = self._origin.partition("://")
        if not is_encrypted_or_local(scheme, host):
            raise UsageError(f"{url} would be read without encryption: give {PREFIX}https://{host}{self._start_path}")
        root = Path(os.environ.get(FOLDER_VARIABLE) or Path.home() / ".cache" / "bookwheel" / "sites").expanduser()
        folder = quote(self._url.partition("://")[2], safe="")
        if len(folder) > _MAX_NAME_BYTES:
            folder = f"{folder[:_MAX_NAME_BYTES]}-{digest_json(folder).rpartition(':')[2][:16]}"
        self.folder, self._versions_file = root / folder, root / f"{folder}.json"
        self._robots, self._n_fetched, self._n_failed = RobotFileParser(), 0, 0
        self._robots.parse([])  # until robots.txt is read, everything may be read
        self._delay, self._sleep, self._has_answered = 0.0, sleep, False
        self._http = open_polite_client()

    def __enter__(self) -> "_SiteClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def mirror(self) -> SiteFiles:
        """Fetch the pages that changed, and remove those that the sitemap no longer lists."""
        with self._lock_folder():
            self._read_robots()
            versions, url_by_path, dropped = self._load_versions(), dict[str, str](), Counter[str]()
            try:
                for url, lastmod in self._list_pages(dropped):
                    path = _choose_path(url)
                    if not path:
                        dropped["bad_name"] += 1
                    elif not self._robots.can_fetch("bookwheel", url):
                        dropped["robots"] += 1
                    elif path not in url_by_path:
                        url_by_path[path] = url
                        self._update_page(url, path, lastmod, versions, dropped)
                        self._check_failures(len(url_by_path), _STOP_AFTER_FAILED_PAGES)
                    elif url_by_path[path] != url:
                        dropped["same_name"] += 1
            finally:
                self._save_versions(versions)
            self._check_failures(len(url_by_path), _MAX_FAILED_PAGES)
            if not versions.keys() & url_by_path.keys():
                raise InputError(f"{self._url} lists no page that can be read ({dict(dropped)}): check the sitemap")
            for path in versions.keys() - url_by_path.keys():
                del versions[path]
            self._save_versions(versions)
            self._remove_other_files(versions)
        return SiteFiles(self.folder, dict(dropped))

    def _check_failures(self, n_pages: int, max_failed: int) -> None:
        if self._n_failed > max(max_failed, _MAX_FAILED_SHARE * n_pages):
            raise UnreachableError(
                f"{self._n_failed} of the first {n_pages:,} pages of {self._url} answer {_SERVER_ERROR}: run the "
                "command again later to continue, or ask the site's operator"
            )

    @contextmanager
    def _lock_folder(self) -> Iterator[None]:
        """Wait until no other run writes into the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.folder.with_name(f"{self.folder.name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _remove_other_files(self, versions: Mapping[str, _PageVersion]) -> None:
        """Remove pages that are not listed, and temporary files of interrupted runs."""
        for folder, _, file_names in os.walk(self.folder):
            for file in (Path(folder, name) for name in file_names):
                if file.relative_to(self.folder).as_posix() not in versions:
                    file.unlink(missing_ok=True)

    def _update_page(
        self, url: str, path: str, lastmod: str, versions: dict[str, _PageVersion], dropped: Counter[str]
    ) -> None:
        """Fetch a page unless its file is up to date, and record its version."""
        file, version = self.folder / path, versions.get(path, _PageVersion())
        has_file = path in versions and file.exists()
        if has_file and lastmod and lastmod == version.lastmod:
            return
        condition_headers = {"If-None-Match": version.etag, "If-Modified-Since": version.modified} if has_file else {}
        try:
            status, headers, body = self._fetch(url, MAX_PAGE_BYTES, {k: v for k, v in condition_headers.items() if v})
            drop_reason = "" if status == 200 or (status == 304 and has_file) else "missing"
        except _UnusablePageError as error:
            status, headers, body, drop_reason = 0, httpx.Headers(), None, error.reason
        except UnreachableError as error:
            if str(error.__cause__) != _SERVER_ERROR:
                raise
            self._n_failed += 1
            if has_file:
                _log.warning("%s answers %s: keeping its last version", url, _SERVER_ERROR)
                return
            status, headers, body, drop_reason = 500, httpx.Headers(), None, "server_error"
        if status == 200:
            is_page = headers.get("content-type", "").partition(";")[0].strip().lower() in _PAGE_TYPES
            drop_reason = ("" if is_page else "unknown_format") if body is not None else "too_large"
        if drop_reason:
            dropped[drop_reason] += 1
            versions.pop(path, None)
            file.unlink(missing_ok=True)
            return
        if status == 200 and body is not None:
            page_bytes = _convert_to_utf8(body, headers.get("content-type", ""))
            if not has_file or file.read_bytes() != page_bytes:
                with atomic_write(file) as temporary_path:
                    temporary_path.write_bytes(page_bytes)
        # A reply with status 304 repeats the ETag, and may leave out other headers.
        etag, modified = headers.get("etag", version.etag), headers.get("last-modified", version.modified)
        versions[path] = _PageVersion(lastmod, etag[:1000], modified[:100])
        self._n_fetched += 1
        if self._n_fetched % _SAVE_INTERVAL == 0:
            self._save_versions(versions)

    def _read_robots(self) -> None:
        """Read `robots.txt`; if there is none, everything may be read."""
        status, _, body = self._fetch(f"{self._origin}/robots.txt", _MAX_ROBOTS_BYTES)
        robots_text = (body or b"").decode("utf-8", "replace") if status == 200 else ""
        rule_lines = ["User-agent: *", "Disallow: /"] if body is None else filter(_is_rule, robots_text.splitlines())
        self._robots = RobotFileParser()
        self._robots.parse(rule_lines)
        self._delay = float(min(self._robots.crawl_delay("bookwheel") or 0, _MAX_DELAY))

    def _list_pages(self, dropped: Counter[str]) -> Iterator[tuple[str, str]]:
        """Yield address and `lastmod` of each page in the sitemap and in those that it lists."""
        pending_sitemaps, n_pages = [self._origin + self._start_path], 0
        seen_sitemaps = {*pending_sitemaps}
        while pending_sitemaps:
            sitemap = pending_sitemaps.pop(0)
            if not self._robots.can_fetch("bookwheel", sitemap):
                raise InputError(f"robots.txt of {self._origin} forbids {sitemap}: ask the site's operator")
            status, _, body = self._fetch(sitemap, _MAX_SITEMAP_BYTES)
            if status != 200 or body is None:
                problem = f"answers HTTP {status}" if status != 200 else f"has more than {_MAX_SITEMAP_BYTES >> 20} MiB"
                raise InputError(f"{sitemap} {problem}: check the address of the sitemap")
            for entry_kind, entry_url, lastmod in _parse_sitemap(body, sitemap):
                origin, path = _split_address(entry_url)
                address = origin + path
                n_pages += entry_kind == "url"
                if origin != self._origin:
                    dropped["other_host" if origin else "bad_name"] += 1
                elif entry_kind == "url":
                    yield address, lastmod
                elif address not in seen_sitemaps:
                    seen_sitemaps.add(address)
                    pending_sitemaps.append(address)
                if n_pages > _MAX_PAGES or len(seen_sitemaps) > _MAX_SITEMAPS:
                    raise InputError(
                        f"{self._url} lists more than {_MAX_PAGES:,} pages or {_MAX_SITEMAPS:,} sitemaps: give a "
                        "sitemap of a part of the site"
                    )

    def _fetch(
        self, url: str, max_bytes: int, headers: Mapping[str, str] | None = None
    ) -> tuple[int, httpx.Headers, bytes | None]:
        """Return the status, headers and body of a reply; the body is None if it is too large."""
        return retry(url, lambda: self._send(url, max_bytes, headers or {}), lambda: self._has_answered, self._sleep)

    def _send(self, url: str, max_bytes: int, headers: Mapping[str, str]) -> tuple[int, httpx.Headers, bytes | None]:
        for _ in range(MAX_REDIRECTS):
            if self._delay:
                self._sleep(self._delay)
            try:
                with self._http.stream("GET", url, headers=headers) as response:
                    self._has_answered = True
                    if response.is_redirect and response.headers.get("location"):
                        url = self._follow_redirect(url, response)
                        continue
                    if response.status_code in BUSY_STATUSES:
                        problem = f"HTTP {response.status_code}"
                        delay = parse_retry_after(response.headers.get("retry-after"))
                        problem += " with Retry-After" if delay is not None and problem == _SERVER_ERROR else ""
                        raise BusyError(problem, delay, _MAX_ERROR_TRIES if problem == _SERVER_ERROR else MAX_TRIES)
                    if response.status_code != 200:
                        return response.status_code, response.headers, b""
                    return 200, response.headers, read_body(response, max_bytes)
            except ReplyTooLargeError:
                return 200, httpx.Headers(), None
            except (httpx.DecodingError, httpx.InvalidURL, httpx.ProtocolError, httpx.UnsupportedProtocol) as error:
                if isinstance(error, httpx.ProtocolError) and "location header" not in str(error):
                    raise  # the connection broke: `retry` sends the request again
                message = f"{url} cannot be read ({format_error(error)}): check the address"
                raise _UnusablePageError("unreadable", message) from error
        message = f"{url} redirects more than {MAX_REDIRECTS} times: give the address that it leads to"
        raise _UnusablePageError("unreadable", message)

    def _follow_redirect(self, url: str, response: httpx.Response) -> str:
        try:
            redirect_url = follow_redirect(url, response)
        except InputError as error:
            raise _UnusablePageError("other_host", str(error)) from error
        if not self._robots.can_fetch("bookwheel", redirect_url):
            message = f"{url} redirects to {redirect_url}, which robots.txt forbids: ask the site's operator"
            raise _UnusablePageError("robots", message)
        return redirect_url

    def _load_versions(self) -> dict[str, _PageVersion]:
        try:
            version_rows = json.loads(self._versions_file.read_bytes())
            return {path: _PageVersion(**version_row) for path, version_row in version_rows.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}  # every page is fetched again

    def _save_versions(self, versions: Mapping[str, _PageVersion]) -> None:
        with atomic_write(self._versions_file) as temporary_path:
            temporary_path.write_text(json.dumps({path: asdict(version) for path, version in versions.items()}))


def _convert_to_utf8(body: bytes, content_type: str) -> bytes:
    """Convert a page from the encoding that its reply declares to UTF-8.

    Return it unchanged if it is UTF-8 already, or if it cannot be decoded.
    """
    try:
        body.decode()
    except UnicodeDecodeError:
        with suppress(DroppedFileError):
            return decode_charset(body, find_charset(content_type)).encode()
    return body


def _choose_path(url: str) -> str:
    """Return the path of a page's file in the folder; empty if its address has no safe path.

    >>> _choose_path("https://example.org/guide/"), _choose_path("https://example.org/a?b=1")
    ('guide/index.html', 'a%3Fb=1.html')
    """
    url_parts = urlsplit(url)
    *folders, name = unquote(url_parts.path.lstrip("/")).split("/")
    name = (name or "index.html") + (f"?{url_parts.query}" if url_parts.query else "")
    segments = [quote(segment, safe=" =&") for segment in (*folders, name)]
    is_safe_path = all(segment.strip(".") and not segment.startswith(".") for segment in segments)
    # The name of a folder never ends like the name of a page, so it cannot be the name of a file.
    segments[:-1] = [_HTML_ENDING.sub(lambda ending: f"%2E{ending[0][1:]}", folder) for folder in segments[:-1]]
    segments[-1] += "" if _HTML_ENDING.search(segments[-1]) else ".html"
    path = "/".join(segments)
    is_short_path = len(path) <= _MAX_PATH_BYTES and all(len(segment) <= _MAX_NAME_BYTES for segment in segments)
    return path if is_safe_path and is_short_path else ""


def _split_address(address: str) -> tuple[str, str]:
    """Return the origin of an address, and its path with the query; both are "" if it is invalid.

    >>> _split_address("HTTPS://Example.org:443#top"), _split_address("http://[x")
    (('https://example.org', '/'), ('', ''))
    """
    try:
        url_parts = urlsplit(address)
        port, host = url_parts.port, url_parts.hostname
    except ValueError:
        return "", ""
    if not host or "@" in url_parts.netloc:
        return "", ""
    is_default = port in {None, {"http": 80, "https": 443}.get(url_parts.scheme)}
    origin = f"{url_parts.scheme}://{f'[{host}]' if ':' in host else host}{'' if is_default else f':{port}'}"
    return origin, (url_parts.path or "/") + (f"?{url_parts.query}" if url_parts.query else "")


def _is_rule(line: str) -> bool:
    """Return whether Python can parse a line of `robots.txt`."""
    try:
        RobotFileParser().parse(["User-agent: *", line])
    except ValueError:
        return False
    return True


def _parse_sitemap(body: bytes, url: str) -> Iterator[tuple[str, str, str]]:
    """Yield the kind (`url` or `sitemap`), address and `lastmod` of each entry.

    Raises:
        InputError: The file is not a sitemap.
    """
    if body.startswith(b"\x1f\x8b"):
        try:
            body = zlib.decompressobj(wbits=31).decompress(body, _MAX_SITEMAP_BYTES)
        except zlib.error as error:
            raise InputError(f"{url} is damaged ({error}): check the sitemap") from error
    try:
        parser = etree.XMLParser(resolve_entities=False, no_network=True, remove_comments=True, remove_pis=True)
        root = etree.fromstring(body, parser)
    except etree.XMLSyntaxError as error:
        raise InputError(
            f"{url} is not a sitemap ({format_error(error)}): give the address of an XML sitemap"
        ) from error
    if etree.QName(root).localname not in {"urlset", "sitemapindex"}:
        raise InputError(f"{url} is not a sitemap (its root is {root.tag!r:.60}): give the address of an XML sitemap")
    for node in root.iterchildren("{*}url", "{*}sitemap"):
        address, lastmod = (" ".join((node.findtext(f"{{*}}{name}") or "").split()) for name in ("loc", "lastmod"))
        yield etree.QName(node).localname, address, lastmod[:40]
