import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from rag_model.encoders.encoder import Encoder
from rag_model.encoders.space import check_same_space
from rag_model.encoders.spec import EncoderSpec
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import InputError, UsageError
from rag_model.training.data.batches import build_dpr_batch, hash_passages, mask_other_positives
from rag_model.training.data.examples import Example, build_passage
from rag_model.training.loop.checkpoint import read_metrics
from rag_model.training.loop.loop import TrainingResult, train
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.objectives.dpr import DprRecipe, DprTask
from rag_model.training.objectives.task_bases import BiEncoder, RankingEvaluator
from tests.fixtures.tiny import save_bert

SETTINGS = LoopSettings(max_steps=30, learning_rate=2e-3, evaluate_every=10, checkpoint_every=30, cpu=True)
RECIPE = DprRecipe(batch_size=8, temperature=0.1)


def learned(tiny: Path, kings: list[Example], folder: Path, **changed: bool) -> TrainingResult:
    recipe = dataclasses.replace(RECIPE, **changed)
    return train(DprTask(recipe.load_encoders(tiny), kings[::2], kings, recipe), SETTINGS, folder)


@pytest.mark.parametrize("how", ["two", "shared", "frozen"])
def test_it_learns_to_tell_kings_apart(tiny: Path, kings: list[Example], tmp_path: Path, how: str) -> None:
    done = learned(tiny, kings, tmp_path, shared=how == "shared", freeze_passages=how == "frozen")
    assert done.best_measures["average_rank"] < done.initial_measures["average_rank"] - 1
    assert done.best_measures["Success@5"] > done.initial_measures["Success@5"]
    assert {row["kind"]: row.keys() for row in read_metrics(tmp_path)}["train"] >= {"loss", "accuracy"}
    asking = Encoder.load(done.best_folder / "question", "question", dtype="float32")
    reading = Encoder.load(done.best_folder / "passage", dtype="float32")
    check_same_space(asking.space(), reading.space())
    pool = [one for example in kings for one in (*example.positives, *example.negatives)]
    read = reading.encode_passages([one.title for one in pool], [one.text for one in pool])
    again = RankingEvaluator(kings, pool)
    rows = np.array([pool.index(one) for one in again.pool])
    measured = again.evaluate(asking.encode_questions([king.question for king in kings]), read[rows])
    assert measured["average_rank"] == pytest.approx(done.best_measures["average_rank"])
    same = np.allclose(asking.encode_questions(["a"]), dataclasses.replace(reading).encode_questions(["a"]), atol=1e-6)
    assert same == (how == "shared")


def test_a_frozen_passage_encoder_is_the_one_that_the_snapshot_was_made_with(
    tiny: Path, kings: list[Example], tmp_path: Path
) -> None:
    done = learned(tiny, kings, tmp_path, freeze_passages=True)
    check_same_space(Encoder.load(done.best_folder / "question", "question").space(), Encoder.load(tiny).space())


def test_losses_repeat(tiny: Path, kings: list[Example], tmp_path: Path) -> None:
    for name in ("a", "b"):
        learned(tiny, kings, tmp_path / name)
    assert read_metrics(tmp_path / "a") == read_metrics(tmp_path / "b")


def test_the_loss_is_that_of_the_vectors(tiny: Path, kings: list[Example]) -> None:
    task = DprTask(BiEncoder.load(tiny, device="cpu").eval(), kings, kings, RECIPE)
    batch = task.batches(0)[0]
    ours, measures = task.loss(batch)
    query_vectors = task.module.encode_questions([example.question for example in batch.examples])
    read = task.module.encode_passages(batch.passages)
    losses = []
    for example, row in zip(batch.examples, query_vectors @ read.T / 0.1, strict=True):
        others = {positive.hash for positive in example.positives[1:]}
        kept = [score for score, passage in zip(row, batch.passages, strict=True) if passage.hash not in others]
        losses.append(np.logaddexp.reduce(kept) - row[batch.passages.index(example.positives[0])])
    assert ours.item() == pytest.approx(np.mean(losses), rel=1e-4)
    assert 0 <= float(measures["accuracy"]) <= 1


def test_equal_passages_of_a_batch_are_one_and_other_positives_are_ignored(kings: list[Example]) -> None:
    first, second = kings[0], kings[1]  # of one king: the same positive
    both = dataclasses.replace(kings[2], positives=(*kings[2].positives, *first.positives))
    batch = build_dpr_batch([first, second, both], 1, None)
    assert batch.gold == (0, 0, 1)
    assert batch.passages == (first.positives[0], both.positives[0], first.negatives[0], both.negatives[0])
    ignored = mask_other_positives(batch.examples, hash_passages(batch.passages), torch.tensor(batch.gold))
    assert ignored.tolist() == [[False] * 4, [False] * 4, [True, False, False, False]]
    own = dataclasses.replace(second, own_document=both.positives[0])
    own_batch = build_dpr_batch([first, own, both], 1, None)
    ignored = mask_other_positives(own_batch.examples, hash_passages(batch.passages), torch.tensor(batch.gold))
    assert ignored.tolist() == [[False] * 4, [False, True, False, False], [True, False, False, False]]


def test_an_epoch_is_shuffled_and_holds_each_example_once(tiny: Path, kings: list[Example]) -> None:
    task = DprTask(BiEncoder.load(tiny, device="cpu"), kings, kings, dataclasses.replace(RECIPE, batch_size=7))
    epochs = [[one for batch in task.batches(epoch) for one in task.ids(batch)] for epoch in (0, 1)]
    assert [len(epoch) for epoch in epochs] == [21, 21]  # 3 of 24 are left over
    assert len(set(epochs[0])) == 21
    assert epochs[0] != epochs[1]
    assert epochs[0] == [one for batch in task.batches(0) for one in task.ids(batch)]
    few = DprTask(task.module, kings[:5], kings, RECIPE)
    assert [len(batch.examples) for batch in few.batches(0)] == [5]


def test_negatives_are_drawn_anew_each_epoch(tiny: Path, kings: list[Example]) -> None:
    many = [dataclasses.replace(kings[0], negatives=tuple(build_passage("", f"no {n}") for n in range(20)))]
    task = DprTask(BiEncoder.load(tiny, device="cpu"), many, kings, dataclasses.replace(RECIPE, hard_negatives=2))
    drawn = {task.batches(epoch)[0].passages[1:] for epoch in range(5)}
    assert len(drawn) > 1
    assert {len(passages) for passages in drawn} == {2}


def test_examples_without_a_passage_are_dropped_or_refused(tiny: Path, kings: list[Example]) -> None:
    encoder = BiEncoder.load(tiny, device="cpu")
    bare = Example("bare", "who?", ("x",))
    task = DprTask(encoder, [*kings, bare], kings, RECIPE)
    assert len(task.train) == 24
    with pytest.raises(InputError, match="example bare has no positive passage: find one by mining"):
        DprTask(encoder, [*kings, bare], kings, dataclasses.replace(RECIPE, without_positive="refuse"))
    with pytest.raises(InputError, match="no example has a positive passage"):
        DprTask(encoder, [bare], kings, RECIPE)
    with pytest.raises(UsageError, match="give a dev file"):
        DprTask(encoder, kings, [], RECIPE)
    with pytest.raises(UsageError, match="goal average_rank needs dev examples with passages"):
        DprTask(encoder, kings, [bare], RECIPE, [kings[0].positives[0]])
    task = DprTask(encoder, kings, [bare], dataclasses.replace(RECIPE, goal="Success@20"), [kings[0].positives[0]])
    assert task.evaluate() == {"Success@1": 0.0, "Success@5": 0.0, "Success@20": 0.0}


def test_it_survives_texts_of_every_kind(tiny: Path, tmp_path: Path) -> None:
    texts = ["", " ", "king " * 300, "„Öde“ 作者 👩‍🚀 \u202e\u0000", "\n\t"]
    examples = [Example(str(n), text or "x", (), (build_passage(text, f"{text}{n}"),)) for n, text in enumerate(texts)]
    examples.append(Example("empty", "", (), (build_passage("", ""),)))
    task = DprTask(BiEncoder.load(tiny, device="cpu"), examples, examples, DprRecipe(batch_size=3))
    done = train(task, dataclasses.replace(SETTINGS, max_steps=4), tmp_path)
    assert all(np.isfinite(value) for value in done.best_measures.values())


def test_success_counts_answers_and_rank_counts_the_positive(kings: list[Example]) -> None:
    pool = [king.positives[0] for king in kings[::2]]
    ranking = RankingEvaluator([kings[0], dataclasses.replace(kings[4], answers=())], pool)
    read = np.eye(len(ranking.pool), dtype=np.float32)
    asked = np.zeros((2, len(ranking.pool)), np.float32)
    asked[0, ranking.rows[kings[0].positives[0].hash]] = 1.0
    asked[1, : len(ranking.pool)] = np.linspace(1, 2, len(ranking.pool))
    place = ranking.rows[kings[4].positives[0].hash]
    measures = ranking.evaluate(asked, read)
    rank = len(ranking.pool) - place
    assert measures["average_rank"] == (1 + rank) / 2
    assert measures["Success@1"] == 0.5
    assert measures["Success@20"] == (1.0 if rank <= 20 else 0.5)
    assert ranking.compute_successes(asked, read, 1).tolist() == [True, False]


def test_the_question_itself_is_not_ranked(kings: list[Example]) -> None:
    own, positive = kings[0].positives[0], kings[4].positives[0]
    example = dataclasses.replace(kings[4], answers=(), own_document=own)
    ranking = RankingEvaluator([example], [own, positive])
    scores = np.zeros((1, len(ranking.pool)), np.float32)
    scores[0, ranking.rows[own.hash]], scores[0, ranking.rows[positive.hash]] = 2.0, 1.0
    assert ranking.evaluate(scores, np.eye(len(ranking.pool), dtype=np.float32))["Success@1"] == 1.0
    assert ranking.evaluate_scores([scores])["average_rank"] == 1.0


def test_encoders_that_do_not_fit_are_refused(tiny: Path, tmp_path: Path) -> None:
    other = save_bert(tmp_path / "other", seed=9)
    with pytest.raises(UsageError, match="cannot be shared"):
        BiEncoder.load(tiny, other, shared=True)
    with pytest.raises(UsageError, match="cannot be frozen for passages"):
        BiEncoder.load(tiny, shared=True, frozen=True)
    with pytest.raises(UsageError, match=r"batch_size of \[dpr\] is 0: use 1 or more"):
        DprRecipe(batch_size=0)
    spec = EncoderSpec(max_length=8)
    assert TrainableEncoder.load(tiny, "question", spec).spec == spec
