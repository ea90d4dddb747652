"""The inverse cloze task: a sentence is the question for the rest of its passage."""

import random
from pathlib import Path

import pytest

from rag_model.encoders.encoder import Encoder
from rag_model.encoders.space import check_same_space
from rag_model.errors import UsageError
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import build_passage
from rag_model.training.data.texts import TextBatch, find_sentences, sample_inverse_cloze
from rag_model.training.loop.loop import train
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.objectives.ict import IctRecipe, IctTask
from rag_model.training.objectives.task_bases import BiEncoder
from tests.fixtures.tiny_snapshot import publish_tiny

ARTICLES = {f"City {x}": f"the king of {x} was {x * 3}. A river {x}{x} is in it. Who wrote {x}?" for x in "abcdefghij"}
RECIPE = IctRecipe(batch_size=4, temperature=0.1, dev_texts=3)
STEPS = LoopSettings(max_steps=30, learning_rate=3e-3, evaluate_every=15, checkpoint_every=30, cpu=True)


@pytest.fixture(scope="module")
def snapshot(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    folder = tmp_path_factory.mktemp("store")
    return publish_tiny(Store.open(str(folder / "store"), create=True), tiny, ARTICLES, folder)


def test_sentence_is_removed_from_its_passage() -> None:
    text = "Dr. Jones slept. He woke at 9 a.m. in York! Why? "
    assert [text[start:end] for start, end in find_sentences(text)] == [
        "Dr. Jones slept.",
        "He woke at 9 a.m. in York!",
        "Why?",
    ]
    passage, dice = build_passage("Jones", text), random.Random(1)
    cases = [sample_inverse_cloze(passage, 0.9, dice) for _ in range(400)]
    unchanged = 0
    for case in cases:
        assert case is not None
        sentence, rest = case
        unchanged += rest.text == passage.text
        assert sentence in text
        assert rest.text == passage.text or sorted(f"{sentence} {rest.text}".split()) == sorted(text.split())
        assert (rest.title, rest.hash) == ("Jones", build_passage("Jones", rest.text).hash)
    assert 20 < unchanged < 65, "a tenth of the passages keep the sentence"
    assert sample_inverse_cloze(build_passage("Jones", "He slept."), 0.9, dice) is None


def test_training_improves_the_rank_and_is_reproducible(tiny: Path, snapshot: Snapshot, tmp_path: Path) -> None:
    task = IctTask(BiEncoder.load(tiny, device="cpu"), snapshot, RECIPE)
    result = train(task, STEPS, tmp_path)
    assert result.best_measures["average_rank"] < result.initial_measures["average_rank"]
    question = Encoder.load(result.best_folder / "question", "question", threads=1, device="cpu")
    check_same_space(question.space(), Encoder.load(result.best_folder / "passage", threads=1, device="cpu").space())
    second_task = IctTask(BiEncoder.load(tiny, device="cpu"), snapshot, RECIPE)
    assert [second_task.draw_pairs(batch) for batch in second_task.batches(1)] == [
        task.draw_pairs(batch) for batch in task.batches(1)
    ]


def test_gradients_reach_both_encoders(tiny: Path, snapshot: Snapshot) -> None:
    task = IctTask(BiEncoder.load(tiny, device="cpu").double(), snapshot, RECIPE)
    loss, _ = task.loss(task.batches(0)[0])
    loss.backward()  # type: ignore[no-untyped-call]
    for part in (task.module.question, task.module.passage):
        assert (
            max(float(parameter.grad.abs().max()) for parameter in part.parameters() if parameter.grad is not None)
            > 1e-6
        )
    row = int(task.batches(0)[0].rows[0])
    assert task.loss(TextBatch(0, (row, row)))[0].item() == pytest.approx(0), "an equal passage is no negative"


def test_passage_of_one_sentence_is_left_out_of_a_batch(tiny: Path, tmp_path: Path) -> None:
    articles = {"One": "only this", "Two": "first. Second."}
    snapshot = publish_tiny(Store.open(str(tmp_path / "store"), create=True), tiny, articles, tmp_path)
    task = IctTask(BiEncoder.load(tiny, device="cpu"), snapshot, IctRecipe(dev_texts=1))
    assert [passage.title for passage in task.draw_pairs(TextBatch(0, (0, 1)))[1]] == ["Two"]
    assert task.draw_pairs(TextBatch(0, (0,))) == (["only this"], snapshot.passages([0]))


def test_invalid_recipe_is_refused() -> None:
    with pytest.raises(UsageError, match=r"removed of \[ict\] is 2"):
        IctRecipe(removed=2)
    with pytest.raises(UsageError, match=r"batch_size of \[ict\] is 0"):
        IctRecipe(batch_size=0)
