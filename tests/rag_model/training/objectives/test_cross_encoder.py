"""Training of a cross-encoder: it learns, is reproducible, and saves a cross-encoder."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from rag_model.encoders.cross_encoder import CrossEncoder
from rag_model.encoders.torch_cross_encoder import TrainableCrossEncoder
from rag_model.errors import InputError, UsageError
from rag_model.training.data.examples import Example
from rag_model.training.loop.checkpoint import read_metrics
from rag_model.training.loop.loop import train
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.objectives.cross_encoder import CrossEncoderRecipe, CrossEncoderTask
from tests.fixtures.tiny import save_cross_encoder, write_json

SETTINGS = LoopSettings(max_steps=80, learning_rate=1e-2, evaluate_every=20, checkpoint_every=80, cpu=True)
RECIPE = CrossEncoderRecipe(batch_size=6, negatives=3, ranked=5)


@pytest.fixture(scope="session")
def kings_with_negatives(kings: list[Example]) -> list[Example]:
    """Return the kings with the passages of other kings as further negatives."""
    positives = [king.positives[0] for king in kings[::2]]
    other_positives = [[p for p in positives if p.hash != king.positives[0].hash] for king in kings]
    pairs = zip(kings, other_positives, strict=True)
    return [dataclasses.replace(king, negatives=(*king.negatives, *extra)) for king, extra in pairs]


def test_training_improves_the_ranking(tiny: Path, kings_with_negatives: list[Example], tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = CrossEncoderTask(TrainableCrossEncoder.load(tiny), kings_with_negatives, kings_with_negatives, RECIPE)
    result = train(task, SETTINGS, tmp_path)
    assert result.best_measures["MRR"] > result.initial_measures["MRR"] + 0.05
    assert result.best_measures["loss"] < result.initial_measures["loss"]
    assert {row["kind"]: row.keys() for row in read_metrics(tmp_path)}["train"] >= {"loss", "accuracy"}
    scorer = CrossEncoder.load(result.best_folder / "cross-encoder", device="cpu")
    ranks = []
    for example in kings_with_negatives:
        passages = [example.positives[0], *example.negatives[:5]]
        scores = scorer.scores([example.question] * 6, [p.title for p in passages], [p.text for p in passages])
        ranks.append(int((scores >= scores[0]).sum()))
    assert np.mean(1 / np.array(ranks)) == pytest.approx(result.best_measures["MRR"], abs=1e-6)


def test_training_is_reproducible(tiny: Path, kings_with_negatives: list[Example], tmp_path: Path) -> None:
    for name in ("a", "b"):
        torch.manual_seed(0)
        task = CrossEncoderTask(TrainableCrossEncoder.load(tiny), kings_with_negatives, kings_with_negatives, RECIPE)
        train(task, dataclasses.replace(SETTINGS, max_steps=5), tmp_path / name)
    assert read_metrics(tmp_path / "a") == read_metrics(tmp_path / "b")


def test_loss_is_the_cross_entropy_of_the_scores(kings_with_negatives: list[Example], tmp_path: Path) -> None:
    folder = save_cross_encoder(tmp_path / "cross")
    task = CrossEncoderTask(
        TrainableCrossEncoder.load(folder).eval(), kings_with_negatives, kings_with_negatives, RECIPE
    )
    batch = task.batches(0)[0]
    scorer = CrossEncoder.load(folder, device="cpu")
    losses = []
    for example, passages in zip(batch.examples, batch.lists, strict=True):
        scores = scorer.scores([example.question] * 4, [p.title for p in passages], [p.text for p in passages])
        losses.append(np.logaddexp.reduce(scores) - scores[0])
    assert task.loss(batch)[0].item() == pytest.approx(np.mean(losses), rel=1e-4)


def test_every_weight_has_a_gradient(tiny: Path, kings_with_negatives: list[Example]) -> None:
    task = CrossEncoderTask(TrainableCrossEncoder.load(tiny), kings_with_negatives, kings_with_negatives, RECIPE)
    task.loss(task.batches(0)[0])[0].backward()  # type: ignore[no-untyped-call]
    assert [name for name, weights in task.module.named_parameters() if weights.grad is None] == []


def test_model_with_constant_scores_ranks_positives_last(kings_with_negatives: list[Example], tmp_path: Path) -> None:
    model = TrainableCrossEncoder.load(save_cross_encoder(tmp_path / "cross"))
    # transformers replaces torch.nn.init's functions while any thread loads a model.
    model.whole.classifier.weight.data.zero_()  # type: ignore[union-attr, operator]
    measures = CrossEncoderTask(model.eval(), kings_with_negatives, kings_with_negatives, RECIPE).evaluate()
    assert (measures["MRR"], measures["Success@1"]) == (pytest.approx(1 / 6), 0)


def test_invalid_recipe_examples_and_models_are_refused(tiny: Path, kings: list[Example], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"negatives of \[cross_encoder\] is 0: use 1 or more"):
        CrossEncoderRecipe(negatives=0)
    without_negatives = [dataclasses.replace(king, negatives=()) for king in kings]
    with pytest.raises(InputError, match="no example has a positive and a negative passage"):
        CrossEncoderTask(TrainableCrossEncoder.load(tiny), without_negatives, kings, RECIPE)
    write_json(tmp_path / "dpr" / "config.json", {"model_type": "dpr"})
    with pytest.raises(InputError, match=r"has no model\.safetensors"):
        TrainableCrossEncoder.load(tmp_path / "dpr")
    with pytest.raises(InputError, match="cannot be loaded"):
        TrainableCrossEncoder.load(save_cross_encoder(tmp_path / "three", labels=3))
