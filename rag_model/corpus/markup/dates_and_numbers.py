"""Render templates of dates and numbers.

A date is written in words, in the order that the template call specifies. Numbers are fractions,
uncertainties, money, formulas, ordinals, percentages and coordinates.

In languages other than English, a date has MediaWiki's month names and order (`language_names`).

Ages that depend on the current day ("age 52") are omitted, because a snapshot would show the age
at build time.
"""

import re

from rag_model.corpus.language_names import format_local_date, get_language_names
from rag_model.corpus.markup.scanner import Renderer, TemplateCall, build_renderers
from rag_model.corpus.markup.tex import format_superscript

_MONTHS = "January February March April May June July August September October November December"
_DAY = re.compile(r"(\d\d?)(?:er|\.?º)?")  # in French, the first day of a month is `1er`


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 6


def _is_day(text: str) -> bool:
    day_match = _DAY.fullmatch(text)
    return day_match is not None and 1 <= int(day_match[1]) <= 31


def _is_year(text: str) -> bool:
    return _is_number(text) and int(text) > 31


def _find_month(call: TemplateCall, text: str) -> int:
    """Return the number of a month that is given as a number or as a name in the page's language.

    Return 0 if the text is not a month.
    """
    if _is_number(text):
        return int(text) if 1 <= int(text) <= 12 else 0
    names = _MONTHS.split() if call.is_english else get_language_names(call.language).months
    return next((month for month, name in enumerate(names, 1) if name.casefold() == text.casefold()), 0)


def format_date(year: str, month: str = "", day: str = "", *, day_first: bool = False) -> str:
    """Format a date in words; parts that are not numbers are kept unchanged.

    >>> format_date("1865", "4", "15"), format_date("1865", "04", day_first=True), format_date("c. 200 BC")
    ('April 15, 1865', 'April 1865', 'c. 200 BC')
    """
    month_name = _MONTHS.split()[int(month) - 1] if _is_number(month) and 1 <= int(month) <= 12 else month
    day = str(int(day)) if _is_number(day) else day
    year = str(int(year)) if _is_number(year) else year
    if not (month_name and day):
        return f"{month_name} {year}".strip()
    if not year:
        return f"{day} {month_name}" if day_first else f"{month_name} {day}"
    return f"{day} {month_name} {year}" if day_first else f"{month_name} {day}, {year}"


def format_call_date(call: TemplateCall, year: str, month: str = "", day: str = "") -> str:
    """Format a date in the language of the page that calls a template."""
    if call.is_english or not (_is_number(month) and 1 <= int(month) <= 12):
        return format_date(year, month, day, day_first=call.is_on("df") or not call.is_english)
    day, year = (str(int(part)) if _is_number(part) else part for part in (day, year))
    return format_local_date(call.language, day, int(month), year)


def _parse_date(call: TemplateCall, date_parts: list[str]) -> list[str]:
    """Return the year, month number and day of a date that begins with the year or with the day.

    The month may be a name, and the year or the day may be empty or left out. Return an empty list
    if the parts are not a date.

    >>> _parse_date(TemplateCall("date", {}, "fr"), ["14", "juillet", "1789"])
    ['1789', '7', '14']
    """
    has_only_month_and_year = len(date_parts) == 2 and not _is_number(date_parts[0])
    first, month_text, last = ([""] * has_only_month_and_year + [*date_parts, "", "", ""])[:3]
    year, day = (last, first) if _is_year(last) or _is_day(first) else (first, last)
    is_date = (year or day) and (not year or _is_year(year)) and (not day or _is_day(day))
    month = _find_month(call, month_text) if is_date else 0
    return [year, str(month), day] if month else []


def render_number_date(call: TemplateCall, date_parts: list[str]) -> str:
    """Render the parts of a date, like `{{ДН|27|1|1839}}`; return "" if they are not a date.

    Fewer than three parts are a date only if one names the month.

    >>> render_number_date(TemplateCall("дн", {}, "uk"), ["27", "1", "1839"])
    '27 січня 1839'
    """
    date = [] if len(date_parts) < 3 and all(map(_is_number, date_parts)) else _parse_date(call, date_parts)
    return format_call_date(call, *date) if date else ""


def _render_date(call: TemplateCall) -> str:
    date_parts = call.get_positional()[:3]
    if not date_parts:
        return ""
    if date := _parse_date(call, date_parts):
        return format_call_date(call, *date)
    months = [part for part in date_parts[:2] if _find_month(call, part)]
    if date_parts[0] and not months and not _is_number(date_parts[0]):
        return date_parts[0]  # a date in words; the other parameters are options
    is_in_words = bool(months) and not _is_number(months[0]) and (months[0] == date_parts[0] or not call.is_english)
    return " ".join(filter(None, date_parts)) if is_in_words else format_call_date(call, *date_parts)


def _render_start_date(call: TemplateCall) -> str:
    year, month, day, hour, minute = (call.get_positional() + [""] * 5)[:5]
    date = format_call_date(call, year, month, day)
    return f"{hour}:{minute.zfill(2)}, {date}" if hour and minute else date


def _render_death_date(call: TemplateCall) -> str:
    death_parts, birth_parts = call.get_positional()[:3], call.get_positional()[3:6]
    birth_date, death_date = (_parse_date(call, parts) or parts for parts in (birth_parts, death_parts))
    age = _compute_age(birth_date, death_date)
    return _render_date(call) + _format_age(call, age)


def _format_age(call: TemplateCall, age: str) -> str:
    return "" if not age else f" (aged {age})" if call.is_english else f" ({age})"


def _compute_age(birth: list[str], death: list[str]) -> str:
    """Return the number of years between two dates (year, month, day), like `55` or `55–56`."""
    if len(birth) < 1 or len(death) < 1 or not all(_is_number(part) for part in (*birth, *death) if part):
        return ""
    (birth_year, *birth_day), (death_year, *death_day) = ([int(n) for n in d if n] or [0] for d in (birth, death))
    if not birth_year or not death_year:
        return ""
    if len(birth_day) == 2 and len(death_day) == 2:
        return str(death_year - birth_year - (death_day < birth_day))
    return f"{death_year - birth_year - 1}–{death_year - birth_year}"


def _render_death_year(call: TemplateCall) -> str:
    death_year, birth_year = ([*call.get_positional(), "", ""])[:2]
    return death_year + _format_age(call, _compute_age([birth_year], [death_year]))


def _render_age(call: TemplateCall) -> str:
    date_parts = call.get_positional()
    return _compute_age(date_parts[:3], date_parts[3:6]) if len(date_parts) >= 6 else ""


def _render_as_of(call: TemplateCall) -> str:
    params = {key: argument for key, argument in call.params.items() if key.isdigit()} | {"df": "y"}
    date = _render_date(call._replace(params=params))
    if call.get("alt") or not call.is_english:
        return call.get("alt") or date
    phrase = "since" if call.is_on("since") else "as of"
    return f"{phrase if call.is_on('lc') else phrase.capitalize()} {date}{call.get('post')}".strip()


def _render_film_dates(call: TemplateCall) -> str:
    """Render dates and places in groups of four parameters: year, month, day, place."""
    date_parts = call.get_positional()
    release_texts = []
    for i in range(0, len(date_parts), 4):
        date = format_call_date(call, *date_parts[i : i + 3])
        location = date_parts[i + 3] if len(date_parts) > i + 3 else ""
        release_texts.append(f"{date} ({location})" if location else date)
    return ", ".join(date for date in release_texts if date)


def _render_old_style(call: TemplateCall) -> str:
    new_date, year, old_date = ([*call.get_positional(), "", "", ""])[:3]
    style_mark = "O.S. " if call.is_english else ""
    return f"{new_date} [{style_mark}{old_date}] {year}".strip()


def _build_prefix_renderer(mark: str) -> Renderer:
    def render(call: TemplateCall) -> str:
        shown_mark = f"{mark} " if call.is_english or mark == "c." else ""
        return shown_mark + "–".join(date_text for date_text in call.get_positional() if date_text)

    return render


DATE_RENDERERS = build_renderers(
    (
        "birth date, birth date and age, bda, birth-date, birth-date and age, birth date text, birthdate, dob, date",
        _render_date,
    ),
    (
        "birthdate and age, birth year and age, bya, birth year, death date, death-date, death "
        "year, dod, date of birth, dts, date table sorting, start-date, end-date, datetime",
        _render_date,
    ),
    (
        "start date, end date, start date and age, end date and age, startdate, enddate, launch date",
        _render_start_date,
    ),
    ("death date and age, dda, death-date and age, deathdateandage", _render_death_date),
    ("death year and age, dya", _render_death_year),
    ("age, age in years, age nts", _render_age),
    ("as of, asof", _render_as_of),
    ("film date, release date, television date", _render_film_dates),
    ("oldstyledate, old style date", _render_old_style),
    ("circa, c., ca., ca", _build_prefix_renderer("c.")),
    ("floruit, fl., fl", _build_prefix_renderer("fl.")),
    ("reign, r.", _build_prefix_renderer("r.")),
    ("born, b.", _build_prefix_renderer("b.")),
    ("died, d.", _build_prefix_renderer("d.")),
)


_NUMBER = re.compile(r"(\d+)(\.\d+)?")


def group_thousands(number: str) -> str:
    """Insert thousands commas into the numbers of a text; numbers with commas stay unchanged.

    >>> group_thousands("1234567.8901 and 42")
    '1,234,567.8901 and 42'
    """
    return _NUMBER.sub(lambda m: f"{int(m[1]):,}{m[2] or ''}" if len(m[1]) < 30 and m[1][0] != "0" else m[0], number)


def _render_formatted_number(call: TemplateCall) -> str:
    text = call.get("1")
    return text.replace(",", "") if call.get("2") == "R" else text if "," in text else group_thousands(text)


def _render_fraction(call: TemplateCall) -> str:
    """Render `{{frac|1|2}}` as 1/2, `{{frac|3|1|2}}` as 3 1/2, `{{frac|3}}` as 1/3."""
    parts = call.get_positional()
    if len(parts) == 3:
        return f"{parts[0]} {parts[1]}/{parts[2]}"
    return f"{parts[0]}/{parts[1]}" if len(parts) == 2 else f"1/{parts[0]}" if parts else "/"


def _render_value(call: TemplateCall) -> str:
    """Render `{{val|1.23|0.02|e=5|u=km}}`: number, uncertainty, power of ten, unit."""
    number_text, uncertainty, lower_uncertainty = ([*call.get_positional(), "", "", ""])[:3]
    text = _format_signed(number_text)
    if lower_uncertainty and uncertainty and not any(map(str.isdigit, uncertainty)):
        separator = "–" if uncertainty in "-–−" else f" {uncertainty} "  # a range: `{{val|12|to|14}}`
        text += separator + _format_signed(lower_uncertainty)
    elif lower_uncertainty:
        text += f" +{uncertainty.lstrip('+')} −{lower_uncertainty.lstrip('-−')}"
    elif uncertainty:
        text += uncertainty if uncertainty.startswith("(") else f" ± {uncertainty}"
    if exponent := call.get("e"):
        text = (f"({text})" if " " in text else text) + f"×10{format_superscript(exponent)}"
    unit = call.get("u", "ul")
    per_unit = call.get("up", "upl")
    text = call.get("p") + text + call.get("s")
    return text + (("" if unit in {"%", "°"} else " ") + unit if unit else "") + (f"/{per_unit}" if per_unit else "")


def _format_signed(number_text: str) -> str:
    return ("−" if number_text[:1] == "-" else "") + group_thousands(number_text.lstrip("-"))


def _render_exponent(call: TemplateCall) -> str:
    return f"×10{format_superscript(call.get('1'))}"


def _render_power(call: TemplateCall) -> str:
    return f"{call.get('1')}×10{format_superscript(call.get('2'))}" if call.get("2") else _render_exponent(call)


def _render_chemical(call: TemplateCall) -> str:
    """Render `{{chem|H|2|O}}` as H2O; a charge such as `2+` follows its element."""
    return "".join(call.get_positional())


def _render_nuclide(call: TemplateCall) -> str:
    """Render `{{nuclide|lithium|7}}` as the name of the isotope, lithium-7."""
    element, mass = ([*call.get_positional(), "", ""])[:2]
    return f"{element}-{mass}" if mass else element


def _build_money_renderer(sign: str) -> Renderer:
    def render(call: TemplateCall) -> str:
        amount = call.get("1")
        return sign + (group_thousands(amount) if amount else "")

    return render


def _render_ordinal(call: TemplateCall) -> str:
    digits = call.get("1")
    if not digits.isdecimal():
        return digits
    is_teen = digits[-2:] in {"11", "12", "13"}
    return digits + ("th" if is_teen else {"1": "st", "2": "nd", "3": "rd"}.get(digits[-1], "th"))


def _render_percentage(call: TemplateCall) -> str:
    part_text, total_text, n_decimals = ([*call.get_positional(), "", "", ""])[:3]
    try:
        share = 100 * float(part_text.replace(",", "")) / float(total_text.replace(",", ""))
        return f"{share:.{min(int(n_decimals or 0), 9)}f}%"
    except (ValueError, ZeroDivisionError):
        return ""


def _render_height(call: TemplateCall) -> str:
    """Render `{{height|ft=6|in=1}}` as 6 ft 1 in, and `{{height|m=1.85}}` as 1.85 m."""
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
    degrees: list[str] = []
    for value in call.get_positional():
        if _ANGLE.fullmatch(value) and len(degrees) < len(_DEGREE_SIGNS):
            degrees.append(value)
        elif degrees and value in {"N", "S", "E", "W"} and len(angles) < 2:
            angles.append("".join(number + sign for number, sign in zip(degrees, _DEGREE_SIGNS, strict=False)) + value)
            degrees = []
        else:
            break
    if not angles and len(degrees) == 2 and call.name in COORDINATES:  # signed degrees
        angles = [
            number.lstrip("-−+") + "°" + compass_letters[number[0] in "-−"]
            for number, compass_letters in zip(degrees, ("NS", "EW"), strict=True)
        ]
    return " ".join(angles) if len(angles) == 2 else ""


_ANGLE = re.compile(r"[-−+]?\d{1,3}(?:\.\d+)?")
_CURRENCY_SIGNS = {
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
        _render_formatted_number,
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
    ("gaps, gapnum", lambda call: "".join(call.get_positional())),
    ("sqrt, radic", lambda call: "√" + call.get("1")),
    ("abs", lambda call: f"|{call.get('1')}|"),
    ("su, subsup, supsub", lambda call: "".join(call.get_positional())),
) | {name: _build_money_renderer(sign) for name, sign in _CURRENCY_SIGNS.items()}
