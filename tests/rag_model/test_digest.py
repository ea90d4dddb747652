"""Digests name the algorithm, agree with `sha256sum`, and forget what JSON writers differ in."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.digest import canonical_json, digest_bytes, digest_file, digest_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), VALUES))
def test_the_order_of_keys_does_not_count(value: dict[str, object]) -> None:
    assert digest_json(dict(reversed(value.items()))) == digest_json(value)


@given(st.dictionaries(st.text(), VALUES), st.text(), VALUES)
def test_what_a_value_holds_does_count(value: dict[str, object], key: str, other: object) -> None:
    changed = {**value, key: [value.get(key), other]}
    assert digest_json(changed) != digest_json(value)


def test_the_known_digest_of_nothing() -> None:
    assert digest_bytes(b"") == "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_a_file_is_digested_by_its_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10_000  # more than is read at a time
    path = tmp_path / "file"
    path.write_bytes(data)
    assert digest_file(path) == digest_bytes(data) == f"sha256:{hashlib.sha256(data).hexdigest()}"


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_are_refused(number: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"loss": number})
