"""Find a complete dump among those that Wikimedia publishes, fetch its files and verify them.

`https://dumps.wikimedia.org/enwiki/` lists runs by date. Each run has a `dumpstatus.json`: jobs
with a status, and, once a job is done, its files with sizes and checksums. Files of a run are
published while it is still being written, so only `dumpstatus.json` shows whether a dump is
complete.
"""

import hashlib
import io
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urljoin, urlsplit
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from rag_model.atomic_write import fsync
from rag_model.errors import InputError, ResourceError, UnreachableError
from rag_model.http_client import USER_AGENT
from rag_model.secrets import refuse_secret
from rag_model.untrusted_text import parse_json

PATIENCE = 60.0  # seconds after which a silent connection is closed
MIN_BYTES = 1 << 16  # minimum bytes in `PATIENCE` seconds
# Current text of all articles, in streams of 100 pages, with an offset index.
ARTICLES_JOB = "articlesmultistreamdump"
_RUN_LINK = re.compile(r'href="(?:[^"]*/)?(\d{8})/?"')
PROPERTIES_JOB = "pagepropstable"  # properties of pages, such as their Wikidata items
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.(?:bz2|sql\.gz)")
_DIGEST_PATTERNS = {"sha1": re.compile(r"[0-9a-f]{40}"), "md5": re.compile(r"[0-9a-f]{32}")}
_MAX_PAGE_BYTES = 1 << 26  # maximum bytes of a listing or status page
_MIN_PAGE_RATE = 1 << 16  # minimum bytes per second of a listing, after a minute
_BLOCK_BYTES = 1 << 20
_MAX_TRIES = 6  # maximum consecutive attempts that fetch less than `MIN_BYTES`
_FIRST_PAUSE = 2.0  # seconds to wait after the first of these attempts; then doubled
# Maximum number of unfinished runs to skip: a run takes days, but the one before is complete.
_MAX_UNFINISHED_RUNS = 3
OnProgress = Callable[[int, int], object]  # (bytes done, total bytes)


class UntrustedServerError(InputError):
    """The server sends invalid data; a retry does not help."""


class _SameServerRedirectHandler(HTTPRedirectHandler):
    """Follows redirects only within the same server."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request | None:
        """Reject redirects to other servers; an upgrade from http to https is allowed."""
        old_url, new_url = urlsplit(req.full_url), urlsplit(newurl)
        is_upgrade = (old_url.scheme, new_url.scheme, old_url.port) == ("http", "https", new_url.port)
        if new_url.netloc != old_url.netloc or not (new_url.scheme == old_url.scheme or is_upgrade):
            raise UntrustedServerError(
                f"{req.full_url} redirects to another server, "
                f"{new_url.scheme}://{new_url.hostname}: use that address "
                "if you trust it"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _MinimumRateStream(io.RawIOBase):
    """A raw stream of a socket that raises a TimeoutError if the rate is too low."""

    def __init__(self, raw: Any, sock: Any) -> None:
        """Wrap `raw`, the raw stream of `sock`."""
        self._raw, self._sock, self._seconds_left = raw, sock, PATIENCE

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read available bytes.

        Raises:
            TimeoutError: The server sends too slowly.
        """
        if self._seconds_left <= 0:
            raise TimeoutError(f"the server sends less than {MIN_BYTES >> 10} KiB in {PATIENCE:.0f} s")
        self._sock.settimeout(self._seconds_left)
        start_seconds = time.monotonic()
        n_read: int | None = self._raw.readinto(buffer)
        waited_seconds = time.monotonic() - start_seconds
        self._seconds_left = min(PATIENCE, self._seconds_left - waited_seconds + (n_read or 0) * PATIENCE / MIN_BYTES)
        return n_read

    def close(self) -> None:
        """Close this stream and the socket's raw stream."""
        self._raw.close()
        super().close()


class _RateCheckedResponse(HTTPResponse):
    def __init__(self, sock: Any, *arguments: Any, **settings: Any) -> None:
        super().__init__(sock, *arguments, **settings)
        file: Any = self.fp
        self.fp = io.BufferedReader(_MinimumRateStream(file.detach(), sock))


class _RateCheckedConnection(HTTPConnection):
    response_class = _RateCheckedResponse


class _RateCheckedHttpsConnection(HTTPSConnection):
    response_class = _RateCheckedResponse


class _HttpHandler(HTTPHandler):
    def http_open(self, req: Request) -> Any:
        return self.do_open(_RateCheckedConnection, req)


class _HttpsHandler(HTTPSHandler):
    def https_open(self, req: Request) -> Any:
        return self.do_open(_RateCheckedHttpsConnection, req)


_OPENER = build_opener(_SameServerRedirectHandler, _HttpHandler, _HttpsHandler)


@contextmanager
def open_url(url: str, headers: Mapping[str, str]) -> Iterator[Any]:
    """Request a URL and yield the response, which is closed at the end of the block.

    Raises:
        InputError: The URL is invalid, or the server refuses it, for example with status 404.
        UnreachableError: The server is unreachable, slow or overloaded.
        UntrustedServerError: The server redirects to another server.
    """
    if urlsplit(url).scheme not in {"http", "https"} or not urlsplit(url).hostname:
        raise InputError(f"{url} is not a web address: give one such as https://dumps.wikimedia.org/enwiki/")
    try:
        response = _OPENER.open(Request(url, headers={"User-Agent": USER_AGENT, **headers}), timeout=PATIENCE)
    except (OSError, HTTPException, ValueError) as error:
        reason, is_permanent = getattr(error, "reason", error), isinstance(error, ValueError)
        if isinstance(error, HTTPError):
            error.close()
            is_permanent = not _is_temporary(error.code)
        if is_permanent:
            raise InputError(f"{url} cannot be read ({reason}): check the address") from error
        advice = "check the network and the server, and try again"
        raise UnreachableError(f"{url} cannot be read ({reason}): {advice}") from error
    with response:
        yield response


def _is_temporary(status_code: int) -> bool:
    return status_code == HTTPStatus.TOO_MANY_REQUESTS or status_code >= HTTPStatus.INTERNAL_SERVER_ERROR


@dataclass(frozen=True, slots=True)
class DumpFile:
    """One file of a dump."""

    name: str
    url: str
    size: int  # bytes
    checksum: tuple[str, str] | None  # algorithm, hex digits; None if not published


@dataclass(frozen=True, slots=True)
class PublishedDump:
    """A complete dump."""

    date: str  # yyyymmdd
    files: tuple[DumpFile, ...]  # streams, their offset indexes, and requested tables

    @property
    def size(self) -> int:
        """Total bytes of all files."""
        return sum(file.size for file in self.files)


def find_newest_dump(
    wiki_url: str, after: str = "", job: str = ARTICLES_JOB, tables: Sequence[str] = ()
) -> PublishedDump | None:
    """Return the newest complete dump after a date, or None.

    If there is no newer run, only one request is sent.

    Args:
        wiki_url: URL of a wiki's dumps, such as `https://dumps.wikimedia.org/enwiki/`.
        after: date of the newest known dump, yyyymmdd.
        job: name of the dump job that creates the files to list.
        tables: further jobs that must be done; their files are listed after those of `job`.

    Raises:
        InputError: The response is not a list of dumps or a dump status.
        UnreachableError: The server is unreachable.
    """
    refuse_secret(wiki_url)
    wiki_url = wiki_url.rstrip("/") + "/"
    run_dates = sorted(set(_RUN_LINK.findall(_read_text_page(wiki_url))), reverse=True)
    if not run_dates:
        raise InputError(f"{wiki_url} lists no dumps by date: give the folder of one wiki, such as …/enwiki/")
    for date in [date for date in run_dates if date > after][:_MAX_UNFINISHED_RUNS]:
        if dump := _read_status(urljoin(wiki_url, f"{date}/dumpstatus.json"), date, [job, *tables]):
            return dump
    return None


def fetch_dump(dump: PublishedDump, folder: Path, on_progress: OnProgress = lambda done, total: None) -> str:
    """Fetch a dump into `folder`, or resume an interrupted fetch; return a glob of its streams.

    A file gets its final name when it is complete. The free disk space is checked first.

    Raises:
        InputError: A file does not match its size or checksum.
        UnreachableError: The server stops sending a file.
        ResourceError: The disk does not have enough space, and nothing was fetched; or it became
            full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _check_disk_space(dump, folder)
    fetched_bytes = 0
    for file in dump.files:
        if not (folder / file.name).exists():
            try:
                _fetch_dump_file(file, folder, partial(_report_total, on_progress, fetched_bytes, dump.size))
            except OSError as error:
                raise ResourceError(
                    f"cannot write {folder / file.name} ({error.strerror}): free space, or name another folder"
                ) from error
        fetched_bytes += file.size
        on_progress(fetched_bytes, dump.size)
    stream_names = [file.name for file in dump.files if ".xml" in file.name]
    return str(folder / (stream_names[0] if len(stream_names) == 1 else "*.xml*.bz2"))


def fetch_file(
    url: str, path: Path, checksum: tuple[str, str] | None, on_progress: OnProgress = lambda done, total: None
) -> None:
    """Fetch one file, or resume an interrupted fetch; `path` exists only when it is complete.

    Raises:
        InputError: The file does not match its checksum (algorithm and hex digits).
        UnreachableError: The server is unreachable.
        ResourceError: The disk has too little free space, or is full.
    """
    with open_url(url, {"Range": "bytes=0-0"}) as response:
        size_text = response.headers.get("Content-Range") or response.headers.get("Content-Length") or ""
    file_size = size_text.rpartition("/")[2]
    if not file_size.isdecimal():
        raise InputError(f"the server of {url} does not report the file's size: download the file and give its path")
    fetch_dump(PublishedDump("", (DumpFile(path.name, url, int(file_size), checksum),)), path.parent, on_progress)


def _report_total(on_progress: OnProgress, bytes_before: int, total_bytes: int, file_bytes: int) -> None:
    on_progress(bytes_before + file_bytes, total_bytes)


def _check_disk_space(dump: PublishedDump, folder: Path) -> None:
    missing_bytes = sum(
        file.size - min(_get_file_size(_get_partial_path(folder, file)), file.size)
        for file in dump.files
        if not (folder / file.name).exists()
    )
    free_bytes = shutil.disk_usage(folder).free
    if missing_bytes > free_bytes:
        raise ResourceError(
            f"the disk of {folder} is full: {missing_bytes:,} bytes have to be fetched and {free_bytes:,} "
            "are free; make room, or name another folder"
        )


def _read_status(url: str, date: str, job_names: Sequence[str]) -> PublishedDump | None:
    """Return the dump of a run; None if a job is not done or there is no status yet."""
    try:
        jobs = parse_json(_read_text_page(url, text_on_404="{}")).get("jobs", {})
        statuses = [jobs.get(job_name, {}) for job_name in job_names]
        if any(status.get("status") != "done" for status in statuses):
            return None
        file_entries = [entry for status in statuses for entry in sorted(status["files"].items())]
        files = tuple(_parse_file_entry(url, name, entry) for name, entry in file_entries)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{url} is not the status of a dump ({type(error).__name__}: {error}): try again later"
        ) from error
    if not files:
        raise UnreachableError(f"{url} says that {job_names[0]} is done but lists no files: try again later")
    return PublishedDump(date, files)


def _parse_file_entry(status_url: str, name: str, file_entry: Mapping[str, Any]) -> DumpFile:
    """Parse the entry of a file on a status page; its URL must be on the same server."""
    url = urljoin(status_url, file_entry["url"])
    if not _FILE_NAME.fullmatch(name) or urlsplit(url)[:2] != urlsplit(status_url)[:2]:
        raise ValueError(f"unexpected file {name!r} at {url!r}")
    algorithm = "sha1" if "sha1" in file_entry else "md5"
    n_bytes, digest = int(file_entry["size"]), str(file_entry[algorithm]).lower()
    if n_bytes < 1 or not _DIGEST_PATTERNS[algorithm].fullmatch(digest):
        raise ValueError(f"unexpected size {n_bytes} or {algorithm} {digest!r} of {name!r}")
    return DumpFile(name, url, n_bytes, (algorithm, digest))


def _get_partial_path(folder: Path, file: DumpFile) -> Path:
    return folder / f"{file.name}.part"


def _fetch_dump_file(file: DumpFile, folder: Path, on_progress: Callable[[int], object]) -> None:
    path, n_failures = _get_partial_path(folder, file), 0
    while (start_size := _get_file_size(path)) < file.size:
        try:
            _append_bytes(file, path, on_progress)
        except (HTTPException, TimeoutError, ConnectionError, UnreachableError) as error:
            n_failures = 0 if _get_file_size(path) - start_size >= MIN_BYTES else n_failures + 1
            if n_failures == _MAX_TRIES:
                raise UnreachableError(
                    f"{file.url} broke off at byte {_get_file_size(path)} of {file.size} ({error}): run it again"
                ) from error
            time.sleep(_FIRST_PAUSE * 2 ** max(0, n_failures - 1))
    algorithm, digest = file.checksum or ("size", "")
    if _get_file_size(path) != file.size or (digest and hash_file(path, algorithm) != digest):
        path.unlink()
        raise InputError(f"{file.url} does not match its {algorithm} and was deleted: run it again")
    fsync(path)
    path.replace(folder / file.name)


def _append_bytes(file: DumpFile, path: Path, on_progress: Callable[[int], object]) -> None:
    """Resume a partial file; start again if the server ignores the range.

    Reads one byte more than is missing, to detect a file that is too long.
    """
    start_size = _get_file_size(path)
    with open_url(file.url, {"Range": f"bytes={start_size}-"} if start_size else {}) as response:
        is_resumed = start_size and response.status == 206
        with path.open("ab" if is_resumed else "wb") as partial_file:
            while chunk := response.read(min(_BLOCK_BYTES, file.size - partial_file.tell() + 1)):
                if partial_file.tell() + len(chunk) > file.size:
                    path.unlink()
                    raise UntrustedServerError(
                        f"{file.url} is longer than the {file.size} bytes in the dump's status, "
                        "and was deleted: try again later"
                    )
                partial_file.write(chunk)
                on_progress(partial_file.tell())
    if _get_file_size(path) < file.size:
        raise ConnectionError("the server closed the connection")


def _get_file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def hash_file(path: Path, algorithm: str) -> str:
    """Return the hex digits of a file's checksum."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _read_text_page(url: str, text_on_404: str | None = None) -> str:
    """Return the text of a page, or `text_on_404` if the server responds 404."""
    try:
        with open_url(url, {}) as response:
            return b"".join(_read_limited_body(response)).decode("utf-8", "replace")
    except InputError as error:
        if text_on_404 is not None and isinstance(error.__cause__, HTTPError) and error.__cause__.code == 404:
            return text_on_404
        raise
    except (HTTPException, OSError) as error:
        raise UnreachableError(f"{url} broke off ({error}): try again later") from error


def _read_limited_body(response: Any) -> Iterator[bytes]:
    """Yield the bytes of a page, at most `_MAX_PAGE_BYTES`.

    Raises:
        TimeoutError: The server sends too slowly.
    """
    start_seconds, fetched_bytes = time.monotonic(), 0
    while fetched_bytes < _MAX_PAGE_BYTES and (chunk := response.read(_MIN_PAGE_RATE)):
        fetched_bytes += len(chunk)
        if time.monotonic() > start_seconds + PATIENCE + fetched_bytes / _MIN_PAGE_RATE:
            raise TimeoutError(f"{fetched_bytes:,} bytes arrived in {time.monotonic() - start_seconds:.0f} s")
        yield chunk
