"""Limits that cannot work are refused before anything is served."""

import math
from dataclasses import fields

import pytest

from rag_model.errors import UsageError
from rag_model.serving.settings import ServiceSettings
from tests.fixtures.serving import with_limits

NUMBERS = [field.name for field in fields(ServiceSettings) if type(field.default) in (int, float)]


@pytest.mark.parametrize("name", NUMBERS)
def test_invalid_limit_is_refused(name: str) -> None:
    for value in (math.nan, math.inf, -math.inf, -1, True):
        with pytest.raises(UsageError, match=f"{name} is "):
            with_limits(**{name: value})


def test_wait_has_an_upper_limit() -> None:
    with pytest.raises(UsageError, match=r"poll_seconds is 1e\+300: give at most"):
        with_limits(poll_seconds=1e300)
