"""Decide which pages are articles, by the rules of DPR, with the words of each language.

DPR (Karpukhin et al. 2020, section 4.1) used DrQA's preparation: WikiExtractor leaves out
redirects, other namespaces and pages with a disambiguation template; `prep_wikipedia.py` drops
titles with "(disambiguation)" and those that start with "List of", "Index of" or "Outline of". Here
these rules apply in each language.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cache
from itertools import chain
from typing import Literal

from rag_model.corpus.language_names import get_names, list_fallbacks
from rag_model.corpus.records import Page, Siteinfo


@dataclass(frozen=True, slots=True)
class Language:
    """The words of one language; compared case-insensitively, except in titles."""

    disambiguation_templates: tuple[str, ...] = ()
    disambiguation_titles: tuple[str, ...] = ()  # anywhere in a title, including the brackets
    list_prefixes: tuple[str, ...] = ()
    list_suffixes: tuple[str, ...] = ()


ENGLISH = Language(
    disambiguation_templates=(
        "disambiguation",
        "disambig",
        "disamb",
        "dab",
        "dabpage",
        "disambiguation page",
        "disambiguation cleanup",
        "disambig-cleanup",
        "dab-cleanup",
        "hndis",
        "hndis-cleanup",
        "human name disambiguation",
        "geodis",
        "placedis",
        "place name disambiguation",
        "numberdis",
        "letter disambiguation",
        "letter-number combination disambiguation",
        "letter–number combination disambiguation",
        "letternumbercombdisambig",
        "latindab",
        "mathdab",
        "roaddis",
        "airport disambiguation",
        "airport disambig",
        "call sign disambiguation",
        "callsigndis",
        "biology disambiguation",
        "chinese title disambiguation",
        "chemistry disambiguation",
        "church disambiguation",
        "genus disambiguation",
        "hospital disambiguation",
        "mathematical disambiguation",
        "mathematics disambiguation",
        "military unit disambiguation",
        "music disambiguation",
        "phonetics disambiguation",
        "port disambiguation",
        "road disambiguation",
        "schooldis",
        "school disambiguation",
        "species latin name disambiguation",
        "species latin name abbreviation disambiguation",
        "station disambiguation",
        "synagogue disambiguation",
        "taxonomic authority disambiguation",
        "taxonomy disambiguation",
        "wpdab",
    ),
    disambiguation_titles=("(disambiguation)", "(disambiguation page)"),
    list_prefixes=("List of ", "Lists of ", "Index of ", "Outline of "),
)

LANGUAGES: dict[str, Language] = {
    "ar": Language(
        disambiguation_templates=("توضيح", "صفحة توضيح"),
        disambiguation_titles=("(توضيح)",),
        list_prefixes=("قائمة ",),
    ),
    "be": Language(
        disambiguation_templates=("неадназначнасць",),
        disambiguation_titles=("(значэнні)",),
        list_prefixes=("Спіс ",),
    ),
    "bg": Language(
        disambiguation_templates=("пояснение", "пояснителна страница"),
        disambiguation_titles=("(пояснение)",),
        list_prefixes=("Списък на ", "Списък с "),
    ),
    "bn": Language(
        disambiguation_templates=("দ্ব্যর্থতা নিরসন",),
        disambiguation_titles=("(দ্ব্যর্থতা নিরসন)",),
        list_suffixes=(" তালিকা",),
    ),
    "ca": Language(
        disambiguation_templates=("desambiguació", "biografia desambiguació"),
        disambiguation_titles=("(desambiguació)",),
        list_prefixes=("Llista d",),
    ),
    "cs": Language(
        disambiguation_templates=("rozcestník", "rozcestník - příjmení"),
        disambiguation_titles=("(rozcestník)",),
        list_prefixes=("Seznam ",),
    ),
    "da": Language(
        disambiguation_templates=("flertydig",),
        disambiguation_titles=("(flertydig)",),
        list_prefixes=("Liste over ",),
    ),
    "de": Language(
        disambiguation_templates=("begriffsklärung", "bkl"),
        disambiguation_titles=("(Begriffsklärung)",),
        list_prefixes=("Liste der ", "Liste von ", "Liste des ", "Liste deutscher ", "Listen "),
    ),
    "el": Language(
        disambiguation_templates=("αποσαφήνιση",),
        disambiguation_titles=("(αποσαφήνιση)",),
        list_prefixes=("Κατάλογος ",),
    ),
    "eo": Language(
        disambiguation_templates=("apartigilo",),
        disambiguation_titles=("(apartigilo)",),
        list_prefixes=("Listo de ",),
    ),
    "es": Language(
        disambiguation_templates=("desambiguación", "desambiguacion", "desambig", "des"),
        disambiguation_titles=("(desambiguación)",),
        list_prefixes=("Lista de ", "Anexo:"),
    ),
    "et": Language(
        disambiguation_templates=("täpsustuslehekülg",),
        disambiguation_titles=("(täpsustus)",),
        list_suffixes=(" loend",),
    ),
    "eu": Language(
        disambiguation_templates=("argipen",),
        disambiguation_titles=("(argipena)",),
        list_suffixes=(" zerrenda",),
    ),
    "fa": Language(
        disambiguation_templates=("ابهام‌زدایی", "ابهام زدایی"),
        disambiguation_titles=("(ابهام‌زدایی)", "(ابهام زدایی)"),
        list_prefixes=("فهرست ",),
    ),
    "fi": Language(
        disambiguation_templates=("täsmennyssivu",),
        disambiguation_titles=("(täsmennyssivu)",),
        list_prefixes=("Luettelo ",),
    ),
    "fr": Language(
        disambiguation_templates=(
            "homonymie",
            "homonymes",
            "homonyme",
            "paronymie",
            "patronymie",
            "toponymie",
            "homonymie de personnes",
            "homonymie de localités",
            "homonymie de clubs sportifs",
            "homonymie de monuments",
            "homonymie de bateaux",
        ),
        disambiguation_titles=("(homonymie)",),
        list_prefixes=("Liste d", "Listes d"),
    ),
    "gl": Language(
        disambiguation_templates=("homónimos",),
        disambiguation_titles=("(homónimos)",),
        list_prefixes=("Lista de ",),
    ),
    "he": Language(
        disambiguation_templates=("פירושונים",),
        disambiguation_titles=("(פירושונים)",),
        list_prefixes=("רשימת ",),
    ),
    "hi": Language(
        disambiguation_templates=("बहुविकल्पी",),
        disambiguation_titles=("(बहुविकल्पी)",),
        list_suffixes=(" की सूची",),
    ),
    "hr": Language(
        disambiguation_templates=("razdvojba",),
        disambiguation_titles=("(razdvojba)",),
        list_prefixes=("Popis ",),
    ),
    "hu": Language(
        disambiguation_templates=("egyért", "egyértelműsítő lap"),
        disambiguation_titles=("(egyértelműsítő lap)",),
        list_suffixes=(" listája",),
    ),
    "hy": Language(
        disambiguation_templates=("բազմիմաստություն",),
        disambiguation_titles=("(այլ կիրառումներ)",),
        list_suffixes=(" ցանկ",),
    ),
    "id": Language(
        disambiguation_templates=("disambiguasi",),
        disambiguation_titles=("(disambiguasi)",),
        list_prefixes=("Daftar ",),
    ),
    "it": Language(
        disambiguation_templates=("disambigua",),
        disambiguation_titles=("(disambigua)",),
        list_prefixes=("Lista d", "Liste d", "Elenco d"),
    ),
    "ja": Language(
        disambiguation_templates=("aimai", "曖昧さ回避", "人名の曖昧さ回避", "地名の曖昧さ回避"),
        disambiguation_titles=("(曖昧さ回避)",),
        list_suffixes=("一覧",),
    ),
    "ko": Language(
        disambiguation_templates=("동음이의", "동명이인"),
        disambiguation_titles=("(동음이의)",),
        list_suffixes=(" 목록",),
    ),
    "mr": Language(
        disambiguation_templates=("निःसंदिग्धीकरण",),
        disambiguation_titles=("(निःसंदिग्धीकरण)",),
        list_suffixes=(" यादी",),
    ),
    "nl": Language(
        disambiguation_templates=("dp", "doorverwijspagina", "dpachternaam"),
        disambiguation_titles=("(doorverwijspagina)",),
        list_prefixes=("Lijst van ", "Lijst met "),
    ),
    "no": Language(
        disambiguation_templates=("peker", "pekerside"),
        disambiguation_titles=("(andre betydninger)",),
        list_prefixes=("Liste over ",),
    ),
    "pl": Language(
        disambiguation_templates=("ujednoznacznienie", "ujedn"),
        disambiguation_titles=("(ujednoznacznienie)",),
        list_prefixes=("Lista ",),
    ),
    "pt": Language(
        disambiguation_templates=("desambiguação", "desambig", "desamb"),
        disambiguation_titles=("(desambiguação)",),
        list_prefixes=("Lista d", "Anexo:"),
    ),
    "ro": Language(
        disambiguation_templates=("dezambiguizare",),
        disambiguation_titles=("(dezambiguizare)",),
        list_prefixes=("Listă de ",),
    ),
    "ru": Language(
        disambiguation_templates=("неоднозначность", "список однофамильцев"),
        disambiguation_titles=("(значения)",),
        list_prefixes=("Список ", "Списки "),
    ),
    "sk": Language(
        disambiguation_templates=("rozlišovacia stránka",),
        disambiguation_titles=("(rozlišovacia stránka)",),
        list_prefixes=("Zoznam ",),
    ),
    "sl": Language(
        disambiguation_templates=("razločitev",),
        disambiguation_titles=("(razločitev)",),
        list_prefixes=("Seznam ",),
    ),
    "sr": Language(
        disambiguation_templates=("вишезначна одредница",),
        disambiguation_titles=("(вишезначна одредница)",),
        list_prefixes=("Списак ",),
    ),
    "sv": Language(
        disambiguation_templates=("förgrening", "förgreningssida", "gren", "grensida"),
        disambiguation_titles=("(olika betydelser)",),
        list_prefixes=("Lista över ", "Lista på "),
    ),
    "th": Language(
        disambiguation_templates=("แก้กำกวม",),
        disambiguation_titles=("(แก้ความกำกวม)",),
        list_prefixes=("รายชื่อ",),
    ),
    "tr": Language(
        disambiguation_templates=("anlam ayrımı", "anlamayrımı"),
        disambiguation_titles=("(anlam ayrımı)",),
        list_suffixes=(" listesi",),
    ),
    "uk": Language(
        disambiguation_templates=("неоднозначність",),
        disambiguation_titles=("(значення)",),
        list_prefixes=("Список ", "Списки "),
    ),
    "vi": Language(
        disambiguation_templates=("định hướng", "trang định hướng"),
        disambiguation_titles=("(định hướng)",),
        list_prefixes=("Danh sách ",),
    ),
    "zh": Language(
        disambiguation_templates=("消歧义", "消歧義", "消歧义页", "消歧義頁"),
        disambiguation_titles=("(消歧义)", "(消歧義)"),
        list_suffixes=("列表",),
    ),
}


_FILE, _CATEGORY = 6, 14


def get_namespace_aliases(code: str) -> dict[str, int]:
    """Return the names, in lower case, of the namespaces of files and categories in this language.

    >>> get_namespace_aliases("el")
    {'αρχείο': 6, 'εικόνα': 6, 'κατηγορία': 14}
    """
    names = get_names(code)
    return dict.fromkeys(names.files, _FILE) | dict.fromkeys(names.categories, _CATEGORY)


def get_base_language(code: str) -> str:
    """Return the language code that the tables of this module use.

    >>> get_base_language("pt-BR"), get_base_language("nb")
    ('pt', 'no')
    """
    base = code.lower().partition("-")[0]
    return "no" if base == "nb" else base


def get_language(code: str) -> Language:
    """Return the words of a language (`de`, `pt-BR`, …), of those that it falls back to, and of English."""
    codes = dict.fromkeys(map(get_base_language, list_fallbacks(code)))
    languages = [*(LANGUAGES[each] for each in codes if each in LANGUAGES), ENGLISH]
    field_names = [field.name for field in fields(Language)]
    words = {name: tuple(chain.from_iterable(getattr(each, name) for each in languages)) for name in field_names}
    words["disambiguation_templates"] += get_names(code).disambiguation
    return Language(**words)


DropReason = Literal["namespace", "redirect", "not_wikitext", "empty", "disambiguation", "list"]


def classify_page(page: Page, siteinfo: Siteinfo) -> Page | DropReason:
    """Return the page if it is an article, otherwise the first `DropReason` that applies.

    Looks at the title, the start of the text and the names of templates, without parsing.
    """
    patterns = _page_patterns(siteinfo.language)
    return next((reason for reason, applies in _REASONS.items() if applies(page, patterns)), page)


@dataclass(frozen=True, slots=True)
class _PagePatterns:
    language: Language
    redirect: re.Pattern[str]
    disambiguation: re.Pattern[str]


@cache
def _page_patterns(code: str) -> _PagePatterns:
    language = get_language(code)
    template_names = "|".join(re.escape(name).replace(r"\ ", "[ _]") for name in language.disambiguation_templates)
    templates = rf"\{{\{{[\s_]*(?i:{template_names})[\s_]*(?:\||\}}\}}|<!--)|__DISAMBIG__"
    redirect_words = "|".join(map(re.escape, ["#REDIRECT", *get_names(code).redirects]))
    redirect = rf"\s*+(?:{redirect_words})\s*+:?\s*+\[\["
    return _PagePatterns(language, re.compile(redirect, re.IGNORECASE), re.compile(templates))


def has_disambiguation_template(names: Iterable[str], language: str) -> bool:
    """Return whether one of the templates of a page marks disambiguation pages.

    >>> has_disambiguation_template(["Modèle:Homonymie de personnes"], "fr")
    True
    """
    marks = _list_disambiguation_templates(language)
    return any(name.rpartition(":")[2].replace("_", " ").strip().lower() in marks for name in names)


@cache
def _list_disambiguation_templates(language: str) -> frozenset[str]:
    return frozenset(map(str.lower, get_language(language).disambiguation_templates))


def _is_disambiguation(page: Page, patterns: _PagePatterns) -> bool:
    in_title = any(title_mark in page.title for title_mark in patterns.language.disambiguation_titles)
    return in_title or patterns.disambiguation.search(page.text) is not None


def _is_list(page: Page, patterns: _PagePatterns) -> bool:
    language = patterns.language
    return page.title.startswith(language.list_prefixes) or page.title.endswith(language.list_suffixes)


_REASONS: dict[DropReason, Callable[[Page, _PagePatterns], bool]] = {
    "namespace": lambda page, _: page.namespace != 0,
    "redirect": lambda page, words: page.redirect or words.redirect.match(page.text) is not None,
    "not_wikitext": lambda page, _: page.model != "wikitext",
    "empty": lambda page, _: not page.text.strip(),
    "disambiguation": _is_disambiguation,
    "list": _is_list,
}
