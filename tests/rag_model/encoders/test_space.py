import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rag_model.encoders.space import (
    Space,
    check_same_space,
    compute_space,
    describe_unusual_settings,
    digest_tokenizer,
    read_declared_space,
)
from rag_model.encoders.spec import EncoderSpec, read_encoder_spec
from rag_model.errors import InputError, RefusedError

Build = Callable[..., Path]
SPEC = EncoderSpec(max_length=64)


def test_a_renamed_folder_is_the_same_space(tiny_bert: Path, tmp_path: Path) -> None:
    renamed = shutil.copytree(tiny_bert, tmp_path / "renamed")
    assert compute_space(renamed, SPEC).digest == compute_space(tiny_bert, SPEC).digest
    check_same_space(compute_space(renamed, SPEC), compute_space(tiny_bert, SPEC))


@pytest.mark.parametrize(
    "change",
    [
        {"pooling": "cls"},
        {"normalize": False},
        {"max_length": 32},
        {"layout": "text"},
        {"passage_prompt": "passage: "},
        {"truncate_dim": 8},
        {"end_token": "[MASK]"},
    ],
)
def test_what_decides_a_passages_vector_decides_the_space(tiny_bert: Path, change: dict[str, Any]) -> None:
    (setting,) = change
    name = {"truncate_dim": "dim", "end_token": "tokenizer"}.get(setting, setting)
    actual = compute_space(tiny_bert, SPEC, "mine")
    reference = compute_space(tiny_bert, replace(SPEC, **change), "theirs")
    with pytest.raises(RefusedError, match=f"encoder mine .* encoder theirs, whose {name} differ"):
        check_same_space(actual, reference)


def test_space_has_settings_that_no_tensor_shows(tiny_bert: Path, tmp_path: Path) -> None:
    space, settings = compute_space(tiny_bert, SPEC), json.loads((tiny_bert / "config.json").read_text())
    folder = shutil.copytree(tiny_bert, tmp_path / "edited")

    def compute_edited_space(**changes: Any) -> Space:
        (folder / "config.json").write_text(json.dumps({**settings, **changes}))
        return compute_space(folder, SPEC)

    edits = {"num_attention_heads": 4, "hidden_act": "relu", "layer_norm_eps": 0.1, "is_decoder": True}
    edits["num_hidden_layers"] = 0
    for name, value in edits.items():
        edited_space = compute_edited_space(**{name: value})
        assert edited_space.config == f"{name} {json.dumps(value)}"
        assert Space.from_json(edited_space.to_json()) == edited_space
        with pytest.raises(RefusedError, match="whose config differ"):
            check_same_space(edited_space, space)
    assert compute_edited_space(torch_dtype="float16", transformers_version="4.8.2", architectures=["Bert"]) == replace(
        space, name="edited"
    )


def test_space_of_published_model_keeps_its_id(minilm: Path) -> None:
    digest = compute_space(minilm, read_encoder_spec(minilm)).digest
    assert digest == "sha256:6e260bf7aec82e38262a488dd640bd7fc65881f6ec7ca7a9e4a85865a5611ff1"


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "xlm-roberta", "hidden_size": 1024, "num_attention_heads": 16, "layer_norm_eps": 1e-5},
        {"model_type": "mpnet", "hidden_size": 768, "num_attention_heads": 12, "layer_norm_eps": 1e-5},
        {"model_type": "distilbert", "dim": 768, "n_heads": 12, "activation": "gelu", "n_layers": 1},
        {"model_type": "bert", "hidden_size": 384, "num_attention_heads": 12, "layer_norm_eps": 1e-12},
        {"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "hidden_act": "silu"},
    ],
)
def test_space_omits_settings_of_published_models(tiny_bert: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = shutil.copytree(tiny_bert, tmp_path / "published")
    (folder / "config.json").write_text(json.dumps({"pad_token_id": 1, **settings}))
    assert describe_unusual_settings(folder) == ""


def test_question_prompt_does_not_decide_the_space(tiny_bert: Path) -> None:
    spec = replace(SPEC, question_prompt="query: ")
    assert compute_space(tiny_bert, spec).digest == compute_space(tiny_bert, SPEC).digest


def test_other_weights_are_another_space(tiny_bert: Path, tiny_dpr: tuple[Path, Path]) -> None:
    with pytest.raises(RefusedError, match="whose weights differ: use the encoder that the snapshot contains"):
        check_same_space(compute_space(tiny_dpr[0], SPEC), compute_space(tiny_bert, SPEC))


def test_saving_a_model_again_keeps_its_space(minilm: Path, tmp_path: Path, sentence_transformers: Any) -> None:
    sentence_transformers.SentenceTransformer(str(minilm), device="cpu").save(str(tmp_path / "again"))
    spec, saved_spec = read_encoder_spec(minilm), read_encoder_spec(tmp_path / "again")
    assert spec == saved_spec
    assert compute_space(minilm, spec).digest == compute_space(tmp_path / "again", saved_spec).digest


def test_truncation_setting_does_not_change_the_tokenizer_digest(tiny_bert: Path, tmp_path: Path) -> None:
    text = (tiny_bert / "tokenizer.json").read_text()
    assert '"truncation": null' in text
    truncating = text.replace('"truncation": null', '"truncation": {"max_length": 8}')
    (tmp_path / "tokenizer.json").write_text(truncating)
    assert digest_tokenizer(tmp_path) == digest_tokenizer(tiny_bert)
    (tmp_path / "tokenizer.json").write_text(text.replace('"lowercase": true', '"lowercase": false'))
    assert digest_tokenizer(tmp_path) != digest_tokenizer(tiny_bert)


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"has no tokenizer\.json"):
        digest_tokenizer(tmp_path)


def test_space_round_trips_through_json_and_corruption_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    space = compute_space(tiny_bert, SPEC, "tiny")
    assert Space.from_json(space.to_json()) == space
    with pytest.raises(InputError, match="space of encoder tiny is corrupt"):
        Space.from_json({**space.to_json(), "max_length": 65})
    with pytest.raises(InputError, match="no field 'weights'"):
        Space.from_json({key: value for key, value in space.to_json().items() if key != "weights"})
    assert read_declared_space(tmp_path) is None
