"""Credit: the revision, the authors, the licence, the changes; nothing where nothing is known."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.corpus.records import Passage
from rag_model.retrieve.attribution import Attribution, script_url

PASSAGE = Passage("12-0", "12", 99, "Anarchism", "", "text", 0, 1, "ab")
ENWIKI = {"base": "https://en.wikipedia.org/wiki/Main_Page", "licence": "CC BY-SA 4.0"}


def test_wikipedia_gets_what_its_licence_asks_for() -> None:
    source = Attribution.from_corpus(ENWIKI)
    assert source.url(PASSAGE) == "https://en.wikipedia.org/w/index.php?oldid=99"
    assert source.credit_line(PASSAGE) == (
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
        ("javascript:alert(1)", ""),
        ("file:///etc/passwd", ""),
        ("https://[broken", ""),
        ("", ""),
    ],
)
def test_scripts_lie_beside_short_addresses(base: str, script: str) -> None:
    assert script_url(base) == script


def test_other_sources_have_no_address() -> None:
    documents = Attribution.from_corpus({"base": "", "licence": ""})
    assert (documents.url(PASSAGE), documents.credit_line(PASSAGE)) == ("", "")
    licensed = Attribution.from_corpus({"licence": "CC0"})
    assert licensed.credit_line(PASSAGE) == "“Anarchism”, CC0; excerpt"
    assert Attribution.from_corpus(ENWIKI).url(replace(PASSAGE, rev_id=0)) == ""


@given(st.sampled_from(["http", "https", "javascript", "data", "ftp", ""]), st.text())
def test_only_web_addresses_come_out(scheme: str, rest: str) -> None:
    script = script_url(f"{scheme}:{rest}")
    assert script == "" or script.startswith(("https://", "http://"))
