"""The text of rendered pages, and pages that are made to take long or to lose text."""

from contextlib import suppress

import pytest

from rag_model.corpus.records import Section, Siteinfo, UnparsablePageError
from rag_model.corpus.rendered_html import clean_html

ATTRIBUTES = " ".join(map("a{}".format, range(300_000)))


def clean(html: str) -> tuple[Section, ...]:
    return clean_html(html, Siteinfo("enwiki", "en", "https://en.wikipedia.org/wiki/Main_Page"))


def test_what_a_reader_does_not_read_as_text_is_dropped() -> None:
    html = (
        "<div class='mw-parser-output'><p>It was <b>built</b> in 1889.<sup class='reference'>[1]</sup></p>"
        "<table><tr><td>cell</td></tr></table><div class='hatnote'>See also</div>"
        "<h2><span>History</span><span class='mw-editsection'>[edit]</span></h2>"
        "<p>The <a href='/wiki/Tower'>tower</a> stands.</p><p style='display: none'>hidden</p></div>"
    )
    assert clean(html) == (Section("", "It was built in 1889."), Section("History", "The tower stands."))


@pytest.mark.parametrize(
    ("html", "words"),
    [
        ("<p>a</p>" + "<div>" * 100_000 + "deep", "nests"),
        (f"<p {ATTRIBUTES}>text</p>", "attributes"),
        ("<p " + ATTRIBUTES.replace(" ", "='>'") + ">text</p>", "attributes"),
        (f'<p = " {ATTRIBUTES}>text</p>', "attributes"),
    ],
    ids=["deep", "attributes", "quoted", "stray quote"],
)
def test_a_page_that_would_take_long_or_lose_its_text_is_refused(html: str, words: str) -> None:
    with pytest.raises(UnparsablePageError, match=words):
        clean(html)


@pytest.mark.parametrize("piece", ['<a b="', "<a b='", "<", "<a ", "<a b=", "</", "<!--", "<a b=\"'", "&#", '"<a '])
def test_the_time_grows_with_the_length(piece: str) -> None:
    """A quadratic step would not end in the time of a test."""
    with suppress(UnparsablePageError):
        clean("<p>text</p>" + piece * 200_000)
