"""Untrusted JSON is parsed into a value that can be written again, or refused with a `ValueError`."""

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
def test_json_values_are_read_back(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert parse_json(text) == parse_json(text.encode()) == value


@pytest.mark.parametrize(
    ("text", "message"),
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
        (b"{", "Expecting"),
    ],
    ids=lambda value: repr(value[:12]),
)
def test_invalid_json_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


@given(st.binary(max_size=60) | st.text('[]{}",:\\ud8c0e19.-NaN', max_size=40).map(str.encode))
def test_parsed_json_can_be_written_or_is_refused(data: bytes) -> None:
    try:
        canonical_json(parse_json(data))
    except ValueError:
        return


@given(st.text(st.characters()))
def test_escaped_text_has_no_control_characters(text: str) -> None:
    printable = escape_controls(text)
    printable.encode()
    assert not any(char < " " and char not in "\n\t" for char in printable)
    assert not any("\x7f" <= char <= "\x9f" for char in printable)
    check_printable(printable, "it")


@given(st.text(st.characters()))
def test_escaping_does_not_change_a_json_document(text: str) -> None:
    assert json.loads(escape_controls(json.dumps([text], ensure_ascii=False))) == [text]


@given(st.text("abcäß漢\U0001f600 .,\n\t"))
def test_ordinary_text_is_not_changed(text: str) -> None:
    assert escape_controls(text) == text


@pytest.mark.parametrize("control", ["\x1b[2J", "\x9b2J", "\x07", "\u202e", "\u2028", "\ud800", "\r"])
def test_control_characters_are_escaped_or_refused(control: str) -> None:
    assert control not in escape_controls(f"a{control}b")
    with pytest.raises(UsageError, match="the note contains the control character"):
        check_printable(f"a{control}b", "the note")


def test_a_number_of_too_many_digits_is_named_without_advice_for_programmers() -> None:
    with pytest.raises(ValueError, match=r"^a whole number has more than 4,300 digits$"):
        parse_json(b'{"id": ' + b"9" * 5000 + b"}")
