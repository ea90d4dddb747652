"""Digests name the algorithm, agree with `sha256sum`, and do not depend on the JSON writer."""

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


@given(st.dictionaries(st.text(), VALUES), st.text(), VALUES)
def test_the_digest_depends_on_contents_and_not_on_the_order_of_keys(
    value: dict[str, object], key: str, addition: object
) -> None:
    assert digest_json(dict(reversed(value.items()))) == digest_json(value)
    assert digest_json({**value, key: [value.get(key), addition]}) != digest_json(value)


def test_the_digest_of_no_bytes_is_that_of_sha256sum() -> None:
    assert digest_bytes(b"") == "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_a_file_is_digested_by_its_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10_000  # longer than one read
    path = tmp_path / "file"
    path.write_bytes(data)
    assert digest_file(path) == digest_bytes(data) == f"sha256:{hashlib.sha256(data).hexdigest()}"


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_are_refused(number: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"loss": number})
