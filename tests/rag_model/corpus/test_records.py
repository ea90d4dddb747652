"""Times are whole seconds in UTC, and are read and written as ISO 8601."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.corpus.records import EARLIEST, LATEST, format_day, format_iso, parse_seconds


@given(seconds=st.integers(EARLIEST, LATEST))
def test_every_time_round_trips(seconds: int) -> None:
    text = format_iso(seconds)
    assert text is not None
    assert parse_seconds(text) == seconds
    assert datetime.fromisoformat(text).replace(tzinfo=UTC).isoformat() == text.replace("Z", "+00:00")


@given(first=st.integers(EARLIEST, LATEST), second=st.integers(EARLIEST, LATEST))
def test_texts_are_ordered_like_times(first: int, second: int) -> None:
    assert ((format_iso(first) or "") < (format_iso(second) or "")) == (first < second)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-01T12:00:00Z", "2026-11-01T12:00:00Z"),
        ("2026-11-01", "2026-11-01T00:00:00Z"),
        ("2026-11-01 12:00:00", "2026-11-01T12:00:00Z"),
        ("2026-11-01T01:30:00+02:00", "2026-10-31T23:30:00Z"),
        ("1969-12-31T23:59:59.999Z", "1969-12-31T23:59:59Z"),
        ("0476-09-04", "0476-09-04T00:00:00Z"),
    ],
)
def test_other_time_formats_are_read(text: str, expected: str) -> None:
    assert format_iso(parse_seconds(text)) == expected
    assert format_day(parse_seconds(text)) == expected[:10]


@pytest.mark.parametrize(
    "text",
    ["", "yesterday", "20261101120000000", "2026-11-01x", "2026-13-01", "10000-01-01", "0001-01-01T00:00:00+14:00"],
)
def test_invalid_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the message is the standard library's
        parse_seconds(text)


def test_missing_time_is_formatted() -> None:
    assert (format_iso(None), format_day(None)) == (None, "")
