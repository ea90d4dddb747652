"""A cross-encoder that is trained: it learns, repeats, and is a cross-encoder afterwards."""

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
def confused(kings: list[Example]) -> list[Example]:
    """The kings, with the passages of others as further negatives."""
    others = [king.positives[0] for king in kings[::2]]
    return [
        dataclasses.replace(king, negatives=(*king.negatives, *(o for o in others if o.hash != king.positives[0].hash)))
        for king in kings
    ]


def test_it_learns_to_tell_kings_apart(tiny: Path, confused: list[Example], tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = CrossEncoderTask(TrainableCrossEncoder.load(tiny), confused, confused, RECIPE)
    done = train(task, SETTINGS, tmp_path)
    assert done.best_measures["MRR"] > done.initial_measures["MRR"] + 0.05
    assert done.best_measures["loss"] < done.initial_measures["loss"]
    assert {row["kind"]: row.keys() for row in read_metrics(tmp_path)}["train"] >= {"loss", "accuracy"}
    scorer = CrossEncoder.load(done.best_folder / "cross-encoder", device="cpu")
    ranks = []
    for one in confused:
        passages = [one.positives[0], *one.negatives[:5]]
        told = scorer.scores([one.question] * 6, [p.title for p in passages], [p.text for p in passages])
        ranks.append(int((told >= told[0]).sum()))
    assert np.mean(1 / np.array(ranks)) == pytest.approx(done.best_measures["MRR"], abs=1e-6)


def test_losses_repeat(tiny: Path, confused: list[Example], tmp_path: Path) -> None:
    for name in ("a", "b"):
        torch.manual_seed(0)
        task = CrossEncoderTask(TrainableCrossEncoder.load(tiny), confused, confused, RECIPE)
        train(task, dataclasses.replace(SETTINGS, max_steps=5), tmp_path / name)
    assert read_metrics(tmp_path / "a") == read_metrics(tmp_path / "b")


def test_the_loss_is_that_of_the_scores(confused: list[Example], tmp_path: Path) -> None:
    folder = save_cross_encoder(tmp_path / "cross")
    task = CrossEncoderTask(TrainableCrossEncoder.load(folder).eval(), confused, confused, RECIPE)
    batch = task.batches(0)[0]
    told = CrossEncoder.load(folder, device="cpu")
    losses = []
    for example, passages in zip(batch.examples, batch.lists, strict=True):
        scores = told.scores([example.question] * 4, [p.title for p in passages], [p.text for p in passages])
        losses.append(np.logaddexp.reduce(scores) - scores[0])
    assert task.loss(batch)[0].item() == pytest.approx(np.mean(losses), rel=1e-4)


def test_every_weight_learns(tiny: Path, confused: list[Example]) -> None:
    task = CrossEncoderTask(TrainableCrossEncoder.load(tiny), confused, confused, RECIPE)
    task.loss(task.batches(0)[0])[0].backward()  # type: ignore[no-untyped-call]
    assert [name for name, one in task.module.named_parameters() if one.grad is None] == []


def test_a_constant_model_is_last(confused: list[Example], tmp_path: Path) -> None:
    model = TrainableCrossEncoder.load(save_cross_encoder(tmp_path / "cross"))
    # transformers replaces torch.nn.init's functions while any thread loads a model.
    model.whole.classifier.weight.data.zero_()  # type: ignore[union-attr, operator]
    measures = CrossEncoderTask(model.eval(), confused, confused, RECIPE).evaluate()
    assert (measures["MRR"], measures["Success@1"]) == (pytest.approx(1 / 6), 0)


def test_what_cannot_be_is_refused(tiny: Path, kings: list[Example], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"negatives of \[cross_encoder\] is 0: use 1 or more"):
        CrossEncoderRecipe(negatives=0)
    bare = [dataclasses.replace(king, negatives=()) for king in kings]
    with pytest.raises(InputError, match="no example has a positive and a negative passage"):
        CrossEncoderTask(TrainableCrossEncoder.load(tiny), bare, kings, RECIPE)
    write_json(tmp_path / "dpr" / "config.json", {"model_type": "dpr"})
    with pytest.raises(InputError, match=r"has no model\.safetensors"):
        TrainableCrossEncoder.load(tmp_path / "dpr")
    with pytest.raises(InputError, match="cannot be loaded"):
        TrainableCrossEncoder.load(save_cross_encoder(tmp_path / "three", labels=3))
