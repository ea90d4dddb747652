"""DPR's token match against an oracle written from its definition, character class by character class."""

import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.evaluation.matching import has_answer, tokenize


def spelled_out(text: str) -> list[str]:
    """Tokenize by walking the characters: the definition, slowly."""
    found: list[str] = []
    run = ""
    for char in unicodedata.normalize("NFD", text):
        major = unicodedata.category(char)[0]
        if major in "LNM":
            run += char
            continue
        found += [run] if run else []
        run = ""
        found += [char] if major not in "ZC" else []
    found += [run] if run else []
    return [token.lower() for token in found]


def oracle(answers: list[str], text: str) -> bool:
    """Compare every window of the text's tokens with every answer's tokens."""
    words = spelled_out(text)
    for answer in map(spelled_out, answers):
        windows = (words[i : i + len(answer)] for i in range(len(words) - len(answer) + 1))
        if any(window == answer for window in windows):
            return True
    return False


# Few characters, so that answers do occur; each stands for a trap: case, marks, separators, controls, sigma,
# dotted I.
TRAPS = "aA1é\u0301ßΣσςİiI ǅⅣ½_-'\"’ \n\t\u00a0\u2003\u200b\ufeff\x00、字🙂\u1abe\U0001d7d9"


@given(st.text(TRAPS, max_size=30) | st.text(max_size=30))
def test_tokens_are_those_of_the_definition(text: str) -> None:
    assert tokenize(text) == spelled_out(text)


@given(st.lists(st.text(TRAPS, max_size=4), max_size=3), st.text(TRAPS, max_size=30))
def test_match_is_that_of_the_definition(answers: list[str], text: str) -> None:
    assert has_answer(answers, text) == oracle(answers, text)


@given(st.text(TRAPS, max_size=20), st.text(TRAPS, max_size=20), st.data())
def test_an_answer_cut_out_at_token_borders_is_found(before: str, after: str, data: st.DataObject) -> None:
    answer = data.draw(st.text(TRAPS, max_size=8))
    assert has_answer([answer], f"{before}\n{answer}\n{after}")


def test_every_character_is_classed_as_the_regex_module_does() -> None:
    regex = pytest.importorskip("regex")
    dpr = regex.compile(r"([\p{L}\p{N}\p{M}]+)|([^\p{Z}\p{C}])", regex.IGNORECASE | regex.UNICODE | regex.MULTILINE)
    known = "".join(f"{chr(c)}\n" for c in range(sys.maxunicode + 1) if unicodedata.category(chr(c)) != "Cn")
    normal = unicodedata.normalize("NFD", known)
    assert tokenize(known) == [match.group().lower() for match in dpr.finditer(normal)]


@pytest.mark.parametrize(
    ("answers", "text", "found"),
    [
        (["Abraham Lincoln"], "President abraham  LINCOLN, 1861", True),
        (["Lincoln"], "Lincolnshire", False),
        (["1,000"], "about 1,000 men", True),
        (["1000"], "about 1,000 men", False),
        (["café"], "CAFE\u0301", True),
        (["cafe"], "café", False),
        (["Paris", "Lutetia"], "once Lutetia", True),
        ([], "anything", False),
        ([""], "an answer without tokens is in every passage, as in DPR", True),
        ([""], "", True),
        (["x"], "", False),
    ],
)
def test_cases(answers: list[str], text: str, found: bool) -> None:
    assert has_answer(answers, text) is found
