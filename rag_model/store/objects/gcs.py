"""Google Cloud Storage through Google's client, which retries failed requests.

A file is created exclusively with `ifGenerationMatch=0`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import requests
from google.api_core.exceptions import GoogleAPICallError, RetryError
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError, TransportError
from google.cloud.storage import Blob, Client
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
from google.cloud.storage.retry import DEFAULT_RETRY

from rag_model.store.objects.buckets import (
    Bucket,
    build_file_entry,
    build_folder_entry,
    create_listing_error,
    create_status_error,
)

# times in seconds, which allow about seven attempts
_RETRY = DEFAULT_RETRY.with_delay(initial=0.1, maximum=3.2, multiplier=2).with_timeout(12)
_BINARY = "application/octet-stream"  # content type of all objects
_CHUNK_UNIT = 256 << 10  # the number of bytes of an upload's chunk must be a multiple of this
_LISTING = "storage#objects"  # value of `kind` in every listing, also in an empty one
_FIELDS = "kind,items(name,size,timeCreated),prefixes,nextPageToken"  # fields of a listing
_CREDENTIALS = "GOOGLE_APPLICATION_CREDENTIALS"


class GCS(Bucket):
    """The file system of the buckets that the environment's credentials can read, or of public
    buckets.
    """

    protocol = ("gs", "gcs")

    def connect(self) -> Client:
        """Create a client with the environment's credentials, or an anonymous one.

        Raises:
            PermissionError: the named credentials cannot be read.
        """
        try:
            client = Client(project=None)
        except DefaultCredentialsError as error:
            if os.environ.get(_CREDENTIALS):
                raise create_status_error(401, str(error)) from error
            client = Client.create_anonymous_client()
        # Otherwise the client looks up the bucket's region in a thread, for its traces.
        client._bucket_metadata_cache = None
        return client

    def head(self, bucket: str, key: str) -> dict[str, Any] | None:
        """Request the object's metadata."""
        with _translate_errors():
            blob = self.client.bucket(bucket).get_blob(key, retry=_RETRY)
        return None if blob is None else _to_entry(bucket, blob)

    def list_objects(self, bucket: str, prefix: str, *, deep: bool) -> Iterator[dict[str, Any]]:
        """List objects in pages of a thousand."""
        blobs = self.client.list_blobs(
            bucket, prefix=prefix, delimiter=None if deep else "/", fields=_FIELDS, retry=_RETRY
        )
        with _translate_errors():
            for page in _iter_pages(blobs):
                yield from (_to_entry(bucket, blob) for blob in page)
        yield from (build_folder_entry(bucket, name) for name in sorted(blobs.prefixes))

    def read_object(self, bucket: str, key: str, start: int | None, end: int | None) -> bytes:
        """Download an object or a range; the checksum of a whole object is verified."""
        last_byte = None if end is None else end - 1
        with _translate_errors():
            try:
                return bytes(self._get_blob(bucket, key).download_as_bytes(start=start, end=last_byte, retry=_RETRY))
            except GoogleAPICallError as error:
                if error.code != 416:
                    raise
                return b""

    def write_object(self, bucket: str, key: str, data: bytes, *, create: bool) -> None:
        """Upload the object in one request."""
        generation = 0 if create else None
        with _translate_errors():
            self._get_blob(bucket, key).upload_from_string(data, _BINARY, if_generation_match=generation, retry=_RETRY)

    def upload(self, bucket: str, key: str, source: Path, chunk_bytes: int, n_ahead: int) -> None:
        """Upload the chunks in order, as the service requires, ignoring `n_ahead`."""
        del n_ahead
        blob = self.client.bucket(bucket).blob(key, chunk_size=-(-chunk_bytes // _CHUNK_UNIT) * _CHUNK_UNIT)
        with _translate_errors():
            blob.upload_from_filename(str(source), _BINARY, retry=_RETRY)

    def delete_object(self, bucket: str, key: str) -> None:
        """Delete the object."""
        with _translate_errors():
            self._get_blob(bucket, key).delete(retry=_RETRY)

    def _get_blob(self, bucket: str, key: str) -> Blob:
        return self.client.bucket(bucket).blob(key)


def _to_entry(bucket: str, blob: Blob) -> dict[str, Any]:
    return build_file_entry(bucket, blob.name, blob.size or 0, blob.time_created)


def _iter_pages(blobs: Any) -> Iterator[Any]:
    """Yield the pages of a listing.

    Raises:
        OSError: the server's reply is not a listing.
    """
    try:
        for page in blobs.pages:
            if page.raw_page.get("kind") != _LISTING:
                raise create_listing_error({"content-type": "JSON"})
            yield page
    except requests.exceptions.JSONDecodeError as error:
        raise create_listing_error({"content-type": "not JSON"}) from error
    except AttributeError as error:  # the client expects a JSON object
        raise create_listing_error({"content-type": "not a JSON object"}) from error


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except RetryError as error:
        raise _to_os_error(error.cause or error) from error
    except (
        GoogleAPICallError,
        InvalidResponse,
        DataCorruption,
        GoogleAuthError,
        requests.RequestException,
    ) as error:
        raise _to_os_error(error) from error


def _to_os_error(error: BaseException) -> OSError:
    response = getattr(error, "response", None)
    if response is not None:
        return create_status_error(response.status_code, _get_server_message(error, response))
    is_denied = isinstance(error, GoogleAuthError) and not isinstance(error, TransportError)
    return create_status_error(401 if is_denied else None, str(error) or type(error).__name__)


def _get_server_message(error: BaseException, response: requests.Response) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return str(response.json()["error"]["message"])
    return str(error)
