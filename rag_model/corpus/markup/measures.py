"""Render numbers and measures: fractions, uncertainties, money, formulas, and `{{convert}}`.

`{{convert}}` shows a measure in the article's unit with its conversion: "5 miles (8.0 km)" answers
a question in either unit, whereas a dropped template leaves "a trail of long". The rounding is the
default of Module:Convert: about as precise as the input, with at least two significant figures.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from rag_model.corpus.markup.call import Renderer, TemplateCall, build_renderers
from rag_model.corpus.markup.tex import format_superscript
from rag_model.corpus.markup.units import UNITS, Unit

_NUMBER_PATTERN = re.compile(r"([-+−]?)(\d[\d,]{0,30}(?:\.\d{0,30})?|\.\d{1,30})(?:e([-+]?\d{1,2}))?", re.IGNORECASE)
_FRACTION_PATTERN = re.compile(r"([-−]?)(?:(\d{1,9})[\s+]+)?(\d{1,9})(?:/{1,2}|⁄)(\d{1,9})")


class Quantity(NamedTuple):
    """A number: its spelling, value and precision."""

    spelling: str
    value: float
    decimals: float  # precision: 2 in 1.25, -2 in 1,300
    of_person: bool = False  # feet and inches: more precise than the number of inches suggests


def read_number(text: str) -> Quantity | None:
    """Parse `1,300`, `-4.5`, `2e6`, `1/2` or `1+1/2`; None if the text is not a number."""
    text = text.strip()
    if fraction := _FRACTION_PATTERN.fullmatch(text):
        return _read_fraction(fraction)
    number = _NUMBER_PATTERN.fullmatch(text)
    if not number:
        return None
    digits = number[2].replace(",", "")
    whole_digits, _, decimals = digits.partition(".")
    precision = len(decimals) if "." in digits else len(whole_digits.rstrip("0")) - len(whole_digits)
    power = int(number[3] or 0)
    sign = "−" if number[1] and number[1] in "-−" else ""
    value = float(f"{'-' if sign else ''}{digits}e{power}")
    spelling = format_number(float(digits), len(decimals)) + (f"×10^{power}" if power else "")
    return Quantity(sign + spelling, value, precision - power)


def _read_fraction(fraction: re.Match[str]) -> Quantity:
    sign, whole_part, top, bottom = fraction.groups()
    parts = max(int(bottom), 1)
    value = int(whole_part or 0) + int(top) / parts
    spelling = f"{'−' if sign else ''}{whole_part + ' ' if whole_part else ''}{top}/{bottom}"
    return Quantity(spelling, -value if sign else value, max(math.log10(parts), 1))


def format_number(value: float, decimals: int) -> str:
    """Format a number with thousands commas, rounded half up to `decimals` (-2: to hundreds).

    >>> format_number(2092.1, -2), format_number(-0.25, 1)
    ('2,100', '−0.3')
    """
    scale = 10.0 ** min(max(decimals, -25), 25)
    size = abs(value)
    if size * scale < 1e15:  # larger floats have no digits to round
        size = math.floor(size * scale + 0.5) / scale
    sign = "−" if value < 0 and size else ""
    return f"{sign}{size:,.{min(max(decimals, 0), 20)}f}"


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
    words: str  # the words of adj=mid and adj=pre

    def join_numbers(self, numbers: Sequence[str]) -> str:
        """Join numbers with the separators of this request."""
        return numbers[0] + "".join(mark + number for mark, number in zip(self.separators, numbers[1:], strict=True))


def render_convert(call: TemplateCall) -> str:
    """Render the measure and its conversions; show unparsable parameters unchanged."""
    arguments = [value for value in call.positional() if value]
    try:
        request = _parse_request(arguments, call)
    except (KeyError, IndexError):
        return " ".join(arguments[:2])
    conversions = [text for target in request.targets if (text := _render_conversion(request, target, call))]
    return _join_conversions(_render_original(request, call), conversions, call)


def _parse_request(arguments: list[str], call: TemplateCall) -> _Request:
    """Parse value, ranges, unit, targets and precision, in that order.

    Raises:
        KeyError, IndexError: The parameters do not have this form, or a unit is unknown.
    """
    arguments = arguments[:40]  # more than any measure has
    words = arguments.pop() if call.get("adj") in {"mid", "pre"} and len(arguments) > 3 else ""
    if span := _SPAN.fullmatch(arguments[0]):
        arguments[:1] = [span[1], "-", span[2]]
    numbers, separators = [_require_number(arguments.pop(0))], []
    while arguments[0].lower() in _RANGES:
        separators.append(_RANGES[arguments.pop(0).lower()])
        numbers.append(_require_number(arguments.pop(0)))
    unit = UNITS[arguments.pop(0)]
    while len(arguments) > 1 and (number := read_number(arguments[0])) and _is_smaller(arguments[1], unit):
        numbers, unit = [_combine_units(numbers[0], unit, number, UNITS[arguments[1]])], UNITS[arguments[1]]
        del arguments[:2]
    targets = (
        arguments.pop(0) if arguments and not _is_integer(arguments[0]) else _choose_default_target(unit, numbers[0])
    )
    decimals = int(arguments[0].replace("−", "-")) if arguments and _is_integer(arguments[0]) else None
    is_single_target = targets in UNITS or targets in _COMPOSITES
    return _Request(numbers, separators, unit, [targets] if is_single_target else targets.split(), decimals, words)


def _require_number(text: str) -> Quantity:
    number = read_number(text)
    if number is None:
        raise KeyError(text)
    return number


def _is_integer(text: str) -> bool:
    return re.fullmatch(r"[-−]?\d{1,2}", text) is not None


def _is_smaller(name: str, unit: Unit) -> bool:
    return name in UNITS and UNITS[name].kind == unit.kind and UNITS[name].factor < unit.factor


def _combine_units(larger_quantity: Quantity, unit: Unit, smaller_quantity: Quantity, smaller: Unit) -> Quantity:
    """Combine 6 feet and 1 inch to one measure in the smaller unit."""
    value = larger_quantity.value * unit.factor / smaller.factor + smaller_quantity.value
    name = unit.singular if larger_quantity.value == 1 else unit.plural
    return Quantity(
        f"{larger_quantity.spelling} {name} {smaller_quantity.spelling}",
        value,
        smaller_quantity.decimals,
        smaller.symbol == "in",
    )


def _choose_default_target(unit: Unit, number: Quantity) -> str:
    """Return the default target; metres below 3 m give feet and inches (Module:Convert)."""
    return "ft" if unit.default == "ftin" and number.value >= 3 else unit.default


def _render_original(request: _Request, call: TemplateCall) -> str:
    """Render the measure in its own unit: "5 miles", "5-mile", "5 mi", "6 feet 1 inch"."""
    unit, last = request.unit, request.numbers[-1]
    adjective = call.get("adj") in {"on", "mid"}
    short = call.name == "cvt" or call.get("abbr") in {"on", "in", "~"} or unit.kind == "temperature"
    ending = read_number(last.spelling.rpartition(" ")[2]) or last  # 6 feet 1 inch
    is_singular = adjective or abs(ending.value) == 1 or ("/" in last.spelling and abs(last.value) < 1)
    name = unit.symbol if short else _localize_unit(unit.singular if is_singular else unit.plural, call)
    if request.words and adjective:
        name += request.words if request.words[0] == "-" else f" {request.words}"
    elif request.words:
        name = f"{request.words} {name}"
    return (
        request.join_numbers([n.spelling for n in request.numbers])
        + _choose_separator(name, adjective and not short)
        + name
    )


def _render_conversion(request: _Request, target: str, call: TemplateCall) -> str:
    """Render one conversion with the unit's symbol or name; "" if the units do not match."""
    if target in _COMPOSITES:
        return _render_composite(request, *_COMPOSITES[target])
    unit = UNITS.get(target)
    if unit is None or unit.kind != request.unit.kind:
        return ""
    numbers = [_render_number(number, request, unit, call) for number in request.numbers]
    adjective = call.get("adj") in {"on", "mid"}
    is_spelled_out = call.get("abbr") in {"off", "none", "in"} and unit.kind != "temperature"
    is_singular = adjective or numbers[-1] == "1"
    name = _localize_unit(unit.singular if is_singular else unit.plural, call) if is_spelled_out else unit.symbol
    return request.join_numbers(numbers) + _choose_separator(name, adjective and is_spelled_out) + name


def _choose_separator(name: str, hyphen: bool) -> str:
    return "-" if hyphen else "" if name.startswith("/") else " "


def _render_composite(request: _Request, large: str, small: str, ratio: int) -> str:
    """Render a conversion to two units, such as feet and inches, rounded to the smaller unit."""
    source, smaller = request.unit, UNITS[small]
    if source.kind != smaller.kind:
        return ""
    conversions = []
    for number in request.numbers:
        large_units, small_units = divmod(math.floor(number.value * source.factor / smaller.factor + 0.5), ratio)
        conversions.append(
            f"{large_units:,} {large} {small_units} {small}" if large_units else f"{small_units} {small}"
        )
    return request.join_numbers(conversions)


def _render_number(number: Quantity, request: _Request, target: Unit, call: TemplateCall) -> str:
    """Convert and format one number, rounded as the template specifies or by default."""
    source = request.unit
    value = (number.value * source.factor + source.offset - target.offset) / target.factor
    if (step := call.get("round")) in {"5", "10", "25", "50"}:
        return format_number(math.floor(value / int(step) + 0.5) * int(step), 0)
    if (figures := call.get("sigfig")) in set("123456789") and value:
        power = int(f"{value:.{int(figures) - 1}e}".partition("e")[2])
        return format_number(value, int(figures) - 1 - power)
    decimals = request.decimals
    return format_number(
        value, compute_default_decimals(number, value, source, target) if decimals is None else decimals
    )


def compute_default_decimals(number: Quantity, output: float, source: Unit, target: Unit) -> int:
    """Return the decimals of a conversion (negative: tens, hundreds), as in Module:Convert.

    Equal to its `default_precision`: the input's decimals plus log10 of twice the ratio of the
    numbers, with at least two significant figures (three, in kelvins, for temperatures).
    """
    if source.kind == "temperature":
        kelvin = abs(number.value * source.factor + source.offset)
        min_decimals = 2 if kelvin < 1e-8 else 2 - math.floor(math.log10(kelvin) + 1e-14)
        return int(max(math.floor(number.decimals), min_decimals))
    if number.value == 0 or output == 0:
        return 0
    min_decimals = 1 - math.floor(math.log10(abs(output)) + 1e-14)
    extra_decimals = math.log10(target.factor) + 2 if number.of_person else math.log10(abs(number.value / output))
    return int(max(math.floor(number.decimals + extra_decimals + math.log10(2)), min_decimals))


def _localize_unit(name: str, call: TemplateCall) -> str:
    if call.get("sp") == "us":
        for british, american in _TO_US:
            name = name.replace(british, american)
    return name


def _join_conversions(original: str, converted: list[str], call: TemplateCall) -> str:
    """Join the measure and its conversions, in brackets unless `disp` specifies another form."""
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


def _render_population_density(call: TemplateCall) -> str:
    """Render `{{pop density|3645257|640082|km2|sqmi}}`: people, area, and units of the area."""
    people, area = (read_number(call.get(key)) for key in ("1", "2"))
    source, target = (UNITS.get(f"/{call.get(key)}") for key in ("3", "4"))
    if not (people and area and area.value and source):
        return ""
    densities = [(people.value / area.value, source)]
    if target:
        densities.append((densities[0][0] * source.factor / target.factor, target))
    decimals = int(call.get("prec")) if _is_integer(call.get("prec")) else int(densities[0][0] < 10)
    densities_text = [format_number(value, decimals) + unit.symbol for value, unit in densities]
    return _join_conversions(densities_text[0], densities_text[1:], call)


MEASURE_RENDERERS = build_renderers(
    ("convert, cvt, convinfobox, conv", render_convert),
    ("pop density, population density", _render_population_density),
)


_NUMBER = re.compile(r"(\d+)(\.\d+)?")


def group_thousands(number: str) -> str:
    """Insert thousands commas in each plain number of a text; numbers with commas are kept.

    >>> group_thousands("1234567.8901 and 42")
    '1,234,567.8901 and 42'
    """
    return _NUMBER.sub(lambda m: f"{int(m[1]):,}{m[2] or ''}" if len(m[1]) < 30 and m[1][0] != "0" else m[0], number)


def _render_formatted(call: TemplateCall) -> str:
    text = call.get("1")
    return text.replace(",", "") if call.get("2") == "R" else text if "," in text else group_thousands(text)


def _render_fraction(call: TemplateCall) -> str:
    """Render `{{frac|1|2}}` as 1/2, `{{frac|3|1|2}}` as 3 1/2, `{{frac|3}}` as 1/3."""
    parts = call.positional()
    if len(parts) == 3:
        return f"{parts[0]} {parts[1]}/{parts[2]}"
    return f"{parts[0]}/{parts[1]}" if len(parts) == 2 else f"1/{parts[0]}" if parts else "/"


def _render_value(call: TemplateCall) -> str:
    """Render `{{val|1.23|0.02|e=5|u=km}}`: number, uncertainty, power of ten, unit."""
    number, first, second = ([*call.positional(), "", "", ""])[:3]
    text = _format_signed(number)
    if second:
        text += f" +{first.lstrip('+')} −{second.lstrip('-−')}"
    elif first:
        text += first if first.startswith("(") else f" ± {first}"
    if power := call.get("e"):
        text = (f"({text})" if " " in text else text) + f"×10{format_superscript(power)}"
    unit = call.get("u", "ul")
    over = call.get("up", "upl")
    text = call.get("p") + text + call.get("s")
    return text + (("" if unit in {"%", "°"} else " ") + unit if unit else "") + (f"/{over}" if over else "")


def _format_signed(number: str) -> str:
    return ("−" if number[:1] == "-" else "") + group_thousands(number.lstrip("-"))


def _render_exponent(call: TemplateCall) -> str:
    return f"×10{format_superscript(call.get('1'))}"


def _render_power(call: TemplateCall) -> str:
    return f"{call.get('1')}×10{format_superscript(call.get('2'))}" if call.get("2") else _render_exponent(call)


def _render_chemical(call: TemplateCall) -> str:
    """Render `{{chem|H|2|O}}` as H2O; a charge such as `2+` follows its element."""
    return "".join(call.positional())


def _render_nuclide(call: TemplateCall) -> str:
    """Render `{{nuclide|lithium|7}}` as the isotope's spoken name, lithium-7."""
    element, mass = ([*call.positional(), "", ""])[:2]
    return f"{element}-{mass}" if mass else element


def _money_renderer(sign: str) -> Renderer:
    def render(call: TemplateCall) -> str:
        amount = call.get("1")
        return sign + (group_thousands(amount) if amount else "")

    return render


def _render_ordinal(call: TemplateCall) -> str:
    number = call.get("1")
    if not number.isdecimal():
        return number
    teen = number[-2:] in {"11", "12", "13"}
    return number + ("th" if teen else {"1": "st", "2": "nd", "3": "rd"}.get(number[-1], "th"))


def _render_percentage(call: TemplateCall) -> str:
    part, total, digits = ([*call.positional(), "", "", ""])[:3]
    try:
        share = 100 * float(part.replace(",", "")) / float(total.replace(",", ""))
        return f"{share:.{min(int(digits or 0), 9)}f}%"
    except (ValueError, ZeroDivisionError):
        return ""


def _render_height(call: TemplateCall) -> str:
    """Render `{{height|ft=6|in=1}}` as 6 ft 1 in and `{{height|m=1.85}}` as 1.85 m, unconverted."""
    if metres := call.get("m", "meter", "metre"):
        return f"{metres} m"
    return " ".join(f"{call.get(unit)} {unit}" for unit in ("cm", "ft", "in") if call.get(unit))


_SIGNS = {
    "usd": "US$", "us$": "US$", "us dollar": "US$",
    "gbp": "£", "pound sterling": "£", "pound": "£", "gbp£": "£", "£": "£",
    "eur": "€", "euro": "€", "€": "€", "inr": "₹", "indian rupee": "₹", "rupee": "₹", "yen": "¥",
    "jpy": "¥", "¥": "¥", "₹": "₹",
    "cad": "CA$", "ca$": "CA$", "aud": "A$", "a$": "A$", "au$": "A$", "nzd": "NZ$", "nz$": "NZ$", "hk$": "HK$",
    "php": "₱", "krw": "₩", "won": "₩", "cny": "CN¥", "rmb": "CN¥", "ils": "₪", "rub": "₽", "ruble": "₽",
}  # fmt: skip

NUMBER_RENDERERS = build_renderers(
    (
        "formatnum, number, nts, number table sorting, format price, formatprice, fmtn, format number, fnum, num",
        _render_formatted,
    ),
    ("frac, fraction, sfrac, mfrac, ssfrac, vulgar fraction", _render_fraction),
    ("val", _render_value),
    ("e, e10, x10^", _render_exponent),
    ("10^, esp", _render_power),
    ("chem, chem2, chemf, chemical formula", _render_chemical),
    ("nuclide, nuclide2, simplenuclide, simplenuclide2, isotope", _render_nuclide),
    ("ordinal, ord, ordinal number", _render_ordinal),
    ("percentage, percent, pct", _render_percentage),
    ("height", _render_height),
    ("gaps, gapnum", lambda call: "".join(call.positional())),
    ("sqrt, radic", lambda call: "√" + call.get("1")),
    ("abs", lambda call: f"|{call.get('1')}|"),
    ("su, subsup, supsub", lambda call: "".join(call.positional())),
) | {name: _money_renderer(sign) for name, sign in _SIGNS.items()}
