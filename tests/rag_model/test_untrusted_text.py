"""JSON of others is a value that can be written again, or one `ValueError`."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.digest import canonical_json
from rag_model.errors import UsageError
from rag_model.untrusted_text import MAX_DEPTH, check_printable, escape_controls, parse_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(VALUES, st.booleans())
def test_what_json_can_hold_is_read_back(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert parse_json(text) == parse_json(text.encode()) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"[" * 100_000, "nested"),
        (b"[" * (MAX_DEPTH + 2) + b"]" * (MAX_DEPTH + 2), "nested"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "nested"),
        (b'{"a": NaN}', "NaN"),
        (b"[-Infinity]", "-Infinity"),
        (b"1e999", "too large"),
        (b'["\\ud83d"]', "half of a character"),
        (b'{"\\uDE00": 1}', "half of a character"),
        (b'"\xff"', "utf-8"),
        (b'"\xed\xa0\x80"', "utf-8"),
        ('"\\ud800"'.encode("utf-16"), "utf-8"),
        ('"\\ud800"'.encode("utf-16-le"), "control character"),
        (b"1" * 5000, "more than 4,300 digits"),
        (b"{", "Expecting"),
    ],
    ids=lambda value: repr(value[:12]),
)
def test_what_would_fail_later_fails_here(text: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_json(text)


@given(st.binary(max_size=60) | st.text('[]{}",:\\ud8c0e19.-NaN', max_size=40).map(str.encode))
def test_nothing_else_is_raised(data: bytes) -> None:
    try:
        canonical_json(parse_json(data))
    except ValueError:
        return


@given(st.text(st.characters()))
def test_what_is_printed_can_be_printed(text: str) -> None:
    shown = escape_controls(text)
    shown.encode()
    assert not any(one < " " and one not in "\n\t" for one in shown)
    assert not any("\x7f" <= one <= "\x9f" for one in shown)
    check_printable(shown, "it")


@given(st.text(st.characters()))
def test_a_json_document_stays_the_same_document(text: str) -> None:
    assert json.loads(escape_controls(json.dumps([text], ensure_ascii=False))) == [text]


@given(st.text("abcäß漢\U0001f600 .,\n\t"))
def test_what_people_write_stays(text: str) -> None:
    assert escape_controls(text) == text


@pytest.mark.parametrize("bad", ["\x1b[2J", "\x9b2J", "\x07", "\u202e", "\u2028", "\ud800", "\r"])
def test_what_is_kept_for_others_is_refused(bad: str) -> None:
    assert bad not in escape_controls(f"a{bad}b")
    with pytest.raises(UsageError, match="the note contains the control character"):
        check_printable(f"a{bad}b", "the note")


def test_a_number_of_too_many_digits_is_named_without_advice_for_programmers() -> None:
    with pytest.raises(ValueError, match=r"^a whole number has more than 4,300 digits$"):
        parse_json(b'{"id": ' + b"9" * 5000 + b"}")
