"""The work on a page grows in proportion to its length, for any wikitext.

Texts that repeat one or two rules of the grammar, or an opening tag before a long run, are read at a length and at
four times this length. Linear code takes four times as much CPU time, quadratic code sixteen times. The CPU time of
this thread is measured, and a ratio counts only if three attempts confirm it.
"""

import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.corpus.articles import classify_page
from rag_model.corpus.chunkers.tokens import Tokens
from rag_model.corpus.chunkers.windows import Recursive, Sections, Sentences, Words
from rag_model.corpus.dump_formats.mediawiki import CANONICAL_NAMESPACES
from rag_model.corpus.records import Article, Page, Section, Siteinfo
from rag_model.corpus.source import split_lines
from rag_model.corpus.wikitext import clean_wikitext
from tests.fixtures.tiny import add_tokenizer

ENGLISH = Siteinfo(
    "enwiki", "en", "https://en.wikipedia.org/wiki/Main_Page", dict(CANONICAL_NAMESPACES), "first-letter"
)
LENGTH = 1 << 13  # characters
TIMES = 4
MAX_RATIO = 8.0  # linear code has 4, quadratic code 16
NEGLIGIBLE = 0.03  # seconds: 1 MB per second is fast enough

RULES = {
    "headings": ["\n==a==\n", "\n=", "=", "\n==a \t"],
    "templates": [
        "{{",
        "}}",
        "{{a|b}}",
        "{{a|",
        "|",
        "{{cite web|",
        "{{cite web|}}",
        "{{convert|1|km}}",
        "{{lang|fr|x}}",
    ],
    "parameters": ["{{{", "}}}", "{{{a|b}}}"],
    "parser functions": ["{{#if:a|b}}", "{{#", "{{!}}"],
    "links": ["[[", "]]", "[[a|b]]", "[[File:a|", "[[a", "]]]"],
    "external links": ["[http://a b]", "[http://a ", "[//", "]", "[", "mailto:a "],
    "tables": ["\n{|", "\n|}", "\n|-", "\n|a||b", "\n!a!!b", "\n:{|", "<table>", "</table>"],
    "references": ["<ref>a</ref>", "<ref>", "</ref>", "<ref name=a/>", '<ref name="a" ', "<references/>"],
    "literals": ["<nowiki>", "</nowiki>", "<pre>", "</pre>", "<nowiki>a</nowiki>", "<nowiki/>"],
    "comments": ["<!--", "-->", "<!--a-->", "<!-"],
    "formulas": ["<math>x^2</math>", "<math>", "</math>", "\\frac{", "<math>{{</math>"],
    "tags": [
        "<br>",
        "<div>",
        "</div>",
        "<a ",
        "<",
        "</",
        "<sup>2</sup>",
        "<sup>",
        '<span style="display:none">',
        "</span>",
    ],
    "apostrophes": ["'", "''", "'''''", "''a"],
    "lists": ["\n* ", "\n#:;*", "\n; a : ", "\n;", ": "],
    "entities": ["&amp;", "&", "&#", "&#x41;", "&amp"],
    "switches": ["__TOC__", "__", "__A", "_"],
    "variants": ["-{", "}-", "-{a|b:c;}-"],
    "rules": ["\n----", "-"],
    "blanks": [" ", "\n", " \n", "\t", "\u00a0", "\u200b"],
    "brackets": ["(", ")", "( ,", ",", "(,)", " ,"],
    "words": ["a", "a ", "1", "1,", "é", "漢", "。", "a. ", "\x00", "\ufdd0", "T"],
}
OPENINGS = [
    "[//", "[mailto:", "[[", "[[a", "[[a (", "{{", "{{a", "{{#if:", "{{convert|", "{{hlist|", "{{{", "-{", "(",
    "&", "__", "<span ", "</span", "<sup", "<table", "</table", "<ref ", "<!--", "<math>", "<a ",
    "#REDIRECT", "#REDIRECT :", "\n=", "\n;", "\n!", "\n{|", "\n*", "''",
]  # fmt: skip
RUNS = ["a", "1", " ", ",", "=", "display:none", "a b,"]
ENDINGS = ["", "b|]]", "\nb|]]", "}}", ")x"]
MARKUP = [piece for pieces in RULES.values() for piece in pieces]
TEXTS = ["a ", "a", "a. ", "。", "漢", "(", '"', "\n", "a\n\n", "a.b", "e\u0301", ". ", "1 ", "\u3000", "A.A. ", "…"]


def clean_page(text: str) -> object:
    """Process a page like a build before chunking."""
    page = Page(7, 7, None, 0, "T", False, "wikitext", text)
    return classify_page(page, ENGLISH), clean_wikitext(text, ENGLISH, "T")


def measure_seconds(work: Callable[[str], object], text: str) -> float:
    start = time.thread_time()
    work(text)
    return time.thread_time() - start


def grows_linearly(work: Callable[[str], object], text: Callable[[int], str], length: int = LENGTH) -> bool:
    """Return whether four times the text takes at most eight times the CPU time in one of three attempts."""
    short, long = text(length), text(TIMES * length)
    for _ in range(3):
        long_seconds = measure_seconds(work, long)
        if long_seconds < NEGLIGIBLE:
            return True
        if long_seconds < MAX_RATIO * min(measure_seconds(work, short) for _ in range(2)):
            return True
    return False


def repeat_pieces(*pieces: str) -> Callable[[int], str]:
    unit = "".join(pieces)
    return lambda length: (unit * (length // len(unit) + 1))[:length]


def open_and_close(first: str, second: str) -> Callable[[int], str]:
    return lambda length: first * (length // 2 // len(first)) + second * (length // 2 // len(second))


@pytest.mark.parametrize("rule", RULES)
def test_repeated_rule_is_linear(rule: str) -> None:
    slow_texts = [piece for piece in RULES[rule] if not grows_linearly(clean_page, repeat_pieces(piece))]
    pairs = combinations(RULES[rule], 2)
    slow_texts += [pair for pair in pairs if not grows_linearly(clean_page, open_and_close(*pair))]
    assert slow_texts == []


@pytest.mark.parametrize("opening", OPENINGS)
def test_opening_before_a_long_run_is_linear(opening: str) -> None:
    def page(run: str, ending: str) -> Callable[[int], str]:
        return lambda length: opening + run * (length // len(run)) + ending

    assert [(run, end) for run in RUNS for end in ENDINGS if not grows_linearly(clean_page, page(run, end))] == []


def test_file_of_empty_streams_is_linear() -> None:
    def work(text: str) -> object:
        return list(split_lines((b"" for _ in text), "a file"))

    assert grows_linearly(work, repeat_pieces("a"))


SHAPES = [
    repeat_pieces,
    open_and_close,
    lambda first, second: lambda length: first + second * (length // len(second)),
    lambda first, second: lambda length: first * (length // len(first)) + second,
]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(MARKUP), st.sampled_from(MARKUP), st.sampled_from(SHAPES))
def test_two_rules_are_linear(first: str, second: str, shape: Callable[..., Callable[[int], str]]) -> None:
    assert grows_linearly(clean_page, shape(first, second))


@pytest.mark.parametrize("piece", TEXTS, ids=ascii)
@pytest.mark.parametrize("kind", [Words, Sections, Sentences, Recursive])
def test_chunking_is_linear(kind: Callable[[], object], piece: str) -> None:
    chunk = kind().open()  # type: ignore[attr-defined]

    def work(text: str) -> object:
        return sum(1 for _ in chunk(Article("1", 1, "T", (Section("", text),))))

    def chunk_many_sections(text: str) -> object:
        sections = tuple(Section("a", text[start : start + 9]) for start in range(0, len(text), 9))
        return sum(1 for _ in chunk(Article("1", 1, "T", sections)))

    assert grows_linearly(work, repeat_pieces(piece))
    assert grows_linearly(chunk_many_sections, repeat_pieces(piece))


@pytest.mark.parametrize("piece", TEXTS, ids=ascii)
def test_chunking_by_tokens_is_linear(piece: str, tmp_path: Path) -> None:
    add_tokenizer(tmp_path)
    chunk = Tokens(tmp_path).open()

    def work(text: str) -> object:
        return sum(1 for _ in chunk(Article("1", 1, "T", (Section("", text),))))

    assert grows_linearly(work, repeat_pieces(piece), LENGTH // 2)


def test_quadratic_work_is_detected() -> None:
    def quadratic(text: str) -> object:
        return sum(text.count("b", start) for start in range(0, len(text), 64))

    def linear(text: str) -> object:
        return sum(text.count("b", start, start + 64) for start in range(0, len(text), 64))

    assert not grows_linearly(quadratic, repeat_pieces("a"), 1 << 16)
    assert grows_linearly(linear, repeat_pieces("a"), 1 << 16)
