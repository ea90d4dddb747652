"""MediaWiki's names in each language for namespaces, redirects, behaviour switches and months.

`.ci/language-names` generates `language_names.tsv` from the message files of MediaWiki 1.39
(`languages/messages`, `languages/i18n`), by its authors and the translators of translatewiki.net;
these files are under the GPL, version 2 or later. The table has only these names: a row has a
language, its fallback language, and eight lists. English names, which every wiki accepts, are in
the row of English. The names of disambiguation templates are from wtf_wikipedia 10.4 (npm, MIT
licence, by Spencer Kelly and contributors). The headings are from MediaWiki's message
`search-ignored-headings`, which names headings that its search ignores, and from `noreferences.py`
of pywikibot-scripts 11.9 (PyPI, MIT licence, by the Pywikibot team).
"""

from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

_TABLE = Path(__file__).with_suffix(".tsv")
_MAX_FALLBACKS = 5  # the longest chain of fallback languages has 3 languages
_SWITCHES_OF_EXTENSIONS = frozenset({"disambig", "expectunusedtemplate", "noglobal", "archivedtalk"})
_RENAMED = {"no": "nb"}  # dumps name the Norwegian wiki by the older code


class LanguageNames(NamedTuple):
    """Names in one language and its fallback languages."""

    files: tuple[str, ...] = ()  # names of the file namespace; lower case
    categories: tuple[str, ...] = ()  # names of the category namespace; lower case
    redirects: tuple[str, ...] = ()  # as MediaWiki writes them: `#WEITERLEITUNG`
    switches: tuple[str, ...] = ()  # behaviour switches without underscores: `notoc`
    months: tuple[str, ...] = ()  # names of the months in a date, from January
    date: tuple[str, ...] = ()  # format string of a date with `day`, `month`, `number` and `year`
    disambiguation: tuple[str, ...] = ()  # names of templates of disambiguation pages; lower case
    # Headings of sections of references and links; lower case. Others are in `language_words.toml`.
    headings: tuple[str, ...] = ()


@cache
def get_language_names(code: str) -> LanguageNames:
    """Return the names in a language, its variants (`zh-hans`) and its fallback languages.

    >>> get_language_names("el").files, get_language_names("pt-BR").redirects
    (('αρχείο', 'εικόνα'), ('#REDIRECIONAMENTO',))
    """
    table, codes = _read_table(), list_fallbacks(code)
    variants = [variant for variant in table if variant.partition("-")[0] == codes[0]]
    rows = [table[key][1] for key in (*codes, *variants) if key in table]
    name_columns = zip(*rows, strict=True) if rows else LanguageNames()
    names = LanguageNames(*(tuple(dict.fromkeys(chain.from_iterable(column))) for column in name_columns))
    months, formats = (next((column for row in rows if (column := row[i])), ()) for i in (4, 5))
    return names._replace(months=months, date=formats[:1])


def list_fallbacks(code: str) -> list[str]:
    """Return the code of a language, followed by the codes of its fallback languages.

    >>> list_fallbacks("bar"), list_fallbacks("pt-BR")
    (['bar', 'de'], ['pt-br', 'pt'])
    """
    table, code = _read_table(), code.lower()
    codes = [code if code in table else _RENAMED.get(code, code)]
    while len(codes) < _MAX_FALLBACKS:
        last_code = codes[-1]
        codes.append(table[last_code][0] if last_code in table else last_code.rpartition("-")[0])
    return [codes[0], *dict.fromkeys(code for code in codes[1:] if code and code != codes[0])]


def format_local_date(code: str, day: str, month: int, year: str) -> str:
    """Format a date as MediaWiki does in a language; without a day, only the month and the year.

    >>> format_local_date("uk", "27", 1, "1839"), format_local_date("ja", "27", 1, "1839")
    ('27 січня 1839', '1839年1月27日')
    """
    names = get_language_names(code)
    month_name = names.months[month - 1] if names.months else str(month)
    if not (day and year):
        return " ".join(date_part for date_part in (day, month_name, year) if date_part)
    return (*names.date, "{day} {month} {year}")[0].format(day=day, month=month_name, number=month, year=year)


@cache
def list_behaviour_switches() -> frozenset[str]:
    """Return all languages' behaviour switches: a page and its wiki may differ in language."""
    return _SWITCHES_OF_EXTENSIONS.union(*(names.switches for _, names in _read_table().values()))


@cache
def _read_table() -> dict[str, tuple[str, LanguageNames]]:
    table_rows = (line.split("\t") for line in _TABLE.read_text(encoding="utf-8").splitlines())
    return {
        code: (fallback, LanguageNames(*(tuple(column.split("|")) if column else () for column in name_columns)))
        for code, fallback, *name_columns in table_rows
    }
