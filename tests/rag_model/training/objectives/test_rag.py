"""RAG fine-tuning over a small real snapshot: what learns, what stays, what is found, and when it is refused."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rag_model.encoders.spec import EncoderSpec
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import InputError, RefusedError, UsageError
from rag_model.evaluation.answers.collapse import CollapsedError, CollapseLimits
from rag_model.generate.load import load_generator
from rag_model.generate.rag import Rag, Variant
from rag_model.generate.rag_folder import load_rag
from rag_model.reading.marginal import MarginalReader
from rag_model.retrieve.factory import open_retriever
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import Example
from rag_model.training.loop.checkpoint import read_metrics
from rag_model.training.loop.loop import train
from rag_model.training.objectives.rag import LOOP, RagRecipe, RagTask
from tests.fixtures.tiny import save_bert
from tests.fixtures.tiny_generators import save_bart, save_llama
from tests.fixtures.tiny_snapshot import publish_tiny

ARTICLES = {f"City {letter}": f"the king of city {letter} was {letter * 3}." for letter in "abcdefghijkl"}
EXAMPLES = [Example(f"q{x}", f"who was the king of city {x}?", (x * 3,)) for x in "abcdefgh"]
DEV = [Example(f"d{x}", f"city {x}: who was king?", (x * 3, "king")) for x in "ijkl"]
RECIPE = RagRecipe(k=3, temperature=0.1, batch_size=4, answered=2, max_new_tokens=4, refuse_collapse=False)
STEPS = replace(LOOP, max_steps=4, evaluate_every=2, checkpoint_every=2, learning_rate=1e-3, cpu=True)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def generators(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("generators")
    return {"bart": save_bart(base / "bart"), "llama": save_llama(base / "llama")}


@pytest.fixture(scope="module")
def snapshot(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    store = Store.open(str(tmp_path_factory.mktemp("store")), create=True)
    return publish_tiny(store, encoder, ARTICLES, tmp_path_factory.mktemp("work"), words=True)


@pytest.fixture
def task_of(encoder: Path, generators: dict[str, Path], snapshot: Snapshot) -> Any:
    def task_of(
        recipe: RagRecipe = RECIPE,
        *,
        kind: Variant = "token",
        family: str = "bart",
        examples: Sequence[Example] = EXAMPLES,
        dev: Sequence[Example] = DEV,
        over: Snapshot = snapshot,
    ) -> RagTask:
        question = TrainableEncoder.load(encoder, "question", device="cpu")
        rag = Rag(question, load_generator(generators[family], device="cpu"), recipe.build_model_settings(kind))
        return RagTask(rag, over, examples, dev, recipe, {"generator": family})

    return task_of


@pytest.mark.parametrize(("kind", "family"), [("token", "bart"), ("sequence", "bart"), ("token", "llama")])
def test_it_learns_and_the_passages_stay(
    task_of: Any, tmp_path: Path, kind: Variant, family: str, snapshot: Snapshot
) -> None:
    task = task_of(kind=kind, family=family)
    before = {name: tensor.clone() for name, tensor in task.module.named_parameters()}
    trained = train(task, replace(STEPS, max_steps=12, evaluate_every=12), tmp_path)
    assert trained.best_measures["nll"] < trained.initial_measures["nll"]
    changed = {name for name, tensor in task.module.named_parameters() if not torch.equal(tensor, before[name])}
    assert any(name.startswith("question.") for name in changed), "answers alone teach the question encoder"
    assert any(name.startswith("body.") for name in changed)
    rag = load_rag(trained.best_folder, device="cpu")
    assert rag.settings == task.module.settings
    assert rag.question.space().digest == (snapshot.space or {})["digest"]
    again = RagTask(rag, snapshot, EXAMPLES, DEV, RECIPE)
    with torch.no_grad():
        assert dict(again.evaluate()) == pytest.approx(dict(trained.best_measures), abs=1e-4)
    assert {"nll", "Success@3", "EM", "F1", "unchanged", "distinct", "spread"} == set(trained.best_measures)


def test_the_gradient_reaches_the_question_encoder_through_the_prior(task_of: Any) -> None:
    """With one passage p(z|x) is 1 whatever is asked, and nothing is to be learned about what to find."""
    for k, learns in ((1, False), (3, True)):
        task = task_of(replace(RECIPE, k=k))
        loss, measures = task.loss(task.batches(0)[0])
        loss.backward()
        norms = [float(p.grad.norm()) for p in task.module.question.parameters() if p.grad is not None]
        assert (max(norms) > 1e-6) == learns
        assert (float(measures["prior_entropy"]) > 1e-6) == learns


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_with_bm25_the_passages_are_weighed_by_its_scores(
    task_of: Any, snapshot: Snapshot, tmp_path: Path, kind: Variant
) -> None:
    recipe = replace(RECIPE, retriever="bm25", weighed_by="scores", temperature=2.0, label_smoothing=0.0)
    task = task_of(recipe, kind=kind)
    task.module.eval()
    batch = task.batches(0)[0]
    found = open_retriever(snapshot, "bm25").search(questions_of(batch), 3)
    scores = torch.zeros(len(batch), 3)  # a passage that BM25 does not find scores 0
    for place, hits in enumerate(found):
        scores[place, : len(hits)] = torch.tensor([hit.score for hit in hits])
    assert scores[0, 0] > scores[0, 2]
    recalled = task._retrieve_batch(batch, torch.zeros(len(batch), 32))
    assert torch.allclose(task._compute_logits(torch.zeros(len(batch), 32), recalled), scores, atol=1e-5)
    loss, _ = task.loss(batch)
    given = task._encode_inputs(batch, recalled)
    spread = torch.log_softmax(task.module.generator.logits(*given), -1)  # (b, k, l, v)
    log_p = spread.gather(-1, given[1].tokens[:, None, :, None].expand(-1, 3, -1, 1))[..., 0]  # (b, k, l)
    prior = torch.log_softmax(scores / 2.0, 1)
    mask = given[1].mask
    if kind == "sequence":
        expected = -torch.logsumexp(prior + (log_p * mask[:, None]).sum(2), 1).mean()
    else:
        expected = -(torch.logsumexp(prior[..., None] + log_p, 1) * mask).sum(1).mean()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    trained = train(task_of(recipe, kind=kind), STEPS, tmp_path)
    rag = load_rag(trained.best_folder, device="cpu")
    assert rag.settings.weighed_by == "scores"
    reader = MarginalReader(open_retriever(snapshot, "bm25", products=True, encoder=rag.question), rag)
    (answer,) = reader.answer([batch[0].example.question])
    weights = torch.softmax(torch.tensor([one.hit.score for one in answer.support]) / 2.0, 0)
    assert [one.weight for one in answer.support] == pytest.approx(weights.tolist(), rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "learns"),
    [
        ({"frozen": "question"}, {"body"}),
        ({"frozen": "generator"}, {"question"}),
        ({"weighed_by": "scores", "retriever": "bm25"}, {"body"}),
        ({}, {"body", "question"}),
    ],
)
def test_what_is_frozen_stays(task_of: Any, tmp_path: Path, changes: dict[str, Any], learns: set[str]) -> None:
    task = task_of(replace(RECIPE, **changes))
    before = {name: tensor.clone() for name, tensor in task.module.named_parameters()}
    train(task, STEPS, tmp_path)
    changed = {name for name, tensor in task.module.named_parameters() if not torch.equal(tensor, before[name])}
    assert {name.partition(".")[0] for name in changed} == learns
    task.module.train()
    assert {name for name in ("question", "body") if getattr(task.module, name).training} == learns


def test_a_killed_run_goes_on_to_the_same_losses(task_of: Any, tmp_path: Path) -> None:
    train(task_of(), STEPS, tmp_path / "whole")

    class Killed(Exception):  # noqa: N818
        """As SIGKILL ends it, but for the test's sake."""

    def kill(kind: str, step: int, steps: int, values: Any) -> None:
        if step == 3:
            raise Killed

    with pytest.raises(Killed):
        train(task_of(), STEPS, tmp_path / "twice", kill)
    train(task_of(), STEPS, tmp_path / "twice")
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "twice")


def test_passages_are_found_by_the_encoder_as_it_is_by_then(task_of: Any, snapshot: Snapshot) -> None:
    batch, once = task_of(), task_of(replace(RECIPE, retrieve="once"))
    given = batch.batches(0)[0]
    expected = [
        [hit.row for hit in some]
        for some in batch._retrieve_batch(given, batch.module.eval().embed_questions(questions_of(given))).hits
    ]
    assert [[hit.row for hit in some] for some in once._retrieve_batch(given, torch.zeros(4, 32)).hits] == expected
    with torch.no_grad():
        for task in (batch, once):
            for parameter in task.module.question.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    moved = [
        [hit.row for hit in some]
        for some in batch._retrieve_batch(given, batch.module.embed_questions(questions_of(given))).hits
    ]
    assert moved != expected
    assert [[hit.row for hit in some] for some in once._retrieve_batch(given, torch.zeros(4, 32)).hits] == expected
    recalled = batch._retrieve_batch(given, torch.ones(4, 32))
    vectors = snapshot.embeddings("part-00000")
    assert np.array_equal(recalled.vectors[0], vectors[[hit.row for hit in recalled.hits[0]]])
    product = float(vectors[recalled.hits[0][0].row].sum())
    assert recalled.hits[0][0].inner_product == pytest.approx(product, rel=1e-3)


def questions_of(batch: Any) -> list[str]:
    return [pair.example.question for pair in batch]


def test_more_passages_than_there_are_are_all_of_them(task_of: Any) -> None:
    task = task_of(replace(RECIPE, k=50))
    loss, _ = task.loss(task.batches(0)[0])
    assert loss.isfinite()
    assert len(task._retrieve_questions(["who"]).hits[0]) == len(ARTICLES)
    with torch.no_grad():
        assert task.evaluate()["Success@12"] == 1.0


def test_what_an_index_does_not_reach_is_filled_up(task_of: Any, snapshot: Snapshot) -> None:
    task = task_of()
    hits = task._memory.retrieve(["who"], np.ones((1, 32), np.float32), 3).hits[0]
    filled = task._memory._pad_hits(hits[:1], 3)
    assert [hit.row for hit in filled[1:]] == [row for row in range(3) if row != hits[0].row][:2]
    assert filled[1].passage == snapshot.passages([filled[1].row])[0]


def test_every_answer_is_an_example_of_its_own(task_of: Any) -> None:
    examples = [Example("two", "who?", ("a", "b")), Example("none", "why?"), Example("one", "日本?", ("c",))]
    pairs = [pair for batch in task_of(examples=examples).batches(0) for pair in batch]
    assert sorted((pair.example.id, pair.answer) for pair in pairs) == [("one", "c"), ("two", "a"), ("two", "b")]
    first = [
        pair for batch in task_of(replace(RECIPE, targets="first"), examples=examples).batches(3) for pair in batch
    ]
    assert sorted(pair.answer for pair in first) == ["a", "c"]


def test_the_order_depends_on_the_epoch_alone(task_of: Any) -> None:
    one, two = task_of(), task_of()
    assert [one.ids(batch) for batch in one.batches(1)] == [two.ids(batch) for batch in two.batches(1)]
    assert [one.ids(batch) for batch in one.batches(0)] != [one.ids(batch) for batch in one.batches(1)]


def test_odd_questions_and_answers_do_no_harm(task_of: Any) -> None:
    odd = [
        Example("long", "who " * 500, ("x" * 500,)),
        Example("blank", " ", ("",)),
        Example("u", "\N{RIGHT-TO-LEFT MARK}שלום \N{ZERO WIDTH JOINER}👩", ("日本",)),
    ]
    task = task_of(examples=odd, dev=odd)
    loss, _ = task.loss(task.batches(0)[0])
    assert loss.isfinite()
    with torch.no_grad():
        assert all(np.isfinite(value) for value in task.evaluate().values())


def test_retrieval_collapse_is_refused(task_of: Any) -> None:
    dev = [replace(DEV[0], id=str(number)) for number in range(20)]  # one question, and so one set of passages
    assert task_of(dev=dev).evaluate()["spread"] == 0.0
    with pytest.raises(CollapsedError, match="20 questions got 3 distinct passages"):
        task_of(replace(RECIPE, refuse_collapse=True), dev=dev).evaluate()
    task_of(replace(RECIPE, refuse_collapse=True, limits=CollapseLimits(least_spread=0.0)), dev=dev).evaluate()


def test_a_model_that_does_not_read_is_refused_when_it_is_trained(task_of: Any) -> None:
    reads = replace(RECIPE, refuse_collapse=True, answered=20, limits=CollapseLimits(least_spread=0.0))
    dev = [Example(str(number), f"city {number}?", ("x",)) for number in range(20)]
    task = task_of(reads, dev=dev)
    with torch.no_grad():
        measures = task.evaluate()
    assert 0 <= measures["unchanged"] <= 1
    task.check({**measures, "unchanged": 0.9})
    with pytest.raises(CollapsedError, match="95% of 20 answers do not change"):
        task.check({**measures, "unchanged": 0.95})
    task_of(replace(reads, refuse_collapse=False), dev=dev).check({"unchanged": 1.0})
    task_of(replace(reads, answered=19), dev=dev).check({"unchanged": 1.0})  # too few to say anything
    task_of(dev=DEV[:1]).check(task_of(dev=DEV[:1]).evaluate())  # nobody else's passages


def test_deaf_generators_answer_the_same_from_any_passages(task_of: Any) -> None:
    task = task_of(replace(RECIPE, answered=4))
    with torch.no_grad():
        for name, weights in task.module.body.named_parameters():
            if "encoder_attn.out_proj" in name:  # what a decoder hears of its context
                weights.zero_()
        assert task.evaluate()["unchanged"] == 1.0


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_half_precision_learns_nearly_the_same(task_of: Any, tmp_path: Path, kind: Variant) -> None:
    losses = {}
    for precision in ("no", "bf16"):
        task = task_of(replace(RECIPE, retrieve="once"), kind=kind)  # else rounding decides between near passages
        done = train(task, replace(STEPS, precision=precision, learning_rate=1e-4), tmp_path / precision)
        assert {weights.dtype for weights in task.module.parameters()} == {torch.float32}
        assert done.best_measures["nll"] < done.initial_measures["nll"]
        losses[precision] = [row["loss"] for row in read_metrics(tmp_path / precision) if row["kind"] == "train"]
    assert losses["bf16"] != losses["no"]
    assert losses["bf16"] == pytest.approx(losses["no"], rel=0.02)


def test_a_snapshot_of_another_space_is_refused(task_of: Any, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    (tmp_path / "work").mkdir()
    other = publish_tiny(store, save_bert(tmp_path / "other", seed=2), ARTICLES, tmp_path / "work")
    with pytest.raises(RefusedError, match="weights differ"):
        task_of(over=other)


def test_a_snapshot_that_compares_by_distance_is_refused(task_of: Any, encoder: Path, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    (tmp_path / "work").mkdir()
    with pytest.raises(UsageError, match="uses metric l2"):
        task_of(over=publish_tiny(store, encoder, ARTICLES, tmp_path / "work", "l2"))


def test_what_cannot_be_learned_from_is_refused(task_of: Any) -> None:
    bare = [Example("bare", "why?")]
    with pytest.raises(InputError, match="no training example has an answer"):
        task_of(examples=bare)
    with pytest.raises(InputError, match="example bare has no answer"):
        task_of(replace(RECIPE, without_answer="refuse"), examples=[*EXAMPLES, *bare])
    with pytest.raises(UsageError, match="no dev example has an answer"):
        task_of(dev=bare)
    with pytest.raises(UsageError, match="no index 'ivf'"):
        task_of(replace(RECIPE, index="ivf"))
    with pytest.raises(UsageError, match="no index 'ivf'"):
        task_of(replace(RECIPE, retriever="rrf(hnsw, ivf)"))
    with pytest.raises(UsageError, match="are both given"):
        replace(RECIPE, index="hnsw", retriever="exact")


def test_a_fused_list_is_weighed_by_inner_products(task_of: Any, snapshot: Snapshot) -> None:
    task = task_of(replace(RECIPE, retriever="rrf(hnsw, exact)"))
    given = task.batches(0)[0]
    recalled = task._retrieve_batch(given, torch.ones(4, 32))
    vectors = snapshot.embeddings("part-00000")
    for hits in recalled.hits:
        products = [float(vectors[hit.row].astype(np.float32).sum()) for hit in hits]
        assert [hit.inner_product for hit in hits] == pytest.approx(products, rel=1e-3)
    with torch.no_grad():
        assert 0 <= task.evaluate()["EM"] <= 1


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"goal": "EM", "answered": 0}, {"k": 0}])
def test_a_recipe_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        RagRecipe(**wrong).build_model_settings("token")


def test_the_record_says_what_decides_the_losses(task_of: Any, snapshot: Snapshot) -> None:
    record = task_of().recipe()
    assert json.loads(json.dumps(record))["snapshot"] == snapshot.id
    assert (record["kind"], record["models"]) == ("rag-token", {"generator": "bart"})
    assert record["train"] != task_of(examples=EXAMPLES[:4]).recipe()["train"]


def test_another_spec_of_the_encoder_is_another_space(
    encoder: Path, generators: dict[str, Path], snapshot: Snapshot
) -> None:
    question = TrainableEncoder.load(encoder, "question", EncoderSpec(pooling="cls", max_length=64), device="cpu")
    rag = Rag(question, load_generator(generators["bart"], device="cpu"))
    with pytest.raises(RefusedError, match="pooling differ"):
        RagTask(rag, snapshot, EXAMPLES, DEV, RECIPE)
