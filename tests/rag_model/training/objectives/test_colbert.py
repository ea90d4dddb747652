"""The objective `colbert`: both losses, training steps, and the saved model."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rag_model.encoders.cross_encoder import CrossEncoder
from rag_model.encoders.spec import TokenSpec
from rag_model.encoders.token_encoder import TokenEncoder
from rag_model.errors import InputError, UsageError
from rag_model.store.store import Store
from rag_model.training.data.batches import add_teacher_scores, build_list_batch
from rag_model.training.data.examples import Example, build_passage
from rag_model.training.loop.loop import train
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.objectives.colbert import COLBERT, ColbertRecipe, ColbertTask, ColbertTraining, InitialColbert
from rag_model.training.objectives.objective import Job, get_objective
from rag_model.training.origins import InitialModels
from tests.fixtures.tiny import save_bert, save_cross_encoder
from tests.fixtures.tiny_colbert import save_colbert, save_marked_bert
from tests.fixtures.tiny_snapshot import publish_tiny

WORDS = ["river", "king", "music", "war", "theory", "city"]
RECIPE = ColbertRecipe(dim=16, question_length=12, passage_length=24, batch_size=3, seed=1)


def build_examples() -> list[Example]:
    """Return six questions; the negatives of each are positives of other questions."""
    pairs = zip(WORDS, WORDS[1:] + WORDS[:1], strict=True)
    texts = [build_passage("", f"the {word} of the {next_word} was in a city.") for word, next_word in pairs]
    return [
        Example(str(n), f"who wrote {word}?", ("x",), (texts[n],), (texts[n - 1], texts[n - 2], texts[n - 3]))
        for n, word in enumerate(WORDS)
    ]


@pytest.fixture(scope="module")
def marked_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_marked_bert(tmp_path_factory.mktemp("late") / "plain")


def load_task(folder: Path, recipe: ColbertRecipe = RECIPE, examples: list[Example] | None = None) -> ColbertTask:
    encoder = InitialColbert.load(folder, recipe, device="cpu")
    return ColbertTask(encoder, examples or build_examples(), build_examples(), recipe)


def test_in_batch_loss_is_the_cross_entropy_of_the_positives(marked_bert: Path) -> None:
    task = load_task(marked_bert)
    task.module.eval()
    batch = build_list_batch(build_examples()[:3], 1, None)
    loss, measures = task.loss(batch)
    encoder = task.encoder()
    query_vectors = torch.from_numpy(encoder.encode_questions([example.question for example in build_examples()[:3]]))
    tokens = encoder.encode_passages([""] * 6, [passage.text for passage in batch.list_pairs()[1]])
    rows = [torch.from_numpy(tokens.vectors[a:b]) for a, b in zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True)]
    scores = torch.stack([torch.stack([(q @ r.T).max(1).values.sum() for r in rows]) for q in query_vectors])
    hashes = [passage.hash for passage in batch.list_pairs()[1]]
    for row, gold in enumerate((0, 2, 4)):  # An equal passage elsewhere in the batch is no negative.
        for column, key in enumerate(hashes):
            if column != gold and key == hashes[gold]:
                scores[row, column] = -torch.inf
    expected = torch.nn.functional.cross_entropy(scores, torch.tensor([0, 2, 4]))
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-4)
    assert set(measures) == {"accuracy", "in_batch"}


def test_teacher_adds_the_distillation_loss_of_whole_lists(marked_bert: Path, tmp_path: Path) -> None:
    teacher = CrossEncoder.load(save_cross_encoder(tmp_path / "teacher"), device="cpu")
    scored = add_teacher_scores(build_examples(), teacher, 3)
    both_losses = load_task(marked_bert, RECIPE, scored)
    assert all(batch.lengths == [4] * 3 for batch in both_losses.batches(0))
    loss, measures = both_losses.loss(both_losses.batches(0)[0])
    assert float(loss.detach()) == pytest.approx(
        float(measures["in_batch"]) + float(measures["distillation"]), rel=1e-5
    )
    distillation_only = load_task(marked_bert, replace(RECIPE, in_batch=False), scored)
    loss, measures = distillation_only.loss(distillation_only.batches(0)[0])
    assert float(loss.detach()) == pytest.approx(float(measures["distillation"]), rel=1e-6)


def test_lists_have_as_many_passages_as_the_settings_say(
    marked_bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    articles = {f"City {number}": f"the king of city {number} was {number + 1000}." for number in range(120)}
    (tmp_path / "work").mkdir()
    store = Store.open(str(tmp_path / "store"), create=True)
    snapshot = publish_tiny(store, marked_bert, articles, tmp_path / "work")
    question = Example("1", "who was the king of city 7?", ("1007",))
    teacher = save_cross_encoder(tmp_path / "teacher")

    def list_lengths(settings: ColbertTraining, **models: str) -> list[int]:
        origins = InitialModels({"colbert": str(marked_bert), **models})
        job = Job(store, snapshot, origins, settings, {"train": [question], "dev": [question]})
        with caplog.at_level(logging.WARNING):
            return COLBERT.task(replace(job, examples=COLBERT.prepare(job))).batches(0)[0].lengths

    loop = LoopSettings(cpu=True)
    assert list_lengths(ColbertTraining(loop), teacher=str(teacher)) == [64], "as many as in ColBERTv2"
    assert list_lengths(ColbertTraining(loop)) == [2]
    assert list_lengths(ColbertTraining(loop, replace(RECIPE, ways=40))) == [40]
    assert not caplog.records
    (shorter,) = list_lengths(ColbertTraining(loop, replace(RECIPE, ways=110)))
    assert shorter < 110
    assert f"most examples have {shorter} or fewer of 110 passages" in caplog.text


def test_training_steps_improve_the_rank(marked_bert: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = load_task(marked_bert)
    initial_weights, rank = task.module.linear.weight.detach().clone(), task.evaluate()["average_rank"]
    optimizer = torch.optim.Adam(
        [parameter for parameter in task.module.parameters() if parameter.requires_grad], lr=2e-3
    )
    for epoch in range(8):
        for batch in task.batches(epoch):
            optimizer.zero_grad()
            task.loss(batch)[0].backward()
            optimizer.step()
    task.module.eval()
    assert not torch.equal(initial_weights, task.module.linear.weight)
    assert task.evaluate()["average_rank"] < rank
    task.save(tmp_path / "model")
    saved = TokenEncoder.load(tmp_path / "model" / "colbert", device="cpu", dtype="float32")
    assert (saved.encode_questions(["who?"]) == task.encoder().encode_questions(["who?"])).all()
    assert saved.spec == TokenSpec(question_length=12, passage_length=24)


def test_training_starts_from_an_existing_colbert(tmp_path: Path) -> None:
    folder = save_colbert(tmp_path / "colbert")
    task = load_task(folder)
    expected = TokenEncoder.load(folder, device="cpu", dtype="float32")
    assert (task.encoder().encode_questions(["who?"]) == expected.encode_questions(["who?"])).all()


def test_batches_depend_on_the_epoch_alone(marked_bert: Path) -> None:
    first, second = load_task(marked_bert), load_task(marked_bert)
    assert first.batches(3) == second.batches(3) != first.batches(4)
    assert first.recipe() == second.recipe()


def test_invalid_models_and_recipes_are_refused(marked_bert: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no token '\[unused0\]'"):
        load_task(save_bert(tmp_path / "unmarked"))
    with pytest.raises(UsageError, match="name a --teacher"):
        load_task(marked_bert, ColbertRecipe(in_batch=False))
    for values in ({"dim": 12}, {"ways": 1}, {"batch_size": 0}):
        with pytest.raises(UsageError):
            ColbertRecipe(**values)  # type: ignore[arg-type]
    assert get_objective("colbert").result.parts == {"colbert"}


def test_goal_needs_dev_examples_with_positives(marked_bert: Path, tmp_path: Path) -> None:
    encoder = InitialColbert.load(marked_bert, RECIPE, device="cpu")
    dev, corpus = [Example("dev", "who wrote river?", ("river",))], [build_examples()[0].positives[0]]
    for recipe, examples in ((RECIPE, dev), (RECIPE, [])):
        with pytest.raises(UsageError, match=r"goal average_rank needs dev examples|the dev set has no example"):
            ColbertTask(encoder, build_examples(), examples, recipe, corpus)
    task = ColbertTask(encoder, build_examples(), dev, replace(RECIPE, goal="Success@20"), corpus)
    result = train(task, LoopSettings(max_steps=2, evaluate_every=1, cpu=True), tmp_path)
    assert (result.steps, result.best_measures["Success@20"]) == (2, 1.0)


@pytest.mark.parametrize("passages_at_once", [1, 2, 4])
def test_passages_in_parts_give_the_same_gradient(marked_bert: Path, passages_at_once: int) -> None:
    scored = [replace(example, scores=(3.0, 1.0, 0.5, 0.2)) for example in build_examples()]
    unsplit, split = (
        load_task(marked_bert, replace(RECIPE, ways=3, passages_at_once=size), scored)
        for size in (RECIPE.passages_at_once, passages_at_once)
    )
    gradients = []
    for task in (unsplit, split):
        task.module.eval()
        loss, measures = task.loss(build_list_batch(scored[:3], 2, None))
        assert {"distillation", "in_batch"} <= set(measures)
        loss.backward()
        parameters = task.module.named_parameters()
        gradients.append({name: parameter.grad for name, parameter in parameters if parameter.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)
