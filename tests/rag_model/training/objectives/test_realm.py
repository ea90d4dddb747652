"""A REALM of tiny models over a tiny snapshot: its candidates, its gradients, and what it survives."""

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
from rag_model.errors import InputError, RefusedError, UsageError
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
from tests.fixtures.tiny_realm import ARTICLES, RECIPE, STEPS, filled, prepare, realm_of
from tests.fixtures.tiny_snapshot import publish_tiny

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="session")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("given"))


@pytest.fixture
def snapshot(given: Path) -> Snapshot:
    return Snapshot.open(str(given / "store"))


def a_task(given: Path, snapshot: Snapshot, recipe: RealmRecipe = RECIPE) -> RealmTask:
    return RealmTask(realm_of(given, frozen=recipe.freeze_encoders), snapshot, recipe)


def test_the_null_passage_is_first_and_the_own_passage_is_gone(given: Path, snapshot: Snapshot) -> None:
    task = a_task(given, snapshot)
    for batch in task.batches(0):
        texts = task.mask_batch(batch)
        vectors = task.module.embed_texts(texts).detach().numpy()
        found = CandidateRetriever(snapshot, None, 4).retrieve(batch.rows, texts, vectors)
        assert found.mask.all()
        for row, passage in zip(batch.rows, found.passages, strict=True):
            own = snapshot.passages([row])[0]
            assert passage[0] is NULL
            assert len(passage) == 4
            assert own.id not in {one.id for one in passage}


def test_a_passage_with_the_same_text_is_gone_too(given: Path, tmp_path: Path) -> None:
    """Compared by words, whatever their case, marks and spaces."""
    told = {**ARTICLES, "Copy": "  THE KING of city a  was, aaa!"}
    snapshot = publish_tiny(Store.open(str(tmp_path / "store"), create=True), given / "encoder", told, tmp_path)
    task = a_task(given, snapshot)
    texts = task.mask_batch(TextBatch(0, (0,)))
    found = CandidateRetriever(snapshot, None, 99).retrieve([0], texts, task.module.embed_texts(texts).detach().numpy())
    assert {one.title for one in found.passages[0]} == {"", *ARTICLES} - {"City a"}


def test_a_passage_that_overlaps_at_the_mask_is_gone(given: Path, tmp_path: Path) -> None:
    """As windows of tokens do: both have the words around the mask, and neither holds the other."""
    told = {
        "Left": "a river in the city of the king, and the king of rome was romulus in the war of music",
        "Right": "AND the king of Rome was Romulus, in the war of music: who wrote the theory of passage to query",
        "Other": "the king of rome was born",
    }
    snapshot = publish_tiny(Store.open(str(tmp_path / "store"), create=True), given / "encoder", told, tmp_path)
    tokens = realm_of(given).reader.tokenizer
    start = told["Left"].index("romulus")
    limits = MaskingLimits(window=60, max_masks=10, share=0.15)
    text = mask_text(
        told["Left"], tokens.tokenize([told["Left"]])[0], [(start, start + 7)], random.Random(1), tokens, limits
    )
    assert (
        text.question
        == "a river in the city of the king, and the king of rome was " + 7 * "[MASK] " + "in the war of music"
    )
    query_vectors = Encoder.load(given / "encoder", "question", threads=1, device="cpu").encode_questions(
        [text.question]
    )
    found = CandidateRetriever(snapshot, None, 99).retrieve([0], [text], query_vectors)
    assert {one.title for one in found.passages[0]} == {"", "Other"}


def test_a_window_that_begins_just_before_the_mask_is_gone() -> None:
    """It holds the hidden word, but not all the words around it."""
    words = [
        "a",
        "river",
        "in",
        "the",
        "city",
        "of",
        "the",
        "king",
        "and",
        "the",
        "king",
        "of",
        "rome",
        "was",
        "romulus",
        "in",
        "the",
        "war",
        "of",
        "music",
    ]

    def window(first: int, end: int) -> Passage:
        text = " ".join(words[first:end])
        return Passage(f"1-{first}", "1", 1, "t", "", text, first, end - first, Passage.hash_of("t", text))

    source = window(0, 16)
    text = MaskedText(("the city of the king and the king of rome was romulus in the",), "who was it?", (), (), ())
    assert _reveals_masks(window(12, len(words)), source, text)
    assert not _reveals_masks(dataclasses.replace(window(12, len(words)), page_id="2"), source, text)
    assert not _reveals_masks(window(16, len(words)), source, text)


def test_masks_hide_wordpieces_and_nothing_else(given: Path, snapshot: Snapshot) -> None:
    task = a_task(given, snapshot)
    tokens = task.module.reader.tokenizer
    for batch in task.batches(0):
        passages = snapshot.passages(batch.rows)
        for passage, text in zip(passages, task.mask_batch(batch), strict=True):
            restored = list(text.ids)
            for place, target in zip(text.positions, text.targets, strict=True):
                assert restored[place] == tokens.mask_id
                restored[place] = target
            (pieces,) = tokens.tokenize([passage.text])
            assert any(pieces.ids[at : at + len(restored)] == restored for at in range(len(pieces.ids)))
            assert len(restored) <= tokens.max_tokens // 2 - 2
            assert 1 <= len(text.positions) <= RECIPE.most_masks
            assert all(clue in extract_words(passage.text) for clue in text.clues)
            assert text.question.split().count(tokens.mask_token) == len(text.positions)
    again = a_task(given, snapshot)
    assert again.mask_batch(again.batches(0)[0]) == task.mask_batch(task.batches(0)[0])
    assert again.mask_batch(again.batches(1)[0]) != task.mask_batch(task.batches(0)[0])


@pytest.mark.parametrize("marginal", ["sequence", "token"])
@torch.no_grad()
def test_the_loss_is_that_of_one_candidate_at_a_time(given: Path, snapshot: Snapshot, marginal: Marginal) -> None:
    """The whole again with transformers alone: no batches, no padding, logits of every token."""
    task = a_task(given, snapshot, dataclasses.replace(RECIPE, marginal=marginal))
    task.module.eval().double()
    batch = task.batches(0)[0]
    loss, measures = task.loss(batch)
    texts, encoders, reader = task.mask_batch(batch), task.module.encoders, task.module.reader
    total, gain = 0.0, 0.0
    for row, text in zip(batch.rows, texts, strict=True):
        asked = encoders.embed_questions([text.question])
        (some,) = (
            CandidateRetriever(snapshot, None, RECIPE.candidates)
            .retrieve([row], [text], asked.detach().float().numpy())
            .passages
        )
        weights = (
            torch.stack([(asked @ encoders.embed_passages([one]).T)[0, 0] / RECIPE.temperature for one in some])
            .double()
            .softmax(0)
        )
        likelihoods = []
        for one in some:
            pieces = reader.tokenizer.tokenize([one.text])[0].ids if one is not NULL else []
            room = reader.tokenizer.max_tokens - 3 - len(text.ids)
            ids = [2, *text.ids, 3, *pieces[: min(room, RECIPE.passage_tokens)], 3]  # [CLS] x [SEP] z [SEP]
            types = [0] * (len(text.ids) + 2) + [1] * (len(ids) - len(text.ids) - 2)
            logits = reader.whole(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0]
            places = [1 + place for place in text.positions]
            likelihoods.append(logits[places].softmax(1)[range(len(places)), list(text.targets)])
        p = torch.stack(likelihoods)  # (c, m)
        y = (weights @ p.prod(1)) if marginal == "sequence" else (weights @ p).prod()
        total -= float(y.log())
        gain += float(y.log() - p[0].log().sum())
    masks = sum(len(text.targets) for text in texts)
    assert float(loss) == pytest.approx(total / (len(texts) if marginal == "sequence" else masks), rel=1e-5)
    assert float(measures["utility"]) == pytest.approx(gain / len(texts), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_reach_what_learns(given: Path, snapshot: Snapshot, frozen: bool) -> None:
    task = a_task(given, snapshot, dataclasses.replace(RECIPE, freeze_encoders=frozen))
    task.module.double().train()
    assert task.module.encoders.training != frozen, "no dropout in what does not learn"
    loss, _ = task.loss(task.batches(0)[0])
    loss.backward()  # type: ignore[no-untyped-call]
    parts = {"encoders.question", "encoders.passage", "reader.whole"}
    reached = {
        part
        for part in parts
        for name, one in task.module.named_parameters()
        if name.startswith(part) and one.grad is not None and one.grad.abs().max() > 1e-9
    }
    assert reached == ({"reader.whole"} if frozen else parts)


def test_what_is_learned_is_saved_and_opens_as_a_pair_and_a_masked_model(given: Path, tmp_path: Path) -> None:
    task, done = filled(given, tmp_path / "run")
    assert done.best_measures["nll"] < done.initial_measures["nll"]
    question = Encoder.load(done.best_folder / "question", "question", threads=1, device="cpu")
    passage = Encoder.load(done.best_folder / "passage", threads=1, device="cpu")
    check_same_space(question.space(), passage.space())
    reader = TrainableMaskedLM.load(done.best_folder / "masked-lm")
    assert not reader.new_head
    trained = task.module.reader.whole.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in reader.whole.state_dict().items())
    rows = [row for row in read_metrics(tmp_path / "run") if row["kind"] == "train"]
    assert all(math.isfinite(row[name]) for row in rows for name in ("utility", "null_prior", "prior_entropy"))
    assert {row["candidates"] for row in rows} == {RECIPE.candidates - 1}


@SHARED
def test_a_killed_run_goes_on_to_the_same_losses(given: Path, tmp_path: Path) -> None:
    check_killed(filled, given, tmp_path / "killed", 3)
    _, whole = filled(given, tmp_path / "whole")
    _, done = filled(given, tmp_path / "killed")
    assert read_metrics(tmp_path / "killed") == read_metrics(tmp_path / "whole")
    assert done.best_measures == whole.best_measures


def test_a_model_that_is_broken_from_the_start_is_named(given: Path, snapshot: Snapshot, tmp_path: Path) -> None:
    task = a_task(given, snapshot)
    with torch.no_grad():
        next(task.module.reader.parameters()).fill_(math.nan)
    with pytest.raises(RefusedError, match=r"step 1 has no loss, because reader\.\S+ of the model is not finite"):
        train(task, STEPS, tmp_path)


def test_candidates_that_all_score_the_same_count_the_same(given: Path, snapshot: Snapshot) -> None:
    task = a_task(given, snapshot)
    task.module.eval()
    with torch.no_grad():
        for parameter in task.module.encoders.question.parameters():
            parameter.zero_()  # every question's vector is 0
    loss, measures = task.loss(task.batches(0)[0])
    assert loss.isfinite()
    assert float(measures["null_prior"]) == pytest.approx(1 / RECIPE.candidates)
    assert float(measures["prior_entropy"]) == pytest.approx(math.log(RECIPE.candidates))


def test_a_corpus_of_one_passage_leaves_the_null_passage(given: Path, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    snapshot = publish_tiny(store, given / "encoder", {"Alone": ARTICLES["City a"]}, tmp_path)
    task = a_task(given, snapshot, dataclasses.replace(RECIPE, batch_size=8))
    done = train(task, STEPS, tmp_path / "run")
    assert done.best_measures["utility"] == 0
    assert done.best_measures["null_prior"] == 1
    assert done.best_measures["nll"] < done.initial_measures["nll"], "the masked language model learns without passages"


def test_texts_held_out_are_never_learned_from() -> None:
    split = TextSplit.hold_out(torch.arange(10).numpy(), 3)
    assert sorted([*split.train, *split.dev]) == list(range(10))
    assert len(split.dev) == 3
    taken = [row for batch in EpochBatches(split.train, 2, 1, 0) for row in batch.rows]
    assert len(set(taken)) == len(taken) == 6
    assert not {*taken} & {*split.dev.tolist()}
    assert [batch.rows for batch in EpochBatches(split.train, 2, 1, 1)] != [
        batch.rows for batch in EpochBatches(split.train, 2, 1, 0)
    ]


def test_what_does_not_fit_is_refused(given: Path, snapshot: Snapshot, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"candidates of \[realm\] is 1: use 2 or more"):
        RealmRecipe(candidates=1)
    with pytest.raises(UsageError, match="checkpoint searched snapshot 000000000000"):
        a_task(given, snapshot).search_snapshot("0" * 64)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError):
        TrainableMaskedLM.load(tmp_path)


@pytest.mark.parametrize("objective", [REALM, ICT], ids=lambda one: one.name)
def test_the_price_is_known_before(given: Path, snapshot: Snapshot, objective: Objective[Any]) -> None:
    store = Store.open(str(given / "store"))
    origins = objective.origins(store, snapshot, NamedModels(encoder=str(given / "encoder")))
    job = Job(store, snapshot, origins, objective.settings(), {"train": (), "dev": ()})
    work = estimate_work(Finetuning(objective, job))
    assert (work.sizes["texts"], "examples" in work.sizes) == (f"{len(ARTICLES)}", False)
    weights = (given / "encoder" / "model.safetensors").stat().st_size
    parts = 3 if objective is REALM else 2
    assert work.stages["train"] > 4 * parts * weights * 0.9
    assert work.sizes.get("rebuilds of the index", "1, ").startswith("1, ")


def test_an_index_moves_only_with_a_passage_encoder_that_learns(given: Path, snapshot: Snapshot) -> None:
    """Rebuilds begin after each step; of frozen encoders there is one, of the published model."""
    store = Store.open(str(given / "store"))
    origins = REALM.origins(store, snapshot, NamedModels())
    models = {part: read_architecture(Path(name)) for part, name in origins.names.items()}
    for frozen, wanted in ((False, 6), (True, 1)):
        recipe = dataclasses.replace(RECIPE, freeze_encoders=frozen)
        settings = RealmTraining(STEPS, recipe, MovingSettings(every=1))
        costs = REALM.costs(Job(store, snapshot, origins, settings, {}), models)
        assert costs.rebuilds == wanted
