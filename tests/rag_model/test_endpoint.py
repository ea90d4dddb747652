"""`Retry-After` is parsed, and the thread that sends requests can be closed from any thread."""

import asyncio
from datetime import UTC, datetime

import pytest

from rag_model.endpoint import EventLoopThread
from rag_model.http_client import parse_retry_after

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("12", 12.0),
        ("Thu, 01 Jan 2026 12:00:30 GMT", 30.0),
        ("Thu, 01 Jan 2026 11:00:00 GMT", 0.0),
        ("soon", None),
        ("-1", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str | None, seconds: float | None) -> None:
    assert parse_retry_after(header, NOW) == seconds


def test_event_loop_thread_is_closed_inside_another_event_loop() -> None:
    requests, finished = EventLoopThread(), list[bool]()

    async def finish() -> None:
        finished.append(True)

    async def close_requests() -> None:  # as a finalizer does if garbage is collected here
        requests.close(finish)

    asyncio.run(close_requests())
    requests.close(finish)  # has no effect
    assert finished == [True]
    assert not requests._thread.is_alive()
