"""Date templates: the date in words, in the order that the article specifies.

Ages that depend on the day of reading ("age 52") are left out: a snapshot would show the age at its build.
"""

from rag_model.corpus.markup.call import Call, Renderer, by_name

_MONTHS = "January February March April May June July August September October November December"


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 6


def written_date(year: str, month: str = "", day: str = "", *, day_first: bool = False) -> str:
    """Write a date in words; parts that are not numbers are not changed.

    >>> written_date("1865", "4", "15"), written_date("1865", "04", day_first=True), written_date("c. 200 BC")
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


def _date(call: Call) -> str:
    parts = call.positional()[:3]
    return written_date(*parts, day_first=call.on("df")) if parts else ""


def _start_date(call: Call) -> str:
    year, month, day, hour, minute = (call.positional() + [""] * 5)[:5]
    date = written_date(year, month, day, day_first=call.on("df"))
    return f"{hour}:{minute.zfill(2)}, {date}" if hour and minute else date


def _death(call: Call) -> str:
    date = _date(call)
    age = _age_between(call.positional()[3:6], call.positional()[:3])
    return f"{date} (aged {age})" if age else date


def _age_between(birth: list[str], death: list[str]) -> str:
    """Return the years from one date to another, each (year, month, day), as one number or as `55–56`."""
    if len(birth) < 1 or len(death) < 1 or not all(_is_number(part) for part in (*birth, *death) if part):
        return ""
    (y1, *rest1), (y2, *rest2) = ([int(part) for part in parts if part] or [0] for parts in (birth, death))
    if not y1 or not y2:
        return ""
    if len(rest1) == 2 and len(rest2) == 2:
        return str(y2 - y1 - (rest2 < rest1))
    return f"{y2 - y1 - 1}–{y2 - y1}"


def _death_year(call: Call) -> str:
    death, birth = ([*call.positional(), "", ""])[:2]
    return f"{death} (aged {age})" if (age := _age_between([birth], [death])) else death


def _age(call: Call) -> str:
    dates = call.positional()
    return _age_between(dates[:3], dates[3:6]) if len(dates) >= 6 else ""


def _as_of(call: Call) -> str:
    date = _date(Call(call.name, {k: v for k, v in call.params.items() if k.isdigit()} | {"df": "y"}))
    if call.get("alt"):
        return call.get("alt")
    words = "since" if call.on("since") else "as of"
    return f"{words if call.on('lc') else words.capitalize()} {date}{call.get('post')}".strip()


def _free_date(call: Call) -> str:
    """`{{dts|July 4, 1976}}` is not changed; `{{dts|1976|7|4}}` is written in words."""
    parts = call.positional()
    return _date(call) if len(parts) > 1 and parts[0].strip("-").isdecimal() else call.get("1")


def _film_dates(call: Call) -> str:
    """Dates and places in groups of four parameters: year, month, day, place."""
    parts = call.positional()
    shown = []
    for i in range(0, len(parts), 4):
        date = written_date(*parts[i : i + 3], day_first=call.on("df"))
        place = parts[i + 3] if len(parts) > i + 3 else ""
        shown.append(f"{date} ({place})" if place else date)
    return ", ".join(date for date in shown if date)


def _old_style(call: Call) -> str:
    new, year, old = ([*call.positional(), "", "", ""])[:3]
    return f"{new} [O.S. {old}] {year}".strip()


def _marked(mark: str) -> Renderer:
    def render(call: Call) -> str:
        return f"{mark} " + "–".join(part for part in call.positional() if part)

    return render


RENDERERS = by_name(
    (
        "birth date, birth date and age, bda, birth-date, birth-date and age, birth date text, birthdate, dob, date",
        _date,
    ),
    (
        "birthdate and age, birth year and age, bya, birth year, death date, death-date, death year, dod, "
        "date of birth",
        _date,
    ),
    (
        "start date, end date, start date and age, end date and age, startdate, enddate, launch date",
        _start_date,
    ),
    ("death date and age, dda, death-date and age, deathdateandage", _death),
    ("death year and age, dya", _death_year),
    ("age, age in years, age nts", _age),
    ("as of, asof", _as_of),
    ("dts, date table sorting, start-date, end-date, datetime", _free_date),
    ("film date, release date, television date", _film_dates),
    ("oldstyledate, old style date", _old_style),
    ("circa, c., ca., ca", _marked("c.")),
    ("floruit, fl., fl", _marked("fl.")),
    ("reign, r.", _marked("r.")),
    ("born, b.", _marked("b.")),
    ("died, d.", _marked("d.")),
)
