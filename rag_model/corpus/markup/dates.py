"""Render date templates: the date in words, in the order that the article specifies.

Other languages than English have MediaWiki's names of months and its order (`language_names`).

Ages that depend on the day of reading ("age 52") are omitted, because a snapshot would show the age
at build time.
"""

from rag_model.corpus.language_names import format_local_date
from rag_model.corpus.markup.scanner import Renderer, TemplateCall, build_renderers

_MONTHS = "January February March April May June July August September October November December"


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 6


def format_date(year: str, month: str = "", day: str = "", *, day_first: bool = False) -> str:
    """Format a date in words; parts that are not numbers are kept unchanged.

    >>> format_date("1865", "4", "15"), format_date("1865", "04", day_first=True), format_date("c. 200 BC")
    ('April 15, 1865', 'April 1865', 'c. 200 BC')
    """
    name = _MONTHS.split()[int(month) - 1] if _is_number(month) and 1 <= int(month) <= 12 else month
    day = str(int(day)) if _is_number(day) else day
    year = str(int(year)) if _is_number(year) else year
    if not (name and day):
        return f"{name} {year}".strip()
    if not year:
        return f"{day} {name}" if day_first else f"{name} {day}"
    return f"{day} {name} {year}" if day_first else f"{name} {day}, {year}"


def format_call_date(call: TemplateCall, year: str, month: str = "", day: str = "") -> str:
    """Format a date in the language of the page of a template."""
    if call.is_english or not (_is_number(month) and 1 <= int(month) <= 12):
        return format_date(year, month, day, day_first=call.is_on("df") or not call.is_english)
    day, year = (str(int(part)) if _is_number(part) else part for part in (day, year))
    return format_local_date(call.language, day, int(month), year)


def render_number_date(call: TemplateCall, numbers: list[str]) -> str:
    """Render three numbers as a date, like `{{ДН|27|1|1839}}`, or return the empty string.

    >>> render_number_date(TemplateCall("дн", {}, "uk"), ["27", "1", "1839"])
    '27 січня 1839'
    """
    if len(numbers) < 3 or not all(map(_is_number, numbers[:3])):
        return ""
    first, month, last = numbers[:3]
    if not 1 <= int(month) <= 12 or not 1 <= min(int(first), int(last)) <= 31 < max(int(first), int(last)):
        return ""
    year, day = (first, last) if int(first) > 31 else (last, first)
    return format_call_date(call, year, month, day)


def _render_date(call: TemplateCall) -> str:
    parts = call.positional()[:3]
    return format_call_date(call, *parts) if parts else ""


def _render_start_date(call: TemplateCall) -> str:
    year, month, day, hour, minute = (call.positional() + [""] * 5)[:5]
    date = format_call_date(call, year, month, day)
    return f"{hour}:{minute.zfill(2)}, {date}" if hour and minute else date


def _render_death_date(call: TemplateCall) -> str:
    date = _render_date(call)
    return date + _format_age(call, _compute_age(call.positional()[3:6], call.positional()[:3]))


def _format_age(call: TemplateCall, age: str) -> str:
    return "" if not age else f" (aged {age})" if call.is_english else f" ({age})"


def _compute_age(birth: list[str], death: list[str]) -> str:
    """Return the years between two dates (year, month, day), like `55` or `55–56`."""
    if len(birth) < 1 or len(death) < 1 or not all(_is_number(part) for part in (*birth, *death) if part):
        return ""
    (y1, *rest1), (y2, *rest2) = ([int(part) for part in parts if part] or [0] for parts in (birth, death))
    if not y1 or not y2:
        return ""
    if len(rest1) == 2 and len(rest2) == 2:
        return str(y2 - y1 - (rest2 < rest1))
    return f"{y2 - y1 - 1}–{y2 - y1}"


def _render_death_year(call: TemplateCall) -> str:
    death, birth = ([*call.positional(), "", ""])[:2]
    return death + _format_age(call, _compute_age([birth], [death]))


def _render_age(call: TemplateCall) -> str:
    dates = call.positional()
    return _compute_age(dates[:3], dates[3:6]) if len(dates) >= 6 else ""


def _render_as_of(call: TemplateCall) -> str:
    dates = {key: value for key, value in call.params.items() if key.isdigit()} | {"df": "y"}
    date = _render_date(call._replace(params=dates))
    if call.get("alt") or not call.is_english:
        return call.get("alt") or date
    words = "since" if call.is_on("since") else "as of"
    return f"{words if call.is_on('lc') else words.capitalize()} {date}{call.get('post')}".strip()


def _render_free_date(call: TemplateCall) -> str:
    """Render `{{dts|July 4, 1976}}` unchanged, and `{{dts|1976|7|4}}` in words."""
    parts = call.positional()
    return _render_date(call) if len(parts) > 1 and parts[0].strip("-").isdecimal() else call.get("1")


def _render_film_dates(call: TemplateCall) -> str:
    """Render dates and places in groups of four parameters: year, month, day, place."""
    parts = call.positional()
    entries = []
    for i in range(0, len(parts), 4):
        date = format_call_date(call, *parts[i : i + 3])
        location = parts[i + 3] if len(parts) > i + 3 else ""
        entries.append(f"{date} ({location})" if location else date)
    return ", ".join(date for date in entries if date)


def _render_old_style(call: TemplateCall) -> str:
    new_date, year, old_date = ([*call.positional(), "", "", ""])[:3]
    mark = "O.S. " if call.is_english else ""
    return f"{new_date} [{mark}{old_date}] {year}".strip()


def _prefix_renderer(mark: str) -> Renderer:
    def render(call: TemplateCall) -> str:
        shown_mark = f"{mark} " if call.is_english or mark == "c." else ""
        return shown_mark + "–".join(part for part in call.positional() if part)

    return render


RENDERERS = build_renderers(
    (
        "birth date, birth date and age, bda, birth-date, birth-date and age, birth date text, birthdate, dob, date",
        _render_date,
    ),
    (
        "birthdate and age, birth year and age, bya, birth year, death date, death-date, death "
        "year, dod, date of birth",
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
    ("dts, date table sorting, start-date, end-date, datetime", _render_free_date),
    ("film date, release date, television date", _render_film_dates),
    ("oldstyledate, old style date", _render_old_style),
    ("circa, c., ca., ca", _prefix_renderer("c.")),
    ("floruit, fl., fl", _prefix_renderer("fl.")),
    ("reign, r.", _prefix_renderer("r.")),
    ("born, b.", _prefix_renderer("b.")),
    ("died, d.", _prefix_renderer("d.")),
)
