"""The config of a model may set sizes; options that name code or other packages are refused."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers

from rag_model.encoders.cross_encoder import CrossEncoder
from rag_model.encoders.encoder import Encoder
from rag_model.encoders.pretrained import check_config, load_pretrained
from rag_model.errors import InputError
from rag_model.generate.load import load_generator
from tests.fixtures.tiny import save_cross_encoder, write_json
from tests.fixtures.tiny_generators import save_llama

Load = Callable[[Path], Any]
LOADERS: tuple[tuple[str, Load], ...] = (
    ("encoder", Encoder.load),
    ("cross-encoder", CrossEncoder.load),
    ("generator", load_generator),
)


@pytest.fixture(scope="module")
def folders(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a folder of each kind of model that transformers loads."""
    folder = tmp_path_factory.mktemp("pretrained")
    return {
        "encoder": tiny_bert,
        "cross-encoder": save_cross_encoder(folder / "cross"),
        "generator": save_llama(folder / "llama"),
    }


def read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_bytes()))


def copy_with_config(folder: Path, into: Path, **values: Any) -> Path:
    """Copy a model, with other values in its config."""
    shutil.copytree(folder, into)
    write_json(into / "config.json", {**read_json(into / "config.json"), **values})
    return into


@pytest.mark.parametrize(("kind", "load"), LOADERS)
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_no_attention_code_of_the_hub_is_loaded(
    folders: dict[str, Path], tmp_path: Path, kind: str, load: Load, key: str
) -> None:
    folder = copy_with_config(folders[kind], tmp_path / "model", **{key: "kernels-community/flash-attn2"})
    with pytest.raises(
        InputError, match=f"names {key} 'kernels-community/flash-attn2', which is code of another package"
    ):
        load(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attn_implementation": "flash_attention_2"}, "names attn_implementation 'flash_attention_2', which is code"),
        ({"text_config": {"attn_implementation": {"": "stranger/evil"}}}, "names attn_implementation {'': 'stranger"),
        ({"experts_implementation": "x/y"}, "names experts_implementation 'x/y'"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "has a quantization_config, and quantized weights are"),
        ({"num_hidden_layers": 1_000_000}, "says num_hidden_layers 1000000, but its weights have 21 tensors"),
        ({"encoder": {"num_layers": 22}}, "says num_layers 22, but its weights have 21 tensors"),
        ({"num_labels": 10**9}, "says num_labels 1000000000, but at most 10,000 are possible"),
        ({"model_type": "timm_wrapper"}, "names 'model_type' 'timm_wrapper', and image models are not supported"),
        ({"use_timm_backbone": True}, "names 'use_timm_backbone' True, and image models"),
        ({"num_attention_heads": 0}, r"cannot be loaded \(.+\): give a bi-encoder"),
        ({"hidden_act": "eval"}, r"cannot be loaded \('eval'\): give a bi-encoder"),
    ],
)
def test_unsupported_options_are_refused(tiny_bert: Path, tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Encoder.load(copy_with_config(tiny_bert, tmp_path / "model", **values))


def test_attention_of_torch_may_be_named(tiny_bert: Path, tmp_path: Path) -> None:
    check_config(copy_with_config(tiny_bert, tmp_path / "model", attn_implementation="sdpa", _attn_implementation=None))


def test_an_adapter_is_refused_because_it_names_another_folder(tiny_bert: Path, tmp_path: Path) -> None:
    folder = copy_with_config(tiny_bert, tmp_path / "model")
    write_json(folder / "adapter_config.json", {"base_model_name_or_path": "/elsewhere"})
    with pytest.raises(InputError, match=r"is an adapter \(adapter_config\.json\): merge it into its model"):
        Encoder.load(folder)


@pytest.mark.parametrize(("kind", "load"), LOADERS)
def test_no_code_that_auto_map_names_is_run(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, load: Load
) -> None:
    """The model type is known to transformers or not, and no consent is read from stdin."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    auto_map = {"AutoConfig": "evil.C", "AutoModel": "evil.M", "AutoModelForCausalLM": "evil.M"}
    marker = tmp_path / "run"
    for model_type in (read_json(folders[kind] / "config.json")["model_type"], "evil"):
        folder = copy_with_config(folders[kind], tmp_path / model_type, auto_map=auto_map, model_type=model_type)
        settings = {**read_json(folder / "tokenizer_config.json"), "auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}}
        write_json(folder / "tokenizer_config.json", settings)
        (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
        if model_type == "evil":
            with pytest.raises(InputError, match="cannot be loaded"):
                load(folder)
        else:
            load(folder)
    assert not marker.exists()
    assert sys.stdin.read() == "y\n" * 9


def test_kernels_of_the_hub_are_not_used_unless_the_operator_asks() -> None:
    module: ModuleType = sys.modules["transformers.integrations.hub_kernels"]
    assert not module._kernels_enabled


def test_errors_of_transformers_become_input_errors(tiny_bert: Path) -> None:
    with pytest.raises(InputError, match=r"^encoder .* cannot be loaded"):
        load_pretrained(transformers.AutoModelForImageClassification, tiny_bert, "encoder", "give another")


@pytest.mark.parametrize(("kind", "load"), LOADERS)
@pytest.mark.parametrize("positions", ["relative_key", "relative_key_query", "alibi"])
def test_positions_that_would_be_ignored_are_refused(
    folders: dict[str, Path], tmp_path: Path, kind: str, load: Load, positions: str
) -> None:
    folder = copy_with_config(folders[kind], tmp_path / "model", position_embedding_type=positions)
    with pytest.raises(InputError, match=f"says position_embedding_type '{positions}', and such positions are not"):
        load(folder)
