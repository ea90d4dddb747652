"""A pair of encoders that a cross-encoder teaches: its margins, what learns, and what is refused."""

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

SETTINGS = LoopSettings(max_steps=60, learning_rate=3e-3, evaluate_every=20, checkpoint_every=60, cpu=True)
RECIPE = MarginMseRecipe(batch_size=8, negatives=2, temperature=0.1, goal="loss")


@pytest.fixture(scope="session")
def taught(kings: list[Example], tmp_path_factory: pytest.TempPathFactory) -> list[Example]:
    """The kings with the scores of a random cross-encoder."""
    teacher = CrossEncoder.load(save_cross_encoder(tmp_path_factory.mktemp("teacher") / "cross"), device="cpu")
    others = [king.positives[0] for king in kings[::2]]
    many = [
        dataclasses.replace(king, negatives=tuple(o for o in others if o.hash != king.positives[0].hash))
        for king in kings
    ]
    return add_teacher_scores(many, teacher, 4)


def distilled(tiny: Path, taught: list[Example], folder: Path, **changed: bool) -> TrainingResult:
    recipe = dataclasses.replace(RECIPE, **changed)
    encoder = BiEncoder.load(tiny, shared=recipe.shared, frozen=recipe.freeze_passages, device="cpu")
    return train(MarginMseTask(encoder, taught, taught, recipe), SETTINGS, folder)


@pytest.mark.parametrize("how", ["two", "shared", "frozen"])
def test_its_margins_come_closer_to_the_teachers(tiny: Path, taught: list[Example], tmp_path: Path, how: str) -> None:
    done = distilled(tiny, taught, tmp_path, shared=how == "shared", freeze_passages=how == "frozen")
    assert done.best_measures["loss"] < 0.9 * done.initial_measures["loss"]
    asking = Encoder.load(done.best_folder / "question", "question", dtype="float32")
    reading = Encoder.load(done.best_folder / "passage", dtype="float32")
    check_same_space(asking.space(), reading.space())
    errors = []
    for one in taught:
        passages = [one.positives[0], *one.negatives]
        read = reading.encode_passages([p.title for p in passages], [p.text for p in passages])
        scores = read @ asking.encode_questions([one.question])[0] / RECIPE.temperature
        errors += [
            ((scores[0] - score) - (one.scores[0] - told)) ** 2
            for score, told in zip(scores[1:], one.scores[1:], strict=True)
        ]
    assert sum(errors) / len(errors) == pytest.approx(done.best_measures["loss"], rel=1e-4)


@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_reach_the_encoders_that_learn(tiny: Path, taught: list[Example], frozen: bool) -> None:
    encoder = BiEncoder.load(tiny, frozen=frozen, device="cpu").double()
    task = MarginMseTask(encoder, taught, taught, dataclasses.replace(RECIPE, freeze_passages=frozen))
    task.loss(task.batches(0)[0])[0].backward()  # type: ignore[no-untyped-call]
    reached = {name.partition(".")[0] for name, one in encoder.named_parameters() if one.grad is not None}
    assert reached == ({"question"} if frozen else {"question", "passage"})
    assert any(
        parameter.grad.abs().max() > 0 for parameter in encoder.question.parameters() if parameter.grad is not None
    )


def test_a_draw_keeps_its_teachers_scores(tiny: Path, taught: list[Example]) -> None:
    task = MarginMseTask(BiEncoder.load(tiny, device="cpu"), taught, taught, RECIPE)
    told = {(one.id, p.hash): s for one in taught for p, s in _scored(one)}
    for batch in task.batches(3):
        for example, passages, scores in zip(batch.examples, batch.lists, batch.scores, strict=True):
            assert scores == tuple(told[example.id, passage.hash] for passage in passages)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match=r"scored of \[margin_mse\] is 0"):
        MarginMseRecipe(scored=0)
    with pytest.raises(UsageError, match=r"temperature of \[margin_mse\] is nan"):
        MarginMseRecipe(temperature=float("nan"))


def _scored(one: Example) -> list[tuple[Passage, float]]:
    return list(zip([one.positives[0], *one.negatives], one.scores, strict=True))
