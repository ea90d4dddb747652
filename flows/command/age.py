"""Ages as people write them: `90d`, `24h`, `30m`, `0`."""

import re

from rag_model.errors import UsageError

_AGE = re.compile(r"([0-9]{1,6})([smhdw]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_age(text: str) -> float:
    """Return an age in seconds.

    >>> parse_age("90d"), parse_age("30m"), parse_age("0")
    (7776000.0, 1800.0, 0.0)

    Raises:
        UsageError: the text is not a whole number with at most one unit.
    """
    match = _AGE.fullmatch(text)
    if not match:
        raise UsageError(f"{text!r} is not an age: write it as 90d, 24h, 30m, 45s or 0")
    return float(int(match[1]) * _SECONDS[match[2]])
