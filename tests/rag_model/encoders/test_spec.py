import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rag_model.encoders.spec import EncoderSpec, find_known_settings, read_encoder_spec
from rag_model.errors import InputError, UsageError
from tests.fixtures.tiny import write_json

Build = Callable[..., Path]
PLAIN = ["Transformer", "Pooling"]  # modules without Normalize


def test_dpr_reads_pairs_by_the_first_token_unnormalised(tiny_dpr: tuple[Path, Path]) -> None:
    expected = EncoderSpec(pooling="cls", normalize=False, max_length=64, layout="pair")
    assert read_encoder_spec(tiny_dpr[0]) == read_encoder_spec(tiny_dpr[1]) == expected


def test_plain_folder_truncates_at_the_limit_of_its_model(tiny_bert: Path) -> None:
    assert read_encoder_spec(tiny_bert) == EncoderSpec(pooling="mean", normalize=True, max_length=64, layout="joined")


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "cls", "include_prompt": True}, "cls"),
        ({"pooling_mode": ["mean"]}, "mean"),
    ],
)
def test_sentence_transformers_names_the_pooling_in_either_layout(
    tiny_st: Build, config: dict[str, Any], pooling: str
) -> None:
    assert read_encoder_spec(tiny_st(pooling=config)).pooling == pooling


def test_sentence_transformers_sets_length_normalisation_and_prompts(tiny_st: Build) -> None:
    prompts = {"prompts": {"query": "query: ", "passage": "passage: "}}
    spec = read_encoder_spec(tiny_st(prompts={**prompts, "similarity_fn_name": "dot"}, modules=PLAIN))
    assert spec == EncoderSpec("mean", False, 24, "joined", "passage: ", "query: ")
    assert read_encoder_spec(tiny_st("cosine", prompts=prompts, modules=PLAIN)) == replace(spec, normalize=True)


@pytest.mark.parametrize("similarity", ["euclidean", "manhattan"])
def test_distances_that_no_index_ranks_by_are_refused(tiny_st: Build, similarity: str) -> None:
    prompts = {"similarity_fn_name": similarity}
    with pytest.raises(InputError, match=f"by {similarity} distance .* use a model for cosine or dot similarity"):
        read_encoder_spec(tiny_st(prompts=prompts, modules=PLAIN))


def test_a_tokenizer_that_keeps_case_is_refused_by_a_model_of_lower_case(tiny_st: Build) -> None:
    folder = tiny_st()
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 24, "do_lower_case": True})
    assert read_encoder_spec(folder).max_length == 24  # the tiny tokenizer lowercases
    rules = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()  # a link
    write_json(folder / "tokenizer.json", {**rules, "normalizer": {"type": "NFC"}})
    with pytest.raises(InputError, match="expects texts in lower case"):
        read_encoder_spec(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("truncate_dim", value) for value in ("8", -1, 1.5, 0, True)),
        *(("similarity_fn_name", value) for value in (["cosine"], "hamming", "", 0)),
    ],
)
def test_a_wrong_setting_of_vectors_in_a_folder_is_refused(tiny_st: Build, name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"config_sentence_transformers.json has {name} {re.escape(repr(value))}: "):
        read_encoder_spec(tiny_st(prompts={name: value}))


def test_a_truncation_beyond_the_vector_is_refused(tiny_bert: Path) -> None:
    with pytest.raises(UsageError, match=r"truncate_dim 33 is more than the 32 dimensions .* use 32 or less"):
        read_encoder_spec(tiny_bert, {"truncate_dim": 33})
    with pytest.raises(UsageError, match="truncate_dim -1 is negative"):
        read_encoder_spec(tiny_bert, {"truncate_dim": -1})


def test_a_record_keeps_the_settings_of_its_build(tiny_st: Build) -> None:
    """Records from before similarities, truncation and end tokens were read keep their vectors."""
    folder = tiny_st(prompts={"truncate_dim": 8}, modules=PLAIN)
    recorded = EncoderSpec(normalize=False, max_length=24).to_json()
    assert not {"truncate_dim", "end_token"} & recorded.keys()  # so that snapshot ids stay equal
    write_json(folder / "bookwheel.json", {"spec": recorded})
    assert read_encoder_spec(folder) == EncoderSpec(normalize=False, max_length=24)
    spec = EncoderSpec(truncate_dim=8, end_token="[SEP]")
    assert EncoderSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pooling": {"pooling_mode_max_tokens": True}}, "pooling_mode_max_tokens, which is not supported"),
        ({"pooling": {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}}, r"\+"),
        ({"pooling": {}}, "none"),
        ({"pooling": {"pooling_mode": "mean", "include_prompt": False}}, "without the prompt"),
        ({"modules": ["Transformer", "Pooling", "Dense"]}, "Dense module, which is not supported"),
        ({"modules": ["Transformer", "Normalize"]}, "no Pooling"),
    ],
)
def test_unsupported_pooling_or_module_is_refused(tiny_st: Build, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_encoder_spec(tiny_st(**change))


def test_record_of_bookwheel_overrides_other_settings(tiny_st: Build) -> None:
    folder = tiny_st()
    (folder / "bookwheel.json").write_text('{"spec": {"pooling": "cls", "max_length": 9}}')
    assert read_encoder_spec(folder) == EncoderSpec(pooling="cls", max_length=9)


def test_an_unknown_setting_is_named(tiny_bert: Path) -> None:
    with pytest.raises(UsageError, match="'pool' is not a setting of an encoder"):
        read_encoder_spec(tiny_bert, {"pool": "cls"})
    with pytest.raises(UsageError, match="pooling 'max' of an encoder is unknown"):
        read_encoder_spec(tiny_bert, {"pooling": "max"})
    with pytest.raises(UsageError, match=r"max_length 65 is more than encoder .* reads: use 64 or less"):
        read_encoder_spec(tiny_bert, {"max_length": 65})
    with pytest.raises(UsageError, match="max_length 2"):
        read_encoder_spec(tiny_bert, {"max_length": 2})


@pytest.mark.parametrize(
    "setting", [{"max_length": "64"}, {"normalize": "yes"}, {"passage_prompt": 5}, {"pooling": None}]
)
def test_a_setting_of_a_wrong_type_is_refused(tiny_bert: Path, setting: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="give a value of type"):
        read_encoder_spec(tiny_bert, setting)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe"])
def test_a_corrupt_config_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=r"config\.json is corrupt"):
        read_encoder_spec(tmp_path)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no config\.json"):
        read_encoder_spec(tmp_path)


def test_families_without_prompts_in_their_files_are_known_by_hub_name() -> None:
    assert find_known_settings("intfloat/multilingual-e5-base")["passage_prompt"] == "passage: "
    assert find_known_settings("BAAI/bge-small-en-v1.5").keys() == {"question_prompt"}
    assert find_known_settings("/models/e5-small-v2") == {}


@pytest.mark.parametrize(
    "name", ["multi-qa-mpnet-base-dot-v1", "msmarco-distilbert-base-tas-b", "facebook-dpr-ctx_encoder-single-nq-base"]
)
def test_models_of_the_dot_product_are_known_by_hub_name(name: str) -> None:
    assert find_known_settings(f"sentence-transformers/{name}") == {"normalize": False}
    assert find_known_settings("sentence-transformers/multi-qa-mpnet-base-cos-v1") == {}


def test_a_passage_without_title_is_its_text() -> None:
    assert EncoderSpec(layout="pair").format_passage("", "text") == "text"
    assert EncoderSpec(layout="pair").format_passage("title", "text") == ("title", "text")
    assert EncoderSpec(passage_prompt="p: ").format_passage("title", "text") == "p: title text"
    assert EncoderSpec(layout="text", passage_prompt="p: ").format_passage("title", "text") == "p: text"
