from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, DPRConfig, DPRQuestionEncoder, RobertaConfig, RobertaModel

from rag_model.encoders.bert import Bert
from rag_model.encoders.encoder import Encoder
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import InputError, UsageError
from tests.fixtures.tiny import SHAPE, add_tokenizer, save_bert, write_json
from tests.rag_model.encoders.test_pretrained import copy_with_config

CPU = torch.device("cpu")
LENGTHS = (16, 3, 9, 1)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save a tiny encoder of each family; RoBERTa's padding id is not 0, and its positions start after it."""
    folder = tmp_path_factory.mktemp("families")
    torch.manual_seed(4)
    RobertaModel(RobertaConfig(**SHAPE | {"max_position_embeddings": 66}), add_pooling_layer=False).save_pretrained(
        folder / "roberta"
    )
    DPRQuestionEncoder(DPRConfig(**SHAPE)).save_pretrained(folder / "dpr")
    for name in ("roberta", "dpr"):
        add_tokenizer(folder / name)
    return {"bert": save_bert(folder / "bert"), "roberta": folder / "roberta", "dpr": folder / "dpr"}


def build_inputs(pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded ids of several lengths, and their mask; one text contains the padding token."""
    ids = torch.full((len(LENGTHS), max(LENGTHS)), pad_id)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        ids[row, :length] = torch.arange(5, 5 + length)
        mask[row, :length] = 1
    ids[0, 7] = pad_id
    return ids, mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["bert", "roberta", "dpr"])
def test_hidden_states_are_those_of_transformers_to_the_bit(
    families: dict[str, Path], family: str, dtype: torch.dtype
) -> None:
    actual = Bert.load(families[family], CPU, dtype)
    model_class: Any = DPRQuestionEncoder if family == "dpr" else AutoModel
    reference = model_class.from_pretrained(str(families[family]), dtype=dtype).eval()
    body = reference.question_encoder.bert_model if family == "dpr" else reference
    assert actual is not None
    ids, mask = build_inputs(actual.sizes.pad_id)
    with torch.inference_mode():
        assert torch.equal(actual(ids, mask)[0], body(input_ids=ids, attention_mask=mask)[0])
        assert torch.equal(actual(ids[:1])[0], body(input_ids=ids[:1])[0])


@pytest.mark.parametrize("family", ["bert", "roberta", "dpr"])
def test_texts_without_padding_have_the_same_hidden_states(families: dict[str, Path], family: str) -> None:
    actual = Bert.load(families[family], CPU, torch.float32)
    assert actual is not None
    torch.manual_seed(7)
    # There are more tokens than are multiplied at once, and one text contains the padding token.
    groups = [torch.randint(5, 60, size) for size in ((40, 30), (3, 16), (1, 1))]
    groups[1][0, 7] = actual.sizes.pad_id
    with torch.inference_mode():
        packed = actual.forward_packed(groups)
        for group, hidden in zip(groups, packed, strict=True):
            torch.testing.assert_close(hidden, actual(group)[0], rtol=0, atol=2e-6)
        for alone, hidden in zip([actual.forward_packed([group[-1:]]) for group in groups], packed, strict=True):
            assert torch.equal(alone[0], hidden[-1:]), "the bits of a text depend on the others"


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_steady_vectors_in_float32_depend_on_no_other_text(tiny_bert: Path, pooling: str) -> None:
    encoder = Encoder.load(tiny_bert, overrides={"pooling": pooling}, device="cpu", dtype="float32")
    texts = ["river " * length for length in (1, 9, 3, 40, 3, 17, 25)] * 30
    ((vectors, tokens),) = encoder.stream([texts], batch_invariant=True)
    for row in (0, 3, 4, 209):
        ((alone, _),) = encoder.stream([texts[row : row + 1]], batch_invariant=True)
        np.testing.assert_array_equal(alone[0], vectors[row])
    ((padded, padded_tokens),) = encoder.stream([texts])
    np.testing.assert_allclose(vectors, padded, rtol=0, atol=2e-6)
    assert tokens == padded_tokens


def test_minilm_encodes_like_transformers(minilm: Path) -> None:
    encoder, oracle = Encoder.load(minilm), Encoder.load(minilm, trainable=True)
    texts = ["A bookwheel lets one read many books at once.", "Paris", "Rivers " * 300, ""]
    assert encoder.model.transformers_model is None
    np.testing.assert_array_equal(encoder.encode_questions(texts), oracle.encode_questions(texts))
    assert encoder.model.dtype == oracle.model.dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_read(tmp_path: Path, tiny_bert: Path, dtype: torch.dtype) -> None:
    folder = copy_with_config(tiny_bert, tmp_path / "half")
    halves = {f"bert.{name}": tensor.to(dtype) for name, tensor in load_file(tiny_bert / "model.safetensors").items()}
    save_file(halves, folder / "model.safetensors", {"format": "pt"})
    encoder, oracle = Encoder.load(folder), Encoder.load(folder, trainable=True)
    assert encoder.model.transformers_model is None
    np.testing.assert_array_equal(encoder.encode_questions(["who wrote it"]), oracle.encode_questions(["who wrote it"]))


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_act": "gelu_new"},
        {"hidden_act": "relu"},
        {"is_decoder": True},
        {"attn_implementation": "eager"},
        {"position_embedding_type": "relative_key"},
        {"model_type": "mpnet"},
        {"num_attention_heads": 3},
        {"num_attention_heads": True},
        {"intermediate_size": 63},
        {"layer_norm_eps": "small"},
        {"pad_token_id": None},
    ],
)
def test_variants_of_bert_are_left_to_transformers(tmp_path: Path, tiny_bert: Path, config: dict[str, Any]) -> None:
    assert Bert.load(tiny_bert, CPU, torch.float32) is not None
    assert Bert.load(copy_with_config(tiny_bert, tmp_path / "other", **config), CPU, torch.float32) is None


def test_missing_and_oversized_tensors_are_refused(tmp_path: Path, tiny_bert: Path) -> None:
    tensors = load_file(tiny_bert / "model.safetensors")
    name = "encoder.layer.0.output.dense.bias"
    for folder_name, replacements in {"fewer": {}, "longer": {name: torch.zeros(33)}}.items():
        folder = copy_with_config(tiny_bert, tmp_path / folder_name)
        other_tensors = {key: tensor for key, tensor in tensors.items() if key != name}
        save_file(other_tensors | replacements, folder / "model.safetensors")
        with pytest.raises(InputError, match=r"lacks 1 tensors|cannot be loaded"):
            Encoder.load(folder)


def test_repeated_tensors_are_left_to_transformers(tmp_path: Path, tiny_bert: Path) -> None:
    tensors, folder = load_file(tiny_bert / "model.safetensors"), copy_with_config(tiny_bert, tmp_path / "twice")
    copies = {f"bert.{name}": tensor + 1 for name, tensor in tensors.items()}
    save_file({**tensors, **copies}, folder / "model.safetensors", {"format": "pt"})
    assert Bert.load(folder, CPU, torch.float32) is None


def test_encoder_loaded_for_inference_is_not_trained(tiny_bert: Path) -> None:
    with pytest.raises(UsageError, match="load it as trainable"):
        TrainableEncoder(Encoder.load(tiny_bert), "question")


def test_config_that_is_not_an_object_is_refused(tmp_path: Path, tiny_bert: Path) -> None:
    folder = copy_with_config(tiny_bert, tmp_path / "list")
    write_json(folder / "config.json", [])
    with pytest.raises(InputError, match="not a JSON object"):
        Bert.load(folder, CPU, torch.float32)
