"""Number templates: fractions, values with units and uncertainties, amounts of money, chemical formulas."""

import re

from rag_model.corpus.markup.call import Call, Renderer, by_name
from rag_model.corpus.markup.tex import raised

_NUMBER = re.compile(r"(\d+)(\.\d+)?")


def grouped(number: str) -> str:
    """Insert thousands commas in each plain number of a text; numbers that have them are not changed.

    >>> grouped("1234567.8901 and 42")
    '1,234,567.8901 and 42'
    """
    return _NUMBER.sub(lambda m: f"{int(m[1]):,}{m[2] or ''}" if len(m[1]) < 30 and m[1][0] != "0" else m[0], number)


def _formatted(call: Call) -> str:
    text = call.get("1")
    return text.replace(",", "") if call.get("2") == "R" else text if "," in text else grouped(text)


def _fraction(call: Call) -> str:
    """`{{frac|1|2}}` is 1/2, `{{frac|3|1|2}}` is 3 1/2, `{{frac|3}}` is 1/3."""
    parts = call.positional()
    if len(parts) == 3:
        return f"{parts[0]} {parts[1]}/{parts[2]}"
    return f"{parts[0]}/{parts[1]}" if len(parts) == 2 else f"1/{parts[0]}" if parts else "/"


def _value(call: Call) -> str:
    """`{{val|1.23|0.02|e=5|u=km}}`: number, uncertainty, power of ten, unit."""
    number, first, second = ([*call.positional(), "", "", ""])[:3]
    shown = _signed(number)
    if second:
        shown += f" +{first.lstrip('+')} −{second.lstrip('-−')}"
    elif first:
        shown += first if first.startswith("(") else f" ± {first}"
    if power := call.get("e"):
        shown = (f"({shown})" if " " in shown else shown) + f"×10{raised(power)}"
    unit = call.get("u", "ul")
    over = call.get("up", "upl")
    shown = call.get("p") + shown + call.get("s")
    return shown + (("" if unit in {"%", "°"} else " ") + unit if unit else "") + (f"/{over}" if over else "")


def _signed(number: str) -> str:
    return ("−" if number[:1] == "-" else "") + grouped(number.lstrip("-"))


def _exponent(call: Call) -> str:
    return f"×10{raised(call.get('1'))}"


def _power(call: Call) -> str:
    return f"{call.get('1')}×10{raised(call.get('2'))}" if call.get("2") else _exponent(call)


def _chemical(call: Call) -> str:
    """`{{chem|H|2|O}}` is H2O; a charge such as `2+` follows its element."""
    return "".join(call.positional())


def _nuclide(call: Call) -> str:
    """`{{nuclide|lithium|7}}` reads as the isotope's spoken name, lithium-7."""
    element, mass = ([*call.positional(), "", ""])[:2]
    return f"{element}-{mass}" if mass else element


def _money(sign: str) -> Renderer:
    def render(call: Call) -> str:
        amount = call.get("1")
        return sign + (grouped(amount) if amount else "")

    return render


def _ordinal(call: Call) -> str:
    number = call.get("1")
    if not number.isdecimal():
        return number
    teen = number[-2:] in {"11", "12", "13"}
    return number + ("th" if teen else {"1": "st", "2": "nd", "3": "rd"}.get(number[-1], "th"))


def _percentage(call: Call) -> str:
    part, whole, digits = ([*call.positional(), "", "", ""])[:3]
    try:
        share = 100 * float(part.replace(",", "")) / float(whole.replace(",", ""))
        return f"{share:.{min(int(digits or 0), 9)}f}%"
    except (ValueError, ZeroDivisionError):
        return ""


def _inches(call: Call) -> str:
    """`{{height|ft=6|in=1}}` and `{{height|m=1.85}}` read as 6 ft 1 in and 1.85 m, without a conversion."""
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

RENDERERS = by_name(
    (
        "formatnum, number, nts, number table sorting, format price, formatprice, fmtn, format number, fnum, num",
        _formatted,
    ),
    ("frac, fraction, sfrac, mfrac, ssfrac, vulgar fraction", _fraction),
    ("val", _value),
    ("e, e10, x10^", _exponent),
    ("10^, esp", _power),
    ("chem, chem2, chemf, chemical formula", _chemical),
    ("nuclide, nuclide2, simplenuclide, simplenuclide2, isotope", _nuclide),
    ("ordinal, ord, ordinal number", _ordinal),
    ("percentage, percent, pct", _percentage),
    ("height", _inches),
    ("gaps, gapnum", lambda call: "".join(call.positional())),
    ("sqrt, radic", lambda call: "√" + call.get("1")),
    ("abs", lambda call: f"|{call.get('1')}|"),
    ("su, subsup, supsub", lambda call: "".join(call.positional())),
) | {name: _money(sign) for name, sign in _SIGNS.items()}
