"""S3 by way of s3fs, with every retry in this one layer.

botocore alone would retry a request, but not a response that breaks off in the middle. s3fs alone would retry
responses too, but not every status that means "later", and it would repeat what botocore had given up on:
25 tries of one request, 125 of a read. So both are told to try once, and this module does the retries.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiohttp
import botocore.exceptions  # type: ignore[import-untyped]
from botocore.parsers import ResponseParserError  # type: ignore[import-untyped]
from s3fs import S3FileSystem

from rag_model.store.objects.ranges import ASKED

_TRIES = 7
_PAUSE = 0.1  # seconds before the second try, doubled for each further one: 6 s in all
_PASSING_STATUS = {429, 500, 502, 503, 504}
_PASSING_CODES = {
    "ConditionalRequestConflict",  # another conditional write of the same key is under way
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "XAmzContentSHA256Mismatch",  # the body was damaged in transit
}
_BROKEN_LINE = (
    aiohttp.ClientError,
    botocore.exceptions.ConnectionError,
    botocore.exceptions.HTTPClientError,
    ResponseParserError,  # an error page in place of XML
    TimeoutError,
)
_Answer = TypeVar("_Answer")


class S3(S3FileSystem):  # type: ignore[misc]
    """An `S3FileSystem` that tries each request, with the body of its response, up to seven times."""

    retries = 1  # s3fs's own
    errors = (botocore.exceptions.BotoCoreError, aiohttp.ClientError)  # those that are no `OSError`

    def __init__(self, *args: Any, config_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        once = {"max_pool_connections": ASKED, **(config_kwargs or {}), "retries": {"total_max_attempts": 1}}
        super().__init__(*args, config_kwargs=once, **kwargs)

    async def _call_s3(self, method: str, *args: Any, **kwargs: Any) -> Any:
        call = super()._call_s3
        return await _patiently(lambda: call(method, *args, **kwargs))

    async def _cat_file(
        self, path: str, version_id: str | None = None, start: int | None = None, end: int | None = None, **_: Any
    ) -> Any:
        """Read a file or a range in one request; s3fs would request the size first and then read in smaller pieces."""
        read = super()._cat_file
        return await _patiently(lambda: read(path, version_id, start=start, end=end, max_concurrency=1))


async def _patiently(attempt: Callable[[], Awaitable[_Answer]]) -> _Answer:
    """Try until it succeeds or cannot; an error that an inner call gave up on is not tried again."""
    for number in range(_TRIES - 1):
        try:
            return await attempt()
        except Exception as error:
            if getattr(error, "given_up", False) or not _passes(error):
                raise
        await asyncio.sleep(_PAUSE * 2**number * random.uniform(0.5, 1))  # clients spread out
    try:
        return await attempt()
    except Exception as error:
        error.given_up = True  # type: ignore[attr-defined]
        raise


def _passes(error: Exception) -> bool:
    """Whether the same request may succeed in a moment."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status in _PASSING_STATUS or response.get("Error", {}).get("Code") in _PASSING_CODES
    return isinstance(error, _BROKEN_LINE) and not isinstance(error, botocore.exceptions.SSLError)
