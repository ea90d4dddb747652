"""Render numbers: fractions, uncertainties, money, formulas, ordinals and percentages."""

import re

from rag_model.corpus.markup.scanner import Renderer, TemplateCall, build_renderers
from rag_model.corpus.markup.tex import format_superscript

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


COORDINATES = frozenset({"coord", "coor", "coordinates", "coord dms", "coor dms", "coor dm"})
_DEGREE_SIGNS = "°′″"


def render_coordinates(call: TemplateCall) -> str:
    """Render `{{coord|13|19|N|169|9|W}}` as 13°19′N 169°9′W; return "" for other parameters.

    >>> render_coordinates(TemplateCall("coord", {"1": "13.5", "2": "-169.25", "3": "display=inline"}))
    '13.5°N 169.25°W'
    """
    angles: list[str] = []
    numbers: list[str] = []
    for value in call.positional():
        if _ANGLE.fullmatch(value) and len(numbers) < len(_DEGREE_SIGNS):
            numbers.append(value)
        elif numbers and value in {"N", "S", "E", "W"} and len(angles) < 2:
            angles.append("".join(number + sign for number, sign in zip(numbers, _DEGREE_SIGNS, strict=False)) + value)
            numbers = []
        else:
            break
    if not angles and len(numbers) == 2 and call.name in COORDINATES:  # signed degrees
        angles = [
            number.lstrip("-−+") + "°" + sides[number[0] in "-−"]
            for number, sides in zip(numbers, ("NS", "EW"), strict=True)
        ]
    return " ".join(angles) if len(angles) == 2 else ""


_ANGLE = re.compile(r"[-−+]?\d{1,3}(?:\.\d+)?")
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
