"""S3 through s3fs; only this module retries requests.

botocore retries a request, but not an incomplete response. s3fs retries responses too, but not for
every transient status. It also repeats requests that botocore has given up, so that a request is
tried 25 times and a read 125 times. So botocore and s3fs are set to try once, and this module
retries.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiohttp
import botocore.exceptions  # type: ignore[import-untyped]
from botocore.parsers import ResponseParserError  # type: ignore[import-untyped]
from s3fs import S3FileSystem

from rag_model.store.objects.buckets import MAX_TRIES, RETRIED_STATUSES, choose_pause, create_listing_error
from rag_model.store.objects.files import MAX_REQUESTS

_RETRIED_CODES = {
    "ConditionalRequestConflict",  # another conditional write of the same key is in progress
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "XAmzContentSHA256Mismatch",  # the body was damaged in transit
}
_CONNECTION_ERRORS = (
    aiohttp.ClientError,
    botocore.exceptions.ConnectionError,
    botocore.exceptions.HTTPClientError,
    ResponseParserError,  # raised if the reply is an error page instead of XML
    TimeoutError,
)
_Response = TypeVar("_Response")


class S3(S3FileSystem):  # type: ignore[misc]
    """An `S3FileSystem` that tries each request and the read of its response up to seven times."""

    retries = 1  # disables the retries of s3fs
    errors = (botocore.exceptions.BotoCoreError, aiohttp.ClientError)  # not subclasses of `OSError`

    def __init__(self, *args: Any, config_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        config = {
            "max_pool_connections": MAX_REQUESTS,
            **(config_kwargs or {}),
            "retries": {"total_max_attempts": 1},
        }
        super().__init__(*args, config_kwargs=config, **kwargs)

    async def set_session(self, refresh: bool = False, kwargs: Any = None) -> Any:
        """Create the client, which checks that the reply to a list request is a listing."""
        client = await super().set_session(refresh, kwargs or {})
        client.meta.events.register("after-call.s3.ListObjectsV2", _check_listing, unique_id="bookwheel-listing")
        return client

    async def _call_s3(self, method: str, *args: Any, **kwargs: Any) -> Any:
        call_s3 = super()._call_s3
        return await _retry(lambda: call_s3(method, *args, **kwargs))

    async def _cat_file(
        self,
        path: str,
        version_id: str | None = None,
        start: int | None = None,
        end: int | None = None,
        **_: Any,
    ) -> Any:
        """Read a file or a range with one request; s3fs would send several."""
        read = super()._cat_file
        return await _retry(lambda: read(path, version_id, start=start, end=end, max_concurrency=1))


def _check_listing(http_response: Any, parsed: dict[str, Any], **_: Any) -> None:
    """Raise an error for a reply that is not a `ListBucketResult`, which always has
    `IsTruncated`.
    """
    if http_response.status_code == 200 and "IsTruncated" not in parsed:
        raise create_listing_error(http_response.headers)


async def _retry(attempt: Callable[[], Awaitable[_Response]]) -> _Response:
    """Retry transient errors, unless an inner call has already retried the error."""
    for n_retries in range(MAX_TRIES - 1):
        try:
            return await attempt()
        except Exception as error:
            if getattr(error, "given_up", False) or not _is_transient(error):
                raise
        await asyncio.sleep(choose_pause(n_retries))
    try:
        return await attempt()
    except Exception as error:
        error.given_up = True  # type: ignore[attr-defined]
        raise


def _is_transient(error: Exception) -> bool:
    """Return whether an error is transient, so that the same request may succeed later."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status in RETRIED_STATUSES or response.get("Error", {}).get("Code") in _RETRIED_CODES
    return isinstance(error, _CONNECTION_ERRORS) and not isinstance(error, botocore.exceptions.SSLError)
