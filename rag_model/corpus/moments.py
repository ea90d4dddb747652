"""When an article's revision was saved: whole seconds since 1970 in UTC where it is kept, ISO 8601 where it is shown.

Seconds, not days, because a page may be edited often in a day; and a dump gives seconds. In files they are a timestamp
of Parquet, which other tools show as a time.
"""

import re
from datetime import UTC, datetime, timedelta

_SHAPE = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[T ].+)?"
)  # the standard library reads a time out of 20261101120000000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)
EARLIEST = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _SECOND  # 0001-01-01T00:00:00Z
LATEST = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _SECOND  # 9999-12-31T23:59:59Z


def seconds_of(text: str) -> int:
    """Return an ISO 8601 date or time in seconds; a day is its first second, a time without a zone is in UTC.

    >>> seconds_of("2026-11-01T12:00:00Z") - seconds_of("2026-11-01")
    43200

    Raises:
        ValueError: it is none, or in UTC it lies outside of the years 1 to 9999.
    """
    if not _SHAPE.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is no date in the form 2026-11-01")
    read = datetime.fromisoformat(text)
    return checked(((read if read.tzinfo else read.replace(tzinfo=UTC)) - _EPOCH) // _SECOND)


def checked(seconds: int) -> int:
    """Return `seconds` if ISO 8601 can show them.

    Raises:
        ValueError: they lie outside of the years 1 to 9999.
    """
    if not EARLIEST <= seconds <= LATEST:
        raise ValueError("a time outside of the years 1 to 9999")
    return seconds


def iso_of(seconds: int | None) -> str | None:
    """Return seconds as ISO 8601 in UTC, of which the text order is the order of time; None stays None.

    >>> iso_of(1793534400)
    '2026-11-01T12:00:00Z'
    """
    return None if seconds is None else f"{(_EPOCH + seconds * _SECOND).replace(tzinfo=None).isoformat()}Z"


def day_of(seconds: int | None) -> str:
    """Return the day of seconds, in UTC; empty for None.

    >>> day_of(1793534400)
    '2026-11-01'
    """
    return (iso_of(seconds) or "").partition("T")[0]
