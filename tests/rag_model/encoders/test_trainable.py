import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer, DPRQuestionEncoder

from rag_model.encoders.encoder import Encoder
from rag_model.encoders.space import check_same_space
from rag_model.encoders.spec import EncoderSpec
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import InputError, RefusedError
from tests.fixtures.tiny import save_bert

Build = Callable[..., Path]
QUESTIONS = ["Who wrote the war music?", "", "Wer schrieb „Öde“? 作者は誰 👩‍🚀", "river " * 200]


def test_vectors_are_those_of_the_encoder(minilm: Path) -> None:
    oracle = Encoder.load(minilm, "question", dtype="float32")
    actual = TrainableEncoder.load(minilm, device="cpu").eval()
    torch.testing.assert_close(
        actual(QUESTIONS).detach(), torch.from_numpy(oracle.encode_questions(QUESTIONS)), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
@pytest.mark.parametrize("layout", ["joined", "pair", "text"])
def test_spec_decides_how_questions_and_passages_are_encoded(
    tiny_bert: Path, texts: tuple[list[str], list[str]], pooling: str, layout: str
) -> None:
    spec = EncoderSpec.from_json(
        {
            "pooling": pooling,
            "layout": layout,
            "max_length": 12,
            "passage_prompt": "passage: ",
            "question_prompt": "query: ",
        }
    )
    oracle = Encoder.load(tiny_bert, overrides=spec.to_json(), dtype="float32")
    actual = TrainableEncoder.load(tiny_bert, "passage", spec)
    passages = list(zip(*texts, strict=True))
    np.testing.assert_allclose(actual.encode(passages), oracle.encode_passages(*texts), atol=1e-5)
    np.testing.assert_allclose(actual.encode(texts[1], "question"), oracle.encode_questions(texts[1]), atol=1e-5)
    assert actual.training  # `encode` does not leave the training mode


def test_training_applies_dropout_and_changes_vectors(tiny_bert: Path) -> None:
    actual = TrainableEncoder.load(tiny_bert)
    assert not torch.equal(actual(QUESTIONS), actual(QUESTIONS))
    actual.eval()
    vectors = actual(QUESTIONS)
    (vectors @ torch.ones(actual.dim)).sum().backward()
    learning = [parameter for parameter in actual.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in learning)
    torch.optim.SGD(learning, 0.1).step()
    assert not torch.allclose(actual(QUESTIONS), vectors)


def test_unused_parameters_are_frozen(minilm: Path) -> None:
    actual = TrainableEncoder.load(minilm, device="cpu")
    frozen = {name for name, parameter in actual.named_parameters() if not parameter.requires_grad}
    assert frozen == {"whole.pooler.dense.weight", "whole.pooler.dense.bias"}


def test_a_saved_encoder_loads_as_it_was_and_transformers_opens_it(tiny_bert: Path, tmp_path: Path) -> None:
    actual = TrainableEncoder.load(tiny_bert, spec=EncoderSpec(pooling="cls", normalize=False, max_length=16))
    with torch.no_grad():
        for parameter in actual.parameters():
            parameter.add_(0.01)
    actual.save(tmp_path / "saved")
    loaded = Encoder.load(tmp_path / "saved", "question", dtype="float32")
    assert loaded.spec == actual.spec
    np.testing.assert_allclose(loaded.encode_questions(QUESTIONS), actual.encode(QUESTIONS), atol=1e-6)
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "bookwheel.json"} <= names
    assert not [name for name in names if name.endswith((".bin", ".pt"))]
    tokens = AutoTokenizer.from_pretrained(tmp_path / "saved")(["the king"], return_tensors="pt")
    hidden = AutoModel.from_pretrained(tmp_path / "saved")(**tokens)[0][:, 0].detach().numpy()
    np.testing.assert_allclose(hidden, actual.encode(["the king"]), atol=1e-5)


def test_encoder_can_be_saved_to_its_own_folder(tmp_path: Path) -> None:
    folder = save_bert(tmp_path / "encoder")
    actual = TrainableEncoder.load(folder)
    actual.save(folder)
    np.testing.assert_allclose(TrainableEncoder.load(folder).encode(["a"]), actual.encode(["a"]), atol=1e-6)


def test_question_encoder_of_dpr_keeps_its_class(tiny_dpr: tuple[Path, Path], tmp_path: Path) -> None:
    spec = EncoderSpec(pooling="cls", normalize=False, max_length=64, layout="pair")
    actual = TrainableEncoder.load(tiny_dpr[1], "question", spec)
    actual.save(tmp_path / "saved")
    tokens = actual.tokenizer.encode("who was the king?").ids
    oracle = DPRQuestionEncoder.from_pretrained(tmp_path / "saved").eval()
    expected = oracle(torch.tensor([tokens])).pooler_output.detach().numpy()
    np.testing.assert_allclose(actual.encode(["who was the king?"]), expected, atol=1e-5)
    with pytest.raises(InputError, match="is DPR's passage encoder"):
        TrainableEncoder.load(tiny_dpr[0], "question")


def test_question_encoder_declares_the_space_of_its_passages(tiny_bert: Path, tmp_path: Path) -> None:
    passages = Encoder.load(tiny_bert).space()
    actual = TrainableEncoder.load(tiny_bert)
    with torch.no_grad():
        next(actual.parameters()).add_(1)
    actual.save(tmp_path / "asks", target_space=passages)
    actual.save(tmp_path / "alone")
    check_same_space(Encoder.load(tmp_path / "asks", "question").space(), passages)
    with pytest.raises(RefusedError, match="weights differ"):
        check_same_space(Encoder.load(tmp_path / "alone", "question").space(), passages)
    other_space = dataclasses.replace(passages, max_length=7)
    with pytest.raises(RefusedError, match="max_length differ"):
        check_same_space(Encoder.load(tmp_path / "asks", "question").space(), other_space)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no model folder"):
        TrainableEncoder.load(tmp_path / "nothing")


def test_saved_files_do_not_depend_on_the_source_folder(tiny_bert: Path, tmp_path: Path) -> None:
    spaces = []
    for name in ("here", "there"):
        shutil.copytree(tiny_bert, tmp_path / name)
        torch.manual_seed(0)  # draws the pooler that the folder lacks
        trained = TrainableEncoder.load(tmp_path / name, "passage", device="cpu")
        spaces.append(trained.save_passage_encoder(tmp_path / f"saved {name}"))
        trained.save(tmp_path / f"asking {name}", target_space=spaces[-1])
    assert spaces[0] == spaces[1]
    for saved in ("saved", "asking"):
        first_files, second_files = (
            {path.name: path.read_bytes() for path in (tmp_path / f"{saved} {name}").iterdir()}
            for name in ("here", "there")
        )
        assert first_files == second_files
