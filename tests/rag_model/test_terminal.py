"""Nothing that others wrote commands a terminal."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.errors import UsageError
from rag_model.terminal import check_printable, printable


@given(st.text(st.characters()))
def test_what_is_printed_can_be_printed(text: str) -> None:
    shown = printable(text)
    shown.encode()
    assert not any(one < " " and one not in "\n\t" for one in shown)
    assert not any("\x7f" <= one <= "\x9f" for one in shown)
    check_printable(shown, "it")


@given(st.text(st.characters()))
def test_a_json_document_stays_the_same_document(text: str) -> None:
    assert json.loads(printable(json.dumps([text], ensure_ascii=False))) == [text]


@given(st.text("abcäß漢\U0001f600 .,\n\t"))
def test_what_people_write_stays(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize("bad", ["\x1b[2J", "\x9b2J", "\x07", "\u202e", "\u2028", "\ud800", "\r"])
def test_what_is_kept_for_others_is_refused(bad: str) -> None:
    assert bad not in printable(f"a{bad}b")
    with pytest.raises(UsageError, match="the note holds the control character"):
        check_printable(f"a{bad}b", "the note")
