"""OpenRAG over a small snapshot: pools, online judgements, gradients and resuming."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import elu

from rag_model.corpus.records import Passage
from rag_model.encoders.architecture import read_architecture
from rag_model.encoders.tokens import load_tokenizer, tokenize
from rag_model.errors import InputError, UsageError
from rag_model.generate.load import load_generator
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.batches import DprBatch
from rag_model.training.data.examples import Example
from rag_model.training.data.judging import ExamplePools, JudgeSettings, PassageJudge, judge_pairs, judge_passages
from rag_model.training.data.temporary_index import BagMemory, find_bag_index
from rag_model.training.finetuning import Finetuning
from rag_model.training.loop.checkpoint import read_metrics
from rag_model.training.loop.loop import train
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.objectives.objective import Job
from rag_model.training.objectives.openrag import OPENRAG, OpenRagRecipe, OpenRagTask, OpenRagTraining
from rag_model.training.objectives.sidr import SidrPair, TrainableSidr, two_way_loss
from rag_model.training.origins import NamedModels
from tests.fixtures.tiny import save_bert
from tests.fixtures.tiny_generators import save_bart
from tests.fixtures.tiny_sidr import save_sidr
from tests.fixtures.tiny_snapshot import publish_tiny

ARTICLES = {
    f"City {x}": f"the king of city {x} was {x * 3} and wrote music in {y}{x}."
    for x, y in zip("abcdefghijklmnop", "ponmlkjihgfedcba", strict=True)
}
CHOICES = ("h", "7")  # A random generator prefers either, depending on the passage.
EXAMPLES = [Example(f"q{x}", f"who was the king of city {x}?", (CHOICES[x in "aceg"],)) for x in "abcdefgh"]
DEV = [Example(f"d{x}", f"city {x}: who was king?", (CHOICES[x in "il"],)) for x in "ijkl"]
RECIPE = OpenRagRecipe(depth=8, proposed=6, asked_terms=40, batch_size=4, terms=24, temperature=20.0, pooled=2)
LOOP = LoopSettings(max_steps=6, learning_rate=1e-3, evaluate_every=3, checkpoint_every=2, cpu=True)
SETTINGS = OpenRagTraining(LOOP, RECIPE, JudgeSettings(CHOICES))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {
        "encoder": save_bert(base / "bert"),
        "sidr": save_sidr(base / "sidr"),
        "generator": save_bart(base / "bart"),
    }


@pytest.fixture(scope="module")
def snapshot(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    store = Store.open(str(tmp_path_factory.mktemp("store")), create=True)
    return publish_tiny(store, folders["encoder"], ARTICLES, tmp_path_factory.mktemp("work"))


@pytest.fixture
def build_job(folders: dict[str, Path], snapshot: Snapshot) -> Any:
    def build(
        settings: OpenRagTraining = SETTINGS,
        train: Sequence[Example] = EXAMPLES,
        corpus: Snapshot = snapshot,
        **fields: Any,
    ) -> Job[OpenRagTraining]:
        store = Store.open(str(corpus.location))
        names = NamedModels(encoder=str(folders["sidr"]), generator=str(folders["generator"]))
        origins = OPENRAG.origins(store, corpus, names)
        return Job(store, corpus, origins, settings, {"train": train, "dev": DEV}, **fields)

    return build


def prepare(job: Job[OpenRagTraining]) -> Job[OpenRagTraining]:
    return replace(job, examples=OPENRAG.prepare(job))


def load_judge(folders: dict[str, Path], settings: JudgeSettings = SETTINGS.judge) -> PassageJudge:
    generator = load_generator(folders["generator"], device="cpu")
    return PassageJudge(generator, [*EXAMPLES, *DEV], settings)


def test_temporary_bags_score_as_a_dense_product(folders: dict[str, Path], snapshot: Snapshot) -> None:
    memory, pair = BagMemory(snapshot, folders["sidr"]), SidrPair.load(folders["sidr"], folders["sidr"], device="cpu")
    assert find_bag_index(snapshot, folders["sidr"]) is None, "the index must be temporary"
    all_passages, questions = snapshot.passages(range(snapshot.n)), [example.question for example in EXAMPLES]
    query_vectors = pair.eval().question.encoder().encode_questions(questions)
    with torch.no_grad():
        bags = pair.embed_passages(all_passages)[1].numpy()
    question_weights = np.zeros((len(questions), bags.shape[1]))
    for row, weighted_terms in enumerate(query_vectors):
        question_weights[row, weighted_terms[:, 0].astype(int)] += weighted_terms[:, 1]
    scores = question_weights @ bags.T
    for passage_scores, proposed in zip(scores, memory.propose(query_vectors, 5), strict=True):
        best = np.lexsort((np.arange(snapshot.n), -passage_scores))[:5]
        assert [passage.hash for passage in proposed] == [all_passages[row].hash for row in best]
    truncated = BagMemory(snapshot, folders["sidr"], terms=2).propose(query_vectors, 5)
    assert [[passage.hash for passage in passages] for passages in truncated] != [
        [passage.hash for passage in passages] for passages in memory.propose(query_vectors, 5)
    ]


def test_pools_agree_with_the_judge(build_job: Any, folders: dict[str, Path]) -> None:
    pools = OPENRAG.prepare(build_job())["train"]
    assert isinstance(pools, ExamplePools)
    assert len(pools) > 0
    assert len(pools) + pools.all_right + pools.all_wrong == len(EXAMPLES)
    judge = load_judge(folders)
    for pool in pools:
        assert all(verdict.right for verdict in judge_passages(judge, pool.question, pool.positives))
        assert not any(verdict.right for verdict in judge_passages(judge, pool.question, pool.negatives))
        assert max(len(pool.positives), len(pool.negatives)) <= 2


def label_naively(
    task: OpenRagTask, judge: PassageJudge, example: Any, ranked: Sequence[Passage], *, has_choices: bool
) -> tuple[Any, Any]:
    """Return the positive and the negative of one question, as the paper describes the online step."""
    positive = None
    labels = {positive.hash: True for positive in example.positives} | {
        negative.hash: False for negative in example.negatives
    }
    for passage in ranked:
        verdict = judge_passages(judge, example.question, [passage])[0]
        if passage.hash in labels:
            label: bool | None = labels[passage.hash]
        elif has_choices:
            label = verdict.right
        else:
            above_negatives = verdict.log_p > example.best_negative_log_p
            below_positives = verdict.log_p < example.worst_positive_log_p
            label = above_negatives if above_negatives != below_positives else None
        if label is False:
            return positive, passage
        if label and positive is None:
            positive = passage
    return positive, None


@pytest.mark.parametrize("has_choices", [True, False])
def test_passages_are_judged_in_order_until_the_first_negative(
    build_job: Any, folders: dict[str, Path], has_choices: bool
) -> None:
    job = prepare(build_job())
    task = OPENRAG.task(job)
    task.module.eval()
    pools = job.examples["train"]
    judge = load_judge(folders)
    if not has_choices:  # These bounds of the pools let scores make some passages positive and others negative.
        judge = load_judge(folders, JudgeSettings())
        task._online_judging = replace(task._online_judging, judge=judge, settings=JudgeSettings())
        scores = [judge_passages(judge, pool.question, pool.positives)[0].log_p for pool in pools]
        pools = [
            replace(pool, best_negative_log_p=score - 0.3 * (index % 2), worst_positive_log_p=score + 0.3 * (index % 3))
            for index, (pool, score) in enumerate(zip(pools, scores, strict=True))
        ]
    ranked = task.rank_proposals([pool.question for pool in pools])
    pair = task.module
    outcomes, labels = set(), task._label_examples(pools, ranked)
    for pool, passages, label in zip(pools, ranked, labels, strict=True):
        scores = pair.scores(pair.encode_questions([pool.question]), passages)[0][0]
        assert (scores.diff() <= 1e-4).all(), "passages are in the order of the encoder"
        assert task._label_examples([pool], [passages]) == [label], "labels do not depend on other questions"
        expected = label_naively(task, judge, pool, passages, has_choices=has_choices)
        assert (label.positive, label.negative) == expected
        assert label.n_judged <= len(passages)
        outcomes.add((label.positive is not None, label.negative is not None))
    assert len(outcomes) > 1, "the questions have different outcomes"
    batch = task.batches(0)[0]
    metrics = task.loss(batch)[1]
    assert {"judged", "online_positives", "online_negatives", "accuracy"} <= set(metrics)


def test_questions_are_judged_in_one_call_and_each_pair_once(build_job: Any, tmp_path: Path) -> None:
    job = prepare(build_job(work=tmp_path, digests={"generator": "g"}))
    task, calls = OPENRAG.task(job), list[int]()
    cache: Any = task._online_judging.scorer
    judge = cache._teacher

    class CountingTeacher:
        def scores(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> Any:
            calls.append(len(questions))
            return judge.scores(questions, titles, texts)

    cache._teacher = CountingTeacher()
    pools = job.examples["train"]
    ranked = task.rank_proposals([pool.question for pool in pools])
    labels = task._label_examples(pools, ranked)
    verdicts = [judge_passages(judge, pool.question, passages)[0] for pool, passages in zip(pools, ranked, strict=True)]
    pairs = [(pool.question, passages[0]) for pool, passages in zip(pools, ranked, strict=True)]
    batch_verdicts = judge_pairs(judge, pairs, len(pairs))
    assert [each.right for each in batch_verdicts] == [each.right for each in verdicts]
    assert [each.log_p for each in batch_verdicts] == pytest.approx([each.log_p for each in verdicts], abs=1e-4)
    assert sum(calls) <= sum(label.n_judged for label in labels), "a pair is judged once"
    assert len(calls) <= max(label.n_judged for label in labels), "each round is one call"
    call_count = len(calls)
    assert task._label_examples(pools, ranked) == labels
    assert len(calls) == call_count, "verdicts are cached by pair"


def compute_weights(encoder: TrainableSidr, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return (n, V) weights and bags by SiDR's equation, one text at a time, without padding."""
    body, weights = encoder.model.body, list[Tensor]()
    tokenizer = load_tokenizer(encoder.folder, encoder.spec.max_length)
    lines = [torch.from_numpy(line).long() for line in tokenize(tokenizer, texts)]
    for line in lines:
        hidden = encoder.model.norm(body(input_ids=line[None])[0][0])  # (t, h)
        weights.append((elu(hidden @ body.get_input_embeddings().weight.T) + 1).amax(0) * encoder.model.term_mask)
    bags = [
        torch.zeros(len(encoder.model.term_mask)).index_fill(0, line, 1) * encoder.model.term_mask for line in lines
    ]
    return torch.stack(weights), torch.stack(bags)


def keep_terms(weights: Tensor, bags: Tensor, count: int) -> Tensor:
    return weights * (bags.bool() | (weights >= weights.topk(count).values[:, -1:]))


def compute_loss(task: OpenRagTask, batch: DprBatch, judge: PassageJudge, all_passages: Sequence[Passage]) -> Tensor:
    """Return the loss of OpenRAG's online step by the equations of the papers."""
    pair, texts = task.module, [example.question for example in batch.examples]
    layout = pair.passage.spec.format_passage
    questions, question_bags = compute_weights(pair.question, texts)
    passages, passage_bags = compute_weights(
        pair.passage, [layout(passage.title, passage.text) for passage in all_passages]
    )
    by_bags, by_weights = (
        (keep_terms(questions, question_bags, pair.question.spec.question_terms) @ vectors.T).tolist()
        for vectors in (passage_bags, keep_terms(passages, passage_bags, pair.passage.spec.passage_terms))
    )
    positives, negatives = list[int](), list[int]()
    for example, bag_scores, weight_scores in zip(batch.examples, by_bags, by_weights, strict=True):
        proposed = sorted(range(len(all_passages)), key=bag_scores.__getitem__, reverse=True)[: RECIPE.proposed]
        ranked = [all_passages[row] for row in sorted(proposed, key=weight_scores.__getitem__, reverse=True)]
        labels = label_naively(task, judge, example, ranked, has_choices=True)
        positives.append(all_passages.index(labels[0] or example.positives[0]))
        negatives.append(all_passages.index(labels[1] or example.negatives[0]))
    rows = list(dict.fromkeys([*positives, *negatives]))
    gold = torch.tensor([rows.index(row) for row in positives])
    is_positive = torch.tensor([[all_passages[row] in example.positives for row in rows] for example in batch.examples])
    weights, bags = passages[rows], passage_bags[rows]
    pairs = (
        (keep_terms(questions, question_bags, RECIPE.terms), weights),
        (questions, keep_terms(weights, bags, RECIPE.terms)),
        (question_bags, weights),
        (questions, bags),
    )
    losses = [
        two_way_loss(a @ b.T / RECIPE.temperature, gold, is_positive.scatter(1, gold[:, None], False)) for a, b in pairs
    ]
    return torch.stack(losses).mean()


def test_online_step_has_the_loss_and_gradient_of_the_equations(
    build_job: Any, folders: dict[str, Path], snapshot: Snapshot
) -> None:
    task = OPENRAG.task(prepare(build_job()))
    task.module.eval()  # without dropout
    batch = task.batches(0)[0]
    parameters = [parameter for parameter in task.module.parameters() if parameter.requires_grad]
    loss, metrics = task.loss(batch)
    assert float(metrics["online_negatives"]) > 0
    expected = compute_loss(task, batch, load_judge(folders), snapshot.passages(range(snapshot.n)))
    assert torch.allclose(loss, expected, rtol=1e-5)
    gradients = [torch.autograd.grad(value, parameters, allow_unused=True) for value in (loss, expected)]
    largest = max(float(gradient.abs().max()) for gradient in gradients[1] if gradient is not None)
    for actual, reference in zip(*gradients, strict=True):
        assert (actual is None) == (reference is None)
        assert actual is None or reference is None or torch.allclose(actual, reference, atol=1e-5 * largest)


def test_gradients_reach_the_encoders_and_not_the_generator(build_job: Any) -> None:
    task = OPENRAG.task(prepare(build_job()))
    judge: Any = task._online_judging.judge
    task.loss(task.batches(0)[0])[0].backward()  # type: ignore[no-untyped-call]
    matrices = [parameter for parameter in task.module.parameters() if parameter.requires_grad and parameter.dim() > 1]
    assert all(matrix.grad is not None and bool(matrix.grad.abs().max() > 0) for matrix in matrices)
    assert all(parameter.grad is None for parameter in judge._generator.module.parameters())
    assert not {*map(id, task.module.parameters())} & {*map(id, judge._generator.module.parameters())}


def test_interrupted_run_resumes_to_the_same_losses_with_cached_verdicts(build_job: Any, tmp_path: Path) -> None:
    def run(folder: Path, kill_at: int = 0) -> list[float]:
        folder.mkdir(exist_ok=True)

        def interrupt(kind: str, step: int, steps: int, values: object) -> None:
            if kind == "train" and step == kill_at:
                raise KeyboardInterrupt

        job = prepare(build_job(work=folder, digests={"generator": "g"}))
        train(OPENRAG.task(job), LOOP, folder, interrupt)
        return [row["loss"] for row in read_metrics(folder) if row["kind"] == "train"]

    expected = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", 5)
    cached = (tmp_path / "killed" / "scores.jsonl").read_bytes()
    assert run(tmp_path / "killed") == expected
    final = (tmp_path / "killed" / "scores.jsonl").read_bytes()
    assert final.startswith(cached)
    assert final.count(b"\n") == (tmp_path / "whole" / "scores.jsonl").read_bytes().count(b"\n")


def test_finetuning_saves_a_pair_for_bags(build_job: Any, tmp_path: Path) -> None:
    messages = list[int]()
    job = Finetuning(OPENRAG, build_job())
    job.prepare(tmp_path, lambda done, total: messages.append(total))
    trained = job.run(tmp_path)
    assert {"right", "nll", "Success@1", "questions", "all_right", "all_wrong", "agreement"} <= set(
        trained.best_measures
    )
    assert {*messages} == {len(EXAMPLES)}
    pair = SidrPair.load(trained.best_folder / "question", trained.best_folder / "passage", device="cpu")
    assert pair.question.spec.question_terms == 12
    space = OPENRAG.space(job.job, trained.best_folder)
    assert space is not None
    assert space.pooling == "max elu1p, 12 terms and its own, 16 units"


def test_costs_grow_with_the_judged_passages(build_job: Any, folders: dict[str, Path]) -> None:
    job = build_job()
    models = {
        part: read_architecture(folders["generator" if part == "generator" else "sidr"]) for part in job.origins.names
    }
    costs = OPENRAG.costs(job, models)
    deeper = OPENRAG.costs(build_job(replace(SETTINGS, openrag=replace(RECIPE, depth=16))), models)
    offline = OPENRAG.costs(build_job(replace(SETTINGS, openrag=replace(RECIPE, online=False))), models)
    assert set(costs.stage_bytes) == {"train", "judge"}
    assert offline.step_operations < costs.step_operations
    assert deeper.preparation_operations == 2 * costs.preparation_operations


def test_invalid_inputs_are_refused(build_job: Any, folders: dict[str, Path], snapshot: Snapshot) -> None:
    with pytest.raises(UsageError, match=r"depth of \[openrag\] is 1: use 2 or more"):
        OpenRagRecipe(depth=1)
    with pytest.raises(InputError, match="no training example has an answer"):
        OPENRAG.prepare(build_job(train=[Example("1", "who?")]))
    with pytest.raises(UsageError, match="have no pools"):
        OPENRAG.task(build_job())
    store = Store.open(str(snapshot.location))
    for names, message in (
        (NamedModels(encoder=str(folders["sidr"])), "there is no generator"),
        (NamedModels(generator=str(folders["generator"])), "there is no SiDR to train"),
        (NamedModels(encoder=str(folders["encoder"]), generator="x"), "is not a SiDR: train one with `finetune sidr`"),
    ):
        with pytest.raises(UsageError, match=message):
            OPENRAG.origins(store, snapshot, names)


def test_corpus_of_one_passage_has_no_pools(build_job: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    (tmp_path / "work").mkdir()
    single = publish_tiny(store, folders["encoder"], {"City a": ARTICLES["City a"]}, tmp_path / "work")
    with pytest.raises(InputError, match="none of 8 questions has a passage with which the generator answers right"):
        OPENRAG.prepare(build_job(corpus=single))


def test_generator_with_equal_scores_for_all_passages_is_refused(
    build_job: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    generator = load_generator(folders["generator"], device="cpu")
    with torch.no_grad():
        generator.module.get_output_embeddings().weight.zero_()  # every token is equally likely for every passage
    generator.module.save_pretrained(tmp_path / "constant")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "constant" / name).write_bytes((folders["generator"] / name).read_bytes())
    job = build_job()
    names = {**job.origins.names, "generator": str(tmp_path / "constant")}
    constant_job = replace(job, origins=replace(job.origins, names=names))
    with pytest.raises(InputError, match="none of 8 questions"):
        OPENRAG.prepare(constant_job)
