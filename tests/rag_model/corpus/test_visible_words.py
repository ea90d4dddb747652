"""The cleaner shows of each construct what MediaWiki shows, and a table says where it does not on purpose."""

import unicodedata
from pathlib import Path

import pytest

from rag_model.corpus.records import Siteinfo
from rag_model.corpus.wikitext import clean_wikitext
from tests.fixtures.markup_constructs import list_constructs, read_cases, render_cases, split_words
from tests.fixtures.wiki_server import running_wiki

SITEINFO = Siteinfo("wiki", "en", "", {"file": 6, "image": 6, "category": 14, "help": 12, "talk": 1})
DEVIATIONS = {  # part of a construct -> why its words differ
    "[[apple pie|]]": "MediaWiki completes this link when a page is saved; an unsaved one is shown with its target",
    "[[Apple_pie]]": "an underscore of a title is a blank, so that its words are found",
    "[[ Apple ]]": "no blank is left before a comma",
    "[[File:None.png]]": "a picture is dropped, whether its file exists or not",
    "{{#expr:": "arithmetic is not computed",
    "-{": "a wiki in one script shows these marks, of which other wikis choose a form",
    "{{{1}}}": "a parameter without a value is left out",
    " left": "brackets without a partner are removed",
    "term : ": "a term and its meaning are one line",
    "; [[Apple]] : ": "a term and its meaning are one line",
    ":; a : b": "a term and its meaning are one line",
}


@pytest.mark.parametrize("number", range(4))
def test_a_reader_of_the_text_sees_the_words_of_the_page(number: int) -> None:
    wrong = {}
    for wikitext, words in read_cases()[number::4]:
        sections = clean_wikitext(wikitext, SITEINFO, "Construct")
        text = unicodedata.normalize("NFKC", " ".join(section.text for section in sections))  # superscripts
        expected = split_words(unicodedata.normalize("NFKC", words))
        if split_words(text) != expected and not any(part in wikitext for part in DEVIATIONS):
            wrong[wikitext] = (text, words)
    assert not wrong


def test_no_deviation_is_stale() -> None:
    constructs = list_constructs()
    assert [part for part in DEVIATIONS if not any(part in construct for construct in constructs)] == []


@pytest.mark.xdist_group("wiki")
def test_the_words_are_those_of_a_real_mediawiki(tmp_path: Path) -> None:
    constructs = list_constructs()
    assert [case.wikitext for case in read_cases()] == constructs
    with running_wiki(tmp_path / "wiki") as wiki:
        some = constructs[::9]
        assert render_cases(wiki, some) == [case for case in read_cases() if case.wikitext in some]


@pytest.mark.parametrize(
    ("switch", "is_shown"),
    [("__INHALTSVERZEICHNIS_ERZWINGEN__", False), ("__目次強制__", False), ("__ToC__", False), ("__DISAMBIG__", False),
     ("__INIT__", True), ("__a__b__", True)],
)  # fmt: skip
def test_switches_of_every_language_are_hidden(switch: str, is_shown: bool) -> None:
    (section,) = clean_wikitext(f"See {switch} here.", SITEINFO)
    assert section.text == (f"See {switch} here." if is_shown else "See here.")
