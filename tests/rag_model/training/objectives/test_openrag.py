"""OpenRAG over a small real snapshot: pools, what is judged online, what learns, resuming, and what is refused."""

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
from rag_model.training.data.judging import ExamplePools, JudgeSettings, PassageJudge, judge_passages
from rag_model.training.data.temporary_index import BagMemory
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
CHOICES = ("h", "7")  # between which a random generator wavers, by passage
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
def job_of(folders: dict[str, Path], snapshot: Snapshot) -> Any:
    def job_of(
        settings: OpenRagTraining = SETTINGS,
        train: Sequence[Example] = EXAMPLES,
        over: Snapshot = snapshot,
        **more: Any,
    ) -> Job[OpenRagTraining]:
        store = Store.open(str(over.location))
        named = NamedModels(encoder=str(folders["sidr"]), generator=str(folders["generator"]))
        origins = OPENRAG.origins(store, over, named)
        return Job(store, over, origins, settings, {"train": train, "dev": DEV}, **more)

    return job_of


def prepared(job: Job[OpenRagTraining]) -> Job[OpenRagTraining]:
    return replace(job, examples=OPENRAG.prepare(job))


def judge_of(folders: dict[str, Path], settings: JudgeSettings = SETTINGS.judge) -> PassageJudge:
    generator = load_generator(folders["generator"], device="cpu")
    return PassageJudge(generator, [*EXAMPLES, *DEV], settings)


def test_bags_that_are_made_here_score_as_a_dense_product(folders: dict[str, Path], snapshot: Snapshot) -> None:
    memory, pair = BagMemory(snapshot, folders["sidr"]), SidrPair.load(folders["sidr"], folders["sidr"], device="cpu")
    assert memory.is_temporary
    every, questions = snapshot.passages(range(snapshot.n)), [one.question for one in EXAMPLES]
    query_vectors = pair.eval().question.encoder().encode_questions(questions)
    with torch.no_grad():
        bags = pair.embed_passages(every)[1].numpy()
    dense = np.zeros((len(questions), bags.shape[1]))
    for row, own in enumerate(query_vectors):
        dense[row, own[:, 0].astype(int)] += own[:, 1]
    scores = dense @ bags.T
    for own, found in zip(scores, memory.propose(query_vectors, 5), strict=True):
        best = np.lexsort((np.arange(snapshot.n), -own))[:5]
        assert [one.hash for one in found] == [every[row].hash for row in best]
    fewer = BagMemory(snapshot, folders["sidr"], terms=2).propose(query_vectors, 5)
    assert [[one.hash for one in own] for own in fewer] != [
        [one.hash for one in own] for own in memory.propose(query_vectors, 5)
    ]


def test_pools_are_what_the_generator_says_of_what_the_bags_find(job_of: Any, folders: dict[str, Path]) -> None:
    pools = OPENRAG.prepare(job_of())["train"]
    assert isinstance(pools, ExamplePools)
    assert len(pools) > 0
    assert len(pools) + pools.all_right + pools.all_wrong == len(EXAMPLES)
    judge = judge_of(folders)
    for pool in pools:
        assert all(told.right for told in judge_passages(judge, pool.question, pool.positives))
        assert not any(told.right for told in judge_passages(judge, pool.question, pool.negatives))
        assert max(len(pool.positives), len(pool.negatives)) <= 2


def naive(
    task: OpenRagTask, judge: PassageJudge, example: Any, ranked: Sequence[Passage], *, closed: bool
) -> tuple[Any, Any]:
    """The online half as the paper says it, for one question."""
    positive = None
    known = {positive.hash: True for positive in example.positives} | {
        negative.hash: False for negative in example.negatives
    }
    for passage in ranked:
        told = judge_passages(judge, example.question, [passage])[0]
        if passage.hash in known:
            label: bool | None = known[passage.hash]
        elif closed:
            label = told.right
        else:
            above, below = told.log_p > example.best_negative_log_p, told.log_p < example.worst_positive_log_p
            label = True if above and not below else False if below and not above else None
        if label is False:
            return positive, passage
        if label and positive is None:
            positive = passage
    return positive, None


@pytest.mark.parametrize("closed", [True, False])
def test_passages_are_judged_in_order_until_the_first_that_does_not_help(
    job_of: Any, folders: dict[str, Path], closed: bool
) -> None:
    job = prepared(job_of())
    task = OPENRAG.task(job)
    task.module.eval()
    pools = job.examples["train"]
    judge = judge_of(folders)
    if not closed:  # the same pools, with bounds so that scores decide either way
        judge = judge_of(folders, JudgeSettings())
        task._online = replace(task._online, judge=judge, settings=JudgeSettings())
        scores = [judge_passages(judge, pool.question, pool.positives)[0].log_p for pool in pools]
        pools = [
            replace(one, best_negative_log_p=score - 0.3 * (place % 2), worst_positive_log_p=score + 0.3 * (place % 3))
            for place, (one, score) in enumerate(zip(pools, scores, strict=True))
        ]
    ranked = task.rank_proposals([pool.question for pool in pools])
    pair = task.module
    seen, together = set(), task._label_examples(pools, ranked)
    for pool, own, found in zip(pools, ranked, together, strict=True):
        scores = pair.scores(pair.encode_questions([pool.question]), own)[0][0]
        assert (scores.diff() <= 1e-4).all(), "in the order of the encoder"
        assert task._label_examples([pool], [own]) == [found], "other questions change nothing"
        expected = naive(task, judge, pool, own, closed=closed)
        assert (found.positive, found.negative) == expected
        assert found.judged <= len(own)
        seen.add((found.positive is not None, found.negative is not None))
    assert len(seen) > 1, "cases differ"
    batch = task.batches(0)[0]
    told = task.loss(batch)[1]
    assert {"judged", "online_positives", "online_negatives", "accuracy"} <= set(told)


def test_questions_are_judged_together_and_each_pair_once(job_of: Any, tmp_path: Path) -> None:
    job = prepared(job_of(work=tmp_path, digests={"generator": "g"}))
    task, calls = OPENRAG.task(job), list[int]()
    cache: Any = task._online.scorer or task._online.judge
    judge = cache._teacher

    class Counting:
        def scores(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> Any:
            calls.append(len(questions))
            return judge.scores(questions, titles, texts)

    cache._teacher = Counting()
    pools = job.examples["train"]
    ranked = task.rank_proposals([pool.question for pool in pools])
    labels = task._label_examples(pools, ranked)
    alone = [judge_passages(judge, pool.question, own)[0] for pool, own in zip(pools, ranked, strict=True)]
    together = task._judge_pairs([(pool.question, own[0]) for pool, own in zip(pools, ranked, strict=True)], judge)
    assert [one.right for one in together] == [one.right for one in alone]
    assert [one.log_p for one in together] == pytest.approx([one.log_p for one in alone], abs=1e-4)
    assert sum(calls) <= sum(label.judged for label in labels), "a pair is judged once"
    assert len(calls) <= max(label.judged for label in labels), "a round is one call"
    done = len(calls)
    assert task._label_examples(pools, ranked) == labels
    assert len(calls) == done, "verdicts are cached by pair"


def plain_weights(one: TrainableSidr, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return (n, V) weights and bags by SiDR's equation, each text alone and without a padding."""
    body, found = one.model.body, list[Tensor]()
    lines = [torch.from_numpy(line).long() for line in tokenize(load_tokenizer(one.folder, one.spec.max_length), texts)]
    for line in lines:
        hidden = one.model.norm(body(input_ids=line[None])[0][0])  # (t, h)
        found.append((elu(hidden @ body.get_input_embeddings().weight.T) + 1).amax(0) * one.model.terms)
    bags = [torch.zeros(len(one.model.terms)).index_fill(0, line, 1) * one.model.terms for line in lines]
    return torch.stack(found), torch.stack(bags)


def plain_kept(weights: Tensor, bags: Tensor, count: int) -> Tensor:
    return weights * (bags.bool() | (weights >= weights.topk(count).values[:, -1:]))


def plain_loss(task: OpenRagTask, batch: DprBatch, judge: PassageJudge, every: Sequence[Passage]) -> Tensor:
    """OpenRAG's online step as the papers say it."""
    pair, asked = task.module, [example.question for example in batch.examples]
    layout = pair.passage.spec.format_passage
    (questions, question_bags), (read, bags) = (
        plain_weights(one, texts)
        for one, texts in ((pair.question, asked), (pair.passage, [layout(one.title, one.text) for one in every]))
    )
    by_bags, by_weights = (
        (plain_kept(questions, question_bags, pair.question.spec.question_terms) @ other.T).tolist()
        for other in (bags, plain_kept(read, bags, pair.passage.spec.passage_terms))
    )
    positives, negatives = list[int](), list[int]()
    for example, proposing, ordering in zip(batch.examples, by_bags, by_weights, strict=True):
        best = sorted(range(len(every)), key=lambda row, own=proposing: -own[row])[: RECIPE.proposed]  # type: ignore[misc]
        ranked = [every[row] for row in sorted(best, key=lambda row, own=ordering: -own[row])]  # type: ignore[misc]
        found = naive(task, judge, example, ranked, closed=True)
        positives.append(every.index(found[0] or example.positives[0]))
        negatives.append(every.index(found[1] or example.negatives[0]))
    rows = list(dict.fromkeys([*positives, *negatives]))
    gold = torch.tensor([rows.index(row) for row in positives])
    known = torch.tensor([[every[row] in example.positives for row in rows] for example in batch.examples])
    weights, own = read[rows], bags[rows]
    pairs = (
        (plain_kept(questions, question_bags, RECIPE.terms), weights),
        (questions, plain_kept(weights, own, RECIPE.terms)),
        (question_bags, weights),
        (questions, own),
    )
    losses = [
        two_way_loss(a @ b.T / RECIPE.temperature, gold, known.scatter(1, gold[:, None], False)) for a, b in pairs
    ]
    return torch.stack(losses).mean()


def test_an_online_step_has_loss_and_gradient_of_the_plain_equations(
    job_of: Any, folders: dict[str, Path], snapshot: Snapshot
) -> None:
    task = OPENRAG.task(prepared(job_of()))
    task.module.eval()  # without dropout
    batch, learned = (
        task.batches(0)[0],
        [parameter for parameter in task.module.parameters() if parameter.requires_grad],
    )
    loss, told = task.loss(batch)
    assert float(told["online_negatives"]) > 0
    expected = plain_loss(task, batch, judge_of(folders), snapshot.passages(range(snapshot.n)))
    assert torch.allclose(loss, expected, rtol=1e-5)
    gradients = [torch.autograd.grad(one, learned, allow_unused=True) for one in (loss, expected)]
    largest = max(float(one.abs().max()) for one in gradients[1] if one is not None)
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or torch.allclose(ours, theirs, atol=1e-5 * largest)


def test_the_gradient_reaches_the_encoders_and_not_the_generator(job_of: Any) -> None:
    task = OPENRAG.task(prepared(job_of()))
    judge: Any = task._online.judge
    task.loss(task.batches(0)[0])[0].backward()  # type: ignore[no-untyped-call]
    learned = [parameter for parameter in task.module.parameters() if parameter.requires_grad and parameter.dim() > 1]
    assert all(one.grad is not None and bool(one.grad.abs().max() > 0) for one in learned)
    assert all(parameter.grad is None for parameter in judge._generator.module.parameters())
    assert not {*map(id, task.module.parameters())} & {*map(id, judge._generator.module.parameters())}


def test_a_run_that_was_killed_goes_on_to_the_same_losses_and_judges_no_pool_again(job_of: Any, tmp_path: Path) -> None:
    def run(folder: Path, kill_at: int = 0) -> list[float]:
        folder.mkdir(exist_ok=True)

        def kill(kind: str, step: int, steps: int, values: object) -> None:
            if kind == "train" and step == kill_at:
                raise KeyboardInterrupt

        job = prepared(job_of(work=folder, digests={"generator": "g"}))
        train(OPENRAG.task(job), LOOP, folder, kill)
        return [row["loss"] for row in read_metrics(folder) if row["kind"] == "train"]

    expected = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", 5)
    kept = (tmp_path / "killed" / "scores.jsonl").read_bytes()
    assert run(tmp_path / "killed") == expected
    again = (tmp_path / "killed" / "scores.jsonl").read_bytes()
    assert again.startswith(kept)
    assert again.count(b"\n") == (tmp_path / "whole" / "scores.jsonl").read_bytes().count(b"\n")


def test_a_finetuning_gives_a_pair_that_asks_bags(job_of: Any, tmp_path: Path) -> None:
    messages = list[int]()
    job = Finetuning(OPENRAG, job_of())
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


def test_costs_grow_with_what_is_judged(job_of: Any, folders: dict[str, Path]) -> None:
    job = job_of()
    models = {
        part: read_architecture(folders["generator" if part == "generator" else "sidr"]) for part in job.origins.names
    }
    costs = OPENRAG.costs(job, models)
    deep = OPENRAG.costs(job_of(replace(SETTINGS, openrag=replace(RECIPE, depth=16))), models)
    offline = OPENRAG.costs(job_of(replace(SETTINGS, openrag=replace(RECIPE, online=False))), models)
    assert set(costs.stage_bytes) == {"train", "judge"}
    assert offline.step_operations < costs.step_operations
    assert deep.preparation_operations == 2 * costs.preparation_operations


def test_what_cannot_be_is_refused(job_of: Any, folders: dict[str, Path], snapshot: Snapshot, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"depth of \[openrag\] is 1: use 2 or more"):
        OpenRagRecipe(depth=1)
    with pytest.raises(InputError, match="no training example has an answer"):
        OPENRAG.prepare(job_of(train=[Example("1", "who?")]))
    with pytest.raises(UsageError, match="have no pools"):
        OPENRAG.task(job_of())
    store = Store.open(str(snapshot.location))
    for named, sentence in (
        (NamedModels(encoder=str(folders["sidr"])), "there is no generator"),
        (NamedModels(generator=str(folders["generator"])), "there is no SiDR to train"),
        (NamedModels(encoder=str(folders["encoder"]), generator="x"), "is not a SiDR: train one with `finetune sidr`"),
    ):
        with pytest.raises(UsageError, match=sentence):
            OPENRAG.origins(store, snapshot, named)


def test_a_corpus_of_one_passage_has_no_pools(job_of: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    (tmp_path / "work").mkdir()
    alone = publish_tiny(store, folders["encoder"], {"City a": ARTICLES["City a"]}, tmp_path / "work")
    with pytest.raises(InputError, match="none of 8 questions has a passage with which the generator answers right"):
        OPENRAG.prepare(job_of(over=alone))


def test_a_generator_that_scores_all_passages_alike_is_refused(
    job_of: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    numb = load_generator(folders["generator"], device="cpu")
    with torch.no_grad():
        numb.module.get_output_embeddings().weight.zero_()  # every token is as likely, whatever was read
    numb.module.save_pretrained(tmp_path / "numb")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "numb" / name).write_bytes((folders["generator"] / name).read_bytes())
    job = job_of()
    deaf = replace(job, origins=replace(job.origins, names={**job.origins.names, "generator": str(tmp_path / "numb")}))
    with pytest.raises(InputError, match="none of 8 questions"):
        OPENRAG.prepare(deaf)
