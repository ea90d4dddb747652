"""Dumps as Wikimedia publishes them: find a complete one, and fetch and verify its files.

`https://dumps.wikimedia.org/enwiki/` lists runs by date. Each run has a `dumpstatus.json`: jobs with a status, and,
once a job is done, its files with sizes and checksums. Files of a run are published while it is still being
written, so only that status says that a dump is complete.
"""

import hashlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urljoin, urlsplit

from rag_model.corpus.web import LEAST, PATIENCE, UntrustedError, opened
from rag_model.errors import InputError, ResourceError
from rag_model.json_text import parse_json
from rag_model.landing import sync
from rag_model.secrets import refuse_secret

JOB = "articlesmultistreamdump"  # the current text of every article, in streams of 100 pages, with an offset index
_RUN = re.compile(r'href="(?:[^"]*/)?(\d{8})/?"')
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.bz2")
_DIGEST = {"sha1": re.compile(r"[0-9a-f]{40}"), "md5": re.compile(r"[0-9a-f]{32}")}
_PAGE = 1 << 26  # most bytes of a listing or a status page
_PAGE_RATE = 1 << 16  # least bytes of one a second, after a first minute
_BLOCK = 1 << 20
_TRIES = 5  # connections in a row that bring little before giving up
_RUNS = 3  # unfinished runs examined before giving up: a run takes days, and the one before it is complete

Tell = Callable[[int, int], object]  # bytes done, bytes in total


@dataclass(frozen=True, slots=True)
class DumpFile:
    """One file of a dump."""

    name: str
    url: str
    size: int  # bytes
    checksum: tuple[str, str]  # algorithm, hex digits


@dataclass(frozen=True, slots=True)
class Published:
    """A dump that is complete."""

    date: str  # yyyymmdd
    files: tuple[DumpFile, ...]  # the streams and their offset indexes

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def newest(wiki: str, after: str = "", job: str = JOB) -> Published | None:
    """Return the newest complete dump that is newer than `after`, or None; if nothing is new it takes one request.

    Args:
        wiki: URL of a wiki's dumps, as `https://dumps.wikimedia.org/enwiki/`.
        after: date of the newest dump that is known, yyyymmdd.
        job: the job of a run whose files are wanted.

    Raises:
        InputError: the server cannot be reached, or its response is not a list of dumps or a dump's status.
    """
    refuse_secret(wiki)
    wiki = wiki.rstrip("/") + "/"
    dates = sorted(set(_RUN.findall(_page(wiki))), reverse=True)
    if not dates:
        raise InputError(f"{wiki} lists no dumps by date: give the folder of one wiki, such as …/enwiki/")
    for date in [date for date in dates if date > after][:_RUNS]:
        if published := _published(urljoin(wiki, f"{date}/dumpstatus.json"), date, job):
            return published
    return None


def fetch(published: Published, folder: Path, tell: Tell = lambda done, total: None) -> str:
    """Fetch a dump's files into `folder`, continuing an earlier call; return the glob of its streams.

    A file gets its name when it is complete. The free space is checked first for all missing bytes.

    Raises:
        InputError: a file does not match its size or checksum, or the server stops sending it.
        ResourceError: the disk has too little free space, so nothing was fetched, or became full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _check_room(published, folder)
    done = 0
    for file in published.files:
        if not (folder / file.name).exists():
            try:
                _fetch(file, folder, lambda size, before=done: tell(before + size, published.size))  # type: ignore[misc]
            except OSError as failed:
                raise ResourceError(f"cannot write {folder / file.name}: {failed.strerror}") from failed
        done += file.size
        tell(done, published.size)
    streams = [file.name for file in published.files if "-index" not in file.name]
    return str(folder / (streams[0] if len(streams) == 1 else "*.xml*.bz2"))


def _check_room(published: Published, folder: Path) -> None:
    lacking = sum(
        file.size - min(_size(_part(folder, file)), file.size)
        for file in published.files
        if not (folder / file.name).exists()
    )
    free = shutil.disk_usage(folder).free
    if lacking > free:
        raise ResourceError(
            f"the disk of {folder} is full: {lacking:,} bytes of the dump of {published.date} have to be fetched and "
            f"{free:,} are free; make room, or name another folder"
        )


def _published(url: str, date: str, job: str) -> Published | None:
    """Read a run's status; None if the job is not done, or the run has no status yet."""
    try:
        jobs = parse_json(_page(url, missing="{}")).get("jobs", {})
        told = jobs.get(job, {})
        if told.get("status") != "done":
            return None
        files = tuple(_file(url, name, facts) for name, facts in sorted(told["files"].items()))
    except (ValueError, KeyError, TypeError, AttributeError) as broken:
        raise InputError(
            f"{url} is not the status of a dump ({type(broken).__name__}: {broken}): try again later"
        ) from broken
    if not files:
        raise InputError(f"{url} says that {job} is done but lists no files of it: try again later")
    return Published(date, files)


def _file(status: str, name: str, facts: Mapping[str, Any]) -> DumpFile:
    """Check a status page's entry of a file: its URL must be on the same server."""
    url = urljoin(status, facts["url"])
    if not _NAME.fullmatch(name) or urlsplit(url)[:2] != urlsplit(status)[:2]:
        raise ValueError(f"a file {name!r} at {url!r}")
    algorithm = "sha1" if "sha1" in facts else "md5"
    size, digest = int(facts["size"]), str(facts[algorithm]).lower()
    if size < 1 or not _DIGEST[algorithm].fullmatch(digest):
        raise ValueError(f"a file {name!r} of {size} bytes with the {algorithm} {digest!r}")
    return DumpFile(name, url, size, (algorithm, digest))


def _part(folder: Path, file: DumpFile) -> Path:
    return folder / f"{file.name}.part"


def _fetch(file: DumpFile, folder: Path, tell: Callable[[int], object]) -> None:
    part, tries = _part(folder, file), 0
    while (begun := _size(part)) < file.size:
        try:
            _append(file, part, tell)
        except UntrustedError:
            raise
        except (HTTPException, TimeoutError, ConnectionError, InputError) as cut:
            tries = 0 if _size(part) - begun >= LEAST else tries + 1
            if tries == _TRIES:
                raise InputError(
                    f"{file.url} broke off at byte {_size(part)} of {file.size} ({cut}): run it again"
                ) from cut
            time.sleep(min(2**tries, 30) / 10)
    if _digest(part, file.checksum[0]) != file.checksum[1] or _size(part) != file.size:
        part.unlink()
        raise InputError(f"{file.url} does not match its {file.checksum[0]} and was deleted: run it again")
    sync(part)
    part.replace(folder / file.name)


def _append(file: DumpFile, part: Path, tell: Callable[[int], object]) -> None:
    """Append to a partial file from its end; if the server ignores the range, start again.

    No more is read than is missing, and one byte to see whether there is more.
    """
    begun = _size(part)
    with opened(file.url, {"Range": f"bytes={begun}-"} if begun else {}) as answer:
        resumed = begun and answer.status == 206
        with part.open("ab" if resumed else "wb") as out:
            while block := answer.read(min(_BLOCK, file.size - out.tell() + 1)):
                if out.tell() + len(block) > file.size:
                    part.unlink()
                    raise UntrustedError(
                        f"{file.url} is longer than the {file.size} bytes that its status says, and was deleted: try "
                        "again later"
                    )
                out.write(block)
                tell(out.tell())
    if _size(part) < file.size:
        raise ConnectionError("the server closed the connection")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _page(url: str, missing: str | None = None) -> str:
    """Return a page's text, or `missing` if the server has no such page."""
    try:
        with opened(url, {}) as answer:
            return b"".join(_blocks(answer)).decode("utf-8", "replace")
    except InputError as failed:
        if missing is not None and isinstance(failed.__cause__, HTTPError) and failed.__cause__.code == 404:
            return missing
        raise
    except (HTTPException, OSError) as cut:
        raise InputError(f"{url} broke off ({cut}): try again later") from cut


def _blocks(answer: Any) -> Iterator[bytes]:
    """Yield a page's bytes, up to the most that are read.

    Raises:
        TimeoutError: it comes too slowly.
    """
    began, done = time.monotonic(), 0
    while done < _PAGE and (block := answer.read(_PAGE_RATE)):
        done += len(block)
        if time.monotonic() > began + PATIENCE + done / _PAGE_RATE:
            raise TimeoutError(f"{done:,} bytes came in {time.monotonic() - began:.0f} s")
        yield block
