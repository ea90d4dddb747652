"""Google Cloud Storage by its own client, which does the retries; a file is created with `ifGenerationMatch=0`."""

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

from rag_model.store.objects.buckets import Bucket, entry, folder, refusal

_RETRY = DEFAULT_RETRY.with_delay(initial=0.1, maximum=3.2, multiplier=2).with_timeout(12)  # seconds: 7 tries or so
_BINARY = "application/octet-stream"
_STEP = 256 << 10  # bytes; a chunk of an upload is a multiple
_FIELDS = "items(name,size,timeCreated),prefixes,nextPageToken"
_CREDENTIALS = "GOOGLE_APPLICATION_CREDENTIALS"


class GCS(Bucket):
    """The buckets that the environment's credentials reach; without credentials, those that are public."""

    protocol = ("gs", "gcs")

    def connect(self) -> Client:
        """Use the environment's credentials, or none.

        Raises:
            PermissionError: the named credentials cannot be read.
        """
        try:
            client = Client(project=None)
        except DefaultCredentialsError as missing:
            if os.environ.get(_CREDENTIALS):
                raise refusal(401, str(missing)) from missing
            client = Client.create_anonymous_client()
        client._bucket_metadata_cache = None  # it would look up the bucket's region in a thread, for traces
        return client

    def head(self, bucket: str, key: str) -> dict[str, Any] | None:
        """Get the object's metadata."""
        with _explained():
            found = self.client.bucket(bucket).get_blob(key, retry=_RETRY)
        return None if found is None else _described(bucket, found)

    def listed(self, bucket: str, prefix: str, *, deep: bool) -> Iterator[dict[str, Any]]:
        """List in pages of a thousand."""
        found = self.client.list_blobs(
            bucket, prefix=prefix, delimiter=None if deep else "/", fields=_FIELDS, retry=_RETRY
        )
        with _explained():
            yield from (_described(bucket, blob) for blob in found)
        yield from (folder(bucket, name) for name in sorted(found.prefixes))

    def get(self, bucket: str, key: str, start: int | None, end: int | None) -> bytes:
        """Download, with the checksum compared where the whole object is read."""
        last = None if end is None else end - 1
        with _explained():
            try:
                return bytes(self._blob(bucket, key).download_as_bytes(start=start, end=last, retry=_RETRY))
            except GoogleAPICallError as beyond:
                if beyond.code != 416:
                    raise
                return b""

    def put(self, bucket: str, key: str, data: bytes, *, create: bool) -> None:
        """Upload in one request."""
        match = 0 if create else None
        with _explained():
            self._blob(bucket, key).upload_from_string(data, _BINARY, if_generation_match=match, retry=_RETRY)

    def upload(self, bucket: str, key: str, source: Path, chunk: int, ahead: int) -> None:
        """Upload in one session, chunk after chunk: the service takes them in order, so `ahead` does not count."""
        del ahead
        blob = self.client.bucket(bucket).blob(key, chunk_size=-(-chunk // _STEP) * _STEP)
        with _explained():
            blob.upload_from_filename(str(source), _BINARY, retry=_RETRY)

    def remove(self, bucket: str, key: str) -> None:
        """Delete it."""
        with _explained():
            self._blob(bucket, key).delete(retry=_RETRY)

    def _blob(self, bucket: str, key: str) -> Blob:
        return self.client.bucket(bucket).blob(key)


def _described(bucket: str, blob: Blob) -> dict[str, Any]:
    return entry(bucket, blob.name, blob.size or 0, blob.time_created)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RetryError as given_up:
        raise _meant(given_up.cause or given_up) from given_up
    except (GoogleAPICallError, InvalidResponse, DataCorruption, GoogleAuthError, requests.RequestException) as error:
        raise _meant(error) from error


def _meant(error: BaseException) -> OSError:
    response = getattr(error, "response", None)
    if response is not None:
        return refusal(response.status_code, _said(error, response))
    refused = isinstance(error, GoogleAuthError) and not isinstance(error, TransportError)
    return refusal(401 if refused else None, str(error) or type(error).__name__)


def _said(error: BaseException, response: requests.Response) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return str(response.json()["error"]["message"])
    return str(error)
