"""Decide which pages of a wiki are articles: DPR's rules, with word lists for each language.

DPR (Karpukhin et al. 2020, section 4.1) used DrQA's preparation: WikiExtractor leaves out
redirects, other namespaces and pages with a disambiguation template; `prep_wikipedia.py` drops
titles with "(disambiguation)" and those that start with "List of", "Index of" or "Outline of". This
module applies these rules in every language.
"""

import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Literal

from rag_model.corpus.language_names import get_language_names, list_fallbacks
from rag_model.corpus.records import Page, Siteinfo

# Values of the fields of `Language`, by language code and field name.
LANGUAGE_WORDS: dict[str, dict[str, list[str]]] = tomllib.loads(
    Path(__file__).with_name("language_words.toml").read_text(encoding="utf-8")
)
_FILE, _CATEGORY = 6, 14  # numbers of namespaces
DropReason = Literal["namespace", "redirect", "not_wikitext", "empty", "disambiguation", "list"]


@dataclass(frozen=True, slots=True)
class Language:
    """Words of one language that identify disambiguation pages, lists and reference sections."""

    disambiguation_templates: tuple[str, ...] = ()
    disambiguation_titles: tuple[str, ...] = ()  # part of a title, with brackets; case-sensitive
    list_prefixes: tuple[str, ...] = ()
    list_suffixes: tuple[str, ...] = ()
    apparatus_headings: tuple[str, ...] = ()  # headings of reference and link sections; lower case


def get_namespace_aliases(code: str) -> dict[str, int]:
    """Return the lower-case names of the file and category namespaces in a language.

    >>> get_namespace_aliases("el")
    {'αρχείο': 6, 'εικόνα': 6, 'κατηγορία': 14}
    """
    wiki_names = get_language_names(code)
    return dict.fromkeys(wiki_names.files, _FILE) | dict.fromkeys(wiki_names.categories, _CATEGORY)


def get_base_language(code: str) -> str:
    """Return the language code that `language_words.toml` uses.

    >>> get_base_language("pt-BR"), get_base_language("nb")
    ('pt', 'no')
    """
    base_code = code.lower().partition("-")[0]
    return "no" if base_code == "nb" else base_code


def get_language(code: str) -> Language:
    """Return the words for a language (`de`, `pt-BR`, …), with its fallback languages and English."""
    codes = dict.fromkeys([*map(get_base_language, list_fallbacks(code)), "en"])
    tables = [LANGUAGE_WORDS[language] for language in codes if language in LANGUAGE_WORDS]
    words_by_field = {
        field.name: tuple(chain.from_iterable(table.get(field.name, ()) for table in tables))
        for field in fields(Language)
    }
    wiki_names = get_language_names(code)
    words_by_field["disambiguation_templates"] += wiki_names.disambiguation
    words_by_field["apparatus_headings"] += wiki_names.headings
    return Language(**words_by_field)


def classify_page(page: Page, siteinfo: Siteinfo) -> Page | DropReason:
    """Return the page if it is an article, otherwise the first `DropReason` that applies.

    The checks use the title, the start of the text and the template names, and parse no wikitext.
    """
    patterns = _compile_page_patterns(siteinfo.language)
    return next((reason for reason, must_drop in _DROP_TESTS.items() if must_drop(page, patterns)), page)


@dataclass(frozen=True, slots=True)
class _PagePatterns:
    language: Language
    redirect: re.Pattern[str]
    disambiguation: re.Pattern[str]


@cache
def _compile_page_patterns(code: str) -> _PagePatterns:
    language = get_language(code)
    template_names = "|".join(re.escape(name).replace(r"\ ", "[ _]") for name in language.disambiguation_templates)
    template_re = rf"\{{\{{[\s_]*(?i:{template_names})[\s_]*(?:\||\}}\}}|<!--)|__DISAMBIG__"
    redirect_words = "|".join(map(re.escape, ["#REDIRECT", *get_language_names(code).redirects]))
    redirect_re = rf"\s*+(?:{redirect_words})\s*+:?\s*+\[\["
    return _PagePatterns(language, re.compile(redirect_re, re.IGNORECASE), re.compile(template_re))


def has_disambiguation_template(names: Iterable[str], language: str) -> bool:
    """Return whether a page has a disambiguation template, given the names of its templates.

    >>> has_disambiguation_template(["Modèle:Homonymie de personnes"], "fr")
    True
    """
    disambiguation_templates = _list_disambiguation_templates(language)
    return any(name.rpartition(":")[2].replace("_", " ").strip().lower() in disambiguation_templates for name in names)


@cache
def _list_disambiguation_templates(language: str) -> frozenset[str]:
    return frozenset(map(str.lower, get_language(language).disambiguation_templates))


def _is_disambiguation(page: Page, patterns: _PagePatterns) -> bool:
    has_title_mark = any(mark in page.title for mark in patterns.language.disambiguation_titles)
    return has_title_mark or patterns.disambiguation.search(page.text) is not None


def _is_list(page: Page, patterns: _PagePatterns) -> bool:
    language = patterns.language
    return page.title.startswith(language.list_prefixes) or page.title.endswith(language.list_suffixes)


_DROP_TESTS: dict[DropReason, Callable[[Page, _PagePatterns], bool]] = {
    "namespace": lambda page, _: page.namespace != 0,
    "redirect": lambda page, patterns: page.redirect or patterns.redirect.match(page.text) is not None,
    "not_wikitext": lambda page, _: page.model != "wikitext",
    "empty": lambda page, _: not page.text.strip(),
    "disambiguation": _is_disambiguation,
    "list": _is_list,
}
