import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, BertConfig, BertForMaskedLM, BertModel, DPRContextEncoder

from rag_model.encoders.weights import digest_weights, list_weight_files, read_tensor_headers
from rag_model.errors import InputError


def save_again(source: Path, into: Path, **options: object) -> Path:
    AutoModel.from_pretrained(source).save_pretrained(into, **options)
    return into


def save_tensors(source: Path, into: Path, tensors: dict[str, torch.Tensor]) -> Path:
    into.mkdir()
    shutil.copy(source / "config.json", into)
    save_file(tensors, into / "model.safetensors")
    return into


def test_digest_does_not_depend_on_names_and_shards(tiny_bert: Path, tmp_path: Path) -> None:
    renamed = shutil.copytree(tiny_bert, tmp_path / "renamed")
    sharded = save_again(tiny_bert, tmp_path / "sharded", max_shard_size="8KB")
    assert len(list_weight_files(sharded)) > 3
    assert digest_weights(tiny_bert) == digest_weights(renamed) == digest_weights(sharded)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_digest_does_not_depend_on_the_dtype(tiny_bert: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = load_file(tiny_bert / "model.safetensors")
    rounded = {name: tensor.to(torch.float16 if dtype == torch.float64 else dtype) for name, tensor in tensors.items()}
    wide = save_tensors(tiny_bert, tmp_path / "wide", {name: t.float() for name, t in rounded.items()})
    converted = save_tensors(tiny_bert, tmp_path / "other", {name: t.to(dtype) for name, t in rounded.items()})
    assert digest_weights(wide) == digest_weights(converted)


def test_digest_depends_on_every_value(tiny_bert: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_bert / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"][7, 3] += 1e-3
    assert digest_weights(save_tensors(tiny_bert, tmp_path / "changed", tensors)) != digest_weights(tiny_bert)


def test_digest_does_not_depend_on_the_class_of_the_model(tiny_bert: Path, tmp_path: Path) -> None:
    config = BertConfig.from_pretrained(tiny_bert)
    bert = BertModel.from_pretrained(tiny_bert, add_pooling_layer=False)
    language_model = BertForMaskedLM(config)
    language_model.bert.load_state_dict(bert.state_dict())
    language_model.save_pretrained(tmp_path / "mlm")
    dpr = DPRContextEncoder.from_pretrained(_as_dpr(tiny_bert, tmp_path / "dpr"))
    dpr.save_pretrained(tmp_path / "dpr-again")
    BertModel(config).save_pretrained(tmp_path / "other-weights")
    digest = digest_weights(tiny_bert)
    assert digest == digest_weights(tmp_path / "mlm") == digest_weights(tmp_path / "dpr-again")
    assert digest != digest_weights(tmp_path / "other-weights")


def _as_dpr(bert: Path, into: Path) -> Path:
    tensors = load_file(bert / "model.safetensors")
    folder = save_tensors(bert, into, {f"ctx_encoder.bert_model.{name}": t for name, t in tensors.items()})
    config = json.loads((bert / "config.json").read_text())
    changed = {**config, "model_type": "dpr", "architectures": ["DPRContextEncoder"]}
    (folder / "config.json").write_text(json.dumps(changed))
    return folder


def test_digest_does_not_depend_on_old_layer_norm_names(tiny_bert: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_bert / "model.safetensors")
    old_tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    assert digest_weights(save_tensors(tiny_bert, tmp_path / "old", old_tensors)) == digest_weights(tiny_bert)


def test_pickled_weights_are_refused(tiny_bert: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_bert / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(InputError, match="only pickled weights"):
        digest_weights(tmp_path)


def test_a_missing_file_is_named(tiny_bert: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no model\.safetensors"):
        digest_weights(tmp_path)
    sharded = save_again(tiny_bert, tmp_path / "sharded", max_shard_size="8KB")
    list_weight_files(sharded)[-1].unlink()
    with pytest.raises(InputError, match=r"model-0.*safetensors is missing or corrupt"):
        digest_weights(sharded)


@pytest.mark.parametrize(("keep", "message"), [(-1, "truncated"), (100, "corrupt"), (4, "corrupt"), (0, "corrupt")])
def test_a_truncated_file_is_named(tiny_bert: Path, tmp_path: Path, keep: int, message: str) -> None:
    data = (tiny_bert / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:keep])
    with pytest.raises(InputError, match=message):
        digest_weights(tmp_path)


def test_quantised_weights_are_refused(tiny_bert: Path, tmp_path: Path) -> None:
    tensors = {"layer.weight": torch.zeros(3, dtype=torch.int8)}
    with pytest.raises(InputError, match="I8 tensors"):
        digest_weights(save_tensors(tiny_bert, tmp_path / "int8", tensors))


def write_header(folder: Path, **entry: object) -> Path:
    """Write weights whose header has other values for a tensor."""
    folder.mkdir(exist_ok=True)
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **entry}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    return folder


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [2, 1 << 40]},  # a reader might not stop at the end of the file
        {"shape": [-2, -2]},
        {"shape": [2.0, 2]},
        {"shape": [2, True]},
        {"shape": "22"},
        {"data_offsets": [16, 0]},
        {"data_offsets": [-16, 0]},
        {"data_offsets": [0, 16, 16]},
        {"data_offsets": [0]},
        {"data_offsets": [0, "16"]},
        {"dtype": ["F32"]},
    ],
    ids=str,
)
def test_a_shape_that_its_bytes_do_not_have_is_refused(tmp_path: Path, entry: dict[str, object]) -> None:
    assert digest_weights(write_header(tmp_path / "valid"))
    with pytest.raises(InputError, match=r"corrupt|save the model as fp32|truncated"):
        digest_weights(write_header(tmp_path / "invalid", **entry))


def test_weights_that_shrink_while_they_are_read_are_truncated(tmp_path: Path) -> None:
    (tensor,) = read_tensor_headers(write_header(tmp_path / "weights")).values()
    data = (tmp_path / "weights" / "model.safetensors").read_bytes()
    (tmp_path / "weights" / "model.safetensors").write_bytes(data[:-8])
    with pytest.raises(InputError, match="truncated: fetch it again"):
        tensor.digest()


@pytest.mark.parametrize("weight_map", [[], {"a": 5}, {"a": ["b"]}, None])
def test_an_index_of_shards_that_names_no_files_is_refused(tmp_path: Path, weight_map: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InputError, match="its weight_map has no file names"):
        list_weight_files(tmp_path)
