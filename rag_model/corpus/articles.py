"""Decide which pages are articles: those that DPR kept of Wikipedia.

DPR (Karpukhin et al. 2020, section 4.1) used DrQA's preparation: WikiExtractor leaves out redirects, other
namespaces and pages with a disambiguation template; `prep_wikipedia.py` drops titles with "(disambiguation)"
and those that start with "List of", "Index of" or "Outline of". Here these rules apply to each language.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from rag_model.corpus.languages import Language, language_of
from rag_model.corpus.records import Page, Siteinfo

DropReason = Literal["namespace", "redirect", "not_wikitext", "empty", "disambiguation", "list"]


def article_or_drop(page: Page, siteinfo: Siteinfo) -> Page | DropReason:
    """Return the page if it is an article, otherwise the first `DropReason` that applies.

    Uses the title, the start of the text and the names of templates; nothing is parsed.
    """
    words = _words(siteinfo.language)
    return next((reason for reason, holds in _REASONS.items() if holds(page, words)), page)


@dataclass(frozen=True, slots=True)
class _Words:
    language: Language
    redirect: re.Pattern[str]
    disambiguation: re.Pattern[str]


@cache
def _words(code: str) -> _Words:
    language = language_of(code)
    names = "|".join(re.escape(name).replace(r"\ ", "[ _]") for name in language.disambiguation_templates)
    templates = rf"\{{\{{[\s_]*(?i:{names})[\s_]*(?:\||\}}\}}|<!--)|__DISAMBIG__"
    marks = "|".join(map(re.escape, language.redirect_words))
    redirect = rf"\s*+(?:{marks})\s*+:?\s*+\[\["
    return _Words(language, re.compile(redirect, re.IGNORECASE), re.compile(templates))


def _is_disambiguation(page: Page, words: _Words) -> bool:
    in_title = any(mark in page.title for mark in words.language.disambiguation_titles)
    return in_title or words.disambiguation.search(page.text) is not None


def _is_list(page: Page, words: _Words) -> bool:
    language = words.language
    return page.title.startswith(language.list_prefixes) or page.title.endswith(language.list_suffixes)


_REASONS: dict[DropReason, Callable[[Page, _Words], bool]] = {
    "namespace": lambda page, _: page.namespace != 0,
    "redirect": lambda page, words: page.redirect or words.redirect.match(page.text) is not None,
    "not_wikitext": lambda page, _: page.model != "wikitext",
    "empty": lambda page, _: not page.text.strip(),
    "disambiguation": _is_disambiguation,
    "list": _is_list,
}
