"""DPR's token match agrees with an implementation of its definition by character classes."""

import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.evaluation.matching import has_answer, tokenize


def tokenize_by_definition(text: str) -> list[str]:
    """Tokenize character by character, as the definition states."""
    tokens: list[str] = []
    run = ""
    for char in unicodedata.normalize("NFD", text):
        major = unicodedata.category(char)[0]
        if major in "LNM":
            run += char
            continue
        tokens += [run] if run else []
        run = ""
        tokens += [char] if major not in "ZC" else []
    tokens += [run] if run else []
    return [token.lower() for token in tokens]


def matches_by_definition(answers: list[str], text: str) -> bool:
    """Compare every window of the text's tokens with every answer's tokens."""
    words = tokenize_by_definition(text)
    for answer in map(tokenize_by_definition, answers):
        windows = (words[i : i + len(answer)] for i in range(len(words) - len(answer) + 1))
        if any(window == answer for window in windows):
            return True
    return False


# Few characters, so that answers occur: cases, marks, separators, controls, sigma, dotted I.
TRICKY_CHARACTERS = "aA1é\u0301ßΣσςİiI ǅⅣ½_-'\"’ \n\t\u00a0\u2003\u200b\ufeff\x00、字🙂\u1abe\U0001d7d9"


@given(st.text(TRICKY_CHARACTERS, max_size=30) | st.text(max_size=30))
def test_tokens_are_those_of_the_definition(text: str) -> None:
    assert tokenize(text) == tokenize_by_definition(text)


@given(st.lists(st.text(TRICKY_CHARACTERS, max_size=4), max_size=3), st.text(TRICKY_CHARACTERS, max_size=30))
def test_match_is_that_of_the_definition(answers: list[str], text: str) -> None:
    assert has_answer(answers, text) == matches_by_definition(answers, text)


@given(st.text(TRICKY_CHARACTERS, max_size=20), st.text(TRICKY_CHARACTERS, max_size=20), st.data())
def test_an_answer_at_token_boundaries_matches(prefix: str, suffix: str, data: st.DataObject) -> None:
    answer = data.draw(st.text(TRICKY_CHARACTERS, max_size=8))
    assert has_answer([answer], f"{prefix}\n{answer}\n{suffix}")


def test_every_character_has_the_class_of_the_regex_module() -> None:
    regex = pytest.importorskip("regex")
    dpr = regex.compile(r"([\p{L}\p{N}\p{M}]+)|([^\p{Z}\p{C}])", regex.IGNORECASE | regex.UNICODE | regex.MULTILINE)
    characters = "".join(f"{chr(c)}\n" for c in range(sys.maxunicode + 1) if unicodedata.category(chr(c)) != "Cn")
    normal = unicodedata.normalize("NFD", characters)
    assert tokenize(characters) == [match.group().lower() for match in dpr.finditer(normal)]


@pytest.mark.parametrize(
    ("answers", "text", "is_match"),
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
def test_examples_of_answers_match(answers: list[str], text: str, is_match: bool) -> None:
    assert has_answer(answers, text) is is_match
