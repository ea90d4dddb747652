"""Object stores as fsspec file systems that use the vendors' clients. No response is cached.

`Bucket` implements the fsspec methods that `Files` calls. These methods use seven abstract methods,
which a subclass for each cloud implements. An object store has no folders: a folder is a common
prefix of keys up to a slash. `find_cloud` chooses the subclass by the scheme of a URL.
"""

import errno
import os
import random
import re
from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from weakref import finalize

from fsspec import AbstractFileSystem

from rag_model.extras import require

MAX_TRIES = 7  # maximum attempts of a request, including the first
RETRIED_STATUSES = {429, 500, 502, 503, 504}
_PAUSE_SECONDS = 0.1  # pause before the first retry; it doubles for each retry, to 6 s in all
_DELETE_THREADS = 8
# query string of a URL in a message, which may contain a signature
_QUERY = re.compile(r"\?[^\s)'\"]+")
_ERROR_TYPES: dict[int, type[OSError]] = {
    401: PermissionError,
    403: PermissionError,
    404: FileNotFoundError,
}
# HTTP status -> error number; servers that do not support conditional writes send these statuses
_ERRNOS = {400: errno.EINVAL, 501: errno.ENOSYS}


class Bucket(AbstractFileSystem):  # type: ignore[misc]
    """A file system of the buckets (Azure: containers) that one set of credentials can access."""

    root_marker = ""

    def __init__(self, **kwargs: Any) -> None:
        """Create the vendor's client; no request is sent yet."""
        super().__init__(**kwargs)
        self._owner_pid, self._client = os.getpid(), self.connect()
        # At its exit, a forked child would close its parent's connections.
        finalize(self, self._client.close).atexit = False

    @property
    def client(self) -> Any:
        """The vendor's client of this process; a forked process creates its own."""
        if self._owner_pid != os.getpid():
            self._owner_pid, self._client = os.getpid(), self.connect()
        return self._client

    @abstractmethod
    def connect(self) -> Any:
        """Return a client for the endpoint and credentials in environment variables."""

    @abstractmethod
    def head(self, bucket: str, key: str) -> dict[str, Any] | None:
        """Return an object's entry (`build_file_entry`); None if there is no such object."""

    @abstractmethod
    def list_objects(self, bucket: str, prefix: str, *, deep: bool) -> Iterator[dict[str, Any]]:
        """Yield the objects whose keys begin with `prefix`.

        Unless `deep` is set, keys with a slash after the prefix are grouped as folders.
        """

    @abstractmethod
    def read_object(self, bucket: str, key: str, start: int | None, end: int | None) -> bytes:
        """Read the bytes [start, end) with one request; fewer if the object is shorter."""

    @abstractmethod
    def write_object(self, bucket: str, key: str, data: bytes, *, create: bool) -> None:
        """Write a whole object; with `create` the server rejects the request if the object exists.

        Raises:
            FileExistsError: the object exists.
        """

    @abstractmethod
    def upload(self, bucket: str, key: str, source: Path, chunk_bytes: int, n_ahead: int) -> None:
        """Upload a file in chunks of about `chunk_bytes` bytes, `n_ahead` of them at a time.

        The object appears complete or not at all.
        """

    @abstractmethod
    def delete_object(self, bucket: str, key: str) -> None:
        """Delete an object.

        Raises:
            FileNotFoundError: there is no such object.
        """

    def split(self, path: str) -> tuple[str, str]:
        """Return the bucket and the key that a path names."""
        bucket, _, key = path.partition("/")
        return bucket, key

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return the entry of one object; a folder is treated as missing."""
        bucket, key = self.split(path)
        object_entry = self.head(bucket, key) if key else None
        if object_entry is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", path)
        return object_entry

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """List the objects and folders in a folder; a missing folder has none."""
        bucket, key = self.split(path)
        object_entries = list(self.list_objects(bucket, f"{key}/" if key else "", deep=False))
        return object_entries if detail else [entry["name"] for entry in object_entries]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Return the bytes of an object or of a range."""
        return self.read_object(*self.split(path), start, end)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Write an object; with `mode="create"` only if it does not exist."""
        self.write_object(*self.split(path), value, create=mode == "create")

    def put_file(self, lpath: str, rpath: str, chunksize: int = 16 << 20, max_concurrency: int = 1, **_: Any) -> None:
        """Upload a local file."""
        self.upload(*self.split(rpath), Path(lpath), chunksize, max_concurrency)

    def rm_file(self, path: str) -> None:
        """Delete one object."""
        self.delete_object(*self.split(path))

    def rm(self, path: str, recursive: bool = False, **_: Any) -> None:
        """Delete an object and, if `recursive`, all objects below it."""
        bucket, key = self.split(path)
        keys_below = [entry["name"] for entry in self.list_objects(bucket, f"{key}/", deep=True)] if recursive else []
        paths = keys_below if self.head(bucket, key) is None else [*keys_below, path]
        if not paths:
            raise FileNotFoundError(errno.ENOENT, "no such object", path)
        with ThreadPoolExecutor(_DELETE_THREADS) as pool:
            list(pool.map(self._delete_if_present, paths))

    def _delete_if_present(self, path: str) -> None:
        try:
            self.rm_file(path)
        except FileNotFoundError:  # another process has deleted it
            return


def build_file_entry(bucket: str, key: str, size: int, modified_time: datetime | None) -> dict[str, Any]:
    """Return the entry of an object in the form that fsspec uses."""
    return {"name": f"{bucket}/{key}", "size": size, "type": "file", "last_modified": modified_time}


def build_folder_entry(bucket: str, prefix: str) -> dict[str, Any]:
    """Return the entry of a folder in the form that fsspec uses."""
    return {"name": f"{bucket}/{prefix.rstrip('/')}", "size": 0, "type": "directory"}


def choose_pause(n_retries: int) -> float:
    """Return the seconds to wait after a failure and `n_retries` failed retries; random, so that
    clients do not retry at the same time.
    """
    return float(_PAUSE_SECONDS * 2**n_retries * random.uniform(0.5, 1))


def create_status_error(status: int | None, message: str) -> OSError:
    """Return the `OSError` for an HTTP status; its message is one line without query strings.

    409 and 412 mean that the object exists: absence is the only condition that requests contain.
    """
    safe_text = _QUERY.sub("?…", " ".join(message.split()))
    if status in {409, 412}:
        return FileExistsError(safe_text)
    if status in _ERROR_TYPES:
        return _ERROR_TYPES[status](safe_text)
    return OSError(_ERRNOS[status], safe_text) if status in _ERRNOS else OSError(safe_text)


def create_listing_error(headers: Any) -> OSError:
    """Return the error for a list request whose reply, with these `headers`, is not a listing.

    Clients interpret a proxy's page or an empty body as an empty listing, from which `gc` would
    conclude that no snapshot needs any file.
    """
    content_type = headers.get("content-type") or "no content type"
    return OSError(
        f"the server replied to a list request without a listing ({content_type}): check the "
        "endpoint, and whether a proxy replies in its place"
    )


@dataclass(frozen=True, slots=True)
class Cloud:
    """One vendor's object store, or a compatible one; repositories of the Hub are read-only."""

    extra: str  # the extra of bookwheel that installs the client
    client: str  # the module of the vendor's client
    file_system: str  # `module:class` of the file system

    def connect(self) -> Any:
        """Return the file system; credentials and endpoint come from the environment.

        Raises:
            MissingExtraError: the client is not installed.
        """
        require(self.client, self.extra)
        module_name, _, class_name = self.file_system.partition(":")
        return getattr(require(module_name, self.extra), class_name)(use_listings_cache=False)


_S3 = Cloud("s3", "s3fs", "rag_model.store.objects.s3:S3")
_GCS = Cloud("gcs", "google.cloud.storage", "rag_model.store.objects.gcs:GCS")
_HUB = Cloud("hub", "huggingface_hub", "rag_model.store.objects.hub:Hub")
_AZURE = Cloud("azure", "azure.storage.blob", "rag_model.store.objects.azure:Azure")
CLOUDS = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GCS),
    **dict.fromkeys(("az", "abfs", "abfss"), _AZURE),
    "hf": _HUB,
}


def find_cloud(url: str) -> Cloud | None:
    """Return the cloud of a URL; None for a local disk and for other protocols of fsspec.

    >>> find_cloud("gs://bucket/library").extra
    'gcs'
    """
    scheme, separator, _ = url.partition("://")
    return CLOUDS.get(scheme) if separator else None
