"""Tokenizers from elsewhere: a pattern that blows up is refused before a question meets it."""

import json
from pathlib import Path
from typing import Any

import pytest

from rag_model.encoders.tokens import load_tokenizer, tokenize
from rag_model.errors import InputError
from rag_model.tokenizer import load_tokenizer_file
from tests.fixtures.tiny import add_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> dict[str, Any]:
    add_tokenizer(tmp_path)
    return dict(json.loads((tmp_path / "tokenizer.json").read_bytes()))


def written(folder: Path, tokenizer: dict[str, Any], **changed: Any) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, **changed}))
    return folder / "tokenizer.json"


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def test_patterns_of_common_models_are_fine(tmp_path: Path, tokenizer: dict[str, Any]) -> None:
    llama = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+"
    )
    loaded = load_tokenizer_file(written(tmp_path, tokenizer, pre_tokenizer=split(llama)))
    assert loaded.encode("king of rivers").tokens


@pytest.mark.parametrize("pattern", ["(a+)+$", "(x+x+)+y"])
def test_a_pattern_that_blows_up_is_refused(tmp_path: Path, tokenizer: dict[str, Any], pattern: str) -> None:
    nested = {"type": "Sequence", "pretokenizers": [split(pattern), {"type": "Whitespace"}]}
    with pytest.raises(InputError, match="one of its patterns is too slow, so use another model"):
        load_tokenizer_file(written(tmp_path, tokenizer, pre_tokenizer=nested))
    replace = {"type": "Replace", "pattern": {"Regex": pattern}, "content": ""}
    with pytest.raises(InputError, match="one of its patterns is too slow"):
        load_tokenizer_file(written(tmp_path, tokenizer, normalizer=replace))


@pytest.mark.parametrize("damage", [b"", b"[" * 9999, b"{}", b"\xff", b'{"version": "1.0"}'])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(damage)
    with pytest.raises(InputError, match="cannot be read") as refused:
        load_tokenizer_file(tmp_path / "tokenizer.json")
    assert "\n" not in str(refused.value)


def test_a_pattern_that_is_none_is_one_sentence(tmp_path: Path, tokenizer: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_tokenizer_file(written(tmp_path, tokenizer, pre_tokenizer=split("(((")))


def test_a_tokenizer_without_a_token_for_the_unknown_is_one_sentence(tmp_path: Path, tokenizer: dict[str, Any]) -> None:
    vocabulary = {token: number for token, number in tokenizer["model"]["vocab"].items() if token != "[UNK]"}
    written(tmp_path, tokenizer, model={**tokenizer["model"], "vocab": vocabulary})
    with pytest.raises(InputError, match="cannot split a text"):
        tokenize(load_tokenizer(tmp_path, 16), ["漢字"])
