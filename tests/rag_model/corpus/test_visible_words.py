"""Clean text has the words that MediaWiki shows, except for a list of intended deviations."""

import re
import unicodedata
from pathlib import Path

import pytest

from rag_model.corpus.records import Siteinfo
from rag_model.corpus.wikitext import clean_wikitext
from tests.fixtures.markup_constructs import list_constructs, read_cases, render_cases, split_words
from tests.fixtures.wiki_server import run_wiki

SITEINFO = Siteinfo("wiki", "en", "", {"file": 6, "image": 6, "category": 14, "help": 12, "talk": 1})
DEVIATIONS = {  # a part of a construct, and why its words differ
    "[[apple pie|]]": "MediaWiki completes this link when a page is saved; an unsaved one is shown with its target",
    "[[Apple_pie]]": "an underscore of a title is a blank, so that its words are found",
    "[[ Apple ]]": "no blank is left before a comma",
    "[[File:None.png]]": "a picture is dropped, whether its file exists or not",
    "{{#expr:": "arithmetic is not computed",
    "{{{1}}}": "a parameter without a value is left out",
    "}} left": "braces without a partner are removed",
    "{{ left": "braces without a partner are removed",
    "{| left": "braces without a partner are removed",
    "[[apple|]]": "MediaWiki completes this link when a page is saved",
    "[https://example.org]": "the number of a link without words is left out, like that of a reference",
}
TERM = re.compile(r"^[:*]*;", re.MULTILINE)  # a term and its meaning become one line with a colon


@pytest.mark.parametrize("number", range(4))
def test_text_has_the_words_of_mediawiki(number: int) -> None:
    differences = {}
    for wikitext, words in read_cases()[number::4]:
        sections = clean_wikitext(wikitext, SITEINFO, "Construct")
        texts = [" ".join(section.text for section in sections), words]
        text, expected = (split_words(unicodedata.normalize("NFKC", text)) for text in texts)  # superscripts
        if TERM.search(wikitext):
            text, expected = ([word.removesuffix(":") for word in words if word != ":"] for words in (text, expected))
        if text != expected and not any(part in wikitext for part in DEVIATIONS):
            differences[wikitext] = text, expected
    assert not differences


def test_every_deviation_occurs() -> None:
    constructs = list_constructs()
    assert [part for part in DEVIATIONS if not any(part in construct for construct in constructs)] == []


@pytest.mark.xdist_group("wiki")
def test_recorded_words_are_those_of_a_real_mediawiki(tmp_path: Path) -> None:
    constructs = list_constructs()
    assert [case.wikitext for case in read_cases()] == constructs
    with run_wiki(tmp_path / "wiki") as wiki:
        sample = constructs[::9]
        assert render_cases(wiki, sample) == [case for case in read_cases() if case.wikitext in sample]


@pytest.mark.parametrize(
    ("switch", "is_shown"),
    [("__INHALTSVERZEICHNIS_ERZWINGEN__", False), ("__目次強制__", False), ("__ToC__", False), ("__DISAMBIG__", False),
     ("__INIT__", True), ("__a__b__", True)],
)  # fmt: skip
def test_switches_of_every_language_are_hidden(switch: str, is_shown: bool) -> None:
    (section,) = clean_wikitext(f"See {switch} here.", SITEINFO)
    assert section.text == (f"See {switch} here." if is_shown else "See here.")


VARIANT_CASES = [  # {1} and {2} are two variants of the language, {2} before {1} where MediaWiki falls back
    ("-{{1}:B; {2}:C}-", "C"), ("-{{2}:B;{1}:C}-", "B"), ("-{plain}-", "plain"), ("-{R|a;b:c}-", "a;b:c"),
    ("-{A|{1}:B;{2}:C}-", "C"), ("-{A;T|{1}:B;{2}:C}-", "C"), ("-{H|{1}:B;{2}:C}-", ""), ("-{T|title}-", ""),
    ("-{-|{1}:B}-", ""), ("-{x|y}-", "y"), ("-{{1};{2}|only}-", "only"), ("-{{1}:''B''; {2}:[[C|D]]}-", "D"),
    ("-{[[C|D]]}-", "D"), ("-{{2}:B -{in}-; {1}:C}-", "B in"), ("-{{2}:x &amp; y;{1}:C}-", "x & y"), ("-{}-", ""),
    ("{{lc:-{{1}:B;{2}:C}-}}", "c"), ("-{{1}:{{lc:B}};{2}:{{lc:C}}}-", "c"), ("-{ab", "-{ab"), ("}- -{", "}- -{"),
    ("-{unknown: B; other: C}-", "unknown: B; other: C"), ("[[A|-{{1}:B;{2}:C}-]]", "C"),
    ("<nowiki>-{x}-</nowiki>", "-{x}-"),
    ("-{{1}:B;{2}:C}- and -{{1}:E;{2}:F}-", "C and F"), ("-{<nowiki>y;z:w</nowiki>}-", "y;z:w"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("language", "variants"),
    [("zh", "zh-tw zh-hans"), ("gan", "gan-hant gan-hans"), ("sr", "sr-el sr-ec"), ("kk", "kk-latn kk-cyrl"),
     ("ku", "ku-arab ku-latn"), ("iu", "ike-latn ike-cans"), ("shi", "shi-tfng shi-latn"), ("uz", "uz-cyrl uz-latn"),
     ("crh", "crh-cyrl crh-latn"), ("tg", "tg-latn tg"), ("ban", "ban-bali ban"), ("tly", "tly-cyrl tly")],
)  # fmt: skip
def test_language_variants_are_chosen_like_in_mediawiki(language: str, variants: str) -> None:
    """The expected words are those of MediaWiki 1.39 for readers without a chosen variant."""
    siteinfo = Siteinfo("wiki", language, "")
    first, second = variants.split()
    for pattern, words in VARIANT_CASES:
        wikitext = pattern.replace("{1}", first).replace("{2}", second)
        texts = [section.text for section in clean_wikitext(f"a {wikitext} d", siteinfo)]
        assert texts == [" ".join(f"a {words} d".split())], wikitext


@pytest.mark.parametrize("language", ["en", "de", "ja", "zh-yue"])
def test_wiki_without_a_converter_shows_variant_markup(language: str) -> None:
    for wikitext in ("-{a}-", "-{zh-hans:x;zh-hant:y}-", "-{H|zh-hans:x}-"):
        (section,) = clean_wikitext(f"See {wikitext} 10-{{{{lc:CM}}}} end.", Siteinfo("wiki", language, ""))
        assert section.text == f"See {wikitext} 10-cm end."
