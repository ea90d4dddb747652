"""`{{convert}}`: a measure in the article's unit with its conversion, rounded as Wikipedia rounds it.

"5 miles (8.0 km)" answers a question in either unit; a dropped template leaves "a trail of long". The
rounding is Module:Convert's default: about as precise as the input, never fewer than two significant figures.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from rag_model.corpus.markup.call import Call, by_name
from rag_model.corpus.markup.quantities import Quantity, read_number, spell
from rag_model.corpus.markup.units import UNITS, Unit

_RANGES = {
    "to": " to ", "to(-)": " to ", "to-": " to ", "-": "–", "–": "–", "—": "–", "and": " and ", "&": " and ",
    "and(-)": " and ", "and to": " and ", "or": " or ", "by": " by ", "by(x)": " by ", "x": " × ", "×": " × ",
    "xx": " × ", "*": " × ", "+": " + ", "±": " ± ", "+/-": " ± ", "with": " with ", ",": ", ",
    ", or": ", or ", ", and": ", and ",
}  # fmt: skip
_COMPOSITES = {
    "ftin": ("ft", "in", 12),
    "ft in": ("ft", "in", 12),
    "stlb": ("st", "lb", 14),
    "lboz": ("lb", "oz", 16),
}
_SPAN = re.compile(r"(\d[\d,.]*)\s*[-–]\s*(\d[\d,.]*)")
_TO_US = (("metre", "meter"), ("litre", "liter"), ("tonnes", "metric tons"), ("tonne", "metric ton"))


class _Request(NamedTuple):
    """The parsed parameters of one `{{convert}}`."""

    numbers: list[Quantity]
    separators: list[str]  # between the numbers
    unit: Unit
    targets: list[str]
    decimals: int | None
    words: str  # of adj=mid and adj=pre

    def joined(self, numbers: Sequence[str]) -> str:
        """Return numbers with this request's separators between them."""
        return numbers[0] + "".join(mark + number for mark, number in zip(self.separators, numbers[1:], strict=True))


def render_convert(call: Call) -> str:
    """Write the measure and its conversions; parameters that cannot be parsed are shown as given, never dropped."""
    given = [value for value in call.positional() if value]
    try:
        request = _parse(given, call)
    except (KeyError, IndexError):
        return " ".join(given[:2])
    converted = [shown for target in request.targets if (shown := _converted(request, target, call))]
    return _join(_original(request, call), converted, call)


def _parse(rest: list[str], call: Call) -> _Request:
    """Read value, ranges, unit, targets and precision, in that order.

    Raises:
        KeyError, IndexError: it does not have this form, or names a unit that is not in the table.
    """
    rest = rest[:40]  # more than any measure has
    words = rest.pop() if call.get("adj") in {"mid", "pre"} and len(rest) > 3 else ""
    if span := _SPAN.fullmatch(rest[0]):
        rest[:1] = [span[1], "-", span[2]]
    numbers, separators = [_required(rest.pop(0))], []
    while rest[0].lower() in _RANGES:
        separators.append(_RANGES[rest.pop(0).lower()])
        numbers.append(_required(rest.pop(0)))
    unit = UNITS[rest.pop(0)]
    while len(rest) > 1 and (number := read_number(rest[0])) and _is_smaller(rest[1], unit):
        numbers, unit = [_composed(numbers[0], unit, number, UNITS[rest[1]])], UNITS[rest[1]]
        del rest[:2]
    targets = rest.pop(0) if rest and not _is_integer(rest[0]) else _default_target(unit, numbers[0])
    decimals = int(rest[0].replace("−", "-")) if rest and _is_integer(rest[0]) else None
    known = targets in UNITS or targets in _COMPOSITES
    return _Request(numbers, separators, unit, [targets] if known else targets.split(), decimals, words)


def _required(text: str) -> Quantity:
    number = read_number(text)
    if number is None:
        raise KeyError(text)
    return number


def _is_integer(text: str) -> bool:
    return re.fullmatch(r"[-−]?\d{1,2}", text) is not None


def _is_smaller(name: str, unit: Unit) -> bool:
    return name in UNITS and UNITS[name].kind == unit.kind and UNITS[name].factor < unit.factor


def _composed(first: Quantity, unit: Unit, second: Quantity, smaller: Unit) -> Quantity:
    """Return `6 feet 1` inch as one measure in the smaller unit."""
    value = first.value * unit.factor / smaller.factor + second.value
    name = unit.singular if first.value == 1 else unit.plural
    return Quantity(f"{first.written} {name} {second.written}", value, second.decimals, smaller.symbol == "in")


def _default_target(unit: Unit, number: Quantity) -> str:
    """Metres convert to feet and inches only where a person could be meant, as in Module:Convert."""
    return "ft" if unit.default == "ftin" and number.value >= 3 else unit.default


def _original(request: _Request, call: Call) -> str:
    """Write the measure in its own unit: "5 miles", "5-mile", "5 mi", "6 feet 1 inch"."""
    unit, last = request.unit, request.numbers[-1]
    adjective = call.get("adj") in {"on", "mid"}
    short = call.name == "cvt" or call.get("abbr") in {"on", "in", "~"} or unit.kind == "temperature"
    ending = read_number(last.written.rpartition(" ")[2]) or last  # 6 feet 1 inch
    single = adjective or abs(ending.value) == 1 or ("/" in last.written and abs(last.value) < 1)
    name = unit.symbol if short else _spelt(unit.singular if single else unit.plural, call)
    if request.words and adjective:
        name += request.words if request.words[0] == "-" else f" {request.words}"
    elif request.words:
        name = f"{request.words} {name}"
    return request.joined([n.written for n in request.numbers]) + _glue(name, adjective and not short) + name


def _converted(request: _Request, target: str, call: Call) -> str:
    """Write one conversion, with the unit's symbol unless names are requested; "" if the units do not match."""
    if target in _COMPOSITES:
        return _composite(request, *_COMPOSITES[target])
    unit = UNITS.get(target)
    if unit is None or unit.kind != request.unit.kind:
        return ""
    numbers = [_number(number, request, unit, call) for number in request.numbers]
    adjective = call.get("adj") in {"on", "mid"}
    named = call.get("abbr") in {"off", "none", "in"} and unit.kind != "temperature"
    single = adjective or numbers[-1] == "1"
    name = _spelt(unit.singular if single else unit.plural, call) if named else unit.symbol
    return request.joined(numbers) + _glue(name, adjective and named) + name


def _glue(name: str, hyphen: bool) -> str:
    return "-" if hyphen else "" if name.startswith("/") else " "


def _composite(request: _Request, large: str, small: str, ratio: int) -> str:
    """Write a conversion to two units, such as feet and inches, rounded to the smaller one."""
    source, smaller = request.unit, UNITS[small]
    if source.kind != smaller.kind:
        return ""
    shown = []
    for number in request.numbers:
        whole, rest = divmod(math.floor(number.value * source.factor / smaller.factor + 0.5), ratio)
        shown.append(f"{whole:,} {large} {rest} {small}" if whole else f"{rest} {small}")
    return request.joined(shown)


def _number(number: Quantity, request: _Request, target: Unit, call: Call) -> str:
    """Convert one number and write it, rounded as the template says or by its default."""
    source = request.unit
    value = (number.value * source.factor + source.offset - target.offset) / target.factor
    if (step := call.get("round")) in {"5", "10", "25", "50"}:
        return spell(math.floor(value / int(step) + 0.5) * int(step), 0)
    if (figures := call.get("sigfig")) in set("123456789") and value:
        power = int(f"{value:.{int(figures) - 1}e}".partition("e")[2])
        return spell(value, int(figures) - 1 - power)
    decimals = request.decimals
    return spell(value, default_decimals(number, value, source, target) if decimals is None else decimals)


def default_decimals(number: Quantity, output: float, source: Unit, target: Unit) -> int:
    """Return a conversion's decimals (negative: tens, hundreds), by Module:Convert's `default_precision`.

    They are the input's decimals plus log10 of twice the ratio of the numbers, and give at least two significant
    figures (three, counted in kelvins, for temperatures).
    """
    if source.kind == "temperature":
        kelvin = abs(number.value * source.factor + source.offset)
        least = 2 if kelvin < 1e-8 else 2 - math.floor(math.log10(kelvin) + 1e-14)
        return int(max(math.floor(number.decimals), least))
    if number.value == 0 or output == 0:
        return 0
    least = 1 - math.floor(math.log10(abs(output)) + 1e-14)
    finer = math.log10(target.factor) + 2 if number.of_person else math.log10(abs(number.value / output))
    return int(max(math.floor(number.decimals + finer + math.log10(2)), least))


def _spelt(name: str, call: Call) -> str:
    if call.get("sp") == "us":
        for british, american in _TO_US:
            name = name.replace(british, american)
    return name


def _join(original: str, converted: list[str], call: Call) -> str:
    """Put the measure and its conversions together: brackets unless `disp` says otherwise."""
    disp = call.get("disp")
    if disp in {"out", "output only", "number", "output number only"}:
        return "; ".join(converted) or original
    if not converted or disp in {"unit", "unit2"}:
        return original
    if disp == "flip" or call.get("order") == "flip":
        original, converted = converted[0], [original]
    if disp in {"or", "comma"}:
        return original + (" or " if disp == "or" else ", ") + converted[0]
    inside = "; ".join(converted)
    return f"{original} [{inside}]" if disp == "sqbr" else f"{original} ({inside})"


def _population_density(call: Call) -> str:
    """`{{pop density|3645257|640082|km2|sqmi}}`: people, area, and the unit of the area."""
    people, area = (read_number(call.get(key)) for key in ("1", "2"))
    source, target = (UNITS.get(f"/{call.get(key)}") for key in ("3", "4"))
    if not (people and area and area.value and source):
        return ""
    densities = [(people.value / area.value, source)]
    if target:
        densities.append((densities[0][0] * source.factor / target.factor, target))
    decimals = int(call.get("prec")) if _is_integer(call.get("prec")) else int(densities[0][0] < 10)
    shown = [spell(value, decimals) + unit.symbol for value, unit in densities]
    return _join(shown[0], shown[1:], call)


RENDERERS = by_name(
    ("convert, cvt, convinfobox, conv", render_convert),
    ("pop density, population density", _population_density),
)
