"""The objective `colbert`: both losses by hand, weights that move, a rank that falls, folders that open again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rag_model.encoders.cross_encoder import CrossEncoder
from rag_model.encoders.spec import TokenSpec
from rag_model.encoders.token_encoder import TokenEncoder
from rag_model.errors import InputError, UsageError
from rag_model.training.data.batches import add_teacher_scores, build_list_batch
from rag_model.training.data.examples import Example, build_passage
from rag_model.training.objectives.colbert import ColbertRecipe, ColbertTask, InitialColbert
from rag_model.training.objectives.objective import get_objective
from tests.fixtures.tiny import save_bert, save_cross_encoder
from tests.fixtures.tiny_colbert import save_colbert, save_marked_bert

WORDS = ["river", "king", "music", "war", "theory", "city"]
RECIPE = ColbertRecipe(dim=16, question_length=12, passage_length=24, batch_size=3, seed=1)


def examples() -> list[Example]:
    """Six questions; the negatives of each are other questions' positives, which do not answer."""
    pairs = zip(WORDS, WORDS[1:] + WORDS[:1], strict=True)
    texts = [build_passage("", f"the {word} of the {other} was in a city.") for word, other in pairs]
    return [
        Example(str(n), f"who wrote {word}?", ("x",), (texts[n],), (texts[n - 1], texts[n - 2], texts[n - 3]))
        for n, word in enumerate(WORDS)
    ]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_marked_bert(tmp_path_factory.mktemp("late") / "plain")


def task(folder: Path, recipe: ColbertRecipe = RECIPE, some: list[Example] | None = None) -> ColbertTask:
    return ColbertTask(InitialColbert.load(folder, recipe, device="cpu"), some or examples(), examples(), recipe)


def test_the_loss_in_the_batch_is_the_likelihood_of_the_positives(plain: Path) -> None:
    own = task(plain)
    own.module.eval()
    batch = build_list_batch(examples()[:3], 1, None)
    loss, measures = own.loss(batch)
    encoder = own.encoder()
    query_vectors = torch.from_numpy(encoder.encode_questions([example.question for example in examples()[:3]]))
    read = encoder.encode_passages([""] * 6, [one.text for one in batch.list_pairs()[1]])
    rows = [torch.from_numpy(read.vectors[a:b]) for a, b in zip(read.offsets[:-1], read.offsets[1:], strict=True)]
    scores = torch.stack([torch.stack([(q @ r.T).max(1).values.sum() for r in rows]) for q in query_vectors])
    hashes = [one.hash for one in batch.list_pairs()[1]]
    for row, gold in enumerate((0, 2, 4)):  # the same passage elsewhere in the batch is no negative
        for place, key in enumerate(hashes):
            if place != gold and key == hashes[gold]:
                scores[row, place] = -torch.inf
    expected = torch.nn.functional.cross_entropy(scores, torch.tensor([0, 2, 4]))
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-4)
    assert set(measures) == {"accuracy", "in_batch"}


def test_a_teacher_adds_the_divergence_of_whole_lists(plain: Path, tmp_path: Path) -> None:
    teacher = CrossEncoder.load(save_cross_encoder(tmp_path / "teacher"), device="cpu")
    some = add_teacher_scores(examples(), teacher, 3)
    both = task(plain, RECIPE, some)
    assert all(batch.lengths == [4] * 3 for batch in both.batches(0))
    loss, measures = both.loss(both.batches(0)[0])
    assert float(loss.detach()) == pytest.approx(
        float(measures["in_batch"]) + float(measures["distillation"]), rel=1e-5
    )
    alone = task(plain, replace(RECIPE, in_batch=False), some)
    loss, measures = alone.loss(alone.batches(0)[0])
    assert float(loss.detach()) == pytest.approx(float(measures["distillation"]), rel=1e-6)


def test_weights_move_and_the_rank_falls(plain: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    own = task(plain)
    before, rank = own.module.linear.weight.detach().clone(), own.evaluate()["average_rank"]
    optimizer = torch.optim.Adam(
        [parameter for parameter in own.module.parameters() if parameter.requires_grad], lr=2e-3
    )
    for epoch in range(8):
        for batch in own.batches(epoch):
            optimizer.zero_grad()
            own.loss(batch)[0].backward()
            optimizer.step()
    own.module.eval()
    assert not torch.equal(before, own.module.linear.weight)
    assert own.evaluate()["average_rank"] < rank
    own.save(tmp_path / "model")
    again = TokenEncoder.load(tmp_path / "model" / "colbert", device="cpu", dtype="float32")
    assert (again.encode_questions(["who?"]) == own.encoder().encode_questions(["who?"])).all()
    assert again.spec == TokenSpec(question_length=12, passage_length=24)


def test_a_colbert_goes_on_as_it_was(tmp_path: Path) -> None:
    folder = save_colbert(tmp_path / "colbert")
    own = task(folder)
    expected = TokenEncoder.load(folder, device="cpu", dtype="float32")
    assert (own.encoder().encode_questions(["who?"]) == expected.encode_questions(["who?"])).all()


def test_equal_epochs_have_equal_batches(plain: Path) -> None:
    one, two = task(plain), task(plain)
    assert one.batches(3) == two.batches(3) != one.batches(4)
    assert one.recipe() == two.recipe()


def test_what_cannot_be_trained_is_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no token '\[unused0\]'"):
        task(save_bert(tmp_path / "unmarked"))
    with pytest.raises(UsageError, match="name a --teacher"):
        task(plain, ColbertRecipe(in_batch=False))
    for wrong in ({"dim": 12}, {"ways": 1}, {"batch_size": 0}):
        with pytest.raises(UsageError):
            ColbertRecipe(**wrong)  # type: ignore[arg-type]
    assert get_objective("colbert").result.parts == {"colbert"}


@pytest.mark.parametrize("passages_at_once", [1, 2, 4])
def test_passages_in_parts_give_the_gradient_of_the_whole(plain: Path, passages_at_once: int) -> None:
    taught = [replace(example, scores=(3.0, 1.0, 0.5, 0.2)) for example in examples()]
    whole, split = (
        task(plain, replace(RECIPE, ways=3, passages_at_once=size), taught)
        for size in (RECIPE.passages_at_once, passages_at_once)
    )
    gradients = []
    for own in (whole, split):
        own.module.eval()
        loss, measures = own.loss(build_list_batch(taught[:3], 2, None))
        assert {"distillation", "in_batch"} <= set(measures)
        loss.backward()
        named = own.module.named_parameters()
        gradients.append({name: one.grad for name, one in named if one.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)
