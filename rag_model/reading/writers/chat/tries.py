"""Try a request again where that helps: after a wait that grows, or as long as the endpoint asks for."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

from rag_model.reading.writers.chat.problems import FailedTryError
from rag_model.reading.writers.chat.settings import ChatSettings

_Done = TypeVar("_Done")
_LONGEST = 30.0  # seconds between two tries, where the endpoint does not say


async def with_tries(settings: ChatSettings, attempt: Callable[[], Awaitable[_Done]], late: FailedTryError) -> _Done:
    """Return what the first successful try gives.

    Raises:
        FailedTryError: no try can help, or none is left; `late` where the time of the whole ran out without any.
    """
    until, last = time.monotonic() + settings.whole_seconds, late
    for number in range(settings.tries):
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + until - time.monotonic()):
                return await attempt()
        except TimeoutError:
            raise late from None
        except FailedTryError as failed:
            last = failed
        wait = _wait(settings, number) if last.wait is None else last.wait
        if not last.passing or number + 1 == settings.tries or time.monotonic() + wait >= until:
            break
        await asyncio.sleep(wait)
    raise last


def retry_after(value: str | None, now: datetime | None = None) -> float | None:
    """Return the seconds that a Retry-After header asks to wait; None where it is missing or cannot be read.

    >>> retry_after("3"), retry_after("soon")
    (3.0, None)
    """
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        then = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (then.replace(tzinfo=then.tzinfo or UTC) - (now or datetime.now(UTC))).total_seconds())


def _wait(settings: ChatSettings, number: int) -> float:
    """Return a wait between half of and the whole doubled time, so that callers do not come back together."""
    doubled: float = settings.backoff_seconds * 2.0**number
    return min(_LONGEST, doubled) * random.uniform(0.5, 1.0)
