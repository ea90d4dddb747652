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


def train_dpr(
    tiny: Path, kings: list[Example], folder: Path, settings: LoopSettings = SETTINGS, **changes: bool
) -> TrainingResult:
    recipe = dataclasses.replace(RECIPE, **changes)
    return train(DprTask(recipe.load_encoders(tiny), kings[::2], kings, recipe), settings, folder)


@pytest.mark.parametrize("encoders", ["two", "shared", "frozen"])
def test_training_improves_the_ranking(tiny: Path, kings: list[Example], tmp_path: Path, encoders: str) -> None:
    changes = {"shared": encoders == "shared", "freeze_passages": encoders == "frozen"}
    result = train_dpr(tiny, kings, tmp_path, **changes)
    assert result.best_measures["average_rank"] < result.initial_measures["average_rank"] - 1
    assert result.best_measures["Success@5"] > result.initial_measures["Success@5"]
    assert {row["kind"]: row.keys() for row in read_metrics(tmp_path)}["train"] >= {"loss", "accuracy"}
    asker = Encoder.load(result.best_folder / "question", "question", dtype="float32")
    reader = Encoder.load(result.best_folder / "passage", dtype="float32")
    check_same_space(asker.space(), reader.space())
    if encoders == "frozen":
        check_same_space(asker.space(), Encoder.load(tiny, dtype="float32").space())
    pool = [passage for example in kings for passage in (*example.positives, *example.negatives)]
    passage_vectors = reader.encode_passages([passage.title for passage in pool], [passage.text for passage in pool])
    evaluator = RankingEvaluator(kings, pool)
    rows = np.array([pool.index(passage) for passage in evaluator.pool])
    measures = evaluator.evaluate(asker.encode_questions([king.question for king in kings]), passage_vectors[rows])
    assert measures["average_rank"] == pytest.approx(result.best_measures["average_rank"])
    equal_vectors = np.allclose(asker.encode_questions(["a"]), reader.encode_questions(["a"]), atol=1e-6)
    assert equal_vectors == (encoders == "shared")


def test_training_is_reproducible(tiny: Path, kings: list[Example], tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, max_steps=6, evaluate_every=3)  # the fourth step begins an epoch
    for name in ("a", "b"):
        train_dpr(tiny, kings, tmp_path / name, settings)
    assert read_metrics(tmp_path / "a") == read_metrics(tmp_path / "b")


def test_loss_is_the_cross_entropy_of_the_inner_products(tiny: Path, kings: list[Example]) -> None:
    task = DprTask(BiEncoder.load(tiny, device="cpu").eval(), kings, kings, RECIPE)
    batch = task.batches(0)[0]
    loss, measures = task.loss(batch)
    query_vectors = task.module.encode_questions([example.question for example in batch.examples])
    passage_vectors = task.module.encode_passages(batch.passages)
    losses = []
    for example, row in zip(batch.examples, query_vectors @ passage_vectors.T / 0.1, strict=True):
        ignored = {positive.hash for positive in example.positives[1:]}
        scores = [score for score, passage in zip(row, batch.passages, strict=True) if passage.hash not in ignored]
        losses.append(np.logaddexp.reduce(scores) - row[batch.passages.index(example.positives[0])])
    assert loss.item() == pytest.approx(np.mean(losses), rel=1e-4)
    assert 0 <= float(measures["accuracy"]) <= 1


def test_equal_passages_are_merged_and_other_positives_ignored(kings: list[Example]) -> None:
    first, second = kings[0], kings[1]  # one king, so both have the same positive
    third = dataclasses.replace(kings[2], positives=(*kings[2].positives, *first.positives))
    batch = build_dpr_batch([first, second, third], 1, None)
    assert batch.gold == (0, 0, 1)
    positives, negatives = (first.positives[0], third.positives[0]), (first.negatives[0], third.negatives[0])
    assert batch.passages == (*positives, *negatives)
    ignored = mask_other_positives(batch.examples, hash_passages(batch.passages), torch.tensor(batch.gold))
    assert ignored.tolist() == [[False] * 4, [False] * 4, [True, False, False, False]]
    with_document = dataclasses.replace(second, own_document=third.positives[0])
    own_batch = build_dpr_batch([first, with_document, third], 1, None)
    ignored = mask_other_positives(own_batch.examples, hash_passages(batch.passages), torch.tensor(batch.gold))
    assert ignored.tolist() == [[False] * 4, [False, True, False, False], [True, False, False, False]]


def test_epoch_is_shuffled_and_contains_each_example_once(tiny: Path, kings: list[Example]) -> None:
    task = DprTask(BiEncoder.load(tiny, device="cpu"), kings, kings, dataclasses.replace(RECIPE, batch_size=7))
    epochs = [[example_id for batch in task.batches(epoch) for example_id in task.ids(batch)] for epoch in (0, 1)]
    assert [len(epoch) for epoch in epochs] == [21, 21]  # 3 of 24 examples do not fill a batch
    assert len(set(epochs[0])) == 21
    assert epochs[0] != epochs[1]
    assert epochs[0] == [example_id for batch in task.batches(0) for example_id in task.ids(batch)]
    small_task = DprTask(task.module, kings[:5], kings, RECIPE)
    assert [len(batch.examples) for batch in small_task.batches(0)] == [5]


def test_epochs_draw_different_negatives(tiny: Path, kings: list[Example]) -> None:
    examples = [dataclasses.replace(kings[0], negatives=tuple(build_passage("", f"no {n}") for n in range(20)))]
    task = DprTask(BiEncoder.load(tiny, device="cpu"), examples, kings, dataclasses.replace(RECIPE, hard_negatives=2))
    draws = {task.batches(epoch)[0].passages[1:] for epoch in range(5)}
    assert len(draws) > 1
    assert {len(passages) for passages in draws} == {2}


def test_examples_without_positive_are_dropped_or_refused(tiny: Path, kings: list[Example]) -> None:
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


def test_training_survives_texts_of_every_kind(tiny: Path, tmp_path: Path) -> None:
    texts = ["", " ", "king " * 300, "„Öde“ 作者 👩‍🚀 \u202e\u0000", "\n\t"]
    examples = [Example(str(n), text or "x", (), (build_passage(text, f"{text}{n}"),)) for n, text in enumerate(texts)]
    examples.append(Example("empty", "", (), (build_passage("", ""),)))
    task = DprTask(BiEncoder.load(tiny, device="cpu"), examples, examples, DprRecipe(batch_size=3))
    result = train(task, dataclasses.replace(SETTINGS, max_steps=4), tmp_path)
    assert all(np.isfinite(value) for value in result.best_measures.values())


def test_success_depends_on_answers_and_rank_on_the_positive(kings: list[Example]) -> None:
    pool = [king.positives[0] for king in kings[::2]]
    ranking = RankingEvaluator([kings[0], dataclasses.replace(kings[4], answers=())], pool)
    passage_vectors = np.eye(len(ranking.pool), dtype=np.float32)
    query_vectors = np.zeros((2, len(ranking.pool)), np.float32)
    query_vectors[0, ranking.row_by_hash[kings[0].positives[0].hash]] = 1.0
    query_vectors[1, : len(ranking.pool)] = np.linspace(1, 2, len(ranking.pool))
    index = ranking.row_by_hash[kings[4].positives[0].hash]
    measures = ranking.evaluate(query_vectors, passage_vectors)
    rank = len(ranking.pool) - index
    assert measures["average_rank"] == (1 + rank) / 2
    assert measures["Success@1"] == 0.5
    assert measures["Success@20"] == (1.0 if rank <= 20 else 0.5)
    assert ranking.compute_successes(query_vectors, passage_vectors, 1).tolist() == [True, False]


def test_own_document_is_not_ranked(kings: list[Example]) -> None:
    own_document, positive = kings[0].positives[0], kings[4].positives[0]
    example = dataclasses.replace(kings[4], answers=(), own_document=own_document)
    ranking = RankingEvaluator([example], [own_document, positive])
    scores = np.zeros((1, len(ranking.pool)), np.float32)
    scores[0, ranking.row_by_hash[own_document.hash]], scores[0, ranking.row_by_hash[positive.hash]] = 2.0, 1.0
    assert ranking.evaluate(scores, np.eye(len(ranking.pool), dtype=np.float32))["Success@1"] == 1.0
    assert ranking.evaluate_scores([scores])["average_rank"] == 1.0


def test_conflicting_settings_of_encoders_are_refused(tiny: Path, tmp_path: Path) -> None:
    other_bert = save_bert(tmp_path / "other", seed=9)
    with pytest.raises(UsageError, match="cannot be shared"):
        BiEncoder.load(tiny, other_bert, shared=True)
    with pytest.raises(UsageError, match="cannot be frozen for passages"):
        BiEncoder.load(tiny, shared=True, frozen=True)
    with pytest.raises(UsageError, match=r"batch_size of \[dpr\] is 0: use 1 or more"):
        DprRecipe(batch_size=0)
    spec = EncoderSpec(max_length=8)
    assert TrainableEncoder.load(tiny, "question", spec).spec == spec
