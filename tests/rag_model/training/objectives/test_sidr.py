"""Training of a pair of SiDR encoders, which weight terms."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rag_model.encoders.sparse_encoder import SparseEncoder
from rag_model.errors import InputError, RefusedError, UsageError
from rag_model.training.data.examples import Example
from rag_model.training.loop.checkpoint import read_metrics
from rag_model.training.loop.loop import TrainingResult, train
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.objectives.sidr import SidrPair, SidrRecipe, SidrTask
from tests.fixtures.tiny_colbert import save_marked_bert
from tests.fixtures.tiny_splade import save_splade

SETTINGS = LoopSettings(max_steps=30, learning_rate=2e-3, evaluate_every=15, checkpoint_every=10, cpu=True)
RECIPE = SidrRecipe(batch_size=8, terms=24, temperature=20.0)


def load_pair(folder: Path, *, shared: bool = False) -> SidrPair:
    return SidrPair.load(folder, folder, dataclasses.replace(RECIPE, shared=shared), device="cpu")


@pytest.fixture(scope="module")
def trained_pair(
    tiny: Path, kings: list[Example], tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainingResult, Path]:
    """Return the result of a short training, and its folder."""
    folder = tmp_path_factory.mktemp("done")
    return train(SidrTask(load_pair(tiny), kings, kings, RECIPE), SETTINGS, folder), folder


def test_training_improves_the_rank_and_saves_a_pair(
    trained_pair: tuple[TrainingResult, Path], kings: list[Example]
) -> None:
    result = trained_pair[0]
    assert result.best_measures["average_rank"] < result.initial_measures["average_rank"]
    assert {"bag_average_rank", "Success@5", "bag_Success@5"} <= set(result.best_measures)
    asker, reader = (
        SparseEncoder.load(result.best_folder / part, device="cpu", dtype="float32") for part in ("question", "passage")
    )
    assert asker.space().digest == reader.space().digest
    pool = list({passage.hash: passage for king in kings for passage in (*king.positives, *king.negatives)}.values())
    vectors = np.zeros((len(pool), reader.dim))
    rows = reader.encode_passages([passage.title for passage in pool], [passage.text for passage in pool])
    vectors[np.repeat(np.arange(len(pool)), np.diff(rows.offsets)), rows.terms] = rows.weights / reader.spec.scale
    ranks = []
    for king, terms in zip(kings, asker.encode_questions([king.question for king in kings]), strict=True):
        scores = vectors[:, terms[:, 0].astype(int)] @ terms[:, 1]
        gold = next(index for index, passage in enumerate(pool) if passage.hash == king.positives[0].hash)
        ranks.append(1 + int((scores > scores[gold]).sum()))
    # The saved encoder rounds weights to bytes.
    assert np.mean(ranks) == pytest.approx(result.best_measures["average_rank"], abs=0.5)


def test_bag_scores_are_products_with_the_question_weights(tiny: Path, kings: list[Example]) -> None:
    pair = load_pair(tiny).eval()
    questions, passages = [king.question for king in kings], [king.positives[0] for king in kings[:5]]
    with torch.no_grad():
        query_vectors = pair.question.encoder().encode_questions(questions)
        passage_vectors = pair.embed_passages(passages)
        by_weights, by_bags = pair.scores(pair.encode_questions(questions), passages)
    question_weights = torch.zeros(len(questions), len(pair.question.model.term_mask))
    for row, terms in enumerate(query_vectors):
        question_weights[row, terms[:, 0].astype(int)] += torch.from_numpy(terms[:, 1])
    assert torch.allclose(by_bags, question_weights @ passage_vectors[1].float().T, atol=1e-2)
    assert (by_weights > by_bags.new_zeros(())).all()


def test_scores_are_float32_in_mixed_precision(tiny: Path, kings: list[Example], tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, precision="bf16", max_steps=2, evaluate_every=2)
    result = train(SidrTask(load_pair(tiny), kings, kings, RECIPE), settings, tmp_path)
    assert result.steps == 2
    pair, passages = load_pair(tiny).eval(), [king.positives[0] for king in kings[:5]]
    query_vectors = pair.encode_questions([king.question for king in kings[:3]])
    with torch.autocast("cpu", torch.bfloat16):
        by_weights, by_bags = pair.scores(query_vectors, passages)
    assert by_weights.dtype == torch.float32
    assert torch.equal(by_bags, pair.scores(query_vectors, passages)[1])


@pytest.mark.parametrize("shared", [True, False])
def test_gradients_reach_both_encoders_and_all_words(tiny: Path, kings: list[Example], shared: bool) -> None:
    pair = load_pair(tiny, shared=shared).double()
    task = SidrTask(pair, kings, kings, RECIPE)
    task.loss(task.batches(0)[0])[0].backward()  # type: ignore[no-untyped-call]
    weights = {name: weight for name, weight in pair.named_parameters() if weight.requires_grad}
    matrices = [weight for weight in weights.values() if weight.dim() > 1]
    assert all(matrix.grad is not None and bool(matrix.grad.abs().max() > 0) for matrix in matrices)
    assert {name.partition(".")[0] for name in weights} == ({"question"} if shared else {"question", "passage"})
    embeddings = next(weight for name, weight in weights.items() if "word_embeddings" in name)
    has_gradient = embeddings.grad.abs().sum(1) > 0  # type: ignore[union-attr]
    batch = task.batches(0)[0]
    question_bags = pair.embed_questions([example.question for example in batch.examples])[1]
    bags = [question_bags, pair.embed_passages(batch.passages)[1]]
    assert has_gradient.sum() > torch.cat(bags).any(0).sum(), "words that occur in no text have weights too"


def test_interrupted_run_resumes_to_the_same_losses(
    trained_pair: tuple[TrainingResult, Path], tiny: Path, kings: list[Example], tmp_path: Path
) -> None:
    expected = [row["loss"] for row in read_metrics(trained_pair[1]) if row["kind"] == "train"]

    def interrupt(kind: str, step: int, steps: int, values: object) -> None:
        if kind == "train" and step == 17:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(SidrTask(load_pair(tiny), kings, kings, RECIPE), SETTINGS, tmp_path, interrupt)
    train(SidrTask(load_pair(tiny), kings, kings, RECIPE), SETTINGS, tmp_path)
    assert [row["loss"] for row in read_metrics(tmp_path) if row["kind"] == "train"] == expected


def test_trained_pair_keeps_its_settings(trained_pair: tuple[TrainingResult, Path]) -> None:
    best = trained_pair[0].best_folder
    pair = SidrPair.load(best / "question", best / "passage", device="cpu")
    assert pair.passage.spec.passage_terms == 24
    config = json.loads((best / "question" / "bookwheel.json").read_text())
    assert config["asks"]["pooling"].startswith("max elu1p, 24 terms")


def test_weights_that_are_not_finite_are_refused(tiny: Path, kings: list[Example], tmp_path: Path) -> None:
    pair = load_pair(tiny)
    with torch.no_grad():
        pair.passage.model.norm.weight[0] = float("nan")
    with pytest.raises(RefusedError, match=r"passage\.model\.norm\.weight of the model is not finite"):
        train(SidrTask(pair, kings, kings, dataclasses.replace(RECIPE)), SETTINGS, tmp_path)


def test_invalid_recipe_examples_and_models_are_refused(tiny: Path, kings: list[Example], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"terms of \[sidr\] is 0"):
        SidrRecipe(terms=0)
    with pytest.raises(UsageError, match=r"temperature of \[sidr\] is nan"):
        SidrRecipe(temperature=float("nan"))
    without_passages = [Example("1", "who?", ("x",))]
    with pytest.raises(InputError, match="no example has a positive passage"):
        SidrTask(load_pair(tiny), without_passages, kings, RECIPE)
    with pytest.raises(UsageError, match="different tokenizers"):
        SidrPair.load(tiny, save_marked_bert(tmp_path / "marked"), device="cpu")
    splade = save_splade(tmp_path / "splade")
    with pytest.raises(UsageError, match="weighs terms by relu"):
        SidrPair.load(splade, splade, device="cpu")
