"""Azure Blob Storage by its own client, which does the retries; a file is created with `If-None-Match: *`."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from azure.core.exceptions import AzureError, HttpResponseError
from azure.storage.blob import BlobClient, BlobPrefix, BlobProperties, BlobServiceClient, ExponentialRetry

from rag_model.errors import UsageError
from rag_model.store.objects.buckets import Bucket, entry, folder, refusal

_TRIES = 7
_PAUSE = 0.1  # seconds before the second try, doubled for each further one: 6 s in all
_BLOCK = 16 << 20  # bytes; a blob has at most 50,000 blocks, so 840 GB
_WHOLE = 8 << 20  # bytes; a larger upload goes in blocks
_RANGE = 256 << 20  # bytes; a larger read takes more than one request


class Azure(Bucket):
    """The containers of the storage account that the environment names."""

    protocol = ("az", "abfs", "abfss")

    def connect(self) -> BlobServiceClient:
        """Use the environment's account and its key, or the login of this machine.

        Raises:
            UsageError: the environment names no account, or its settings cannot be read.
        """
        sizes = {"max_block_size": _BLOCK, "max_single_put_size": _WHOLE}
        reads = {"max_single_get_size": _RANGE, "max_chunk_get_size": _RANGE}
        options: dict[str, Any] = {**sizes, **reads, "retry_policy": _Patience()}
        try:
            if whole := _setting("CONNECTION_STRING"):
                return BlobServiceClient.from_connection_string(whole, **options)
            address = f"https://{_account()}.blob.core.windows.net"
            return BlobServiceClient(address, _setting("ACCOUNT_KEY") or _setting("SAS_TOKEN") or _login(), **options)
        except ValueError as wrong:
            raise UsageError(
                f"Azure's settings cannot be read ({wrong}): check AZURE_STORAGE_CONNECTION_STRING, or "
                "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
            ) from wrong

    def head(self, bucket: str, key: str) -> dict[str, Any] | None:
        """Get the blob's properties."""
        try:
            with _explained():
                return _described(bucket, self._blob(bucket, key).get_blob_properties())
        except FileNotFoundError:
            return None

    def listed(self, bucket: str, prefix: str, *, deep: bool) -> Iterator[dict[str, Any]]:
        """List in pages of 5,000."""
        container = self.client.get_container_client(bucket)
        with _explained():
            for found in container.list_blobs(prefix) if deep else container.walk_blobs(prefix):
                yield folder(bucket, found.name) if isinstance(found, BlobPrefix) else _described(bucket, found)

    def get(self, bucket: str, key: str, start: int | None, end: int | None) -> bytes:
        """Download."""
        length = None if end is None else end - (start or 0)
        with _explained():
            try:
                return bytes(self._blob(bucket, key).download_blob(start or 0 if length else start, length).readall())
            except HttpResponseError as beyond:
                if beyond.status_code != 416:
                    raise
                return b""

    def put(self, bucket: str, key: str, data: bytes, *, create: bool) -> None:
        """Upload in one request, a large one in blocks that count together."""
        with _explained():
            self._blob(bucket, key).upload_blob(data, overwrite=not create)

    def upload(self, bucket: str, key: str, source: Path, chunk: int, ahead: int) -> None:
        """Upload in blocks of 16 MiB, whatever `chunk` is; they become the blob in one last request."""
        del chunk
        with _explained(), source.open("rb") as file:
            self._blob(bucket, key).upload_blob(file, overwrite=True, max_concurrency=ahead)

    def remove(self, bucket: str, key: str) -> None:
        """Delete it."""
        with _explained():
            self._blob(bucket, key).delete_blob()

    def _blob(self, bucket: str, key: str) -> BlobClient:
        return self.client.get_blob_client(bucket, key)


class _Patience(ExponentialRetry):  # type: ignore[misc]
    """Seven tries within about six seconds, of every request that may succeed in a moment."""

    def __init__(self) -> None:
        again = _TRIES - 1
        super().__init__(retry_total=again, retry_connect=again, retry_read=again, retry_status=again)

    def get_backoff_time(self, settings: dict[str, Any]) -> float:
        """Return the seconds before try `count + 2`; clients spread out."""
        return float(_PAUSE * 2 ** settings["count"] * random.uniform(0.5, 1))


def _account() -> str:
    named = _setting("ACCOUNT_NAME")
    if named is None:
        raise UsageError(
            "no Azure storage account is named: set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or "
            "AZURE_STORAGE_CONNECTION_STRING"
        )
    return named


def _login() -> Any:
    """Return the credentials of the machine, of the environment or of `az login`, in azure-identity's own order."""
    from azure.identity import DefaultAzureCredential  # noqa: PLC0415 - takes half a second, and a key needs none of it

    return DefaultAzureCredential()


def _setting(name: str) -> str | None:
    return os.environ.get(f"AZURE_STORAGE_{name}") or None


def _described(bucket: str, blob: BlobProperties) -> dict[str, Any]:
    return entry(bucket, blob.name, blob.size, blob.last_modified)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except HttpResponseError as error:
        code = getattr(error, "error_code", None) or ""  # of the service, such as AuthenticationFailed
        raise refusal(error.status_code, f"{error.message.partition(chr(10))[0]} {code}") from error
    except AzureError as error:
        raise refusal(None, error.message) from error
