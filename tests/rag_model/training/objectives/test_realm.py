"""REALM with tiny models over a tiny snapshot: candidates, loss, gradients and resuming."""

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rag_model.corpus.records import Passage
from rag_model.encoders.architecture import read_architecture
from rag_model.encoders.encoder import Encoder
from rag_model.encoders.masked_lm import TrainableMaskedLM
from rag_model.encoders.space import check_same_space
from rag_model.errors import InputError, RefusedError, StoreError, UsageError
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.texts import EpochBatches, TextBatch, TextSplit
from rag_model.training.finetuning import Finetuning, estimate_work
from rag_model.training.loop.checkpoint import read_metrics
from rag_model.training.loop.loop import train
from rag_model.training.moving_index import MovingSettings
from rag_model.training.objectives.ict import ICT
from rag_model.training.objectives.objective import Job, Objective
from rag_model.training.objectives.realm import REALM, RealmRecipe, RealmTask, RealmTraining
from rag_model.training.objectives.realm_model import (
    NULL,
    CandidateRetriever,
    Marginal,
    MaskedText,
    MaskingLimits,
    _reveals_masks,
    extract_words,
    mask_text,
)
from rag_model.training.origins import NamedModels
from tests.fixtures.forked_processes import SHARED, check_killed
from tests.fixtures.tiny_realm import ARTICLES, RECIPE, STEPS, load_realm, prepare, train_realm
from tests.fixtures.tiny_snapshot import publish_tiny

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("given"))


@pytest.fixture
def snapshot(inputs: Path) -> Snapshot:
    return Snapshot.open(str(inputs / "store"))


def load_task(inputs: Path, snapshot: Snapshot, recipe: RealmRecipe = RECIPE) -> RealmTask:
    return RealmTask(load_realm(inputs, frozen=recipe.freeze_encoders), snapshot, recipe)


def test_null_passage_is_first_and_the_own_passage_left_out(inputs: Path, snapshot: Snapshot) -> None:
    task = load_task(inputs, snapshot)
    for batch in task.batches(0):
        texts = task.mask_batch(batch)
        vectors = task.module.embed_texts(texts).detach().numpy()
        candidates = CandidateRetriever(snapshot, None, 4).retrieve(batch.rows, texts, vectors)
        assert candidates.mask.all()
        for row, passages in zip(batch.rows, candidates.passages, strict=True):
            source = snapshot.passages([row])[0]
            assert passages[0] is NULL
            assert len(passages) == 4
            assert source.id not in {passage.id for passage in passages}


def test_passage_with_the_same_text_is_left_out(inputs: Path, tmp_path: Path) -> None:
    """Texts are compared by words, without case, punctuation and spaces."""
    articles = {**ARTICLES, "Copy": "  THE KING of city a  was, aaa!"}
    snapshot = publish_tiny(Store.open(str(tmp_path / "store"), create=True), inputs / "encoder", articles, tmp_path)
    task = load_task(inputs, snapshot)
    texts = task.mask_batch(TextBatch(0, (0,)))
    vectors = task.module.embed_texts(texts).detach().numpy()
    candidates = CandidateRetriever(snapshot, None, 99).retrieve([0], texts, vectors)
    assert {passage.title for passage in candidates.passages[0]} == {"", *ARTICLES} - {"City a"}


def test_passage_that_overlaps_at_the_mask_is_left_out(inputs: Path, tmp_path: Path) -> None:
    """Windows of tokens overlap so: both contain the words around the mask, and neither contains the other."""
    articles = {
        "Left": "a river in the city of the king, and the king of rome was romulus in the war of music",
        "Right": "AND the king of Rome was Romulus, in the war of music: who wrote the theory of passage to query",
        "Other": "the king of rome was born",
    }
    snapshot = publish_tiny(Store.open(str(tmp_path / "store"), create=True), inputs / "encoder", articles, tmp_path)
    tokens = load_realm(inputs).reader.tokenizer
    start = articles["Left"].index("romulus")
    limits = MaskingLimits(window=60, max_masks=10, share=0.15)
    pieces = tokens.tokenize([articles["Left"]])[0]
    text = mask_text(articles["Left"], pieces, [(start, start + 7)], random.Random(1), tokens, limits)
    assert text.question == articles["Left"].replace("romulus", " ".join(["[MASK]"] * 7))
    encoder = Encoder.load(inputs / "encoder", "question", threads=1, device="cpu")
    query_vectors = encoder.encode_questions([text.question])
    candidates = CandidateRetriever(snapshot, None, 99).retrieve([0], [text], query_vectors)
    assert {passage.title for passage in candidates.passages[0]} == {"", "Other"}


def test_window_that_starts_just_before_the_mask_is_left_out() -> None:
    """It contains the hidden word, but not all the words around it."""
    article = "a river in the city of the king and the king of rome was romulus in the war of music"
    words = article.split()

    def window(first: int, end: int) -> Passage:
        text = " ".join(words[first:end])
        return Passage(f"1-{first}", "1", 1, "t", "", text, first, end - first, Passage.hash_of("t", text))

    source = window(0, 16)
    text = MaskedText(("the city of the king and the king of rome was romulus in the",), "who was it?", (), (), ())
    assert _reveals_masks(window(12, len(words)), source, text)
    assert not _reveals_masks(dataclasses.replace(window(12, len(words)), page_id="2"), source, text)
    assert not _reveals_masks(window(16, len(words)), source, text)


def test_masks_hide_only_wordpieces(inputs: Path, snapshot: Snapshot) -> None:
    task = load_task(inputs, snapshot)
    tokens = task.module.reader.tokenizer
    for batch in task.batches(0):
        passages = snapshot.passages(batch.rows)
        for passage, text in zip(passages, task.mask_batch(batch), strict=True):
            restored = list(text.ids)
            for position, target in zip(text.positions, text.targets, strict=True):
                assert restored[position] == tokens.mask_id
                restored[position] = target
            (pieces,) = tokens.tokenize([passage.text])
            assert any(pieces.ids[start : start + len(restored)] == restored for start in range(len(pieces.ids)))
            assert len(restored) <= tokens.max_tokens // 2 - 2
            assert 1 <= len(text.positions) <= RECIPE.most_masks
            assert all(clue in extract_words(passage.text) for clue in text.clues)
            assert text.question.split().count(tokens.mask_token) == len(text.positions)
    second_task = load_task(inputs, snapshot)
    assert second_task.mask_batch(second_task.batches(0)[0]) == task.mask_batch(task.batches(0)[0])
    assert second_task.mask_batch(second_task.batches(1)[0]) != task.mask_batch(task.batches(0)[0])


@pytest.mark.parametrize("marginal", ["sequence", "token"])
@torch.no_grad()
def test_loss_equals_that_of_single_candidates(inputs: Path, snapshot: Snapshot, marginal: Marginal) -> None:
    """Compute it with transformers alone: without batches and padding, with the logits of every token."""
    task = load_task(inputs, snapshot, dataclasses.replace(RECIPE, marginal=marginal))
    task.module.eval().double()
    batch = task.batches(0)[0]
    loss, measures = task.loss(batch)
    texts, encoders, reader = task.mask_batch(batch), task.module.encoders, task.module.reader
    total, gain = 0.0, 0.0
    for row, text in zip(batch.rows, texts, strict=True):
        query_vector = encoders.embed_questions([text.question])
        retriever = CandidateRetriever(snapshot, None, RECIPE.candidates)
        (candidates,) = retriever.retrieve([row], [text], query_vector.detach().float().numpy()).passages
        scores = [(query_vector @ encoders.embed_passages([passage]).T)[0, 0] for passage in candidates]
        weights = (torch.stack(scores).double() / RECIPE.temperature).softmax(0)
        likelihoods = []
        for passage in candidates:
            pieces = reader.tokenizer.tokenize([passage.text])[0].ids if passage is not NULL else []
            room = reader.tokenizer.max_tokens - 3 - len(text.ids)
            ids = [2, *text.ids, 3, *pieces[: min(room, RECIPE.passage_tokens)], 3]  # [CLS] x [SEP] z [SEP]
            types = [0] * (len(text.ids) + 2) + [1] * (len(ids) - len(text.ids) - 2)
            logits = reader.whole(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0]
            positions = [1 + position for position in text.positions]
            likelihoods.append(logits[positions].softmax(1)[range(len(positions)), list(text.targets)])
        p = torch.stack(likelihoods)  # (c, m)
        y = (weights @ p.prod(1)) if marginal == "sequence" else (weights @ p).prod()
        total -= float(y.log())
        gain += float(y.log() - p[0].log().sum())
    masks = sum(len(text.targets) for text in texts)
    assert float(loss) == pytest.approx(total / (len(texts) if marginal == "sequence" else masks), rel=1e-5)
    assert float(measures["utility"]) == pytest.approx(gain / len(texts), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_reach_the_trained_parts(inputs: Path, snapshot: Snapshot, frozen: bool) -> None:
    task = load_task(inputs, snapshot, dataclasses.replace(RECIPE, freeze_encoders=frozen))
    task.module.double().train()
    assert task.module.encoders.training != frozen, "frozen encoders have no dropout"
    loss, _ = task.loss(task.batches(0)[0])
    loss.backward()  # type: ignore[no-untyped-call]
    parts = {"encoders.question", "encoders.passage", "reader.whole"}
    parts_with_gradient = {
        part
        for part in parts
        for name, parameter in task.module.named_parameters()
        if name.startswith(part) and parameter.grad is not None and parameter.grad.abs().max() > 1e-9
    }
    assert parts_with_gradient == ({"reader.whole"} if frozen else parts)


def test_trained_parts_are_saved_as_a_pair_and_a_masked_model(inputs: Path, tmp_path: Path) -> None:
    task, result = train_realm(inputs, tmp_path / "run")
    assert result.best_measures["nll"] < result.initial_measures["nll"]
    question = Encoder.load(result.best_folder / "question", "question", threads=1, device="cpu")
    passage = Encoder.load(result.best_folder / "passage", threads=1, device="cpu")
    check_same_space(question.space(), passage.space())
    reader = TrainableMaskedLM.load(result.best_folder / "masked-lm")
    assert not reader.new_head
    trained = task.module.reader.whole.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in reader.whole.state_dict().items())
    rows = [row for row in read_metrics(tmp_path / "run") if row["kind"] == "train"]
    assert all(math.isfinite(row[name]) for row in rows for name in ("utility", "null_prior", "prior_entropy"))
    assert {row["candidates"] for row in rows} == {RECIPE.candidates - 1}


@SHARED
def test_killed_run_resumes_to_the_same_losses(inputs: Path, tmp_path: Path) -> None:
    check_killed(train_realm, inputs, tmp_path / "killed", 3)
    _, uninterrupted = train_realm(inputs, tmp_path / "whole")
    _, result = train_realm(inputs, tmp_path / "killed")
    assert read_metrics(tmp_path / "killed") == read_metrics(tmp_path / "whole")
    assert result.best_measures == uninterrupted.best_measures


def test_weights_that_are_not_finite_are_refused(inputs: Path, snapshot: Snapshot, tmp_path: Path) -> None:
    task = load_task(inputs, snapshot)
    with torch.no_grad():
        next(task.module.reader.parameters()).fill_(math.nan)
    with pytest.raises(RefusedError, match=r"step 1 has no loss, because reader\.\S+ of the model is not finite"):
        train(task, STEPS, tmp_path)


def test_candidates_with_equal_scores_have_equal_priors(inputs: Path, snapshot: Snapshot) -> None:
    task = load_task(inputs, snapshot)
    task.module.eval()
    with torch.no_grad():
        for parameter in task.module.encoders.question.parameters():
            parameter.zero_()  # the vector of every question is 0
    loss, measures = task.loss(task.batches(0)[0])
    assert loss.isfinite()
    assert float(measures["null_prior"]) == pytest.approx(1 / RECIPE.candidates)
    assert float(measures["prior_entropy"]) == pytest.approx(math.log(RECIPE.candidates))


def test_corpus_of_one_passage_has_only_the_null_passage(inputs: Path, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    snapshot = publish_tiny(store, inputs / "encoder", {"Alone": ARTICLES["City a"]}, tmp_path)
    task = load_task(inputs, snapshot, dataclasses.replace(RECIPE, batch_size=8))
    result = train(task, STEPS, tmp_path / "run")
    assert result.best_measures["utility"] == 0
    assert result.best_measures["null_prior"] == 1
    assert result.best_measures["nll"] < result.initial_measures["nll"], "the masked language model learns without them"


def test_held_out_texts_are_never_in_a_batch() -> None:
    split = TextSplit.hold_out(torch.arange(10).numpy(), 3)
    assert sorted([*split.train, *split.dev]) == list(range(10))
    assert len(split.dev) == 3
    rows = [row for batch in EpochBatches(split.train, 2, 1, 0) for row in batch.rows]
    assert len(set(rows)) == len(rows) == 6
    assert not {*rows} & {*split.dev.tolist()}
    assert [batch.rows for batch in EpochBatches(split.train, 2, 1, 1)] != [
        batch.rows for batch in EpochBatches(split.train, 2, 1, 0)
    ]


def test_invalid_recipe_snapshot_and_model_are_refused(inputs: Path, snapshot: Snapshot, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"candidates of \[realm\] is 1: use 2 or more"):
        RealmRecipe(candidates=1)
    with pytest.raises(StoreError, match="no snapshot or ref"):
        load_task(inputs, snapshot).search_snapshot("0" * 64)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError):
        TrainableMaskedLM.load(tmp_path)


@pytest.mark.parametrize("objective", [REALM, ICT], ids=lambda objective: objective.name)
def test_work_is_estimated_before_training(inputs: Path, snapshot: Snapshot, objective: Objective[Any]) -> None:
    store = Store.open(str(inputs / "store"))
    origins = objective.origins(store, snapshot, NamedModels(encoder=str(inputs / "encoder")))
    job = Job(store, snapshot, origins, objective.settings(), {"train": (), "dev": ()})
    work = estimate_work(Finetuning(objective, job))
    assert (work.sizes["texts"], "examples" in work.sizes) == (f"{len(ARTICLES)}", False)
    weights = (inputs / "encoder" / "model.safetensors").stat().st_size
    parts = 3 if objective is REALM else 2
    assert work.stages["train"] > 4 * parts * weights * 0.9
    assert work.sizes.get("rebuilds of the index", "1, ").startswith("1, ")


def test_rebuilds_are_counted_only_for_a_trained_passage_encoder(inputs: Path, snapshot: Snapshot) -> None:
    """A rebuild follows each step; with frozen encoders there is only the rebuild for the published model."""
    store = Store.open(str(inputs / "store"))
    origins = REALM.origins(store, snapshot, NamedModels())
    models = {part: read_architecture(Path(name)) for part, name in origins.names.items()}
    for frozen, rebuilds in ((False, 6), (True, 1)):
        recipe = dataclasses.replace(RECIPE, freeze_encoders=frozen)
        settings = RealmTraining(STEPS, recipe, MovingSettings(every=1))
        costs = REALM.costs(Job(store, snapshot, origins, settings, {}), models)
        assert costs.rebuilds == rebuilds
