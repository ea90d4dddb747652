"""Render `{{convert}}`: a measure in the article's unit, followed by its conversions.

"5 miles (8.0 km)" answers a question in either unit, whereas a dropped template leaves "a trail of
long". The rules are from Wikipedia's Module:Convert: a conversion is about as precise as the
input, with at least two significant figures. Links, sort keys and tables are not rendered. A unit
that is not in `units` is shown as written, without a conversion. In languages other than English,
units are shown as symbols.
"""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from rag_model.corpus.markup.scanner import Renderer, TemplateCall, build_renderers
from rag_model.corpus.markup.tex import format_superscript
from rag_model.corpus.markup.units import FULL_NAMES, SYMBOL_KINDS, UNITS, Unit, find_unit, get_symbol

_NUMBER_PATTERN = re.compile(r"([-+−]?)(\d[\d,]{0,30}(?:\.\d{0,30})?|\.\d{1,30})(?:e([-+]?\d{1,2}))?", re.IGNORECASE)
_FRACTION_PATTERN = re.compile(r"([-−]?)(?:(\d{1,9})\s*[\s+]\s*)?(\d{1,9})\s*(?:/{1,2}|⁄)\s*(\d{1,9})")
_INTEGER = re.compile(r"[-−]?\d{1,2}")
_SPACED_RANGE = re.compile(r"(\S+)\s+([^\s\d]+|to about)\s+(\S.*)", re.DOTALL)
# separators that need no spaces between the numbers
_RANGE_WORDS = ("-", "–", "xx", "x", "×", "*")
_MAX_ARGUMENTS = 40  # maximum arguments that are parsed; no real call has more
_MAX_RANGES = 30  # limit of Module:Convert
_MAX_FIGURES = 14  # significant figures of a result, as in Module:Convert
_FUDGE = 1e-14  # added before rounding, as in Module:Convert


class Quantity(NamedTuple):
    """A number of the input, with its digits, value and precision."""

    digits: str  # without sign and thousands commas
    value: float
    decimals: float  # precision: 2 for 1.25, -2 for 1,300
    sign: str = ""
    exponent: int | None = None  # 6 for 1e6


class _Separator(NamedTuple):
    """A separator between two numbers, such as "to" or "by"."""

    text: str
    with_symbols: str = ""  # used instead of `text` if units are shown as symbols
    of_output: str = ""  # used instead of `text` in the conversion
    is_word: bool = False  # whether adj=on puts hyphens around it also if units are symbols
    repeats_symbol: bool = False  # whether each number is followed by the unit's symbol
    repeats_output: bool = False  # whether each converted number is followed by its unit
    is_tolerance: bool = False  # whether the number after it is a difference, as after ±


_TIMES, _TOLERANCE = _Separator(" by ", " × ", repeats_symbol=True), _Separator(" ± ", is_tolerance=True)
_SEPARATORS = {
    "to": _Separator(" to ", is_word=True), "to-": _Separator(" to "), "to(-)": _Separator(" to ", of_output="–"),
    "to about": _Separator(" to about "), "-": _Separator("–"), "–": _Separator("–"), "—": _Separator("–"),
    "and": _Separator(" and ", is_word=True), "&": _Separator(" and "), "and(-)": _Separator(" and ", of_output="–"),
    "and to": _Separator(" and "), "or": _Separator(" or ", is_word=True), "by": _Separator(" by "),
    "by(x)": _Separator(" by ", of_output=" × ", repeats_output=True), "x": _TIMES, "×": _TIMES,
    "xx": _Separator(" × "), "*": _Separator("×"), "+": _Separator(" + "), "±": _TOLERANCE, "+/-": _TOLERANCE,
    "with": _Separator(" with "), ",": _Separator(", "), ", or": _Separator(", or "), ", and": _Separator(", and "),
}  # fmt: skip
_SUBDIVISIONS = {  # smaller units that may follow a larger unit, by symbol
    "mi": ("ft", "yd", "furlong", "ch"), "yd": ("ft", "in"), "ft": ("in",), "ch": ("yd", "ft"),
    "st": ("lb",), "lb": ("oz",),
}  # fmt: skip
# Units from the smallest to the largest, each with how many make the next unit (0 for the largest).
_COMPOSITES = {
    "ftin": (("in", 12), ("ft", 0)),
    "ydft": (("ft", 3), ("yd", 0)),
    "ydftin": (("in", 12), ("ft", 3), ("yd", 0)),
    "stlb": (("lb", 14), ("st", 0)),
    "lboz": (("oz", 16), ("lb", 0)),
}
_SCALES = {3: "thousand", 6: "million", 9: "billion", 12: "trillion", 15: "quadrillion"}
# Strings before, after and between the conversions, by the value of `disp`.
_JOINS = {
    "or": (" or ", "", " or "), "comma": (", ", "", ", "), "sqbr": (" [", "]", "; "), "(or)": (" (", ")", " or "),
    "slash": (" / ", "", "; "), "br": ("\n", "", "; "), "br()": ("\n(", ")", "; "),
}  # fmt: skip
_WITH_NAMES = {"or", "slash", "br", "br()"}  # values of `disp` that show units by name
_HAND = UNITS["hand"]
_US_SPELLINGS = (("metre", "meter"), ("litre", "liter"), ("tonne", "metric ton"), ("US ", "U.S. "), ("deca", "deka"))


@dataclass(slots=True)
class _ConvertCall:
    """The parsed parameters of one `{{convert}}`."""

    call: TemplateCall
    numbers: list[Quantity]
    separators: list[_Separator]  # separators between the numbers
    components: list[tuple[Quantity, Unit]]  # numbers and units of "6 feet 1 inch"; empty for one unit
    unit: Unit  # unit of the numbers; the smallest if there are several units
    targets: Sequence[str] = ()
    decimals: int | None = None
    middle_words: str = ""  # words after the unit (adj=mid)
    before_unit: str = ""  # words before the unit (adj=pre)
    delimiters: tuple[str, str, str] = ("", "", "")  # before, after and between the conversions
    abbr: str | None = None
    is_flipped: bool = False
    is_adjective: bool = False

    def wants_name(self, unit: Unit, side: str) -> bool:
        """Return whether a unit is shown by its name in the input ("in") or the output ("out")."""
        if unit.singular in FULL_NAMES:
            return True
        if self.abbr is None and unit.kind in SYMBOL_KINDS:
            return False
        if self.abbr is None and (unit is _HAND or self.call.get("disp") in _WITH_NAMES):
            return True
        return not self._uses_symbols(side)

    def shows_power_of_ten(self, side: str) -> bool:
        """Return whether millions are shown as a power of ten in the input or the output."""
        return self._uses_symbols(side) and self.call.get("abbr") != "unit"

    def _uses_symbols(self, side: str) -> bool:
        symbol_side = self.abbr or "out"
        if self.is_flipped:
            symbol_side = {"in": "out", "out": "in"}.get(symbol_side, symbol_side)
        return symbol_side in {"on", side}

    def format_digits(self, digits: str, *, is_output: bool) -> str:
        """Format digits with thousands commas unless `comma` forbids them, or spell the number."""
        spell_mode = self.call.get("spell").lower()
        is_spelled_out = spell_mode == "on" or (spell_mode == "in" and is_output == self.is_flipped)
        is_spelled_out = is_spelled_out and self.call.is_english
        if is_spelled_out and digits.isdecimal() and len(digits) < 10:
            return spell_integer(int(digits), " " if self.call.get("sp") == "us" else " and ")
        whole_digits, point, decimals = digits.partition(".")
        comma_mode = self.call.get("comma")
        is_ungrouped = comma_mode in {"off", "gaps", "gaps3"} or (comma_mode == "5" and len(whole_digits) < 5)
        if not is_ungrouped and whole_digits.isdecimal():
            whole_digits = f"{int(whole_digits):,}"
        return whole_digits + point + decimals


class _FormattedNumber(NamedTuple):
    """A formatted number, and whether its unit is singular."""

    text: str
    is_singular: bool


def read_number(text: str) -> Quantity | None:
    """Parse `1,300`, `-4.5`, `2e6`, `1/2` or `1+1/2`; None if the text is not a number."""
    text = text.strip()
    if fraction_match := _FRACTION_PATTERN.fullmatch(text):
        return _read_fraction(fraction_match)
    number_match = _NUMBER_PATTERN.fullmatch(text)
    if not number_match:
        return None
    digits = number_match[2].replace(",", "")
    whole_digits, point, decimals = digits.partition(".")
    precision = len(decimals) if point else len(whole_digits.rstrip("0")) - len(whole_digits)
    power = int(number_match[3] or 0)
    value = float(f"{'-' if number_match[1] in ('-', '−') else ''}{digits}e{power}")
    shown_digits = whole_digits + (f".{decimals}" if decimals else "")
    exponent = power if number_match[3] else None
    return Quantity(shown_digits, value, precision - power, number_match[1].replace("-", "−"), exponent)


def _read_fraction(fraction: re.Match[str]) -> Quantity:
    sign, whole_part, numerator, denominator = fraction.groups()
    divisor = max(int(denominator), 1)
    value = int(whole_part or 0) + int(numerator) / divisor
    digits = f"{whole_part + ' ' if whole_part else ''}{numerator}/{denominator}"
    return Quantity(digits, -value if sign else value, max(math.log10(divisor), 1), "−" if sign else "")


def render_convert(call: TemplateCall) -> str:
    """Render a measure and its conversions; an invalid call gives its first two parameters."""
    try:
        request = _parse_request(call)
    except (LookupError, ValueError):
        return " ".join([value for value in call.get_positional() if value][:2])
    disp = call.get("disp")
    conversions: list[str] = []
    is_first_input = call.get("order") == "out" and len(request.targets) > 1
    for target in request.targets:
        side = "in" if is_first_input and not conversions else "out"
        with suppress(LookupError, ArithmeticError, ValueError):
            conversions.append(_render_conversion(request, target, side))
    if disp == "unit" or (disp == "unit2" and not conversions):
        return _name_unit(request, request.unit, "in", is_singular=False)
    if disp == "unit2":
        target = request.targets[0]
        unit = find_unit(_COMPOSITES[target][-1][0] if target in _COMPOSITES else target)
        return _name_unit(request, unit, "out", is_singular=False)
    if disp in {"out", "output only", "number", "output number only"} and conversions:
        return "; ".join(conversions)
    original = conversions.pop(0) if is_first_input and conversions else _render_original(request)
    if not conversions:
        return original
    before, after, between = request.delimiters
    converted = between.join(conversions)
    first_text, second_text = (converted, original) if request.is_flipped else (original, converted)
    if call.get("abbr") == "~" and not request.is_flipped and not request.components and before == " (":
        first_text += f" [{get_symbol(request.unit)}]"
    if call.get("spell") in {"In", "On"}:
        first_text = first_text[:1].upper() + first_text[1:]
    return first_text + before + second_text + after


def render_measure(call: TemplateCall) -> str:
    """Render the measure of a template with the parameters of `{{convert}}`, without conversions.

    Return "" if the parameters are not a measure, or the unit is unknown.

    >>> render_measure(TemplateCall("রূপান্তর", {"1": "100", "2": "–", "3": "150", "4": "km2"}, "bn"))
    '100–150 km²'
    """
    try:
        request = _parse_request(call)
    except (LookupError, ValueError):
        return ""
    request.abbr = "on"
    return _render_original(request) if request.unit.kind else ""


def _parse_request(call: TemplateCall) -> _ConvertCall:
    """Parse value, separators, unit, targets, precision and words, in that order.

    Raises:
        LookupError, ValueError: The parameters are not in this order.
    """
    arguments = call.get_positional()[:_MAX_ARGUMENTS]
    quantities, separators = _take_numbers(arguments)
    request = _ConvertCall(call, quantities, separators, [], _take_unit(arguments))
    while not separators and len(arguments) > 1 and _is_subdivision(request.unit, arguments[1]):
        _add_smaller_unit(request, arguments)
    disp, abbr = call.get("disp"), call.get("abbr")
    request.abbr = {"none": "off", "unit": "on", "h": "on"}.get(abbr, abbr)
    if request.abbr not in {"on", "off", "in", "out"}:
        request.abbr = "on" if call.name == "cvt" else None
    if request.abbr is None and call.get("spell").lower() == "on":
        request.abbr = "off"
    if not call.is_english:
        request.abbr = "on"
    request.is_flipped = "flip" in {disp, call.get("order"), call.get("adj")}
    adjective_mode = call.get("adj", "sing")
    request.is_adjective = adjective_mode in {"on", "mid"} and call.is_english
    request.delimiters = _JOINS.get(disp, (" (", ")", "; "))

    target = arguments.pop(0) if arguments and not _INTEGER.fullmatch(arguments[0]) else ""
    request.decimals = _take_precision(arguments)
    if adjective_mode == "mid" and arguments:
        middle_words = arguments.pop(0)
        request.middle_words = middle_words if middle_words[:1] in {"-", ""} else f" {middle_words}"
    if adjective_mode == "pre" and arguments:
        request.before_unit = arguments.pop(0)
    if disp == "x":
        before, after = [*arguments[:2], "", ""][:2]
        del arguments[:2]
        request.delimiters = (_pad_words(before, " ", " ") or " [", _pad_words(after, " ", "") if before else "]", "; ")
    if request.decimals is None:
        request.decimals = _take_precision(arguments)
    request.targets = _split_targets(target or _choose_default_target(request))
    return request


_ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SIZES = ((10**6, "million"), (10**3, "thousand"), (10**2, "hundred"))


def spell_integer(number: int, conjunction: str = " and ") -> str:
    """Spell a number below 1,000 million, with the conjunction before its last two digits.

    >>> spell_integer(1234), spell_integer(120, " ")
    ('one thousand two hundred and thirty-four', 'one hundred twenty')
    """
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
    power, size_name = next((power, size_name) for power, size_name in _SIZES if number >= power)
    quotient, remainder = divmod(number, power)
    words = f"{spell_integer(quotient, ' ')} {size_name}"
    if not remainder:
        return words
    return words + (conjunction if remainder < 100 else " ") + spell_integer(remainder, conjunction)


def _take_numbers(arguments: list[str]) -> tuple[list[Quantity], list[_Separator]]:
    """Remove and return the numbers and separators at the start of the arguments."""
    quantities: list[Quantity] = []
    separators: list[_Separator] = []
    while True:
        text = arguments.pop(0)
        quantity = read_number(text)
        if quantity is None:
            if not (range_parts := _split_range(text)):
                raise ValueError(text)
            arguments[:0] = range_parts
            continue
        quantities.append(quantity)
        if len(separators) > _MAX_RANGES:
            raise ValueError(text)
        if not arguments or (separator := _SEPARATORS.get(arguments[0].lower())) is None:
            return quantities, separators
        separators.append(separator)
        del arguments[0]


def _split_range(text: str) -> list[str]:
    """Split `3 to 5` or `3x5` into number, separator and rest; return [] for other texts."""
    if range_match := _SPACED_RANGE.fullmatch(text.strip()):
        return list(range_match.groups())
    for range_word in _RANGE_WORDS:
        if (word_start := text.find(range_word, 1)) > 0:
            return [text[:word_start], range_word, text[word_start + len(range_word) :]]
    return []


def _take_unit(arguments: list[str]) -> Unit:
    """Remove and return the first argument, a unit; an unknown unit is shown as written."""
    code = arguments.pop(0)
    try:
        return find_unit(code)
    except KeyError:
        if not code:
            raise
        return Unit("", code, code, code, 1.0, "")


def _take_precision(arguments: list[str]) -> int | None:
    if not arguments or not _INTEGER.fullmatch(arguments[0]):
        return None
    return int(arguments.pop(0).replace("−", "-"))


def _pad_words(text: str, before: str, after: str) -> str:
    """Surround the words of disp=x with spaces, except at punctuation and brackets."""
    if not text:
        return ""
    return (before if text[0] not in ",.;:)]" else "") + text + (after if text[-1] not in "([" else "")


def _is_subdivision(unit: Unit, code: str) -> bool:
    smaller = UNITS.get(code)
    return smaller is not None and smaller.symbol in _SUBDIVISIONS.get(unit.symbol, ())


def _add_smaller_unit(request: _ConvertCall, arguments: list[str]) -> None:
    """Add a number in a smaller unit (1 inch after 6 feet), and express the sum in this unit.

    Raises:
        ValueError: There is no number before the smaller unit.
    """
    quantity = read_number(arguments.pop(0))
    smaller = find_unit(arguments.pop(0))
    if quantity is None:
        raise ValueError(smaller.symbol)
    total = request.numbers[0].value * round(request.unit.factor / smaller.factor) + quantity.value
    decimals = quantity.decimals if "/" in quantity.digits else max(quantity.decimals, 0)
    request.components = [*(request.components or [(request.numbers[0], request.unit)]), (quantity, smaller)]
    request.numbers, request.unit = [Quantity(quantity.digits, total, decimals)], smaller


def _split_targets(text: str) -> list[str]:
    text = text.replace("L/100 km", "L/100km")
    if text in _COMPOSITES:
        return [text]
    try:
        find_unit(text)
    except KeyError:
        return text.replace("+", " ").split()
    return [text]


def _choose_default_target(request: _ConvertCall) -> str:
    """Return the default target units; lengths below 3 m are converted to feet and inches."""
    if request.components:
        first_unit = request.components[0][1]
        return "kg lb" if first_unit.symbol == "st" else first_unit.default
    if request.unit.default == "ftin":
        return "ftin" if 0 < request.numbers[0].value < 3 else "ft"
    return request.unit.default


def _render_original(request: _ConvertCall) -> str:
    """Render the measure in its own unit: "5 miles", "5-mile", "5 mi", "6 feet 1 inch"."""
    if request.components:
        is_hyphenated = request.is_adjective and request.wants_name(request.components[0][1], "in")
        separator = "-" if is_hyphenated else " "
        pieces = []
        for quantity, unit in request.components:
            formatted_number = _format_input(request, quantity)
            pieces += [formatted_number.text, _name_unit(request, unit, "in", is_singular=formatted_number.is_singular)]
        return separator.join(pieces) + request.middle_words * (not request.is_flipped)
    formatted_numbers = [_format_input(request, quantity) for quantity in request.numbers]
    return _join_numbers(request, formatted_numbers, request.unit, "in")


def _format_input(request: _ConvertCall, quantity: Quantity) -> _FormattedNumber:
    digits, magnitude = quantity.digits, abs(quantity.value)
    if (adjustment_match := re.fullmatch(r"ri([0-3])", request.call.get("adj"))) and "/" not in digits:
        digits = f"{magnitude + 2 * _FUDGE:.{adjustment_match[1]}f}"
        magnitude = float(digits)
    power = "" if quantity.exponent is None else f"×10{format_superscript(str(quantity.exponent))}"
    shown_digits = digits + power if power else request.format_digits(digits, is_output=False)
    return _FormattedNumber(_add_sign(shown_digits, quantity.sign), magnitude <= 1 if "/" in digits else magnitude == 1)


def _name_unit(request: _ConvertCall, unit: Unit, side: str, *, is_singular: bool) -> str:
    """Return the name or symbol of a unit in the input or the output."""
    if request.wants_name(unit, side):
        is_singular = request.is_adjective or (is_singular and not unit.exponent)
        unit_name = unit.singular if is_singular else unit.plural
    else:
        unit_name = unit.symbol
    if request.call.get("sp") == "us" and (request.wants_name(unit, side) or unit_name.startswith("US ")):
        for british, american in _US_SPELLINGS:
            unit_name = unit_name.replace(british, american)
    return unit_name


def _join_numbers(request: _ConvertCall, formatted_numbers: Sequence[_FormattedNumber], unit: Unit, side: str) -> str:
    """Join the numbers of a range and their unit in the input or the output."""
    has_name = request.wants_name(unit, side)
    is_hyphenated = has_name and request.is_adjective
    is_output = (side == "out") != request.is_flipped
    unit_name = _name_unit(request, unit, side, is_singular=formatted_numbers[-1].is_singular)
    separator = "-" if is_hyphenated else "" if unit_name.startswith("/") else " "
    if is_hyphenated:
        unit_name = unit_name.replace(" ", "-")
    repeats_unit = not is_hyphenated and any(
        (range_separator.repeats_symbol and not has_name) or (range_separator.repeats_output and is_output)
        for range_separator in request.separators
    )
    words = ""
    for i, formatted_number in enumerate(formatted_numbers):
        is_last_number = i == len(formatted_numbers) - 1
        text = formatted_number.text
        if unit.exponent and request.shows_power_of_ten(side):
            text += f"×10{format_superscript(str(unit.exponent))}"
        elif unit.exponent and is_last_number:
            text += ("-" if request.is_adjective else " ") + _SCALES[unit.exponent]
        if repeats_unit and not is_last_number:
            text += separator + unit_name
        words += (_format_separator(request, request.separators[i - 1], has_name, is_output, text) if i else "") + text
    if request.call.get("disp") in {"number", "output number only"} or request.call.get("abbr") == "values":
        return words
    if request.before_unit and side == "in":
        words += f" {request.before_unit}"
    return words + separator + unit_name + request.middle_words * (not is_output)


def _format_separator(
    request: _ConvertCall, separator: _Separator, has_name: bool, is_output: bool, next_text: str
) -> str:
    text = (separator.of_output if is_output else "") or ("" if has_name else separator.with_symbols) or separator.text
    if not request.call.is_english and any(map(str.isalpha, text)):
        text = "–"
    is_adjective = request.is_adjective and not separator.is_tolerance
    if is_adjective and (has_name or (separator.is_word and request.abbr == "on")):
        text = text.replace(" ", "-")
    return " – " if text == "–" and next_text.startswith("−") else text


def _render_conversion(request: _ConvertCall, target: str, side: str) -> str:
    """Render the conversion to one target.

    Raises:
        LookupError, ArithmeticError, ValueError: The measure cannot be converted to the target.
    """
    if request.unit is _HAND:
        return _render_hands(request, target, side)
    if target in _COMPOSITES:
        return _render_composite(request, target, side)
    unit = find_unit(target)
    if unit.kind != request.unit.kind:
        raise KeyError(target)
    if unit is _HAND:
        inches = [round(quantity.value * request.unit.factor / UNITS["in"].factor) for quantity in request.numbers]
        hand_lengths = [
            _FormattedNumber(f"{n_inches // 4}.{n_inches % 4}" if n_inches % 4 else str(n_inches // 4), n_inches == 4)
            for n_inches in inches
        ]
        return _join_numbers(request, hand_lengths, unit, side)
    return _join_numbers(request, _convert_numbers(request, unit), unit, side)


def _render_hands(request: _ConvertCall, target: str, side: str) -> str:
    """Convert a height in hands; 14.2 means 14 hands and 2 inches."""
    inch_quantities = []
    for quantity in request.numbers:
        whole_digits, _, inch_digit = quantity.digits.partition(".")
        n_inches = 4 * int(whole_digits) + int(inch_digit or 0)
        inch_quantities.append(Quantity(str(n_inches), float(n_inches), 0.0))
    abbr = "off" if target == "in" and request.abbr is None else request.abbr
    inch_request = _ConvertCall(request.call, inch_quantities, request.separators, [], UNITS["in"], [target], abbr=abbr)
    inch_request.decimals = 0 if request.decimals is None and target in {"in", "cm"} else request.decimals
    return _render_conversion(inch_request, target, side)


def _convert_numbers(request: _ConvertCall, unit: Unit) -> list[_FormattedNumber]:
    """Convert and format the numbers, rounded as the template specifies or by default."""
    values = [_convert_value(request, i, unit) for i in range(len(request.numbers))]
    default_decimals = [
        compute_default_decimals(quantity, value, request.unit, unit, is_composite=bool(request.components))
        for quantity, value in zip(request.numbers, values, strict=True)
    ]
    if request.call.get("round") != "each":
        default_decimals = [max(default_decimals)] * len(values)
    return [_format_output(request, value, decimals) for value, decimals in zip(values, default_decimals, strict=True)]


def _convert_value(request: _ConvertCall, i: int, unit: Unit) -> float:
    value, source_unit = request.numbers[i].value, request.unit
    if i and request.separators[i - 1].is_tolerance:
        return value * source_unit.factor / unit.factor
    if source_unit.offset or unit.offset or source_unit.is_inverse or unit.is_inverse:
        return unit.from_base(source_unit.to_base(value))
    return value * (source_unit.factor / unit.factor)


def compute_default_decimals(
    number: Quantity, converted_value: float, source: Unit, target: Unit, *, is_composite: bool = False
) -> int:
    """Return the number of decimals of a converted value in Module:Convert; -1 rounds to tens.

    The module's `default_precision` is the input's decimals plus log10 of twice the ratio of input
    and output, with at least two significant figures (three, in kelvins, for temperatures). Feet,
    pounds and heights in feet and inches are more precise.
    """
    if source.kind == "temperature":
        kelvin = abs(source.to_base(number.value))
        min_decimals = 2 if kelvin < 1e-8 else 2 - math.floor(math.log10(kelvin) + _FUDGE)
        return int(max(math.floor(number.decimals), min_decimals))
    if number.value == 0 or converted_value == 0:
        return 0
    if target.symbol in {"ft", "lb"} and not target.exponent and number.value == math.floor(number.value):
        extra_decimals = -math.log10(source.factor)
    elif is_composite and source.symbol == "in":
        extra_decimals = math.log10(target.factor) + 2
    else:
        extra_decimals = math.log10(abs(number.value / converted_value))
    min_decimals = 1 - math.floor(math.log10(abs(converted_value)) + _FUDGE)
    return int(max(math.floor(number.decimals + extra_decimals + math.log10(2)), min_decimals))


def _format_output(request: _ConvertCall, value: float, default_decimals: int) -> _FormattedNumber:
    """Format a converted number, rounded as the template specifies or by default.

    Raises:
        ArithmeticError: The number is infinite.
    """
    magnitude, significant_figures, rounding_step = abs(value), request.call.get("sigfig"), request.call.get("round")
    if math.isinf(magnitude):
        raise OverflowError(value)
    fraction = request.call.get("frac")
    if fraction.isdecimal() and 1 < int(fraction[:4]) < 1000:
        text, is_singular = _format_fraction(magnitude, int(fraction)), magnitude <= 1
    elif request.decimals is not None:
        text, is_singular = _format_magnitude(request, magnitude, request.decimals)
    elif significant_figures.isdecimal() and magnitude:
        n_significant = min(max(int(significant_figures[:3]), 1), _MAX_FIGURES)
        power = int(f"{magnitude:.{n_significant - 1}e}".partition("e")[2])
        text, is_singular = _format_magnitude(request, magnitude, n_significant - 1 - power)
    elif rounding_step in {"0.5", "5", "10", "25", "50"}:
        rounded_value = math.floor(magnitude / float(rounding_step) + 0.5) * float(rounding_step)
        text, is_singular = _format_magnitude(request, rounded_value, int(rounded_value != math.floor(rounded_value)))
    else:
        text, is_singular = _format_magnitude(request, magnitude, default_decimals)
    is_zero = not text.strip("0.") or text == "zero"
    return _FormattedNumber(_add_sign(text, "−" if value < 0 and not is_zero else ""), is_singular)


def _add_sign(text: str, sign: str) -> str:
    return f"negative {text}" if sign == "−" and text[0].isalpha() else sign + text


def _format_fraction(magnitude: float, denominator: int) -> str:
    whole_digits, numerator = divmod(math.floor(magnitude * denominator + 0.5), denominator)
    divisor = math.gcd(numerator, denominator)
    fraction = f"{numerator // divisor}/{denominator // divisor}" if numerator else ""
    return f"{whole_digits} {fraction}" if whole_digits and numerator else fraction or str(whole_digits)


def _format_magnitude(request: _ConvertCall, magnitude: float, decimals: int) -> tuple[str, bool]:
    """Round and format a number without sign; very large and small numbers get a power of ten.

    Returns:
        (text, whether the unit is singular, as after 1).
    """
    if decimals >= 0:
        text = f"{magnitude + 2 * _FUDGE:.{decimals}f}" if decimals <= 8 else f"{magnitude:.{decimals}f}"
        whole_digits, _, decimal_digits = text.partition(".")
    else:
        leading_digits = f"{magnitude / 10.0**-decimals:.0f}"
        whole_digits, decimal_digits = leading_digits + "0" * -decimals if leading_digits != "0" else "0", ""
    is_singular = whole_digits == "1" and not decimal_digits.strip("0")
    is_scientific = any(quantity.exponent is not None for quantity in request.numbers)
    max_whole_digits, max_zeros = (4, 2) if is_scientific else (10, 4)
    significant_decimals = decimal_digits.lstrip("0")
    if (
        whole_digits == "0" and significant_decimals and len(decimal_digits) - len(significant_decimals) >= max_zeros
    ) or (
        whole_digits != "0"
        and len(whole_digits) >= max_whole_digits
        and not (len(whole_digits) == 10 and whole_digits == "1" + "0" * 9)
    ):
        exponent = len(whole_digits) - 1 if whole_digits != "0" else len(significant_decimals) - len(decimal_digits) - 1
        n_known_digits = len(whole_digits) + decimals if decimals < 0 else _MAX_FIGURES
        digits = (whole_digits + decimal_digits if whole_digits != "0" else significant_decimals)[
            : min(n_known_digits, _MAX_FIGURES)
        ]
        significand = digits[0] + (f".{digits[1:]}" if digits[1:] else "")
        return f"{significand}×10{format_superscript(str(exponent))}", False
    text = (f"{whole_digits}.{decimal_digits}" if decimal_digits else whole_digits)[: _MAX_FIGURES + 1]
    return request.format_digits(text, is_output=True), is_singular


def _render_composite(request: _ConvertCall, target: str, side: str) -> str:
    """Render a conversion to several units at once, such as feet and inches."""
    unit_levels = _COMPOSITES[target]
    smallest_unit = find_unit(unit_levels[0][0])
    if smallest_unit.kind != request.unit.kind:
        raise KeyError(target)
    formatted_numbers = _convert_numbers(request, smallest_unit)
    has_name = request.wants_name(smallest_unit, side)
    separator = "-" if has_name and request.is_adjective else " "
    words = ""
    for i, formatted_number in enumerate(formatted_numbers):
        value = _convert_value(request, i, smallest_unit)
        decimals = len(formatted_number.text.partition(".")[2]) if "×" not in formatted_number.text else 0
        amount_left = round(abs(value) + 2 * _FUDGE, decimals) if decimals else float(math.floor(abs(value) + 0.5))
        pieces: list[str] = []
        for code, ratio in unit_levels:
            amount_left, n_units = divmod(amount_left, ratio) if ratio else (0.0, amount_left)
            text = "0" if not n_units else request.format_digits(f"{n_units:.{decimals}f}", is_output=True)
            unit_name = _name_unit(request, find_unit(code), side, is_singular=n_units == 1)
            pieces.insert(0, text + separator + unit_name)
            decimals = 0
            if not amount_left:
                break
        text = ("−" if value < 0 else "") + separator.join(pieces)
        words += (_format_separator(request, request.separators[i - 1], has_name, True, text) if i else "") + text
    return words


def _render_population_density(call: TemplateCall) -> str:
    """Render `{{pop density|3645257|640082|km2|sqmi}}`: people, area, and units of the area."""
    people, area = (read_number(call.get(key)) for key in ("1", "2"))
    source, target = (UNITS.get(f"/{call.get(key)}") for key in ("3", "4"))
    if not (people and area and area.value and source):
        return ""
    densities = [(people.value / area.value, source)]
    if target:
        densities.append((densities[0][0] * source.factor / target.factor, target))
    decimals = int(call.get("prec")) if _INTEGER.fullmatch(call.get("prec")) else int(densities[0][0] < 10)
    density_texts = [f"{density + 2 * _FUDGE:,.{max(decimals, 0)}f}{unit.symbol}" for density, unit in densities]
    return density_texts[0] + (f" ({density_texts[1]})" if target else "")


CONVERT_RENDERERS: dict[str, Renderer] = build_renderers(
    ("convert, cvt, convinfobox, conv", render_convert),
    ("pop density, population density", _render_population_density),
)
