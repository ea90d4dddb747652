"""How long the client waits before it asks again."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from rag_model.client import ClientSettings
from rag_model.client.client import compute_pause

SETTINGS = ClientSettings(tries=6, first_pause=1.0, max_pause=8.0)


@pytest.mark.parametrize(("attempt", "longest"), [(2, 1.0), (3, 2.0), (4, 4.0), (5, 8.0), (6, 8.0)])
def test_pauses_double_up_to_the_longest_and_spread(attempt: int, longest: float) -> None:
    pauses = [compute_pause(attempt, SETTINGS) for _ in range(200)]
    assert all(pause is not None and longest / 2 <= pause <= longest for pause in pauses)
    assert len(set(pauses)) > 100


def test_the_tries_have_an_end() -> None:
    assert compute_pause(7, SETTINGS) is None
    assert compute_pause(5_000, ClientSettings(tries=10_000)) is not None


@pytest.mark.parametrize(("asked", "wait"), [("7", 7.0), ("8", 8.0), ("9", None), ("inf", 0.0), ("-3", 0.0), ("", 0.0)])
def test_a_service_is_waited_for_as_long_as_it_says_but_not_for_longer_than_the_client_would(
    asked: str, wait: float | None
) -> None:
    assert compute_pause(2, ClientSettings(first_pause=0.0, max_pause=8.0), asked) == wait


def test_a_date_is_as_good_as_seconds() -> None:
    settings = ClientSettings(first_pause=0.0, max_pause=1e6)
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=1000), usegmt=True)
    wait = compute_pause(2, settings, later)
    assert wait is not None
    assert 0 < wait <= 1000
    assert compute_pause(2, settings, "Thu, 01 Jan 1970 00:00:00 GMT") == 0.0
    assert compute_pause(2, settings, "Thu, 99 Jan 1970") == 0.0
