"""Credit lines name the revision, the authors, the licence and the changes, as far as they are known."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.corpus.records import Passage
from rag_model.retrieve.attribution import UNKNOWN_LICENCE, Attribution, find_licence, find_script_url

PASSAGE = Passage("12-0", "12", 99, "Anarchism", "", "text", 0, 1, "ab")
ENWIKI = {"base": "https://en.wikipedia.org/wiki/Main_Page", "licence": "CC BY-SA 4.0"}


def test_credit_of_wikipedia_has_what_its_licence_requires() -> None:
    source = Attribution.from_corpus(ENWIKI)
    assert source.build_url(PASSAGE) == "https://en.wikipedia.org/w/index.php?oldid=99"
    assert source.build_credit_line(PASSAGE) == (
        "“Anarchism” (https://en.wikipedia.org/w/index.php?oldid=99)"
        " by its authors (https://en.wikipedia.org/w/index.php?curid=12&action=history),"
        " CC BY-SA 4.0 (https://creativecommons.org/licenses/by-sa/4.0/); excerpt, markup removed"
    )


@pytest.mark.parametrize(
    ("base", "script"),
    [
        ("https://de.wikipedia.org/wiki/Wikipedia:Hauptseite", "https://de.wikipedia.org/w/index.php"),
        ("http://wiki.example.org/index.php/Main_Page", "http://wiki.example.org/index.php"),
        ("https://example.org/mw/index.php?title=Main_Page", "https://example.org/mw/index.php"),
        ("https://wiki.example.org/wiki/Main_Page", "https://wiki.example.org/wiki/Main_Page"),
        ("https://wiki.example.org/", "https://wiki.example.org/"),
        ("https://wiki.example.org", "https://wiki.example.org/"),
        ("https://notwikipedia.org/wiki/Main_Page", "https://notwikipedia.org/wiki/Main_Page"),
        ('https://example.org/a(b)"<c>/M', "https://example.org/a%28b%29%22%3Cc%3E/M"),
        ("javascript:alert(1)", ""),
        ("file:///etc/passwd", ""),
        ("https://[broken", ""),
        ("", ""),
    ],
)
def test_the_script_of_a_wiki_is_not_guessed(base: str, script: str) -> None:
    assert find_script_url(base) == script


@pytest.mark.parametrize(
    ("base", "licence"),
    [
        ("https://en.wikipedia.org/wiki/Main_Page", "CC BY-SA 4.0"),
        ("https://simple.wiktionary.org/wiki/Main_Page", "CC BY-SA 4.0"),
        ("https://wikisource.org/wiki/Main_Page", "CC BY-SA 4.0"),
        ("https://commons.wikimedia.org/wiki/Main_Page", "CC BY-SA 4.0"),
        ("https://www.mediawiki.org/wiki/MediaWiki", "CC BY-SA 4.0"),
        ("https://www.wikidata.org/wiki/Wikidata:Main_Page", "CC0 1.0"),
        ("https://en.wikinews.org/wiki/Main_Page", UNKNOWN_LICENCE),
        ("https://ru.wikinews.org/wiki/Main_Page", UNKNOWN_LICENCE),
        ("https://wikipedia.org.example.org/wiki/Main_Page", UNKNOWN_LICENCE),
        ("https://example-wikipedia.org/wiki/Main_Page", UNKNOWN_LICENCE),
        ("https://wiki.example.org/", UNKNOWN_LICENCE),
        ("en.wikipedia.org", UNKNOWN_LICENCE),
        ("", UNKNOWN_LICENCE),
    ],
)
def test_the_licence_of_a_wiki_is_not_guessed(base: str, licence: str) -> None:
    assert find_licence(base) == licence


def test_the_credit_of_an_unknown_licence_says_so() -> None:
    source = Attribution.from_corpus({"base": "https://wiki.example.org/", "licence": UNKNOWN_LICENCE})
    assert source.build_credit_line(PASSAGE) == (
        "“Anarchism” (https://wiki.example.org/?oldid=99)"
        " by its authors (https://wiki.example.org/?curid=12&action=history),"
        " licence unknown; excerpt, markup removed"
    )


def test_other_sources_have_no_address() -> None:
    documents = Attribution.from_corpus({"base": "", "licence": ""})
    assert (documents.build_url(PASSAGE), documents.build_credit_line(PASSAGE)) == ("", "")
    licensed = Attribution.from_corpus({"licence": "CC0"})
    assert licensed.build_credit_line(PASSAGE) == "“Anarchism”, CC0; excerpt"
    assert Attribution.from_corpus(ENWIKI).build_url(replace(PASSAGE, rev_id=0)) == ""


@given(st.sampled_from(["http", "https", "javascript", "data", "ftp", ""]), st.text())
def test_only_web_addresses_are_returned(scheme: str, rest: str) -> None:
    script = find_script_url(f"{scheme}:{rest}")
    assert script == "" or script.startswith(("https://", "http://"))
