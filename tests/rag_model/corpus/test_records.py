"""Times are whole seconds in UTC inside, and ISO 8601 outside."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.corpus.records import EARLIEST, LATEST, format_day, format_iso, parse_seconds


@given(at=st.integers(EARLIEST, LATEST))
def test_every_second_comes_back(at: int) -> None:
    shown = format_iso(at)
    assert shown is not None
    assert parse_seconds(shown) == at
    assert datetime.fromisoformat(shown).replace(tzinfo=UTC).isoformat() == shown.replace("Z", "+00:00")


@given(one=st.integers(EARLIEST, LATEST), other=st.integers(EARLIEST, LATEST))
def test_text_order_is_the_order_of_time(one: int, other: int) -> None:
    assert ((format_iso(one) or "") < (format_iso(other) or "")) == (one < other)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2026-11-01T12:00:00Z", "2026-11-01T12:00:00Z"),
        ("2026-11-01", "2026-11-01T00:00:00Z"),
        ("2026-11-01 12:00:00", "2026-11-01T12:00:00Z"),
        ("2026-11-01T01:30:00+02:00", "2026-10-31T23:30:00Z"),
        ("1969-12-31T23:59:59.999Z", "1969-12-31T23:59:59Z"),
        ("0476-09-04", "0476-09-04T00:00:00Z"),
    ],
)
def test_texts_of_other_writers_are_read(text: str, shown: str) -> None:
    assert format_iso(parse_seconds(text)) == shown
    assert format_day(parse_seconds(text)) == shown[:10]


@pytest.mark.parametrize(
    "text",
    ["", "yesterday", "20261101120000000", "2026-11-01x", "2026-13-01", "10000-01-01", "0001-01-01T00:00:00+14:00"],
)
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the standard library's own words
        parse_seconds(text)


def test_no_time_is_shown_as_none() -> None:
    assert (format_iso(None), format_day(None)) == (None, "")
