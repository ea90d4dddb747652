"""A step that does not fit into GPU memory runs in parts, with the same gradient."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rag_model.encoders.torch_cross_encoder import TrainableCrossEncoder
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import ResourceError
from rag_model.generate.load import load_generator
from rag_model.training.data.examples import Example, build_passage
from rag_model.training.loop.checkpoint import read_metrics
from rag_model.training.loop.loop import ForwardSplitter, train
from rag_model.training.objectives.cross_encoder import CrossEncoderRecipe, CrossEncoderTask
from rag_model.training.objectives.dpr import DprRecipe, DprTask
from tests.fixtures.tiny_generators import save_bart, save_llama
from tests.fixtures.toy_task import LineTask, limit_rows, make_settings


def build_dpr(folder: Path, kings: list[Example]) -> Any:
    recipe = DprRecipe(batch_size=6, temperature=0.1)
    return DprTask(recipe.load_encoders(folder), kings, kings, recipe)


def build_cross_encoder(folder: Path, kings: list[Example]) -> Any:
    recipe = CrossEncoderRecipe(batch_size=3, negatives=1)
    return CrossEncoderTask(TrainableCrossEncoder.load(folder), kings, kings, recipe)


@pytest.mark.parametrize("build", [build_dpr, build_cross_encoder])
def test_step_without_memory_runs_in_parts_to_the_same_weights(
    tiny: Path, kings: list[Example], tmp_path: Path, build: Callable[..., Any]
) -> None:
    weights, rows = [], []
    for limit in (1_000, 2):
        torch.manual_seed(0)
        task = build(tiny, kings)
        for part in task.module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        failures = limit_rows(task.module, limit)
        settings = make_settings(max_steps=3, accumulation=2, learning_rate=1e-3, adam_epsilon=1e-3)
        train(task, settings, tmp_path / str(limit))
        assert bool(failures) == (limit == 2)
        weights.append(torch.nn.utils.parameters_to_vector(task.module.parameters()).detach())
        rows.append([row for row in read_metrics(tmp_path / str(limit)) if row["kind"] == "train"])
    for first, second in zip(*rows, strict=True):
        assert second["loss"] == pytest.approx(first["loss"], rel=1e-4)
        assert second["gradient_norm"] == pytest.approx(first["gradient_norm"], rel=1e-3)
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-5)


def test_recomputed_part_has_the_same_dropout(tiny: Path) -> None:
    model: Any = TrainableEncoder.load(tiny, "question", device="cpu").whole.train()
    ids, gradients = torch.arange(5, 29).reshape(4, 6), []

    def run_halves() -> torch.Tensor:
        return torch.cat([model(input_ids=half)[0] for half in ids.chunk(2)])

    def run_split() -> torch.Tensor:
        assert ForwardSplitter(model).double_parts()
        return model(input_ids=ids)[0]  # type: ignore[no-any-return]

    for run in (run_halves, run_split):
        model.zero_grad()
        torch.manual_seed(3)
        run()[:, :, :4].square().sum().backward()
        gradients.append(model.get_input_embeddings().weight.grad.clone())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("save", [save_bart, save_llama])
def test_generators_compute_the_same_logits_in_parts(save: Callable[..., Path], tmp_path: Path) -> None:
    generator = load_generator(save(tmp_path / "generator"), device="cpu")
    splitter = ForwardSplitter(generator.module)
    questions = ["who was king?", "what is a river?", "who?"]
    passages = [[build_passage("", text)] for text in ("the king.", "a river is long and old.", "x")]
    logits = []
    for _ in range(2):
        contexts = generator.encode_contexts(questions, passages)
        logits.append(generator.logits(contexts, generator.encode_targets(["a king", "a river", "x"])))
        assert splitter.double_parts()
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)


def test_step_that_never_fits_is_refused(tiny: Path, kings: list[Example], tmp_path: Path) -> None:
    task = build_dpr(tiny, kings)
    limit_rows(task.module, 0)
    with pytest.raises(ResourceError, match=r"the GPU's memory does not hold step 1: use a smaller batch_size"):
        train(task, make_settings(max_steps=1), tmp_path)


def test_model_that_cannot_be_split_fails_at_once(tmp_path: Path) -> None:
    class FullMemoryTask(LineTask):
        def loss(self, batch: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(ResourceError, match="step 1"):
        train(FullMemoryTask(), make_settings(max_steps=1), tmp_path)
