"""RAG fine-tuning over a small snapshot: what is trained, what is retrieved, and what is refused."""

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
    return publish_tiny(store, encoder, ARTICLES, tmp_path_factory.mktemp("work"), bm25=True)


@pytest.fixture
def build_task(encoder: Path, generators: dict[str, Path], snapshot: Snapshot) -> Any:
    def build(
        recipe: RagRecipe = RECIPE,
        *,
        kind: Variant = "token",
        family: str = "bart",
        examples: Sequence[Example] = EXAMPLES,
        dev: Sequence[Example] = DEV,
        corpus: Snapshot = snapshot,
    ) -> RagTask:
        question = TrainableEncoder.load(encoder, "question", device="cpu")
        rag = Rag(question, load_generator(generators[family], device="cpu"), recipe.build_model_settings(kind))
        return RagTask(rag, corpus, examples, dev, recipe, {"generator": family})

    return build


@pytest.mark.parametrize(("kind", "family"), [("token", "bart"), ("sequence", "bart"), ("token", "llama")])
def test_training_improves_the_reader_and_keeps_the_encoder_space(
    build_task: Any, tmp_path: Path, kind: Variant, family: str, snapshot: Snapshot
) -> None:
    task = build_task(kind=kind, family=family)
    initial = {name: tensor.clone() for name, tensor in task.module.named_parameters()}
    result = train(task, replace(STEPS, max_steps=12, evaluate_every=12), tmp_path)
    assert result.best_measures["nll"] < result.initial_measures["nll"]
    changed_names = {name for name, tensor in task.module.named_parameters() if not torch.equal(tensor, initial[name])}
    assert any(name.startswith("question.") for name in changed_names), "the question encoder learns from answers alone"
    assert any(name.startswith("body.") for name in changed_names)
    rag = load_rag(result.best_folder, device="cpu")
    assert rag.settings == task.module.settings
    assert rag.question.space().digest == (snapshot.space or {})["digest"]
    loaded = RagTask(rag, snapshot, EXAMPLES, DEV, RECIPE)
    with torch.no_grad():
        assert dict(loaded.evaluate()) == pytest.approx(dict(result.best_measures), abs=1e-4)
    assert {"nll", "Success@3", "EM", "F1", "unchanged", "distinct", "spread"} == set(result.best_measures)


def test_gradients_reach_the_question_encoder_through_the_prior(build_task: Any) -> None:
    """With one passage, p(z|x) is 1 for every question, so that the encoder has no gradient."""
    for k, learns in ((1, False), (3, True)):
        task = build_task(replace(RECIPE, k=k))
        loss, measures = task.loss(task.batches(0)[0])
        loss.backward()
        norms = [float(p.grad.norm()) for p in task.module.question.parameters() if p.grad is not None]
        assert (max(norms) > 1e-6) == learns
        assert (float(measures["prior_entropy"]) > 1e-6) == learns


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_passages_of_bm25_are_weighed_by_its_scores(
    build_task: Any, snapshot: Snapshot, tmp_path: Path, kind: Variant
) -> None:
    recipe = replace(RECIPE, retriever="bm25", weighed_by="scores", temperature=2.0, label_smoothing=0.0)
    task = build_task(recipe, kind=kind)
    task.module.eval()
    batch = task.batches(0)[0]
    results = open_retriever(snapshot, "bm25").search(get_questions(batch), 3)
    scores = torch.zeros(len(batch), 3)  # a passage that BM25 does not retrieve has score 0
    for row, hits in enumerate(results):
        scores[row, : len(hits)] = torch.tensor([hit.score for hit in hits])
    assert scores[0, 0] > scores[0, 2]
    retrieved = task._retrieve_batch(batch, torch.zeros(len(batch), 32))
    assert torch.allclose(task._compute_logits(torch.zeros(len(batch), 32), retrieved), scores, atol=1e-5)
    loss, _ = task.loss(batch)
    inputs = task._encode_inputs(batch, retrieved)
    log_probabilities = torch.log_softmax(task.module.generator.logits(*inputs), -1)  # (b, k, l, v)
    log_p = log_probabilities.gather(-1, inputs[1].tokens[:, None, :, None].expand(-1, 3, -1, 1))[..., 0]  # (b, k, l)
    prior = torch.log_softmax(scores / 2.0, 1)
    mask = inputs[1].mask
    if kind == "sequence":
        expected = -torch.logsumexp(prior + (log_p * mask[:, None]).sum(2), 1).mean()
    else:
        expected = -(torch.logsumexp(prior[..., None] + log_p, 1) * mask).sum(1).mean()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    result = train(build_task(recipe, kind=kind), STEPS, tmp_path)
    rag = load_rag(result.best_folder, device="cpu")
    assert rag.settings.weighed_by == "scores"
    reader = MarginalReader(open_retriever(snapshot, "bm25", products=True, encoder=rag.question), rag)
    (answer,) = reader.answer([batch[0].example.question])
    weights = torch.softmax(torch.tensor([support.hit.score for support in answer.support]) / 2.0, 0)
    assert [support.weight for support in answer.support] == pytest.approx(weights.tolist(), rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "learns"),
    [
        ({"frozen": "question"}, {"body"}),
        ({"frozen": "generator"}, {"question"}),
        ({"weighed_by": "scores", "retriever": "bm25"}, {"body"}),
        ({}, {"body", "question"}),
    ],
)
def test_frozen_parts_are_unchanged(build_task: Any, tmp_path: Path, changes: dict[str, Any], learns: set[str]) -> None:
    task = build_task(replace(RECIPE, **changes))
    initial = {name: tensor.clone() for name, tensor in task.module.named_parameters()}
    train(task, STEPS, tmp_path)
    changed_names = {name for name, tensor in task.module.named_parameters() if not torch.equal(tensor, initial[name])}
    assert {name.partition(".")[0] for name in changed_names} == learns
    task.module.train()
    assert {name for name in ("question", "body") if getattr(task.module, name).training} == learns


def test_killed_run_resumes_to_the_same_losses(build_task: Any, tmp_path: Path) -> None:
    train(build_task(), STEPS, tmp_path / "whole")

    class KilledError(Exception):
        """Ends a training in place of SIGKILL."""

    def kill(kind: str, step: int, steps: int, values: Any) -> None:
        if step == 3:
            raise KilledError

    with pytest.raises(KilledError):
        train(build_task(), STEPS, tmp_path / "twice", kill)
    train(build_task(), STEPS, tmp_path / "twice")
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "twice")


def test_passages_are_retrieved_by_the_current_encoder_unless_once(build_task: Any, snapshot: Snapshot) -> None:
    every_batch, once = build_task(), build_task(replace(RECIPE, retrieve="once"))
    examples = every_batch.batches(0)[0]
    every_batch.module.eval()

    def retrieve_rows(task: RagTask) -> list[list[int]]:
        retrieved = task._retrieve_batch(examples, task.module.embed_questions(get_questions(examples)))
        return [[hit.row for hit in hits] for hits in retrieved.hits]

    expected = retrieve_rows(every_batch)
    assert retrieve_rows(once) == expected
    with torch.no_grad():
        for task in (every_batch, once):
            for parameter in task.module.question.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    assert retrieve_rows(every_batch) != expected
    assert retrieve_rows(once) == expected
    retrieved = every_batch._retrieve_batch(examples, torch.ones(4, 32))
    vectors = snapshot.embeddings("part-00000")
    assert np.array_equal(retrieved.vectors[0], vectors[[hit.row for hit in retrieved.hits[0]]])
    product = float(vectors[retrieved.hits[0][0].row].sum())
    assert retrieved.hits[0][0].inner_product == pytest.approx(product, rel=1e-3)


def get_questions(batch: Any) -> list[str]:
    return [pair.example.question for pair in batch]


def test_k_above_the_corpus_size_retrieves_all_passages(build_task: Any) -> None:
    task = build_task(replace(RECIPE, k=50))
    loss, _ = task.loss(task.batches(0)[0])
    assert loss.isfinite()
    assert len(task._retrieve_questions(["who"]).hits[0]) == len(ARTICLES)
    with torch.no_grad():
        assert task.evaluate()["Success@12"] == 1.0


def test_missing_hits_are_padded_with_other_passages(build_task: Any, snapshot: Snapshot) -> None:
    task = build_task()
    hits = task._memory.retrieve(["who"], np.ones((1, 32), np.float32), 3).hits[0]
    padded = task._memory._pad_hits(hits[:1], 3)
    assert [hit.row for hit in padded[1:]] == [row for row in range(3) if row != hits[0].row][:2]
    assert padded[1].passage == snapshot.passages([padded[1].row])[0]


def test_every_answer_becomes_a_training_pair(build_task: Any) -> None:
    examples = [Example("two", "who?", ("a", "b")), Example("none", "why?"), Example("one", "日本?", ("c",))]
    pairs = [pair for batch in build_task(examples=examples).batches(0) for pair in batch]
    assert sorted((pair.example.id, pair.answer) for pair in pairs) == [("one", "c"), ("two", "a"), ("two", "b")]
    task = build_task(replace(RECIPE, targets="first"), examples=examples)
    assert sorted(pair.answer for batch in task.batches(3) for pair in batch) == ["a", "c"]


def test_batches_depend_on_the_epoch_alone(build_task: Any) -> None:
    first, second = build_task(), build_task()
    assert [first.ids(batch) for batch in first.batches(1)] == [second.ids(batch) for batch in second.batches(1)]
    assert [first.ids(batch) for batch in first.batches(0)] != [first.ids(batch) for batch in first.batches(1)]


def test_unusual_questions_and_answers_have_finite_losses(build_task: Any) -> None:
    examples = [
        Example("long", "who " * 500, ("x" * 500,)),
        Example("blank", " ", ("",)),
        Example("u", "\N{RIGHT-TO-LEFT MARK}שלום \N{ZERO WIDTH JOINER}👩", ("日本",)),
    ]
    task = build_task(examples=examples, dev=examples)
    loss, _ = task.loss(task.batches(0)[0])
    assert loss.isfinite()
    with torch.no_grad():
        assert all(np.isfinite(value) for value in task.evaluate().values())


def test_retrieval_collapse_is_refused(build_task: Any) -> None:
    dev = [replace(DEV[0], id=str(number)) for number in range(20)]  # one question, so all have the same passages
    assert build_task(dev=dev).evaluate()["spread"] == 0.0
    with pytest.raises(CollapsedError, match="20 questions got 3 distinct passages"):
        build_task(replace(RECIPE, refuse_collapse=True), dev=dev).evaluate()
    build_task(replace(RECIPE, refuse_collapse=True, limits=CollapseLimits(least_spread=0.0)), dev=dev).evaluate()


def test_trained_model_that_ignores_passages_is_refused(build_task: Any) -> None:
    recipe = replace(RECIPE, refuse_collapse=True, answered=20, limits=CollapseLimits(least_spread=0.0))
    dev = [Example(str(number), f"city {number}?", ("x",)) for number in range(20)]
    task = build_task(recipe, dev=dev)
    with torch.no_grad():
        measures = task.evaluate()
    assert 0 <= measures["unchanged"] <= 1
    task.check({**measures, "unchanged": 0.9})
    with pytest.raises(CollapsedError, match="95% of 20 answers do not change"):
        task.check({**measures, "unchanged": 0.95})
    build_task(replace(recipe, refuse_collapse=False), dev=dev).check({"unchanged": 1.0})
    build_task(replace(recipe, answered=19), dev=dev).check({"unchanged": 1.0})  # too few answers for the check
    build_task(dev=DEV[:1]).check(build_task(dev=DEV[:1]).evaluate())  # no passages of other questions


def test_generator_without_cross_attention_never_changes_its_answers(build_task: Any) -> None:
    task = build_task(replace(RECIPE, answered=4))
    with torch.no_grad():
        for name, weights in task.module.body.named_parameters():
            if "encoder_attn.out_proj" in name:  # The context reaches the decoder only through this layer.
                weights.zero_()
        assert task.evaluate()["unchanged"] == 1.0


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_bf16_has_nearly_the_losses_of_float32(build_task: Any, tmp_path: Path, kind: Variant) -> None:
    losses = {}
    for precision in ("no", "bf16"):
        task = build_task(replace(RECIPE, retrieve="once"), kind=kind)  # rounding could change the hits of each step
        steps = replace(STEPS, precision=precision, learning_rate=1e-4, evaluate_every=4)
        result = train(task, steps, tmp_path / precision)
        assert {weights.dtype for weights in task.module.parameters()} == {torch.float32}
        assert result.best_measures["nll"] < result.initial_measures["nll"]
        losses[precision] = [row["loss"] for row in read_metrics(tmp_path / precision) if row["kind"] == "train"]
    assert losses["bf16"] != losses["no"]
    assert losses["bf16"] == pytest.approx(losses["no"], rel=0.02)


def test_snapshot_of_another_encoder_space_is_refused(build_task: Any, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    (tmp_path / "work").mkdir()
    snapshot = publish_tiny(store, save_bert(tmp_path / "other", seed=2), ARTICLES, tmp_path / "work")
    with pytest.raises(RefusedError, match="weights differ"):
        build_task(corpus=snapshot)


def test_snapshot_with_l2_distances_is_refused(build_task: Any, encoder: Path, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    (tmp_path / "work").mkdir()
    with pytest.raises(UsageError, match="uses metric l2"):
        build_task(corpus=publish_tiny(store, encoder, ARTICLES, tmp_path / "work", "l2"))


def test_examples_without_answers_and_missing_indexes_are_refused(build_task: Any) -> None:
    without_answers = [Example("bare", "why?")]
    with pytest.raises(InputError, match="no training example has an answer"):
        build_task(examples=without_answers)
    with pytest.raises(InputError, match="example bare has no answer"):
        build_task(replace(RECIPE, without_answer="refuse"), examples=[*EXAMPLES, *without_answers])
    with pytest.raises(UsageError, match="no dev example has an answer"):
        build_task(dev=without_answers)
    with pytest.raises(UsageError, match="no index 'ivf'"):
        build_task(replace(RECIPE, index="ivf"))
    with pytest.raises(UsageError, match="no index 'ivf'"):
        build_task(replace(RECIPE, retriever="rrf(hnsw, ivf)"))
    with pytest.raises(UsageError, match="are both given"):
        replace(RECIPE, index="hnsw", retriever="exact")


def test_fused_hits_are_weighed_by_inner_products(build_task: Any, snapshot: Snapshot) -> None:
    task = build_task(replace(RECIPE, retriever="rrf(hnsw, exact)"))
    batch = task.batches(0)[0]
    retrieved = task._retrieve_batch(batch, torch.ones(4, 32))
    vectors = snapshot.embeddings("part-00000")
    for hits in retrieved.hits:
        products = [float(vectors[hit.row].astype(np.float32).sum()) for hit in hits]
        assert [hit.inner_product for hit in hits] == pytest.approx(products, rel=1e-3)
    with torch.no_grad():
        assert 0 <= task.evaluate()["EM"] <= 1


@pytest.mark.parametrize("changes", [{"batch_size": 0}, {"goal": "EM", "answered": 0}, {"k": 0}])
def test_invalid_recipe_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        RagRecipe(**changes).build_model_settings("token")


def test_record_contains_what_determines_the_losses(build_task: Any, snapshot: Snapshot) -> None:
    record = build_task().recipe()
    assert json.loads(json.dumps(record))["snapshot"] == snapshot.id
    assert (record["kind"], record["models"]) == ("rag-token", {"generator": "bart"})
    assert record["train"] != build_task(examples=EXAMPLES[:4]).recipe()["train"]


def test_encoder_with_another_spec_is_refused(encoder: Path, generators: dict[str, Path], snapshot: Snapshot) -> None:
    question = TrainableEncoder.load(encoder, "question", EncoderSpec(pooling="cls", max_length=64), device="cpu")
    rag = Rag(question, load_generator(generators["bart"], device="cpu"))
    with pytest.raises(RefusedError, match="pooling differ"):
        RagTask(rag, snapshot, EXAMPLES, DEV, RECIPE)
