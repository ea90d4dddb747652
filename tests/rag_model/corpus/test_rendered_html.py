"""Rendered pages give the visible text, and pages that would be slow or lose text are refused."""

from contextlib import suppress

import pytest

from rag_model.corpus.records import Section, Siteinfo, UnparsablePageError
from rag_model.corpus.rendered_html import clean_html

ATTRIBUTES = " ".join(map("a{}".format, range(300_000)))


def clean(html: str) -> tuple[Section, ...]:
    return clean_html(html, Siteinfo("enwiki", "en", "https://en.wikipedia.org/wiki/Main_Page"))


def test_only_visible_text_is_kept() -> None:
    html = (
        "<div class='mw-parser-output'><p>It was <b>built</b> in 1889.<sup class='reference'>[1]</sup></p>"
        "<table><tr><td>cell</td></tr></table><div class='hatnote'>See also</div>"
        "<h2><span>History</span><span class='mw-editsection'>[edit]</span></h2>"
        "<p>The <a href='/wiki/Tower'>tower</a> stands.</p><p style='display: none'>hidden</p></div>"
    )
    assert clean(html) == (Section("", "It was built in 1889."), Section("History", "The tower stands."))


@pytest.mark.parametrize(
    ("html", "message"),
    [
        ("<p>a</p>" + "<div>" * 100_000 + "deep", "nests"),
        (f"<p {ATTRIBUTES}>text</p>", "attributes"),
        ("<p " + ATTRIBUTES.replace(" ", "='>'") + ">text</p>", "attributes"),
        (f'<p = " {ATTRIBUTES}>text</p>', "attributes"),
    ],
    ids=["deep", "attributes", "quoted", "stray quote"],
)
def test_hostile_page_is_refused(html: str, message: str) -> None:
    with pytest.raises(UnparsablePageError, match=message):
        clean(html)


@pytest.mark.parametrize("piece", ['<a b="', "<a b='", "<", "<a ", "<a b=", "</", "<!--", "<a b=\"'", "&#", '"<a '])
def test_time_is_linear_in_the_length(piece: str) -> None:
    """Quadratic code would exceed the time limit of the test."""
    with suppress(UnparsablePageError):
        clean("<p>text</p>" + piece * 200_000)
