"""When a request is worth another try, and after how many seconds."""

import math
import random
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from rag_model.client.settings import ClientSettings

BUSY = frozenset((429, 503))  # a full queue, or no snapshot open yet: the service names the seconds to wait


def pause_before(attempt: int, settings: ClientSettings, asked: str | None = None) -> float | None:
    """Return the seconds to wait before try `attempt`, from 2: doubling, and at random so that clients spread out.

    `asked` is the reply's Retry-After, which is waited for at least. None: there is no further try.

    >>> pause_before(2, ClientSettings(first_pause=0), asked="3")
    3.0
    """
    if attempt > settings.tries:
        return None
    longest = min(settings.most_pause, settings.first_pause * 2.0 ** min(attempt - 2, 60))
    wait = max(longest * random.uniform(0.5, 1), _seconds(asked))
    return wait if wait <= settings.most_pause else None


def _seconds(asked: str | None) -> float:
    """Return the seconds that a Retry-After header asks for, as a number or as a date; 0 where it says neither."""
    if not asked:
        return 0.0
    try:
        found = float(asked)
    except ValueError:
        return _until(asked)
    return max(0.0, found) if math.isfinite(found) else 0.0


def _until(date: str) -> float:
    try:
        when = parsedate_to_datetime(date)
    except ValueError:
        return 0.0
    return max(0.0, (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
