"""Times of revisions: stored as whole seconds since 1970 in UTC, shown as ISO 8601.

Seconds instead of days, because a page may be edited several times a day and dumps contain seconds.
Parquet files store them as timestamps, which other tools show as times.
"""

import re
from datetime import UTC, datetime, timedelta

# Stricter than fromisoformat, which accepts 20261101120000000.
_ISO_SHAPE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[T ].+)?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)
EARLIEST = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _SECOND  # 0001-01-01T00:00:00Z
LATEST = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _SECOND  # 9999-12-31T23:59:59Z


def parse_seconds(text: str) -> int:
    """Parse an ISO 8601 date (its first second) or time to seconds; default zone UTC.

    >>> parse_seconds("2026-11-01T12:00:00Z") - parse_seconds("2026-11-01")
    43200

    Raises:
        ValueError: The text is not a date, or outside of the years 1 to 9999 in UTC.
    """
    if not _ISO_SHAPE.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not a date in the form 2026-11-01")
    moment = datetime.fromisoformat(text)
    return check_seconds(((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH) // _SECOND)


def check_seconds(seconds: int) -> int:
    """Return `seconds` if ISO 8601 can represent them.

    Raises:
        ValueError: The time is outside of the years 1 to 9999.
    """
    if not EARLIEST <= seconds <= LATEST:
        raise ValueError("a time outside of the years 1 to 9999")
    return seconds


def format_iso(seconds: int | None) -> str | None:
    """Format seconds as ISO 8601 in UTC, whose text order is the order of time; None stays None.

    >>> format_iso(1793534400)
    '2026-11-01T12:00:00Z'
    """
    return None if seconds is None else f"{(_EPOCH + seconds * _SECOND).replace(tzinfo=None).isoformat()}Z"


def format_day(seconds: int | None) -> str:
    """Format the day of seconds in UTC; empty for None.

    >>> format_day(1793534400)
    '2026-11-01'
    """
    return (format_iso(seconds) or "").partition("T")[0]
