"""The pause of the client before a retry."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from rag_model.client import ClientSettings
from rag_model.client.client import compute_pause

SETTINGS = ClientSettings(tries=6, first_pause=1.0, max_pause=8.0)


@pytest.mark.parametrize(("attempt", "max_pause"), [(2, 1.0), (3, 2.0), (4, 4.0), (5, 8.0), (6, 8.0)])
def test_pauses_double_up_to_max_pause_and_are_randomized(attempt: int, max_pause: float) -> None:
    pauses = [compute_pause(attempt, SETTINGS) for _ in range(200)]
    assert all(pause is not None and max_pause / 2 <= pause <= max_pause for pause in pauses)
    assert len(set(pauses)) > 100


def test_number_of_tries_is_limited() -> None:
    assert compute_pause(7, SETTINGS) is None
    assert compute_pause(5_000, ClientSettings(tries=10_000)) is not None


@pytest.mark.parametrize(
    ("retry_after", "expected"), [("7", 7.0), ("8", 8.0), ("9", None), ("inf", 0.0), ("-3", 0.0), ("", 0.0)]
)
def test_retry_after_is_respected_up_to_max_pause(retry_after: str, expected: float | None) -> None:
    assert compute_pause(2, ClientSettings(first_pause=0.0, max_pause=8.0), retry_after) == expected


def test_retry_after_may_be_a_date() -> None:
    settings = ClientSettings(first_pause=0.0, max_pause=1e6)
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=1000), usegmt=True)
    wait = compute_pause(2, settings, later)
    assert wait is not None
    assert 0 < wait <= 1000
    assert compute_pause(2, settings, "Thu, 01 Jan 1970 00:00:00 GMT") == 0.0
    assert compute_pause(2, settings, "Thu, 99 Jan 1970") == 0.0
