"""Numbers as articles write them: read with their precision, and written with thousands commas."""

import math
import re
from typing import NamedTuple

_NUMBER = re.compile(r"([-+−]?)(\d[\d,]{0,30}(?:\.\d{0,30})?|\.\d{1,30})(?:e([-+]?\d{1,2}))?", re.IGNORECASE)
_FRACTION = re.compile(r"([-−]?)(?:(\d{1,9})[\s+]+)?(\d{1,9})(?:/{1,2}|⁄)(\d{1,9})")


class Quantity(NamedTuple):
    """A number: as written, its value, and its precision."""

    written: str
    value: float
    decimals: float  # precision: 2 for 1.25, -2 for 1,300
    of_person: bool = False  # feet and inches: more precise than their inches show


def read_number(text: str) -> Quantity | None:
    """Read `1,300`, `-4.5`, `2e6`, `1/2` or `1+1/2`; None if it is not a number."""
    text = text.strip()
    if fraction := _FRACTION.fullmatch(text):
        return _read_fraction(fraction)
    number = _NUMBER.fullmatch(text)
    if not number:
        return None
    digits = number[2].replace(",", "")
    whole, _, decimals = digits.partition(".")
    known = len(decimals) if "." in digits else len(whole.rstrip("0")) - len(whole)
    power = int(number[3] or 0)
    sign = "−" if number[1] and number[1] in "-−" else ""
    value = float(f"{'-' if sign else ''}{digits}e{power}")
    written = spell(float(digits), len(decimals)) + (f"×10^{power}" if power else "")
    return Quantity(sign + written, value, known - power)


def _read_fraction(fraction: re.Match[str]) -> Quantity:
    sign, whole, top, bottom = fraction.groups()
    parts = max(int(bottom), 1)
    value = int(whole or 0) + int(top) / parts
    written = f"{'−' if sign else ''}{whole + ' ' if whole else ''}{top}/{bottom}"
    return Quantity(written, -value if sign else value, max(math.log10(parts), 1))


def spell(value: float, decimals: int) -> str:
    """Write a number with thousands commas, rounded half up to `decimals` (-2: to hundreds).

    >>> spell(2092.1, -2), spell(-0.25, 1)
    ('2,100', '−0.3')
    """
    scale = 10.0 ** min(max(decimals, -25), 25)
    size = abs(value)
    if size * scale < 1e15:  # beyond that a float has no digits to round
        size = math.floor(size * scale + 0.5) / scale
    sign = "−" if value < 0 and size else ""
    return f"{sign}{size:,.{min(max(decimals, 0), 20)}f}"
