"""Which pages are articles: what DPR kept of Wikipedia.

DPR (Karpukhin et al. 2020, section 4.1) took DrQA's preparation: WikiExtractor leaves out redirects, other namespaces
and what holds a disambiguation template; `prep_wikipedia.py` drops titles with "(disambiguation)" and those that start
with "List of", "Index of" or "Outline of". Here the same rules stand for each language (`languages.py`).
"""

import re
from functools import cache
from typing import Literal

from rag_model.corpus.languages import Language, language_of
from rag_model.corpus.records import Page, Siteinfo

DropReason = Literal["namespace", "redirect", "not_wikitext", "empty", "disambiguation", "list"]


def article_or_drop(page: Page, siteinfo: Siteinfo) -> Page | DropReason:
    """Return the page if it is an article, else the reason why it is none: the first that holds, in a fixed order."""
    return drop_reason(page, siteinfo) or page


def drop_reason(page: Page, siteinfo: Siteinfo) -> DropReason | None:
    """Return why a page is no article, or None; looks at its head, its title and its templates' names only."""
    if page.namespace != 0:
        return "namespace"
    language, templates, redirect = _rules(siteinfo.language)
    if page.redirect or redirect.match(page.text):
        return "redirect"
    if page.model != "wikitext":
        return "not_wikitext"
    if not page.text.strip():
        return "empty"
    if any(mark in page.title for mark in language.disambiguation_titles) or templates.search(page.text):
        return "disambiguation"
    if page.title.startswith(language.list_prefixes) or page.title.endswith(language.list_suffixes):
        return "list"
    return None


@cache
def _rules(code: str) -> tuple[Language, re.Pattern[str], re.Pattern[str]]:
    language = language_of(code)
    names = "|".join(re.escape(name).replace(r"\ ", "[ _]") for name in language.disambiguation_templates)
    templates = rf"\{{\{{[\s_]*(?i:{names})[\s_]*(?:\||\}}\}}|<!--)|__DISAMBIG__"
    words = "|".join(map(re.escape, language.redirect_words))
    return language, re.compile(templates), re.compile(rf"\s*(?:{words})\s*:?\s*\[\[", re.IGNORECASE)
