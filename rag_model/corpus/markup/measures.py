"""`{{convert}}`: a measure in the article's unit with its conversion, rounded as Wikipedia rounds it.

"5 miles (8.0 km)" answers a question in either unit; a dropped template leaves "a trail of long". The
rounding follows Module:Convert's default: about as precise as the input, and never fewer than two
significant figures.
"""

import math
import re
from typing import NamedTuple

from rag_model.corpus.markup.call import Call, by_name
from rag_model.corpus.markup.units import UNITS, Unit

_RANGES = {
    "to": " to ", "-": "–", "–": "–", "—": "–", "and": " and ", "or": " or ", "by": " by ", "x": " × ",
    "×": " × ", "*": " × ",
    "to(-)": " to ", "to-": " to ", "and(-)": " and ", "&": " and ", "xx": " × ", "by(x)": " by ",
    "+/-": " ± ", "±": " ± ",
    "and to": " and ", "with": " with ", "+": " + ", ",": ", ", ", ": ", ", ", and": ", and ",
    ", or": ", or ",
}  # fmt: skip
_COMPOSITES = {
    "ftin": ("ft", "in", 12),
    "ft in": ("ft", "in", 12),
    "stlb": ("st", "lb", 14),
    "lboz": ("lb", "oz", 16),
}
_NUMBER = re.compile(r"([-+−]?)(\d[\d,]{0,30}(?:\.\d{0,30})?|\.\d{1,30})(?:e([-+]?\d{1,2}))?", re.IGNORECASE)
_FRACTION = re.compile(r"([-−]?)(?:(\d{1,9})[\s+]+)?(\d{1,9})(?:/{1,2}|⁄)(\d{1,9})")
_SPAN = re.compile(r"(\d[\d,.]*)\s*[-–]\s*(\d[\d,.]*)")
_TO_US = (("metre", "meter"), ("litre", "liter"), ("tonnes", "metric tons"), ("tonne", "metric ton"))


class Measure(NamedTuple):
    """A number as it was written and as it counts; `decimals` is how finely it is known, -2 for 1,300."""

    written: str
    value: float
    decimals: float


def read_number(text: str) -> Measure | None:
    """Read `1,300`, `-4.5`, `2e6`, `1/2` or `1+1/2`; None where it is no number."""
    text = text.strip()
    if fraction := _FRACTION.fullmatch(text):
        sign, whole, top, bottom = fraction.groups()
        value = int(whole or 0) + int(top) / max(int(bottom), 1)
        written = f"{'−' if sign else ''}{whole + ' ' if whole else ''}{top}/{bottom}"
        return Measure(written, -value if sign else value, max(math.log10(max(int(bottom), 1)), 1))
    if number := _NUMBER.fullmatch(text):
        digits = number[2].replace(",", "")
        whole, _, decimals = digits.partition(".")
        known = len(decimals) if "." in digits else len(whole.rstrip("0")) - len(whole)
        power = int(number[3] or 0)
        value = float(f"{'-' if number[1] in '-−' and number[1] else ''}{digits}e{power}")
        written = _spell(float(digits), len(decimals)) + (f"×10^{power}" if power else "")
        return Measure(("−" if value < 0 else "") + written, value, known - power)
    return None


def default_decimals(measure: Measure, output: float, source: Unit, target: Unit) -> int:
    """Return a conversion's decimals (negative: tens, hundreds), by Module:Convert's `default_precision`."""
    if source.kind == "temperature":
        kelvin = abs(measure.value * source.factor + source.offset)
        least, finer = (2.0 if kelvin < 1e-8 else 2 - math.floor(math.log10(kelvin) + 1e-14)), 0.0
    elif measure.value == 0 or output == 0:
        return 0
    else:
        least = 1 - math.floor(math.log10(abs(output)) + 1e-14)
        finer = math.log10(abs(measure.value / output)) + math.log10(2)
    return int(max(math.floor(measure.decimals + finer), least))


class _Request(NamedTuple):
    """What one `{{convert}}` asks for."""

    numbers: list[Measure]
    separators: list[str]
    unit: Unit
    targets: list[str]
    decimals: int | None
    extra: str  # the words of adj=mid and adj=pre


def render_convert(call: Call) -> str:
    """Write the measure and its conversions; what cannot be read is shown as given, never dropped."""
    given = call.positional()
    try:
        request = _parse(given, call)
    except (KeyError, IndexError):
        return " ".join(given[:2])
    original = _original(request, call)
    converted = [shown for target in request.targets if (shown := _converted(request, target, call))]
    return _join(original, converted, call)


def _parse(given: list[str], call: Call) -> _Request:
    """Read value, ranges, unit, targets and precision, in that order.

    Raises:
        KeyError, IndexError: it does not have this form, or names a unit that is not in the table.
    """
    rest = [value for value in given if value]
    extra = rest.pop() if call.get("adj") in {"mid", "pre"} and len(rest) > 3 else ""
    if span := _SPAN.fullmatch(rest[0]):
        rest[0:1] = [span[1], "-", span[2]]
    numbers, separators = [_required(rest.pop(0))], []
    while rest[0] in _RANGES or rest[0].lower() in _RANGES:
        separators.append(_RANGES[rest.pop(0).lower()])
        numbers.append(_required(rest.pop(0)))
    unit = UNITS[rest.pop(0)]
    while (
        len(rest) >= 2
        and (number := read_number(rest[0]))
        and rest[1] in UNITS
        and UNITS[rest[1]].kind == unit.kind
    ):
        numbers, unit = [_composed(numbers[0], unit, number, UNITS[rest[1]])], UNITS[rest[1]]
        del rest[:2]
    targets = rest.pop(0) if rest and not _is_integer(rest[0]) else _default_target(unit, numbers[0])
    decimals = int(rest[0]) if rest and _is_integer(rest[0]) and abs(int(rest[0])) < 20 else None
    names = [targets] if targets in UNITS or targets in _COMPOSITES else targets.split()
    return _Request(numbers, separators, unit, names, decimals, extra)


def _required(text: str) -> Measure:
    number = read_number(text)
    if number is None:
        raise KeyError(text)
    return number


def _is_integer(text: str) -> bool:
    return text.lstrip("-−").isdecimal()


def _composed(first: Measure, unit: Unit, second: Measure, smaller: Unit) -> Measure:
    """Return `6 ft 1 in` as one measure in the smaller unit."""
    ratio = unit.factor / smaller.factor
    return Measure(
        f"{first.written} {unit.symbol} {second.written}", first.value * ratio + second.value, second.decimals
    )


def _default_target(unit: Unit, number: Measure) -> str:
    """Metres convert to feet and inches only where a person could be meant, as in Module:Convert."""
    return "ft" if unit.default == "ftin" and number.value >= 3 else unit.default


def _original(request: _Request, call: Call) -> str:
    """Write the measure in its own unit: "5 miles", "5-mile", "5 mi", "6 feet 1 inch"."""
    numbers, unit = request.numbers, request.unit
    shown = numbers[0].written + "".join(
        s + n.written for s, n in zip(request.separators, numbers[1:], strict=True)
    )
    by_symbol = (
        call.get("abbr") in {"on", "in", "~"} or unit.kind == "temperature" or "disp" in call.get("abbr")
    )
    adjective = call.get("adj") in {"on", "mid", "1"}
    last = numbers[-1].value
    single = abs(last) == 1 or (0 < abs(last) < 1 and "/" in numbers[-1].written)
    name = unit.symbol if by_symbol else _spelt(unit.singular if single or adjective else unit.plural, call)
    if request.extra:
        name = (
            f"{name}{'' if request.extra[0] == '-' else ' '}{request.extra}"
            if adjective
            else f"{request.extra} {name}"
        )
    glue = "-" if adjective and not by_symbol else "" if name.startswith("/") else " "
    return shown + glue + name


def _converted(request: _Request, target: str, call: Call) -> str:
    if target in _COMPOSITES:
        return _composite(request, *_COMPOSITES[target])
    unit = UNITS.get(target)
    if unit is None or unit.kind != request.unit.kind:
        return ""
    values = [_number(number, request, unit, call) for number in request.numbers]
    shown = values[0] + "".join(s + v for s, v in zip(request.separators, values[1:], strict=True))
    by_name = call.get("abbr") in {"off", "none", "in"} and unit.kind != "temperature"
    name = unit.symbol
    if by_name:
        adjective = call.get("adj") in {"on", "mid"}
        name = _spelt(unit.singular if adjective or values[-1] == "1" else unit.plural, call)
        return shown + ("-" if adjective else " ") + name
    return shown + ("" if name.startswith("/") else " ") + name


def _composite(request: _Request, large: str, small: str, ratio: int) -> str:
    """Write a conversion to two units, such as feet and inches, rounded to the smaller one."""
    source, smaller = request.unit, UNITS[small]
    if source.kind != smaller.kind:
        return ""
    shown = []
    for number in request.numbers:
        count = math.floor(number.value * source.factor / smaller.factor + 0.5)
        whole, rest = divmod(count, ratio)
        shown.append(f"{whole:,} {large} {rest} {small}" if whole else f"{rest} {small}")
    return shown[0] + "".join(s + v for s, v in zip(request.separators, shown[1:], strict=True))


def _number(number: Measure, request: _Request, target: Unit, call: Call) -> str:
    source = request.unit
    value = (number.value * source.factor + source.offset - target.offset) / target.factor
    if (figures := call.get("sigfig")).isdecimal() and value:
        decimals = int(figures) - 1 - math.floor(math.log10(abs(value)))
    elif (step := call.get("round")) in {"5", "10", "25", "50"}:
        return _spell(math.floor(value / int(step) + 0.5) * int(step), 0)
    else:
        decimals = (
            request.decimals
            if request.decimals is not None
            else default_decimals(number, value, source, target)
        )
    return _spell(value, decimals)


def _spell(value: float, decimals: int) -> str:
    """Write a number with thousands commas, rounded half up to `decimals`."""
    scale = 10.0 ** min(max(decimals, -25), 25)
    rounded = math.floor(abs(value) * scale + 0.5) / scale if abs(value) * scale < 1e15 else abs(value)
    sign = "−" if value < 0 and rounded else ""
    return f"{sign}{rounded:,.{min(max(decimals, 0), 20)}f}"


def _spelt(name: str, call: Call) -> str:
    if call.get("sp") == "us":
        for british, american in _TO_US:
            name = name.replace(british, american)
    return name


def _join(original: str, converted: list[str], call: Call) -> str:
    disp = call.get("disp")
    if disp in {"out", "output only", "number", "output number only"}:
        return "; ".join(converted) or original
    if not converted or disp in {"unit", "unit2"}:
        return original
    if disp == "flip" or call.get("order") == "flip":
        original, converted = converted[0], [original]
    if disp in {"or", "comma", "sqbr", "x"}:
        joint = {"or": " or ", "comma": ", "}.get(disp)
        return f"{original}{joint}{converted[0]}" if joint else f"{original} [{'; '.join(converted)}]"
    return f"{original} ({'; '.join(converted)})"


RENDERERS = by_name(("convert, cvt, convinfobox, convert/dual, conv", render_convert))
