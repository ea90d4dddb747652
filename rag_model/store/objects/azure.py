"""Azure Blob Storage through Microsoft's client, which retries failed requests.

A file is created exclusively with `If-None-Match: *`.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from azure.core.exceptions import AzureError, HttpResponseError
from azure.storage.blob import (
    BlobClient,
    BlobPrefix,
    BlobProperties,
    BlobServiceClient,
    ExponentialRetry,
)

from rag_model.errors import UsageError
from rag_model.store.objects.buckets import (
    MAX_TRIES,
    Bucket,
    build_file_entry,
    build_folder_entry,
    choose_pause,
    create_listing_error,
    create_status_error,
)

# The root element of every listing.
_LISTING = re.compile(rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*\?>)?\s*<EnumerationResults\b")
_BLOCK_BYTES = 16 << 20  # bytes of a block; a blob has at most 50,000 blocks, which is 840 GB
# maximum bytes that one request uploads; larger files are sent in blocks
_SINGLE_UPLOAD_BYTES = 8 << 20
_SINGLE_READ_BYTES = 256 << 20  # maximum bytes that one request reads


class Azure(Bucket):
    """The file system of the storage account that environment variables name; its buckets are
    containers.
    """

    protocol = ("az", "abfs", "abfss")

    def connect(self) -> BlobServiceClient:
        """Create a client for the environment's account, with its key or this machine's login.

        Raises:
            UsageError: the environment names no account, or its settings cannot be read.
        """
        write_sizes = {"max_block_size": _BLOCK_BYTES, "max_single_put_size": _SINGLE_UPLOAD_BYTES}
        read_sizes = {"max_single_get_size": _SINGLE_READ_BYTES, "max_chunk_get_size": _SINGLE_READ_BYTES}
        options: dict[str, Any] = {**write_sizes, **read_sizes, "retry_policy": _RetryPolicy()}
        try:
            if connection_string := _get_setting("CONNECTION_STRING"):
                return BlobServiceClient.from_connection_string(connection_string, **options)
            account_url = f"https://{_get_account_name()}.blob.core.windows.net"
            return BlobServiceClient(
                account_url,
                _get_setting("ACCOUNT_KEY") or _get_setting("SAS_TOKEN") or _create_credential(),
                **options,
            )
        except ValueError as error:
            raise UsageError(
                f"Azure's settings cannot be read ({error}): check "
                "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and "
                "AZURE_STORAGE_ACCOUNT_KEY"
            ) from error

    def head(self, bucket: str, key: str) -> dict[str, Any] | None:
        """Request the blob's properties."""
        try:
            with _translate_errors():
                return _to_entry(bucket, self._get_blob_client(bucket, key).get_blob_properties())
        except FileNotFoundError:
            return None

    def list_objects(self, bucket: str, prefix: str, *, deep: bool) -> Iterator[dict[str, Any]]:
        """List blobs in pages of 5,000."""
        container = self.client.get_container_client(bucket)
        list_blobs = container.list_blobs if deep else container.walk_blobs
        with _translate_errors():
            for item in list_blobs(prefix, raw_response_hook=_check_listing):
                is_folder = isinstance(item, BlobPrefix)
                yield build_folder_entry(bucket, item.name) if is_folder else _to_entry(bucket, item)

    def read_object(self, bucket: str, key: str, start: int | None, end: int | None) -> bytes:
        """Download a blob or a range of its bytes."""
        length = None if end is None else end - (start or 0)
        with _translate_errors():
            try:
                return bytes(
                    self._get_blob_client(bucket, key).download_blob(start or 0 if length else start, length).readall()
                )
            except HttpResponseError as error:
                if error.status_code != 416:
                    raise
                return b""

    def write_object(self, bucket: str, key: str, data: bytes, *, create: bool) -> None:
        """Upload by one request; a large blob is sent in blocks, which the last request commits."""
        with _translate_errors():
            self._get_blob_client(bucket, key).upload_blob(data, overwrite=not create)

    def upload(self, bucket: str, key: str, source: Path, chunk_bytes: int, n_ahead: int) -> None:
        """Upload in blocks of 16 MiB, ignoring `chunk_bytes`; the last request commits them."""
        del chunk_bytes
        with _translate_errors(), source.open("rb") as file:
            self._get_blob_client(bucket, key).upload_blob(file, overwrite=True, max_concurrency=n_ahead)

    def delete_object(self, bucket: str, key: str) -> None:
        """Delete the blob."""
        with _translate_errors():
            self._get_blob_client(bucket, key).delete_blob()

    def _get_blob_client(self, bucket: str, key: str) -> BlobClient:
        return self.client.get_blob_client(bucket, key)


class _RetryPolicy(ExponentialRetry):  # type: ignore[misc]
    """Try a request up to seven times within about six seconds if its error is transient."""

    def __init__(self) -> None:
        retries = MAX_TRIES - 1
        super().__init__(retry_total=retries, retry_connect=retries, retry_read=retries, retry_status=retries)

    def get_backoff_time(self, settings: dict[str, Any]) -> float:
        """Return the seconds to wait before the next try."""
        return choose_pause(settings["count"])


def _check_listing(response: Any) -> None:
    """Raise an error for a reply that is not the XML of a listing."""
    http_reply = response.http_response
    if http_reply.status_code == 200 and not _LISTING.match(http_reply.body()):
        raise create_listing_error(http_reply.headers)


def _get_account_name() -> str:
    account_name = _get_setting("ACCOUNT_NAME")
    if account_name is None:
        raise UsageError(
            "no Azure storage account is named: set AZURE_STORAGE_ACCOUNT_NAME and "
            "AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_CONNECTION_STRING"
        )
    return account_name


def _create_credential() -> Any:
    """Return the credentials that azure-identity finds in the environment, on the machine or from
    `az login`.
    """
    # Imported here because it takes half a second, and an account key does not need it.
    from azure.identity import DefaultAzureCredential  # noqa: PLC0415

    return DefaultAzureCredential()


def _get_setting(name: str) -> str | None:
    return os.environ.get(f"AZURE_STORAGE_{name}") or None


def _to_entry(bucket: str, blob: BlobProperties) -> dict[str, Any]:
    return build_file_entry(bucket, blob.name, blob.size, blob.last_modified)


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except HttpResponseError as error:
        error_code = getattr(error, "error_code", None) or ""  # such as AuthenticationFailed
        raise create_status_error(error.status_code, f"{error.message.partition(chr(10))[0]} {error_code}") from error
    except AzureError as error:
        raise create_status_error(None, error.message) from error
