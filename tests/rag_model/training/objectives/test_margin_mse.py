"""Encoders that learn the score margins of a cross-encoder."""

import dataclasses
from pathlib import Path

import pytest

from rag_model.corpus.records import Passage
from rag_model.encoders.cross_encoder import CrossEncoder
from rag_model.encoders.encoder import Encoder
from rag_model.encoders.space import check_same_space
from rag_model.errors import UsageError
from rag_model.training.data.batches import add_teacher_scores
from rag_model.training.data.examples import Example
from rag_model.training.loop.loop import TrainingResult, train
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.objectives.margin_mse import MarginMseRecipe, MarginMseTask
from rag_model.training.objectives.task_bases import BiEncoder
from tests.fixtures.tiny import save_cross_encoder

SETTINGS = LoopSettings(max_steps=24, learning_rate=3e-3, evaluate_every=12, checkpoint_every=24, cpu=True)
RECIPE = MarginMseRecipe(batch_size=8, negatives=2, temperature=0.1, goal="loss")


@pytest.fixture(scope="session")
def scored_kings(kings: list[Example], tmp_path_factory: pytest.TempPathFactory) -> list[Example]:
    """Return the kings with the scores of a random cross-encoder."""
    teacher = CrossEncoder.load(save_cross_encoder(tmp_path_factory.mktemp("teacher") / "cross"), device="cpu")
    positives = [king.positives[0] for king in kings[::2]]
    kings_with_negatives = [
        dataclasses.replace(king, negatives=tuple(p for p in positives if p.hash != king.positives[0].hash))
        for king in kings
    ]
    return add_teacher_scores(kings_with_negatives, teacher, 4)


def train_with_teacher(tiny: Path, scored_kings: list[Example], folder: Path, **changes: bool) -> TrainingResult:
    recipe = dataclasses.replace(RECIPE, **changes)
    encoder = BiEncoder.load(tiny, shared=recipe.shared, frozen=recipe.freeze_passages, device="cpu")
    return train(MarginMseTask(encoder, scored_kings, scored_kings, recipe), SETTINGS, folder)


@pytest.mark.parametrize("changes", [{}, {"shared": True}, {"freeze_passages": True}], ids=["two", "shared", "frozen"])
def test_training_brings_margins_closer_to_the_teacher(
    tiny: Path, scored_kings: list[Example], tmp_path: Path, changes: dict[str, bool]
) -> None:
    result = train_with_teacher(tiny, scored_kings, tmp_path, **changes)
    assert result.best_measures["loss"] < 0.9 * result.initial_measures["loss"]
    question = Encoder.load(result.best_folder / "question", "question", dtype="float32")
    passage = Encoder.load(result.best_folder / "passage", dtype="float32")
    check_same_space(question.space(), passage.space())
    errors = []
    for example in scored_kings:
        passages = [example.positives[0], *example.negatives]
        passage_vectors = passage.encode_passages([p.title for p in passages], [p.text for p in passages])
        scores = passage_vectors @ question.encode_questions([example.question])[0] / RECIPE.temperature
        errors += [
            ((scores[0] - score) - (example.scores[0] - teacher_score)) ** 2
            for score, teacher_score in zip(scores[1:], example.scores[1:], strict=True)
        ]
    assert sum(errors) / len(errors) == pytest.approx(result.best_measures["loss"], rel=1e-4)


@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_reach_the_trained_encoders(tiny: Path, scored_kings: list[Example], frozen: bool) -> None:
    encoder = BiEncoder.load(tiny, frozen=frozen, device="cpu").double()
    task = MarginMseTask(encoder, scored_kings, scored_kings, dataclasses.replace(RECIPE, freeze_passages=frozen))
    task.loss(task.batches(0)[0])[0].backward()  # type: ignore[no-untyped-call]
    parts = {name.partition(".")[0] for name, parameter in encoder.named_parameters() if parameter.grad is not None}
    assert parts == ({"question"} if frozen else {"question", "passage"})
    assert any(
        parameter.grad.abs().max() > 0 for parameter in encoder.question.parameters() if parameter.grad is not None
    )


def test_drawn_negatives_keep_their_scores(tiny: Path, scored_kings: list[Example]) -> None:
    task = MarginMseTask(BiEncoder.load(tiny, device="cpu"), scored_kings, scored_kings, RECIPE)
    expected = {(king.id, passage.hash): score for king in scored_kings for passage, score in _pair_scores(king)}
    for batch in task.batches(3):
        for example, passages, scores in zip(batch.examples, batch.lists, batch.scores, strict=True):
            assert scores == tuple(expected[example.id, passage.hash] for passage in passages)


def test_invalid_recipe_is_refused() -> None:
    with pytest.raises(UsageError, match=r"scored of \[margin_mse\] is 0"):
        MarginMseRecipe(scored=0)
    with pytest.raises(UsageError, match=r"temperature of \[margin_mse\] is nan"):
        MarginMseRecipe(temperature=float("nan"))


def _pair_scores(example: Example) -> list[tuple[Passage, float]]:
    return list(zip([example.positives[0], *example.negatives], example.scores, strict=True))
