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
from tests.rag_model.encoders.test_pretrained import changed

CPU = torch.device("cpu")
LENGTHS = (16, 3, 9, 1)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny encoder of each family; RoBERTa's padding is no zero, and its positions begin behind it."""
    folder = tmp_path_factory.mktemp("families")
    torch.manual_seed(4)
    RobertaModel(RobertaConfig(**SHAPE | {"max_position_embeddings": 66}), add_pooling_layer=False).save_pretrained(
        folder / "roberta"
    )
    DPRQuestionEncoder(DPRConfig(**SHAPE)).save_pretrained(folder / "dpr")
    for name in ("roberta", "dpr"):
        add_tokenizer(folder / name)
    return {"bert": save_bert(folder / "bert"), "roberta": folder / "roberta", "dpr": folder / "dpr"}


def given(pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids of several lengths, padded, and their mask; one text names the padding's token itself."""
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
    whole: Any = DPRQuestionEncoder if family == "dpr" else AutoModel
    reference = whole.from_pretrained(str(families[family]), dtype=dtype).eval()
    body = reference.question_encoder.bert_model if family == "dpr" else reference
    assert actual is not None
    ids, mask = given(actual.sizes.pad_id)
    with torch.inference_mode():
        assert torch.equal(actual(ids, mask)[0], body(input_ids=ids, attention_mask=mask)[0])
        assert torch.equal(actual(ids[:1])[0], body(input_ids=ids[:1])[0])


@pytest.mark.parametrize("family", ["bert", "roberta", "dpr"])
def test_texts_without_padding_have_the_same_hidden_states(families: dict[str, Path], family: str) -> None:
    actual = Bert.load(families[family], CPU, torch.float32)
    assert actual is not None
    torch.manual_seed(7)
    # More tokens than are multiplied at once; one text names the padding's token itself.
    groups = [torch.randint(5, 60, size) for size in ((40, 30), (3, 16), (1, 1))]
    groups[1][0, 7] = actual.sizes.pad_id
    with torch.inference_mode():
        found = actual.forward_packed(groups)
        for own, hidden in zip(groups, found, strict=True):
            torch.testing.assert_close(hidden, actual(own)[0], rtol=0, atol=2e-6)
        for alone, hidden in zip([actual.forward_packed([own[-1:]]) for own in groups], found, strict=True):
            assert torch.equal(alone[0], hidden[-1:]), "the bits of a text depend on the others"


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_steady_vectors_in_float32_depend_on_no_other_text(tiny_bert: Path, pooling: str) -> None:
    encoder = Encoder.load(tiny_bert, overrides={"pooling": pooling}, device="cpu", dtype="float32")
    texts = ["river " * length for length in (1, 9, 3, 40, 3, 17, 25)] * 30
    ((vectors, tokens),) = encoder.stream([texts], batch_invariant=True)
    for row in (0, 3, 4, 209):
        ((alone, _),) = encoder.stream([texts[row : row + 1]], batch_invariant=True)
        np.testing.assert_array_equal(alone[0], vectors[row])
    ((padded, again),) = encoder.stream([texts])
    np.testing.assert_allclose(vectors, padded, rtol=0, atol=2e-6)
    assert tokens == again


def test_the_real_minilm_too(minilm: Path) -> None:
    encoder, oracle = Encoder.load(minilm), Encoder.load(minilm, trainable=True)
    texts = ["A bookwheel lets one read many books at once.", "Paris", "Rivers " * 300, ""]
    assert encoder.model.transformers_model is None
    np.testing.assert_array_equal(encoder.encode_questions(texts), oracle.encode_questions(texts))
    assert encoder.model.dtype == oracle.model.dtype


@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16])
def test_weights_of_half_the_size_are_read(tmp_path: Path, tiny_bert: Path, kept: torch.dtype) -> None:
    folder = changed(tiny_bert, tmp_path / "half")
    halves = {f"bert.{name}": one.to(kept) for name, one in load_file(tiny_bert / "model.safetensors").items()}
    save_file(halves, folder / "model.safetensors", {"format": "pt"})
    encoder, oracle = Encoder.load(folder), Encoder.load(folder, trainable=True)
    assert encoder.model.transformers_model is None
    np.testing.assert_array_equal(encoder.encode_questions(["who wrote it"]), oracle.encode_questions(["who wrote it"]))


@pytest.mark.parametrize(
    "said",
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
def test_what_is_not_exactly_bert_is_left_to_transformers(
    tmp_path: Path, tiny_bert: Path, said: dict[str, Any]
) -> None:
    assert Bert.load(tiny_bert, CPU, torch.float32) is not None
    assert Bert.load(changed(tiny_bert, tmp_path / "other", **said), CPU, torch.float32) is None


def test_tensors_that_are_missing_or_of_another_size_are_named_by_transformers(tmp_path: Path, tiny_bert: Path) -> None:
    tensors = load_file(tiny_bert / "model.safetensors")
    name = "encoder.layer.0.output.dense.bias"
    for place, others in {"fewer": {}, "longer": {name: torch.zeros(33)}}.items():
        folder = changed(tiny_bert, tmp_path / place)
        save_file({**{key: one for key, one in tensors.items() if key != name}, **others}, folder / "model.safetensors")
        with pytest.raises(InputError, match=r"lacks 1 tensors|cannot be loaded"):
            Encoder.load(folder)


def test_tensors_that_are_there_twice_are_left_to_transformers(tmp_path: Path, tiny_bert: Path) -> None:
    tensors, folder = load_file(tiny_bert / "model.safetensors"), changed(tiny_bert, tmp_path / "twice")
    others = {f"bert.{name}": one + 1 for name, one in tensors.items()}
    save_file({**tensors, **others}, folder / "model.safetensors", {"format": "pt"})
    assert Bert.load(folder, CPU, torch.float32) is None


def test_what_was_loaded_to_encode_is_not_trained(tiny_bert: Path) -> None:
    with pytest.raises(UsageError, match="load it as trainable"):
        TrainableEncoder(Encoder.load(tiny_bert), "question")


def test_a_config_that_is_no_object_is_one_sentence(tmp_path: Path, tiny_bert: Path) -> None:
    folder = changed(tiny_bert, tmp_path / "list")
    write_json(folder / "config.json", [])
    with pytest.raises(InputError, match="not a JSON object"):
        Bert.load(folder, CPU, torch.float32)
