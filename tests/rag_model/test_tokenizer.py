"""Untrusted tokenizers: a pattern that takes too long is refused before it splits a question."""

import base64
import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from rag_model.encoders.tokens import load_tokenizer, tokenize
from rag_model.errors import InputError
from rag_model.generate.load import load_generator
from rag_model.reading.extractive import SpanModel
from rag_model.tokenizer import GuardedTokenizer, _bound_growth, load_tokenizer_file
from tests.fixtures.tiny import add_tokenizer, write_json
from tests.fixtures.tiny_generators import save_llama
from tests.fixtures.tiny_spans import save_span_model


@pytest.fixture
def tokenizer(tmp_path: Path) -> dict[str, Any]:
    add_tokenizer(tmp_path)
    return dict(json.loads((tmp_path / "tokenizer.json").read_bytes()))


def write_tokenizer(folder: Path, fields: dict[str, Any], **changed_fields: Any) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps({**fields, **changed_fields}))
    return folder / "tokenizer.json"


def build_split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def test_patterns_of_common_models_are_accepted(tmp_path: Path, tokenizer: dict[str, Any]) -> None:
    llama = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+"
    )
    loaded = load_tokenizer_file(write_tokenizer(tmp_path, tokenizer, pre_tokenizer=build_split(llama)))
    assert loaded.encode("king of rivers").tokens


@pytest.mark.parametrize("pattern", ["(a+)+$", "(x+x+)+y"])
def test_a_pattern_that_blows_up_is_refused(tmp_path: Path, tokenizer: dict[str, Any], pattern: str) -> None:
    nested = {"type": "Sequence", "pretokenizers": [build_split(pattern), {"type": "Whitespace"}]}
    with pytest.raises(InputError, match="one of its patterns is too slow, so use another model"):
        load_tokenizer_file(write_tokenizer(tmp_path, tokenizer, pre_tokenizer=nested))
    replace = {"type": "Replace", "pattern": {"Regex": pattern}, "content": ""}
    with pytest.raises(InputError, match="one of its patterns is too slow"):
        load_tokenizer_file(write_tokenizer(tmp_path, tokenizer, normalizer=replace))


@pytest.mark.parametrize("damage", [b"", b"[" * 9999, b"{}", b"\xff", b'{"version": "1.0"}'])
def test_a_damaged_file_is_refused_in_one_sentence(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(damage)
    with pytest.raises(InputError, match="cannot be read") as error:
        load_tokenizer_file(tmp_path / "tokenizer.json")
    assert "\n" not in str(error.value)


def test_an_invalid_pattern_is_refused(tmp_path: Path, tokenizer: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_tokenizer_file(write_tokenizer(tmp_path, tokenizer, pre_tokenizer=build_split("(((")))


def test_a_tokenizer_without_an_unknown_token_is_refused(tmp_path: Path, tokenizer: dict[str, Any]) -> None:
    vocabulary = {token: number for token, number in tokenizer["model"]["vocab"].items() if token != "[UNK]"}
    write_tokenizer(tmp_path, tokenizer, model={**tokenizer["model"], "vocab": vocabulary})
    with pytest.raises(InputError, match="cannot split a text"):
        tokenize(load_tokenizer(tmp_path, 16), ["漢字"])


def build_replace(literal: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": literal}, "content": content}


NINEFOLD_RULE = build_replace("#", "#" * 9)
LENGTHENING_RULES: dict[str, Any] = {
    "a literal": {"normalizer": build_replace("#", "#" * 100)},
    "a chain of literals": {"normalizer": {"type": "Sequence", "normalizers": [build_replace("#", "##")] * 7}},
    "nested chains": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Sequence", "normalizers": [NINEFOLD_RULE]}, NINEFOLD_RULE],
        }
    },
    "the empty literal": {"normalizer": build_replace("", "x" * 100)},
    "a pattern that matches nothing": {
        "normalizer": {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "x" * 100}
    },
    "a prefix": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "#" * 999}, build_replace("#", "#" * 60)],
        }
    },
    "bytes of bytes": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 4}},
    "a decoder": {"decoder": {"type": "Sequence", "decoders": [build_replace("#", "##")] * 7}},
    "copies in a template": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 100,
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {},
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LENGTHENING_RULES)
def test_rules_that_lengthen_a_text_are_refused(tmp_path: Path, tokenizer: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError, match=r"^the \w+ of the tokenizer \S+ makes a text up to [^\n]+ another model$"):
        load_tokenizer_file(write_tokenizer(tmp_path, tokenizer, **LENGTHENING_RULES[name]))


@pytest.mark.parametrize(
    "steps",
    [
        [
            build_replace("``", '"'),
            build_replace("''", '"'),
            {"type": "NFKD"},
            {"type": "StripAccents"},
            {"type": "Lowercase"},
        ],
        [{"type": "Prepend", "prepend": "▁"}, build_replace(" ", "▁")],
        [{"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": " "}, {"type": "Lowercase"}],
    ],
)
def test_rules_of_common_models_run_in_this_process(
    tmp_path: Path, tokenizer: dict[str, Any], steps: list[dict[str, Any]]
) -> None:
    file = write_tokenizer(tmp_path, tokenizer, normalizer={"type": "Sequence", "normalizers": steps})
    assert type(load_tokenizer_file(file)) is Tokenizer


def test_growth_stays_within_its_bound(tmp_path: Path, tokenizer: dict[str, Any]) -> None:
    chain = [
        build_replace("#", "a#b"),
        build_replace("a", "##"),
        {"type": "Prepend", "prepend": "#"},
        build_replace("#", "xyz"),
    ]
    rule = {"type": "Sequence", "normalizers": chain}
    loaded = load_tokenizer_file(write_tokenizer(tmp_path, tokenizer, normalizer=rule))
    growth_factor, added_characters = _bound_growth(iter(chain))
    for text in ("#", "#" * 500, "a" * 500, ""):
        assert len(loaded.normalizer.normalize_str(text)) <= growth_factor * len(text) + added_characters
    assert (growth_factor, added_characters) == (18, 3)


@pytest.mark.parametrize("pattern", ["#+#+[!?]", r"(\$+)+;", "(-|-)*~"])
def test_the_trial_repeats_the_characters_of_a_pattern(
    tmp_path: Path, tokenizer: dict[str, Any], pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rag_model.tokenizer._TRIAL_SECONDS", 1.0)  # one text of the first pattern takes 4
    with pytest.raises(InputError, match="one of its patterns is too slow, so use another model"):
        load_tokenizer_file(write_tokenizer(tmp_path, tokenizer, pre_tokenizer=build_split(pattern)))


def test_an_unknown_pattern_runs_in_a_child_with_the_same_results(tmp_path: Path, tokenizer: dict[str, Any]) -> None:
    file = write_tokenizer(tmp_path, tokenizer, pre_tokenizer=build_split("[0-9]+|[a-z]+|[^a-z0-9]"))
    guarded, plain = load_tokenizer(tmp_path, 12, "[SEP]"), Tokenizer.from_file(str(file))
    plain.enable_truncation(12)
    assert type(guarded) is GuardedTokenizer
    texts = ["king of rivers 12", "", "é漢", ("a king", "of a river " * 9)]
    for actual, reference in zip(guarded.encode_batch_fast(texts), plain.encode_batch(texts), strict=True):
        for name in ("ids", "tokens", "type_ids", "special_tokens_mask", "sequence_ids", "offsets"):
            assert getattr(actual, name) == getattr(reference, name)
        assert len(actual.overflowing) == len(reference.overflowing)
    assert guarded.encode("a king").ids == plain.encode("a king").ids
    assert guarded.get_vocab() == plain.get_vocab()
    for tokenizer_copy in (copy.deepcopy(guarded), pickle.loads(pickle.dumps(guarded))):
        assert type(tokenizer_copy) is GuardedTokenizer
        assert tokenizer_copy.encode("a king").ids == plain.encode("a king").ids
    guarded.no_truncation()
    assert len(guarded.encode("king " * 99, add_special_tokens=False).ids) >= 99


UNTRIED_PATTERN = r"(?:\x{7A}+\x{7A}+)+\x{79}\b"  # no trial writes a run of z
HOSTILE_TEXT = "z" * 20_000 + " "


def test_a_hostile_text_that_passes_the_trial_is_refused_and_the_next_text_is_split(
    tmp_path: Path, tokenizer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The characters of a pattern can be written so that no trial finds them."""
    monkeypatch.setattr("rag_model.tokenizer._CALL_SECONDS", 1.0)
    write_tokenizer(tmp_path, tokenizer, pre_tokenizer=build_split(UNTRIED_PATTERN))
    loaded = load_tokenizer(tmp_path, 64)
    with pytest.raises(InputError, match=r"^the model's tokenizer [^\n]+$"):
        tokenize(loaded, [HOSTILE_TEXT])
    assert len(tokenize(loaded, ["a king"])) == 1


@pytest.mark.parametrize("kind", ["generator", "spans"])
def test_a_model_of_transformers_runs_an_unknown_pattern_in_a_child(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results are those of the same tokenizer in this process."""
    monkeypatch.setattr("rag_model.tokenizer._CALL_SECONDS", 1.0)
    folder = save_llama(tmp_path / "model") if kind == "generator" else save_span_model(tmp_path / "model", "bert")
    fields = json.loads((folder / "tokenizer.json").read_bytes())
    (folder / "tokenizer.json").unlink()  # all tiny models link to one file
    steps = {"type": "Sequence", "pretokenizers": [build_split(UNTRIED_PATTERN), fields["pre_tokenizer"]]}
    write_tokenizer(folder, fields, pre_tokenizer=steps, model={**fields["model"], "max_input_chars_per_word": 100})
    settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    # A class of one model, such as BertTokenizer, would replace the patterns by its own.
    (folder / "tokenizer_config.json").unlink()
    write_json(folder / "tokenizer_config.json", {**settings, "tokenizer_class": "PreTrainedTokenizerFast"})
    plain = AutoTokenizer.from_pretrained(folder)
    model: Any = load_generator(folder) if kind == "generator" else SpanModel.load(folder)
    guarded = model.tokenizer
    assert type(guarded.backend_tokenizer) is GuardedTokenizer
    pair = (["a king", "who?"], ["of a river " * 9, "12"])
    for arguments, options in (
        ((["king of rivers 12", "", "é漢"],), {"add_special_tokens": False}),
        (pair, {"truncation": "only_second", "max_length": 12, "return_offsets_mapping": True}),
        (("king [SEP] of",), {"split_special_tokens": True}),
        (pair, {}),
    ):
        actual, reference = guarded(*arguments, **options), plain(*arguments, **options)
        assert dict(actual) == dict(reference)
        assert [actual.sequence_ids(row) for row in range(len(actual.encodings))] == [
            reference.sequence_ids(row) for row in range(len(reference.encodings))
        ]
    assert guarded.decode(actual["input_ids"][0]) == plain.decode(actual["input_ids"][0])
    with pytest.raises(InputError, match=r"^the model's tokenizer [^\n]+$"):
        model.encode_targets([HOSTILE_TEXT]) if kind == "generator" else model.score(HOSTILE_TEXT, ["a text"])
    guarded.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "tokenizer.json").read_bytes())["pre_tokenizer"] == steps


@pytest.mark.parametrize("trie", [b"", b"\xff" * 4, b"\x01\0\0\0\xff\x0f\0\x80"])
def test_a_panic_of_the_library_is_explained(tmp_path: Path, tokenizer: dict[str, Any], trie: bytes) -> None:
    table = base64.b64encode(len(trie).to_bytes(4, "little") + trie + b"ab\0").decode()
    write_tokenizer(tmp_path, tokenizer, normalizer={"type": "Precompiled", "precompiled_charsmap": table})
    with pytest.raises(InputError, match=r"^[^\n]+ fetch the model again$") as error:
        tokenize(load_tokenizer(tmp_path, 64), ["a king"])
    assert type(error.value.__cause__).__name__ == "PanicException"


def test_words_that_take_cubic_time_are_refused(tmp_path: Path, tokenizer: dict[str, Any]) -> None:
    file = write_tokenizer(tmp_path, tokenizer, model={**tokenizer["model"], "max_input_chars_per_word": 10**9})
    with pytest.raises(InputError, match="splits words of up to 1,000,000,000 characters"):
        load_tokenizer_file(file)
