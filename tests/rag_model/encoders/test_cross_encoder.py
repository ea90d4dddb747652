"""Cross-encoders: the scores that transformers gives, by torch and by ONNX, and refusals of other models."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rag_model.encoders.cross_encoder import CrossEncoder, PairBatch, PairModel, Scores
from rag_model.encoders.model import choose_inference_dtype, list_dtype_memo_inputs
from rag_model.encoders.onnx_cross_encoder import OnnxPairModel
from rag_model.encoders.torch_cross_encoder import TorchPairModel
from rag_model.errors import InputError, UsageError
from tests.fixtures.tiny import save_bert, save_cross_encoder, save_onnx

QUESTIONS = ["who wrote the river?", "a king", "who wrote the river?", "music of war"] * 3
TITLES = ["River", "", "King", "War and the music"] * 3
TEXTS = [f"the river was born in the city of king {'and ' * (7 * number)}" for number in range(12)]


@dataclass
class BoundedModel:
    """A model with another maximum batch size, which records the sizes of its batches."""

    model: PairModel
    batch_tokens: int
    sizes: list[int] = field(default_factory=list)

    def logits(self, batch: PairBatch) -> Scores:
        self.sizes.append(batch.input_ids.size)
        return self.model.logits(batch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_cross_encoder(tmp_path_factory.mktemp("cross"))


@pytest.fixture(scope="module")
def graph(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_onnx(folder, tmp_path_factory.mktemp("graph"))


@pytest.fixture(scope="module")
def quantized_graph(graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = Path(shutil.copytree(graph, tmp_path_factory.mktemp("quantised") / "model"))
    quantize_dynamic(graph / "model.onnx", out / "model.onnx", weight_type=QuantType.QInt8)
    return out


@pytest.fixture(params=["torch", "onnx"])
def scorer(request: pytest.FixtureRequest) -> CrossEncoder:
    return CrossEncoder.load(request.getfixturevalue({"torch": "folder", "onnx": "graph"}[request.param]), device="cpu")


def test_scores_are_the_logits_of_transformers(scorer: CrossEncoder, folder: Path) -> None:
    scores = scorer.scores(QUESTIONS, TITLES, TEXTS)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = AutoModelForSequenceClassification.from_pretrained(str(folder)).eval()
    for question, title, text, score in zip(QUESTIONS, TITLES, TEXTS, scores, strict=True):
        passage = f"{title} {text}".strip()
        inputs = tokenizer(question, passage, truncation="only_second", max_length=64, return_tensors="pt")
        with torch.inference_mode():
            assert score == pytest.approx(model(**inputs).logits.item(), abs=1e-4)
    assert len(set(scores.tolist())) > 8, "different pairs have different scores"


@pytest.mark.parametrize("budget", [1, 64, 100_000])
def test_score_does_not_depend_on_the_batch(scorer: CrossEncoder, budget: int) -> None:
    together = CrossEncoder(scorer.tokenizer, BoundedModel(scorer.model, budget)).scores(QUESTIONS, TITLES, TEXTS)
    alone = [scorer.scores([q], [t], [x])[0] for q, t, x in zip(QUESTIONS, TITLES, TEXTS, strict=True)]
    np.testing.assert_allclose(together, alone, atol=1e-4)
    assert scorer.scores([], [], []).shape == (0,)


def test_scores_in_bfloat16_are_near(folder: Path) -> None:
    single, half = (
        CrossEncoder.load(folder, device="cpu", dtype=dtype).scores(QUESTIONS, TITLES, TEXTS)
        for dtype in (None, "bfloat16")
    )
    assert half.dtype == np.float32
    assert 0 < np.abs(half - single).max() < 0.05 * np.abs(single).max()
    with pytest.raises(UsageError, match="dtype 'int9' is unknown"):
        CrossEncoder.load(folder, device="cpu", dtype="int9")


@pytest.mark.parametrize(
    ("has_gpu", "has_bf16", "device", "precision", "expected"),
    [
        (True, True, None, "", "bfloat16"),
        (True, True, "cuda:1", "auto", "bfloat16"),
        (True, True, "cpu", "", "float32"),
        (True, False, None, "", "float32"),
        (False, True, None, "", "float32"),
        (True, True, None, "float32", "float32"),
    ],
)
def test_gpu_with_bfloat16_scores_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, has_bf16: bool, device: str | None, precision: str, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    monkeypatch.setenv("BOOKWHEEL_PRECISION", precision)
    assert choose_inference_dtype(device) == expected
    assert device or list_dtype_memo_inputs() == ({} if expected == "float32" else {"dtype": expected})
    monkeypatch.setenv("BOOKWHEEL_PRECISION", "half")
    with pytest.raises(UsageError, match="BOOKWHEEL_PRECISION is 'half': use auto or float32"):
        choose_inference_dtype(device)


def test_a_graph_that_quantises_batches_reads_one_pair_at_a_time(quantized_graph: Path, graph: Path) -> None:
    scorer = CrossEncoder.load(quantized_graph, device="cpu")
    assert (scorer.model.batch_tokens, CrossEncoder.load(graph).model.batch_tokens > 1) == (1, True)
    together = scorer.scores(QUESTIONS, TITLES, TEXTS)
    alone = [scorer.scores([q], [t], [x])[0] for q, t, x in zip(QUESTIONS, TITLES, TEXTS, strict=True)]
    assert together.tolist() == alone
    mixed = CrossEncoder(scorer.tokenizer, BoundedModel(scorer.model, 100_000)).scores(QUESTIONS, TITLES, TEXTS)
    assert np.abs(mixed - together).max() > 1e-3, "one batch gives other scores"


def test_memory_is_bounded_by_the_tokens_of_a_batch(scorer: CrossEncoder) -> None:
    bounded = BoundedModel(scorer.model, scorer.model.batch_tokens)
    CrossEncoder(scorer.tokenizer, bounded).scores(QUESTIONS * 20, TITLES * 20, TEXTS * 20)
    assert max(bounded.sizes) <= 1024
    assert len(bounded.sizes) > 5


def test_padding_to_a_multiple_changes_no_score(folder: Path) -> None:
    scorer = CrossEncoder.load(folder, device="cpu")
    pairs = scorer.tokenizer.encode(QUESTIONS, TITLES, TEXTS)
    longest = max(len(pair.ids) for pair in pairs)
    padded = scorer.tokenizer.pad_batch(pairs, longest - 1)
    assert padded.input_ids.shape[1] == min(2 * (longest - 1), scorer.tokenizer.max_length)
    assert scorer.tokenizer.pad_batch(pairs, 10_000).input_ids.shape[1] == scorer.tokenizer.max_length
    unpadded = scorer.model.logits(scorer.tokenizer.pad_batch(pairs))
    np.testing.assert_allclose(scorer.model.logits(padded), unpadded, atol=1e-5)


def test_a_long_question_leaves_room_for_the_passage(scorer: CrossEncoder) -> None:
    long = "who wrote the king " * 2_000
    first_score, second_score = scorer.scores([long, long], ["", ""], ["the river", "music and war"])
    assert first_score != second_score


def test_passages_of_every_kind_have_a_score(scorer: CrossEncoder) -> None:
    texts = ["", " ", "\u0000", "作者 👩‍🚀 \u202e", "king " * 5_000]
    scores = scorer.scores(["who?"] * 5, [""] * 5, texts)
    assert np.isfinite(scores).all()
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)


def test_safetensors_are_preferred_with_torch(folder: Path, graph: Path, tmp_path: Path) -> None:
    both = Path(shutil.copytree(folder, tmp_path / "both"))
    (both / "onnx").mkdir()
    shutil.copy(graph / "model.onnx", both / "onnx" / "model.onnx")
    assert isinstance(CrossEncoder.load(both, device="cpu").model, TorchPairModel)
    (both / "model.safetensors").unlink()
    assert isinstance(CrossEncoder.load(both, device="cpu").model, OnnxPairModel)


def _save_3_labels(folder: Path) -> Path:
    return save_cross_encoder(folder, labels=3)


def _as_graph(save: Callable[[Path], Path], folder: Path) -> Path:
    return save_onnx(save(folder / "whole"), folder / "graph")


def _with_config(folder: Path) -> Path:
    graph = _as_graph(save_bert, folder)
    shutil.copy(folder / "whole" / "config.json", graph)
    return graph


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (save_bert, "is a BertModel, which does not score pairs: give a cross-encoder"),
        (_save_3_labels, "computes 3 scores per pair"),
        (lambda folder: _as_graph(save_bert, folder), "has a graph whose output logits is not one score per pair"),
        (lambda folder: _as_graph(_save_3_labels, folder), "a graph whose output logits is not one score per pair"),
        (_with_config, "is a BertModel, which does not score pairs: give a cross-encoder"),
    ],
)
def test_another_model_is_refused(save: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        CrossEncoder.load(save(tmp_path / "other"))


@pytest.mark.parametrize(
    ("fixture", "missing_file", "message"),
    [
        ("folder", "config.json", r"has no config\.json: give the folder of a Hugging Face model"),
        ("folder", "model.safetensors", r"neither model\.safetensors nor an ONNX file"),
        ("folder", "tokenizer.json", r"tokenizer"),
        ("graph", "tokenizer.json", r"tokenizer"),
        ("graph", "model.onnx", r"neither model\.safetensors nor an ONNX file"),
    ],
)
def test_a_missing_file_is_named(
    fixture: str, missing_file: str, message: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(request.getfixturevalue(fixture), tmp_path / "lacking"))
    (folder / missing_file).unlink()
    with pytest.raises(InputError, match=message):
        CrossEncoder.load(folder)


@pytest.mark.parametrize(("fixture", "file"), [("folder", "model.safetensors"), ("graph", "model.onnx")])
@pytest.mark.parametrize("size", [0, 50, -100])
def test_a_damaged_folder_is_refused(
    fixture: str, file: str, size: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(request.getfixturevalue(fixture), tmp_path / "cross"))
    (folder / file).write_bytes((folder / file).read_bytes()[:size])
    with pytest.raises(InputError, match=file.replace(".", r"\.")):
        CrossEncoder.load(folder)


def test_a_graph_that_does_not_fit_its_tokenizer_is_refused(graph: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(graph, tmp_path / "cross"))
    rules = json.loads((folder / "tokenizer.json").read_text())
    rules["model"]["vocab"]["king"] = 50_000
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    with pytest.raises(InputError, match="an ONNX model cannot score pairs"):
        CrossEncoder.load(folder).scores(["king"], [""], ["king"])


def write_graph(path: Path, *nodes: Any, **numbers: Any) -> None:
    """Write a graph that sums the ids to `x`, from which `nodes` compute the logits `y`."""
    numbers |= {"axes": [1]}
    tensors = [helper.make_tensor(name, TensorProto.INT64, np.shape(n), np.ravel(n)) for name, n in numbers.items()]
    all_nodes = [helper.make_node("Cast", ["input_ids"], ["f"], to=TensorProto.FLOAT)]
    all_nodes += [helper.make_node("ReduceSum", ["f", "axes"], ["x"]), *nodes]
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["b", "s"])
    logits = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", 1])
    graph = helper.make_graph(all_nodes, "graph", [ids], [logits], tensors)
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    )


def test_a_graph_that_takes_all_memory_is_refused(graph: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(graph, tmp_path / "cross"))
    bomb = helper.make_node("ConstantOfShape", ["shape"], ["zeros"])
    maximum = helper.make_node("ReduceMax", ["zeros"], ["most"], keepdims=0)
    addition = helper.make_node("Add", ["x", "most"], ["y"])
    write_graph(folder / "model.onnx", bomb, maximum, addition, shape=[60_000, 60_000])  # 14 GB
    with pytest.raises(InputError, match=r"model\.onnx needed more than [\d,]+ MiB of memory"):
        CrossEncoder.load(folder)


def test_missing_device_is_refused(graph: Path) -> None:
    for device in ("cuda:7", "tpu", "cuda:x"):
        with pytest.raises(UsageError, match=f"onnxruntime has no device {device}"):
            CrossEncoder.load(graph, device=device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_scores(folder: Path) -> None:
    scorers = [CrossEncoder.load(folder, device=device) for device in ("cpu", "cuda:0")]
    np.testing.assert_allclose(*(scorer.scores(QUESTIONS, TITLES, TEXTS) for scorer in scorers), atol=1e-4)


@pytest.mark.parametrize("operator", [b"\x22\x04Loop", b"\x22\x84\x00Scan"])
def test_a_graph_that_may_never_end_is_refused(graph: Path, operator: bytes, tmp_path: Path) -> None:
    """The length before the name of an operator is encoded as usual, or with more bytes than needed."""
    folder = shutil.copytree(graph, tmp_path / "endless")
    with (folder / "model.onnx").open("ab") as file:
        file.write(operator)
    with pytest.raises(InputError, match="has a graph with loops, which may never end"):
        CrossEncoder.load(folder, device="cpu")
