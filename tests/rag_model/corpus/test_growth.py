"""The work on a page grows in proportion to its length, whatever any editor writes on it.

Every rule of the grammar is repeated, alone and beside others, to a length and to four times that. A linear pass takes
four times the processor time for it, a quadratic one sixteen times. So is every opening followed by a long run.
Processor time of this thread is compared with itself, and only a ratio that three tries confirm counts.
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
LENGTH = 1 << 14  # characters
TIMES = 4
MOST = 8.0  # between 4, linear, and 16, quadratic
NEGLIGIBLE = 0.03  # seconds: 2 MB a second or faster is linear enough

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


def read(text: str) -> object:
    """Do with a page what a build does before it is cut."""
    page = Page(7, 7, None, 0, "T", False, "wikitext", text)
    return classify_page(page, ENGLISH), clean_wikitext(text, ENGLISH, "T")


def seconds(work: Callable[[str], object], text: str) -> float:
    before = time.thread_time()
    work(text)
    return time.thread_time() - before


def grows_linearly(work: Callable[[str], object], text: Callable[[int], str], length: int = LENGTH) -> bool:
    """Whether four times the text takes at most eight times the work, in one of three tries."""
    short, long = text(length), text(TIMES * length)
    for _ in range(3):
        whole = seconds(work, long)
        if whole < NEGLIGIBLE or whole < MOST * min(seconds(work, short) for _ in range(2)):
            return True
    return False


def repeated(*pieces: str) -> Callable[[int], str]:
    unit = "".join(pieces)
    return lambda length: (unit * (length // len(unit) + 1))[:length]


def opened_and_closed(first: str, second: str) -> Callable[[int], str]:
    return lambda length: first * (length // 2 // len(first)) + second * (length // 2 // len(second))


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_repeated_is_linear(rule: str) -> None:
    slow = [piece for piece in RULES[rule] if not grows_linearly(read, repeated(piece))]
    slow += [pair for pair in combinations(RULES[rule], 2) if not grows_linearly(read, opened_and_closed(*pair))]
    assert slow == []


@pytest.mark.parametrize("opening", OPENINGS)
def test_an_opening_before_a_long_run_is_linear(opening: str) -> None:
    def page(run: str, ending: str) -> Callable[[int], str]:
        return lambda length: opening + run * (length // len(run)) + ending

    assert [(run, end) for run in RUNS for end in ENDINGS if not grows_linearly(read, page(run, end))] == []


def test_a_file_of_empty_streams_is_linear() -> None:
    def work(text: str) -> object:
        return list(split_lines((b"" for _ in text), "a file"))

    assert grows_linearly(work, repeated("a"))


SHAPES = [
    repeated,
    opened_and_closed,
    lambda one, two: lambda length: one + two * (length // len(two)),
    lambda one, two: lambda length: one * (length // len(one)) + two,
]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(MARKUP), st.sampled_from(MARKUP), st.sampled_from(SHAPES))
def test_two_rules_together_are_linear(one: str, two: str, shape: Callable[..., Callable[[int], str]]) -> None:
    assert grows_linearly(read, shape(one, two))


@pytest.mark.parametrize("piece", TEXTS, ids=ascii)
@pytest.mark.parametrize("kind", [Words, Sections, Sentences, Recursive])
def test_cutting_is_linear(kind: Callable[[], object], piece: str) -> None:
    cut = kind().open()  # type: ignore[attr-defined]

    def work(text: str) -> object:
        return sum(1 for _ in cut(Article("1", 1, "T", (Section("", text),))))

    def many(text: str) -> object:
        sections = tuple(Section("a", text[at : at + 9]) for at in range(0, len(text), 9))
        return sum(1 for _ in cut(Article("1", 1, "T", sections)))

    assert grows_linearly(work, repeated(piece))
    assert grows_linearly(many, repeated(piece))


@pytest.mark.parametrize("piece", TEXTS, ids=ascii)
def test_cutting_by_tokens_is_linear(piece: str, tmp_path: Path) -> None:
    add_tokenizer(tmp_path)
    cut = Tokens(tmp_path).open()

    def work(text: str) -> object:
        return sum(1 for _ in cut(Article("1", 1, "T", (Section("", text),))))

    assert grows_linearly(work, repeated(piece), LENGTH // 4)


def test_the_measure_tells_a_quadratic_pass_from_a_linear_one() -> None:
    def quadratic(text: str) -> object:
        return sum(text.count("b", at) for at in range(0, len(text), 64))

    def linear(text: str) -> object:
        return sum(text.count("b", at, at + 64) for at in range(0, len(text), 64))

    assert not grows_linearly(quadratic, repeated("a"), 1 << 16)
    assert grows_linearly(linear, repeated("a"), 1 << 16)
