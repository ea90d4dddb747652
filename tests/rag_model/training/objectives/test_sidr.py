"""A pair of encoders of weighted terms: it learns, its gradient, its folders, resuming, and what is refused."""

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


def pair_of(folder: Path, *, shared: bool = False) -> SidrPair:
    return SidrPair.load(folder, folder, dataclasses.replace(RECIPE, shared=shared), device="cpu")


@pytest.fixture(scope="module")
def done(tiny: Path, kings: list[Example], tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingResult, Path]:
    """A short training; its folder."""
    folder = tmp_path_factory.mktemp("done")
    return train(SidrTask(pair_of(tiny), kings, kings, RECIPE), SETTINGS, folder), folder


def test_it_learns_and_its_folders_are_a_pair_that_ranks_as_in_training(
    done: tuple[TrainingResult, Path], kings: list[Example]
) -> None:
    trained = done[0]
    assert trained.best_measures["average_rank"] < trained.initial_measures["average_rank"]
    assert {"bag_average_rank", "Success@5", "bag_Success@5"} <= set(trained.best_measures)
    asking, reading = (
        SparseEncoder.load(trained.best_folder / part, device="cpu", dtype="float32")
        for part in ("question", "passage")
    )
    assert asking.space().digest == reading.space().digest
    pool = list({one.hash: one for example in kings for one in (*example.positives, *example.negatives)}.values())
    dense = np.zeros((len(pool), reading.dim))
    rows = reading.encode_passages([one.title for one in pool], [one.text for one in pool])
    dense[np.repeat(np.arange(len(pool)), np.diff(rows.offsets)), rows.terms] = rows.weights / reading.spec.scale
    ranks = []
    for king, asked in zip(kings, asking.encode_questions([king.question for king in kings]), strict=True):
        scores = dense[:, asked[:, 0].astype(int)] @ asked[:, 1]
        gold = next(place for place, passage in enumerate(pool) if passage.hash == king.positives[0].hash)
        ranks.append(1 + int((scores > scores[gold]).sum()))
    assert np.mean(ranks) == pytest.approx(trained.best_measures["average_rank"], abs=0.5), (
        "but for the rounding to bytes"
    )


def test_scores_are_dense_products_and_bags_score_by_the_questions_weights(tiny: Path, kings: list[Example]) -> None:
    pair = pair_of(tiny).eval()
    questions, passages = [king.question for king in kings], [king.positives[0] for king in kings[:5]]
    with torch.no_grad():
        query_vectors, read = pair.question.encoder().encode_questions(questions), pair.embed_passages(passages)
        by_weights, by_bags = pair.scores(pair.encode_questions(questions), passages)
    dense = torch.zeros(len(questions), len(pair.question.model.terms))
    for row, own in enumerate(query_vectors):
        dense[row, own[:, 0].astype(int)] += torch.from_numpy(own[:, 1])
    assert torch.allclose(by_bags, dense @ read[1].float().T, atol=1e-2)
    assert (by_weights > by_bags.new_zeros(())).all()


def test_in_mixed_precision_it_trains_and_scores_in_float32(tiny: Path, kings: list[Example], tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, precision="bf16", max_steps=2, evaluate_every=2)
    trained = train(SidrTask(pair_of(tiny), kings, kings, RECIPE), settings, tmp_path)
    assert trained.steps == 2
    pair, passages = pair_of(tiny).eval(), [king.positives[0] for king in kings[:5]]
    query_vectors = pair.encode_questions([king.question for king in kings[:3]])
    with torch.autocast("cpu", torch.bfloat16):
        by_weights, by_bags = pair.scores(query_vectors, passages)
    assert by_weights.dtype == torch.float32
    assert torch.equal(by_bags, pair.scores(query_vectors, passages)[1])


@pytest.mark.parametrize("shared", [True, False])
def test_the_gradient_reaches_both_encoders_and_all_that_weighs(tiny: Path, kings: list[Example], shared: bool) -> None:
    pair = pair_of(tiny, shared=shared).double()
    task = SidrTask(pair, kings, kings, RECIPE)
    task.loss(task.batches(0)[0])[0].backward()  # type: ignore[no-untyped-call]
    learned = {name: one for name, one in pair.named_parameters() if one.requires_grad}
    assert all(one.grad is not None and bool(one.grad.abs().max() > 0) for one in learned.values() if one.dim() > 1)
    assert {name.partition(".")[0] for name in learned} == ({"question"} if shared else {"question", "passage"})
    words = next(one for name, one in learned.items() if "word_embeddings" in name)
    held = words.grad.abs().sum(1) > 0  # type: ignore[union-attr]
    batch = task.batches(0)[0]
    bags = [
        pair.embed_questions([example.question for example in batch.examples])[1],
        pair.embed_passages(batch.passages)[1],
    ]
    assert held.sum() > torch.cat(bags).any(0).sum(), "words that no text has are weighed too"


def test_a_run_that_was_killed_goes_on_to_the_same_losses(
    done: tuple[TrainingResult, Path], tiny: Path, kings: list[Example], tmp_path: Path
) -> None:
    expected = [row["loss"] for row in read_metrics(done[1]) if row["kind"] == "train"]
    seen = list[int]()

    def kill(kind: str, step: int, steps: int, values: object) -> None:
        seen.append(step)
        if kind == "train" and step == 17:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(SidrTask(pair_of(tiny), kings, kings, RECIPE), SETTINGS, tmp_path, kill)
    train(SidrTask(pair_of(tiny), kings, kings, RECIPE), SETTINGS, tmp_path)
    assert [row["loss"] for row in read_metrics(tmp_path) if row["kind"] == "train"] == expected


def test_a_trained_one_is_trained_on_with_its_own_settings(done: tuple[TrainingResult, Path]) -> None:
    best = done[0].best_folder
    again = SidrPair.load(best / "question", best / "passage", device="cpu")
    assert again.passage.spec.passage_terms == 24
    told = json.loads((best / "question" / "bookwheel.json").read_text())
    assert told["asks"]["pooling"].startswith("max elu1p, 24 terms")


def test_a_model_that_is_broken_from_the_start_is_named(tiny: Path, kings: list[Example], tmp_path: Path) -> None:
    pair = pair_of(tiny)
    with torch.no_grad():
        pair.passage.model.norm.weight[0] = float("nan")
    with pytest.raises(RefusedError, match=r"passage\.model\.norm\.weight of the model is not finite"):
        train(SidrTask(pair, kings, kings, dataclasses.replace(RECIPE)), SETTINGS, tmp_path)


def test_what_cannot_be_is_refused(tiny: Path, kings: list[Example], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"terms of \[sidr\] is 0"):
        SidrRecipe(terms=0)
    with pytest.raises(UsageError, match=r"temperature of \[sidr\] is nan"):
        SidrRecipe(temperature=float("nan"))
    bare = [Example("1", "who?", ("x",))]
    with pytest.raises(InputError, match="no example has a positive passage"):
        SidrTask(pair_of(tiny), bare, kings, RECIPE)
    with pytest.raises(UsageError, match="different tokenizers"):
        SidrPair.load(tiny, save_marked_bert(tmp_path / "marked"), device="cpu")
    splade = save_splade(tmp_path / "splade")
    with pytest.raises(UsageError, match="weighs terms by relu"):
        SidrPair.load(splade, splade, device="cpu")
