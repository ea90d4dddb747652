"""Repositories of the Hugging Face Hub: read one as a store, or export a folder as one commit.

URLs are `hf://datasets/USER/NAME@REVISION/FOLDER`. The Hub cannot create a single file exclusively,
so refs could not be moved safely: a store there is read-only, and `bookwheel export --layout store`
writes a whole store as one commit (`open_commit`). The file system of huggingface_hub caches
listings and sends three requests for one read, so this module uses its client, which sends one
request for each operation.
"""

import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Never, TypeVar
from urllib.parse import quote

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
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
from huggingface_hub.utils import (
    HfUri,
    get_session,
    hf_raise_for_status,
    parse_hf_uri,
    parse_ratelimit_headers,
)
from huggingface_hub.utils.logging import get_logger

from rag_model.errors import BookwheelError, ReadOnlyError, StoreError, UsageError, format_error
from rag_model.process import temporary_folder
from rag_model.store.objects.buckets import (
    MAX_TRIES,
    RETRIED_STATUSES,
    Bucket,
    build_file_entry,
    build_folder_entry,
    choose_pause,
    create_status_error,
)

T = TypeVar("T")
# prefixes of the URLs of repositories, by kind
URL_PREFIXES = {"dataset": "datasets/", "model": "", "space": "spaces/"}
_LOGGED_SECONDS = 5.0  # a longer wait is logged
# a child of the logger of huggingface_hub, which writes to standard error
_LOG = get_logger("huggingface_hub.bookwheel")
_HUB_FILES = {".gitattributes"}  # files that the Hub creates in a new repository
# HTTP statuses of replies if another writer has created the repository or committed to it
_CONFLICT_STATUSES = {409, 412}


class HubApi(HfApi):  # type: ignore[misc]
    """The client of the Hub that `HF_ENDPOINT` and `HF_TOKEN` name."""

    def __init__(self) -> None:
        """Create the client; no request is sent yet."""
        super().__init__(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="bookwheel")

    def close(self) -> None:
        """Leave the connections open, because all users of huggingface_hub in this process share
        them.
        """


class Hub(Bucket):
    """The file system of the repositories that the environment's token can read, or of public
    repositories.
    """

    protocol = "hf"

    def connect(self) -> HubApi:
        """Use the environment's endpoint and token."""
        return HubApi()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """Return the path after `hf://`, which begins with the repository.

        Raises:
            UsageError: the path names no repository.
        """
        stripped_path = super()._strip_protocol(path)
        parse_repository(stripped_path)
        return stripped_path

    def split(self, path: str) -> tuple[str, str]:
        """Return the repository with its revision, and the path in it."""
        key = parse_repository(path).path_in_repo
        return path.removesuffix(key).rstrip("/"), key

    def head(self, bucket: str, key: str) -> dict[str, Any] | None:
        """Request the headers of the file."""
        try:
            with guard_request():
                metadata = _retry(lambda: self.client.get_hf_file_metadata(url=self._build_url(bucket, key)))
        except FileNotFoundError:
            return None
        if metadata.size is None:
            raise OSError("the Hub did not send the size of the file")
        return build_file_entry(bucket, key, metadata.size, None)

    def list_objects(self, bucket: str, prefix: str, *, deep: bool) -> Iterator[dict[str, Any]]:
        """List files in pages of a thousand."""
        # `HfApi.list_repo_tree` would wait for a reply without a limit.
        repository, headers, tree_items = parse_repository(bucket), self.client._build_hf_headers(), list[Any]()
        revision = quote(repository.revision or constants.DEFAULT_REVISION, safe="")
        tree_url = f"{self.client.endpoint}/api/{repository.type}s/{repository.id}/tree/{revision}"
        folder_path = f"/{quote(prefix.rstrip('/'), safe='')}" if prefix else ""
        page_url: str | None = f"{tree_url}{folder_path}?recursive={str(deep).lower()}"
        try:
            with guard_request():
                while page_url is not None:
                    response = _retry(partial(_http_get, page_url, headers))
                    tree_items += ((item["type"], item["path"], item["size"]) for item in response.json())
                    page_url = response.links.get("next", {}).get("url")
        except FileNotFoundError:  # git has no empty folders
            return
        for kind, path, size in tree_items:
            if kind == "file":
                yield build_file_entry(bucket, path, size, None)
            elif not deep:
                yield build_folder_entry(bucket, path)

    def read_object(self, bucket: str, key: str, start: int | None, end: int | None) -> bytes:
        """Download a file or a range; large files are read from the address to which the Hub
        redirects.
        """
        is_whole = start is None and end is None
        headers = {**self.client._build_hf_headers(), "Accept-Encoding": "identity"}
        if not is_whole:
            headers["Range"] = f"bytes={start or 0}-{'' if end is None else end - 1}"
        with guard_request():
            try:
                response = _retry(lambda: _http_get(self._build_url(bucket, key), headers))
            except HfHubHTTPError as error:
                if error.response.status_code != 416:
                    raise
                return b""
        return bytes(response.content if is_whole or response.status_code == 206 else response.content[start:end])

    def write_object(self, bucket: str, key: str, data: bytes, *, create: bool) -> None:
        """Raise `ReadOnlyError`."""
        _refuse_write(bucket)

    def upload(self, bucket: str, key: str, source: Path, chunk_bytes: int, n_ahead: int) -> None:
        """Raise `ReadOnlyError`."""
        _refuse_write(bucket)

    def delete_object(self, bucket: str, key: str) -> None:
        """Raise `ReadOnlyError`."""
        _refuse_write(bucket)

    def rm(self, path: str, recursive: bool = False, **_: Any) -> None:
        """Raise `ReadOnlyError`."""
        _refuse_write(self.split(path)[0])

    def _build_url(self, bucket: str, key: str) -> str:
        repository = parse_repository(bucket)
        revision = quote(repository.revision or constants.DEFAULT_REVISION, safe="")
        return f"{self.client.endpoint}/{URL_PREFIXES[repository.type]}{repository.id}/resolve/{revision}/{quote(key)}"


def parse_repository(path: str) -> HfUri:
    """Parse a URL, with or without `hf://`, into repository kind, name, revision and path.

    Raises:
        UsageError: the URL names no repository, or names a bucket instead of one.
    """
    hub_path = path.removeprefix("hf://").strip("/")
    advice = "give hf://datasets/USER/NAME, or hf://USER/NAME for the repository of a model"
    try:
        repository = parse_hf_uri(f"hf://{hub_path}")
    except HfUriError as error:
        raise UsageError(f"hf://{hub_path} names no repository of the Hub: {advice}") from error
    if repository.type not in URL_PREFIXES:
        raise UsageError(f"hf://{hub_path} is in no repository of datasets, models or spaces: {advice}")
    return repository


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raise each error of the Hub as an `OSError` with a one-line message."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise OSError("HF_HUB_OFFLINE is set, so no request is sent to the Hub: unset it") from error
    except EntryNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "no such file") from error
    except HfHubHTTPError as error:
        raise _to_os_error(error) from error
    except HTTPError as error:
        raise OSError(
            f"the Hub cannot be reached ({format_error(error)}); check the network, and HF_ENDPOINT if it is set"
        ) from error


@contextmanager
def guard_request() -> Iterator[None]:
    """Translate the errors of one request, including those that invalid settings or replies of
    other servers cause.
    """
    try:
        with translate_errors():
            yield
    except (OSError, BookwheelError):
        raise
    except Exception as error:  # the client parses addresses and replies without checks
        description = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise OSError(
            f"the reply is not from the Hub ({description}); check the network, and HF_ENDPOINT "
            "and HF_TOKEN if they are set"
        ) from error


def _to_os_error(error: HfHubHTTPError) -> OSError:
    status, token = error.response.status_code, get_token()
    if isinstance(error, GatedRepoError):
        return OSError(
            "its owner requires readers to accept terms; accept them on the repository's page, and set HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return OSError("the repository has no such revision; check the revision after the @")
    if isinstance(error, RepositoryNotFoundError) or status == 401:
        reason = "the token in HF_TOKEN does not open it" if token else "it is private and HF_TOKEN is not set"
        return OSError(f"there is no such repository, or {reason}; check the name and the token")
    if status == 429:
        reset_seconds = _get_seconds_until_reset(error)
        retry_text = "later" if reset_seconds is None else f"in {reset_seconds} s"
        hint = "" if token else "; with HF_TOKEN it is higher"
        return OSError(f"the Hub's limit of requests is reached: try again {retry_text}{hint}")
    return create_status_error(status, error.server_message or str(error))


def _http_get(url: str, headers: dict[str, str]) -> Any:
    response = get_session().get(url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
    hf_raise_for_status(response)
    return response


def _retry(request: Callable[[], T]) -> T:
    """Send a request, and repeat it after transient errors; after a rate limit, wait as long as the
    Hub requests.
    """
    for n_retries in range(MAX_TRIES - 1):
        try:
            return request()
        except HTTPError as error:
            hub_error = error if isinstance(error, HfHubHTTPError) else None
            if hub_error is not None and hub_error.response.status_code not in RETRIED_STATUSES:
                raise
            reset_seconds = None if hub_error is None else _get_seconds_until_reset(hub_error)
        wait_seconds = choose_pause(n_retries) if reset_seconds is None else reset_seconds + random.random()
        if wait_seconds > _LOGGED_SECONDS:
            _LOG.warning("the Hub's limit of requests is reached: waiting %d s", wait_seconds)
        time.sleep(wait_seconds)
    return request()


def _get_seconds_until_reset(error: HfHubHTTPError) -> int | None:
    """Return the seconds until the rate limit is reset; None if the reply does not state them."""
    limit = parse_ratelimit_headers(error.response.headers) if error.response.status_code == 429 else None
    return limit.reset_in_seconds if limit is not None and limit.remaining == 0 else None


def _refuse_write(bucket: str) -> Never:
    raise ReadOnlyError(
        f"hf://{bucket} can be read as a store, but not written: the Hub cannot create one file "
        "exclusively, so refs could not be moved safely; write to a store elsewhere, then "
        "`bookwheel export --layout store` to a new place"
    )


@contextmanager
def open_commit(url: str, kind: str, summary: str) -> Iterator[Path]:
    """Yield a new local folder; when the block succeeds, commit its files below `url`.

    Readers see the commit completely or not at all. The commit names its parent, so of two writers
    that saw the same empty folder one is rejected. A missing repository is created as a private
    one. `kind` is the required kind of repository: `dataset` or `model`. `summary` is the message
    of the commit.

    Raises:
        StoreError: the Hub cannot be reached, or the token has no write permission; nothing was
            committed.
        UsageError: the folder of the repository is not empty, or the repository has another kind.
    """
    repository, api = parse_repository(url), HubApi()
    if repository.type != kind:
        raise UsageError(f"{url} is in a repository of {repository.type}s: give hf://{URL_PREFIXES[kind]}USER/NAME")
    _check_folder_name(repository, url)
    with _translate_commit_errors(url), guard_request():
        parent_commit = _find_parent_commit(api, repository, url)
    with temporary_folder("upload") as folder:
        yield folder
        with _translate_commit_errors(url):
            _send_commit(
                api,
                repository,
                folder,
                parent_commit or _create_repository(api, repository),
                summary,
            )


@contextmanager
def _translate_commit_errors(url: str) -> Iterator[None]:
    try:
        with translate_errors():
            yield
    except OSError as error:
        status = getattr(getattr(error.__cause__, "response", None), "status_code", None)
        if status in _CONFLICT_STATUSES:
            raise StoreError(f"{url} was changed by another writer meanwhile: inspect it, and export again") from error
        error_prefix = (
            "cannot write to" if not isinstance(error, PermissionError) else "the token in HF_TOKEN cannot write to"
        )
        raise StoreError(f"{error_prefix} {url}: {error}") from error
    except (RuntimeError, ValueError) as error:
        # The upload of a file, or the check of the card's metadata, has failed.
        raise StoreError(f"cannot write to {url}: {format_error(error.__cause__ or error)}; export again") from error


def _check_folder_name(repository: HfUri, url: str) -> None:
    try:
        CommitOperationAdd(f"{repository.path_in_repo}/README.md", b"")
    except ValueError as error:
        raise UsageError(f"files cannot be written to {url}: the Hub accepts no folder .., .git or .cache") from error


def _find_parent_commit(api: HubApi, repository: HfUri, url: str) -> str | None:
    """Check that the folder is empty; return the newest commit of its repository, or None if there
    is no repository.
    """
    if get_token() is None:
        raise StoreError(f"cannot write to {url}: HF_TOKEN is not set; set it to a token with write permission")
    options = {"repo_type": repository.type, "revision": repository.revision}
    try:
        parent_commit = api.repo_info(repository.id, **options).sha
    except RepositoryNotFoundError:
        if repository.revision:
            raise
        return None
    api.auth_check(repository.id, repo_type=repository.type, write=True)
    if repository.path_in_repo:
        is_occupied = bool(api.get_paths_info(repository.id, repository.path_in_repo, **options))
    else:
        is_occupied = any(item.path not in _HUB_FILES for item in api.list_repo_tree(repository.id, **options))
    if is_occupied:
        raise UsageError(f"{url} is not empty: give a new repository, or a new folder in this one")
    return str(parent_commit)


def _create_repository(api: HubApi, repository: HfUri) -> str:
    api.create_repo(repository.id, repo_type=repository.type, private=True)
    return str(api.repo_info(repository.id, repo_type=repository.type).sha)


def _send_commit(api: HubApi, repository: HfUri, folder: Path, parent: str, summary: str) -> None:
    path_prefix = f"{repository.path_in_repo}/" if repository.path_in_repo else ""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    additions = [CommitOperationAdd(f"{path_prefix}{path.relative_to(folder).as_posix()}", path) for path in files]
    options = {"repo_type": repository.type, "revision": repository.revision}
    # `create_commit` alone would not upload files that a .gitignore of the repository names.
    api.preupload_lfs_files(repository.id, additions, gitignore_content="", free_memory=False, **options)
    api.create_commit(repository.id, additions, commit_message=summary, parent_commit=parent, **options)
