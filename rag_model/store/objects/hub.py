"""Repositories of the Hugging Face Hub, as `hf://datasets/USER/NAME@REVISION/FOLDER`, to read: nothing is cached.

The Hub cannot create one file exclusively, so refs could not be moved safely, and every write is refused. A whole store
goes there as one commit: `bookwheel export --layout store`. huggingface_hub's own file system answers from cached
listings and asks three times to read once, so here its client is asked: one request an answer.
"""

import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Never, TypeVar
from urllib.parse import quote

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HfUriError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import HfUri, get_session, hf_raise_for_status, parse_hf_uri, parse_ratelimit_headers
from huggingface_hub.utils.logging import get_logger

from rag_model.errors import BookwheelError, ReadOnlyError, UsageError, reason
from rag_model.store.objects.buckets import Bucket, entry, folder, refusal

T = TypeVar("T")
KINDS = {"dataset": "datasets/", "model": "", "space": "spaces/"}  # the beginning of their addresses
_TRIES = 7
_PAUSE = 0.1  # seconds before the second try, doubled for each further one: 6 s in all
_PASSING = {429, 500, 502, 503, 504}
_TOLD = 5.0  # seconds; a longer wait is logged
_LOG = get_logger("huggingface_hub.bookwheel")  # the client's own, which goes to standard error


class HubApi(HfApi):  # type: ignore[misc]
    """The library's client of the Hub that the environment names, by `HF_ENDPOINT` and `HF_TOKEN`."""

    def __init__(self) -> None:
        """Nothing is sent yet."""
        super().__init__(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="bookwheel")

    def close(self) -> None:
        """Leave the connections open: all users of the library in this process share them."""


class Hub(Bucket):
    """The repositories that the environment's token reaches; without one, those that are public."""

    protocol = "hf"

    def connect(self) -> HubApi:
        """Use the environment's endpoint and token."""
        return HubApi()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """Return the path behind `hf://`, with the repository at its front.

        Raises:
            UsageError: it names no repository.
        """
        stripped = super()._strip_protocol(path)
        repository_of(stripped)
        return stripped

    def split(self, path: str) -> tuple[str, str]:
        """Return the repository with its revision, and the path in it."""
        key = repository_of(path).path_in_repo
        return path.removesuffix(key).rstrip("/"), key

    def head(self, bucket: str, key: str) -> dict[str, Any] | None:
        """Ask for the headers of the file."""
        try:
            with asked():
                found = _patiently(lambda: self.client.get_hf_file_metadata(url=self._url(bucket, key)))
        except FileNotFoundError:
            return None
        if found.size is None:
            raise OSError("the Hub does not say how large it is")
        return entry(bucket, key, found.size, None)

    def listed(self, bucket: str, prefix: str, *, deep: bool) -> Iterator[dict[str, Any]]:
        """List in pages of a thousand."""
        place, below = repository_of(bucket), prefix.rstrip("/") or None
        wanted = {"revision": place.revision, "repo_type": place.type, "recursive": deep}
        try:
            with asked():
                found = _patiently(lambda: list(self.client.list_repo_tree(place.id, below, **wanted)))
        except FileNotFoundError:  # git has no empty folders
            return
        for one in found:
            if isinstance(one, RepoFile):
                yield entry(bucket, one.path, one.size, None)
            elif not deep:
                yield folder(bucket, one.path)

    def get(self, bucket: str, key: str, start: int | None, end: int | None) -> bytes:
        """Download, by way of the redirect to where large files lie."""
        whole = start is None and end is None
        headers = {**self.client._build_hf_headers(), "Accept-Encoding": "identity"}
        if not whole:
            headers["Range"] = f"bytes={start or 0}-{'' if end is None else end - 1}"
        with asked():
            try:
                response = _patiently(lambda: _got(self._url(bucket, key), headers))
            except HfHubHTTPError as beyond:
                if beyond.response.status_code != 416:
                    raise
                return b""
        return bytes(response.content if whole or response.status_code == 206 else response.content[start:end])

    def put(self, bucket: str, key: str, data: bytes, *, create: bool) -> None:
        """Refuse."""
        _refuse(bucket)

    def upload(self, bucket: str, key: str, source: Path, chunk: int, ahead: int) -> None:
        """Refuse."""
        _refuse(bucket)

    def remove(self, bucket: str, key: str) -> None:
        """Refuse."""
        _refuse(bucket)

    def rm(self, path: str, recursive: bool = False, **_: Any) -> None:
        """Refuse."""
        _refuse(self.split(path)[0])

    def _url(self, bucket: str, key: str) -> str:
        place = repository_of(bucket)
        revision = quote(place.revision or constants.DEFAULT_REVISION, safe="")
        return f"{self.client.endpoint}/{KINDS[place.type]}{place.id}/resolve/{revision}/{quote(key)}"


def repository_of(path: str) -> HfUri:
    """Return kind, name, revision and path of what `hf://` or the path behind it names.

    Raises:
        UsageError: it names no repository, or a bucket.
    """
    told = path.removeprefix("hf://").strip("/")
    advice = "give hf://datasets/USER/NAME, or hf://USER/NAME for that of a model"
    try:
        found = parse_hf_uri(f"hf://{told}")
    except HfUriError as wrong:
        raise UsageError(f"hf://{told} names no repository of the Hub: {advice}") from wrong
    if found.type not in KINDS:
        raise UsageError(f"hf://{told} is in no repository of datasets, models or spaces: {advice}")
    return found


@contextmanager
def explained() -> Iterator[None]:
    """Raise the Hub's errors as those of files, each with one line that says why."""
    try:
        yield
    except OfflineModeIsEnabled as offline:
        raise OSError("HF_HUB_OFFLINE is set, so the Hub is not asked: unset it") from offline
    except EntryNotFoundError as missing:
        raise FileNotFoundError(errno.ENOENT, "no such file") from missing
    except HfHubHTTPError as refused:
        raise _meant(refused) from refused
    except HTTPError as lost:
        raise OSError(
            f"the Hub cannot be reached ({reason(lost)}); check the network, and HF_ENDPOINT if it is set"
        ) from lost


@contextmanager
def asked() -> Iterator[None]:
    """Do so for one question, also if a setting cannot be put into a request or something else than the Hub answers."""
    try:
        with explained():
            yield
    except (OSError, BookwheelError):
        raise
    except Exception as wrong:  # the client parses addresses and answers as if all were well
        said = f"{type(wrong).__name__}: {' '.join(str(wrong).split())}"
        raise OSError(
            f"what answers is not the Hub ({said}); check the network, and HF_ENDPOINT and HF_TOKEN if they are set"
        ) from wrong


def _meant(error: HfHubHTTPError) -> OSError:
    status, token = error.response.status_code, get_token()
    if isinstance(error, GatedRepoError):
        return OSError("its owner asks readers to accept terms; accept them on its page, and set HF_TOKEN")
    if isinstance(error, RevisionNotFoundError):
        return OSError("the repository has no such revision; check what follows the @")
    if isinstance(error, RepositoryNotFoundError) or status == 401:
        why = "the token in HF_TOKEN does not open it" if token else "it is private and HF_TOKEN is not set"
        return OSError(f"there is no such repository, or {why}; check the name and the token")
    if status == 429:
        told = _reset(error)
        again = "later" if told is None else f"in {told} s"
        more = "" if token else "; with HF_TOKEN it is higher"
        return OSError(f"the Hub's limit of requests is reached: try again {again}{more}")
    return refusal(status, error.server_message or str(error))


def _got(url: str, headers: dict[str, str]) -> Any:
    response = get_session().get(url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
    hf_raise_for_status(response)
    return response


def _patiently(ask: Callable[[], T]) -> T:
    """Ask again while the answer may be another in a moment, or after the time that a limit of requests tells."""
    for number in range(1, _TRIES):
        try:
            return ask()
        except HTTPError as error:
            refused = error if isinstance(error, HfHubHTTPError) else None
            if refused is not None and refused.response.status_code not in _PASSING:
                raise
            told = None if refused is None else _reset(refused)
        wait = _PAUSE * 2 ** (number - 1) * random.uniform(0.5, 1) if told is None else told + random.random()
        if wait > _TOLD:
            _LOG.warning("the Hub's limit of requests is reached: waiting %d s", wait)
        time.sleep(wait)
    return ask()


def _reset(error: HfHubHTTPError) -> int | None:
    """Return the seconds until a limit that was reached is lifted, if the Hub says so."""
    limit = parse_ratelimit_headers(error.response.headers) if error.response.status_code == 429 else None
    return limit.reset_in_seconds if limit is not None and limit.remaining == 0 else None


def _refuse(bucket: str) -> Never:
    raise ReadOnlyError(
        f"hf://{bucket} can be read as a store, but not written: the Hub cannot create one file exclusively, so refs "
        "could not be moved safely; write to a store elsewhere, then `bookwheel export --layout store` to a new place"
    )
