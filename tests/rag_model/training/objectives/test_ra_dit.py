"""RA-DIT over a small real snapshot: what each stage learns and leaves alone, where it resumes, what it refuses."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import InputError, RefusedError, UsageError
from rag_model.evaluation.answers.collapse import CollapsedError, CollapseLimits
from rag_model.generate.load import load_generator
from rag_model.generate.rag_folder import load_rag
from rag_model.store.objects.memo import ResultNotRecordedError
from rag_model.store.recorded_tasks import OnProgress, compute_once
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.answer_scores import AnswerScores
from rag_model.training.data.blocks import ScoreBlock
from rag_model.training.data.examples import Example
from rag_model.training.data.memory import PassageMemory
from rag_model.training.data.passage_lists import PassageList
from rag_model.training.finetuning import Finetuning, estimate_work
from rag_model.training.loop.checkpoint import read_metrics
from rag_model.training.loop.loop import TrainingResult, train
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.objectives.objective import Job
from rag_model.training.objectives.ra_dit import RA_DIT
from rag_model.training.objectives.ra_dit_tasks import (
    DevSet,
    LmRecipe,
    RaDitRecipe,
    RaDitTraining,
    RetrieverRecipe,
    RetrieverTask,
)
from rag_model.training.origins import InitialModels, NamedModels
from tests.fixtures.tiny_generators import save_bart, save_llama
from tests.fixtures.tiny_snapshot import publish_tiny

ARTICLES = {f"City {x}": f"the king of city {x} was {x * 3} and the answer is {x * 2}." for x in "abcdefghijkl"}
EXAMPLES = [Example(f"q{x}", f"who was the king of city {x}?", (x * 3, "another")) for x in "abcdefgh"]
DEV = [Example(f"d{x}", f"city {x}: who was king?", (x * 3, "king")) for x in "ijkl"]
LOOP = LoopSettings(max_steps=4, evaluate_every=2, checkpoint_every=2, learning_rate=1e-3, cpu=True)
SETTINGS = RaDitTraining(
    LOOP,
    LOOP,
    RaDitRecipe(k=4, temperature=0.1),
    LmRecipe(batch_size=4),
    RetrieverRecipe(batch_size=4, text_share=0.5, text_tokens=8, goal="kl"),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("generators")
    return {"llama": save_llama(base / "llama"), "bart": save_bart(base / "bart")}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.open(str(tmp_path_factory.mktemp("store")), create=True)


@pytest.fixture
def reading(store: Store) -> Store:
    """The same store, whose memo makes nothing."""
    same = Store.open(store.url)
    same.memo = replace(same.memo, can_produce=False)
    return same


@pytest.fixture(scope="module")
def snapshot(store: Store, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    return publish_tiny(store, tiny, ARTICLES, tmp_path_factory.mktemp("work"))


@pytest.fixture(scope="module")
def job_of(store: Store, snapshot: Snapshot, tiny: Path, models: dict[str, Path]) -> Any:
    """A job; `lm` and `retriever` change settings of the stages, the others those of both."""

    def job_of(
        *,
        family: str = "llama",
        train: Sequence[Example] = EXAMPLES,
        dev: Sequence[Example] = DEV,
        over: Snapshot | None = None,
        loop: LoopSettings = LOOP,
        lm: Mapping[str, Any] | None = None,
        retriever: Mapping[str, Any] | None = None,
        **both: Any,
    ) -> Job[RaDitTraining]:
        settings = replace(
            SETTINGS,
            loop=loop,
            lm_loop=loop,
            ra_dit=replace(SETTINGS.ra_dit, **both),
            lm=replace(SETTINGS.lm, **(lm or {})),
            retriever=replace(SETTINGS.retriever, **(retriever or {})),
        )
        origins = InitialModels({"question": str(tiny), "generator": str(models[family])})
        return Job(store, over or snapshot, origins, settings, {"train": train, "dev": dev})

    return job_of


@pytest.fixture(scope="module")
def whole(job_of: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainingResult]:
    """Both stages, left alone."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, Finetuning(RA_DIT, job_of()).run(folder)


def losses(folder: Path, *stages: str) -> list[dict[str, Any]]:
    return [row for stage in stages for row in read_metrics(folder / stage)]


@pytest.mark.parametrize("family", ["llama", "bart"])
def test_both_stages_make_one_model_that_answers(
    job_of: Any, store: Store, tmp_path: Path, family: str, models: dict[str, Path]
) -> None:
    loop = replace(LOOP, max_steps=10, evaluate_every=5)
    prefers = {"preference": "mean_log_probability", "preference_temperature": 0.1}
    run = Finetuning(RA_DIT, job_of(family=family, loop=loop, dev=EXAMPLES, retriever=prefers))
    trained = run.run(tmp_path / "run")
    rows = losses(tmp_path / "run", "lm", "retriever")
    dev = [row for row in rows if row["kind"] == "dev"]
    assert dev[2]["nll"] < dev[0]["nll"], "LM-ft makes the answers of the dev set more likely"
    assert dev[5]["kl"] < dev[3]["kl"], "R-ft comes nearer to the generator's preference"
    assert dev[3]["nll"] == pytest.approx(dev[2]["nll"], abs=1e-4), "R-ft begins where LM-ft ended"
    assert set(trained.initial_measures) == {"nll", "Success@4", "distinct", "spread"} < set(trained.best_measures)
    assert trained.steps == 20
    found, _ = run.publish(trained, tmp_path / "run", "reader", {})
    assert found.before["nll"] == dev[0]["nll"]
    folder = store.get_model_folder("reader")
    assert {"lm-metrics.jsonl", "retriever-metrics.jsonl"} <= {path.name for path in folder.iterdir()}
    card = (folder / "README.md").read_text()
    snapshot = run.snapshot.id[:12]
    assert f"### Stage lm\n\nTrained on 8 questions, each after 3 passages of snapshot {snapshot}. 10 steps" in card
    assert f"Trained on 8 questions and 8 plain texts of snapshot {snapshot}, each with 4 passages" in card
    rag = load_rag(folder, device="cpu")
    assert (rag.settings.kind, rag.settings.k, rag.settings.temperature) == ("sequence", 4, 0.1)
    assert rag.question.space().digest == (run.snapshot.space or {})["digest"]


def test_answers_are_measured_by_inner_products_whatever_finds_the_passages(
    snapshot: Snapshot, tiny: Path, models: dict[str, Path]
) -> None:
    question = TrainableEncoder.load(tiny, "question", device="cpu")
    dev = DevSet(PassageMemory(snapshot, question), DEV, SETTINGS.ra_dit)
    asked = [example.question for example in dev.examples]
    recalled = PassageMemory(snapshot, question).retrieve(asked, question.encode_questions(asked), 3)
    others = [[replace(hit, score=-hit.score) for hit in some] for some in recalled.hits]
    generator = load_generator(str(models["llama"]), device="cpu")
    assert dev.compute_losses(generator, replace(recalled, hits=others)) == dev.compute_losses(generator, recalled)


def test_the_first_stage_moves_the_generator_alone(job_of: Any, tmp_path: Path, tiny: Path, models: Any) -> None:
    run = Finetuning(RA_DIT, job_of(stages="lm"))
    rag = load_rag(run.run(tmp_path / "run").best_folder, device="cpu")
    assert not same(rag.generator.module, models["llama"])
    assert (tmp_path / "run" / "lm").is_dir()
    assert not (tmp_path / "run" / "retriever").exists()
    before = TrainableEncoder.load(tiny, "question", device="cpu")
    questions = ["who was king?"]
    assert (rag.question.encode_questions(questions) == before.encode_questions(questions)).all()


def test_the_second_stage_moves_the_question_encoder_alone(job_of: Any, tmp_path: Path, models: Any) -> None:
    prefers = {"preference": "mean_log_probability", "preference_temperature": 0.1}
    run = Finetuning(RA_DIT, job_of(stages="retriever", dev=EXAMPLES, retriever=prefers))
    trained = run.run(tmp_path / "run")
    assert trained.best_step > 0
    rag = load_rag(trained.best_folder, device="cpu")
    assert same(rag.generator.module, models["llama"])
    task = retriever_of(run.job)
    before = task.module.state_dict()
    moved = {name for name, weights in rag.question.state_dict().items() if not torch.equal(weights, before[name])}
    assert len(moved) > 5


def same(module: Any, folder: Path) -> bool:
    """Whether a model has the weights of a folder."""
    other = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return all(torch.equal(weights, other[name]) for name, weights in module.state_dict().items())


def retriever_of(job: Job[RaDitTraining]) -> RetrieverTask:
    task = RA_DIT.stages(job)[-1].task(None, lambda _, __: None)
    assert isinstance(task, RetrieverTask)
    return task


def test_the_gradient_reaches_the_question_encoder_and_nothing_else(job_of: Any) -> None:
    task = retriever_of(job_of(stages="retriever"))
    loss, measures = task.loss(task.batches(0)[0])
    loss.backward()  # type: ignore[no-untyped-call]
    norms = [float(weights.grad.norm()) for weights in task.module.parameters() if weights.grad is not None]
    assert max(norms) > 1e-6
    assert all(weights.grad is None for weights in task.generator.module.parameters())
    assert set(measures) == {"target_entropy", "prior_entropy"}
    learns = {name for name, weights in task.module.named_parameters() if weights.requires_grad}
    assert {name for name, weights in task.module.named_parameters() if weights.grad is not None} == learns


def test_the_first_loss_is_that_of_transformers(job_of: Any, models: dict[str, Path]) -> None:
    """Eq. 3: each passage on its own before the question, the loss on the answer alone, summed."""
    task: Any = RA_DIT.stages(job_of())[0].task(None, lambda _, __: None)
    task.module.eval()
    (batch,) = [tuple(task._train[:2])]
    model, generator = AutoModelForCausalLM.from_pretrained(models["llama"]).eval(), task._generator
    total, tokens = 0.0, 0
    for one, passages in zip(batch, task._read_passages(batch, 3), strict=True):
        answer = generator.tokenizer(" " + one.answer, add_special_tokens=False)["input_ids"]
        answer.append(generator.end_token)
        for passage in passages:
            prompt = generator.encode_contexts([one.text], [[passage]]).tokens[0].tolist()
            labels = torch.tensor([[*[-100] * len(prompt), *answer]])
            with torch.no_grad():
                given = model(input_ids=torch.tensor([[*prompt, *answer]]), labels=labels)
            total += float(given.loss) * len(answer)
            tokens += len(answer)
    loss, measures = task.loss(batch)
    assert float(loss.detach()) == pytest.approx(total / 2, rel=1e-4)
    assert float(measures["token_nll"]) == pytest.approx(total / tokens, rel=1e-4)


class Killed(BaseException):
    """As SIGKILL ends it, but for the test's sake."""


@pytest.mark.parametrize(
    ("stage", "kind", "at"), [("lm", "train", 3), ("score", "score", 1), ("retriever", "train", 3)]
)
def test_a_killed_run_goes_on_to_the_same_losses(
    job_of: Any, whole: tuple[Path, TrainingResult], tmp_path: Path, stage: str, kind: str, at: int
) -> None:
    begun = list[str]()

    def kill(said: str, step: int, *_: Any) -> None:
        begun.extend(["lm" if not (tmp_path / "twice" / "retriever").exists() else "retriever"] * (said == "train"))
        if (said, step) == (kind, at) and (stage == "score" or begun[-1] == stage):
            raise Killed

    with pytest.raises(Killed):
        Finetuning(RA_DIT, job_of()).run(tmp_path / "twice", kill)
    again = Finetuning(RA_DIT, job_of()).run(tmp_path / "twice")
    assert losses(tmp_path / "twice", "lm", "retriever") == losses(whole[0], "lm", "retriever")
    assert (again.steps, again.best_measures) == (whole[1].steps, whole[1].best_measures)


@pytest.mark.usefixtures("whole")
def test_scores_and_lists_are_computed_once(job_of: Any, reading: Store) -> None:
    """With other settings of the training they are found; other lists are not."""
    done = list[int]()

    def scorer(tasks: Sequence[ScoreBlock], tell: OnProgress) -> list[Mapping[str, Any]]:
        done.extend([len(tasks)] if isinstance(tasks[0], ScoreBlock) else [])
        return [compute_once(task, reading) for task in tasks]

    def begin(**changed: Any) -> None:
        job = replace(job_of(**changed), store=reading, runner=scorer)
        RA_DIT.stages(Finetuning(RA_DIT, job).prepare())[-1].task(None, lambda _, __: None)

    begin(loop=replace(LOOP, learning_rate=1e-5), retriever={"preference": "mean_log_probability"}, temperature=0.5)
    assert done == [1]
    for changed in ({"k": 3}, {"seed": 1}, {"train": EXAMPLES[1:]}, {"dev": DEV[1:]}):
        with pytest.raises(ResultNotRecordedError):
            begin(**changed)


def test_the_tuned_generator_scores_if_the_recipe_says_so(job_of: Any, whole: tuple[Path, TrainingResult]) -> None:
    """The paper's scores are the initial generator's: section 5.2."""
    tuned = next((whole[0] / "lm").glob("best-*4"))
    told = {}
    for name in ("initial", "tuned"):
        stage = RA_DIT.stages(job_of(retriever={"scored_by": name}))[-1]
        told[name] = stage.task(tuned, lambda _, __: None).recipe()["scores"]
    alone = retriever_of(job_of(stages="retriever")).recipe()["scores"]
    assert alone == told["initial"] != told["tuned"]


def test_a_stage_may_begin_where_another_run_ended(job_of: Any, store: Store, tmp_path: Path) -> None:
    first = Finetuning(RA_DIT, job_of(stages="lm"))
    trained = first.run(tmp_path / "lm")
    first.publish(trained, tmp_path / "lm", "first", {})
    origins = RA_DIT.origins(store, first.snapshot, NamedModels(generator="model:first"))
    job = job_of(stages="retriever")
    task = retriever_of(
        replace(job, origins=InitialModels({**job.origins.names, "generator": origins.names["generator"]}))
    )
    with torch.no_grad():
        assert task.evaluate()["nll"] == pytest.approx(trained.best_measures["nll"], abs=1e-4)
    with pytest.raises(UsageError, match="there is no generator"):
        RA_DIT.origins(store, first.snapshot, NamedModels())


def scored(task: RetrieverTask, *log_p: float, tokens: int = 1) -> tuple[PassageList, ...]:
    """The task's first batch, with other scores."""
    return tuple(replace(one, scores=AnswerScores(log_p, tokens)) for one in task.batches(0)[0])


def test_a_generator_that_does_not_care_is_told(job_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Every passage has the same score: the target is uniform, the loss is defined, and the entropy says so."""
    task = retriever_of(job_of(stages="retriever"))
    batch = scored(task, *[-3.0] * 4)
    loss, measures = task.loss(batch)
    assert loss.isfinite()
    assert float(loss.detach()) > 0
    assert float(measures["target_entropy"]) == pytest.approx(math.log(4), rel=1e-6)
    with caplog.at_level(logging.WARNING):
        RetrieverTask(
            task._question,
            lambda: task.generator,
            task._memory,
            batch,
            (task._dev_set, batch),
            task._recipe,
            task._shared_recipe,
        )
    assert "100 % of the examples have a uniform target" in caplog.text


def test_long_answers_underflow_unless_the_mean_is_taken(job_of: Any) -> None:
    for name, uniform in (("probability", True), ("mean_log_probability", False)):
        task = retriever_of(job_of(stages="retriever", retriever={"preference": name}))
        loss, measures = task.loss(scored(task, -800.0, -900.0, -1000.0, -1100.0, tokens=100))
        assert loss.isfinite()
        assert (float(measures["target_entropy"]) == pytest.approx(math.log(4), rel=1e-6)) == uniform


def test_examples_without_answers_are_left_out(job_of: Any) -> None:
    bare = [*EXAMPLES[:4], Example("bare", "why?")]
    lm, retriever = (stage.task(None, lambda _, __: None) for stage in RA_DIT.stages(job_of(train=bare)))
    for task in (lm, retriever):
        ids = {name for batch in task.batches(0) for name in task.ids(batch) if not name.startswith("text ")}
        assert ids == {"qa", "qb", "qc", "qd"}
    for stages in ("lm", "retriever"):
        with pytest.raises(InputError, match="no training example has an answer"):
            RA_DIT.task(job_of(train=bare[4:], stages=stages))
        with pytest.raises(UsageError, match="no dev example has an answer"):
            RA_DIT.task(job_of(dev=bare[4:], stages=stages))


def test_a_share_of_the_examples_is_plain_text(job_of: Any) -> None:
    for share, texts in ((0.0, 0), (0.5, 8), (0.2, 2), (0.95, len(ARTICLES))):
        task = retriever_of(job_of(stages="retriever", retriever={"text_share": share}))
        ids = [name for batch in task.batches(0) for name in task.ids(batch)]
        assert sum(name.startswith("text ") for name in ids) == texts, "as many as the snapshot has, at most"
        assert len(ids) == len(EXAMPLES) + texts


def test_a_snapshot_of_one_passage(store: Store, tiny: Path, job_of: Any, tmp_path: Path) -> None:
    """LM-ft reads what there is; there is nothing to choose from, and R-ft says so."""
    (tmp_path / "one").mkdir()
    one = publish_tiny(store, tiny, {"City a": "the king of city a was aaa."}, tmp_path / "one")
    lm = RA_DIT.stages(job_of(over=one, stages="lm"))[0].task(None, lambda _, __: None)
    assert lm.loss(lm.batches(0)[0])[0].isfinite()
    with pytest.raises(InputError, match="only one passage"):
        RA_DIT.task(job_of(over=one, stages="retriever"))


def test_examples_that_found_fewer_passages_take_none_from_the_others(job_of: Any) -> None:
    lm: Any = RA_DIT.stages(job_of())[0].task(None, lambda _, __: None)
    many, few, *_ = lm.batches(0)[0]
    few = replace(few, rows=few.rows[:1])
    assert len(many.rows) > 1
    apart = [lm.loss((one,))[0].item() for one in (many, few)]
    assert lm.loss((many, few))[0].item() == pytest.approx(sum(apart) / 2, rel=1e-5)


def test_a_model_that_is_broken_from_the_start_is_named_rather_than_the_examples(job_of: Any, tmp_path: Path) -> None:
    lm: Any = RA_DIT.stages(job_of())[0].task(None, lambda _, __: None)
    with torch.no_grad():
        lm.module.lm_head.weight[3] = torch.nan
    with pytest.raises(RefusedError, match=r"because lm_head\.weight of the model is not finite"):
        train(lm, LOOP, tmp_path / "lm")


def test_a_loss_that_is_not_finite_names_the_examples(job_of: Any, tmp_path: Path) -> None:
    task = retriever_of(job_of(stages="retriever"))
    poisoned = [replace(one, scores=AnswerScores((math.nan,) * 4, 1)) for batch in task.batches(0) for one in batch]
    task._train = tuple(poisoned)
    with pytest.raises(RefusedError, match="the loss of step 1 is nan, of examples"):
        train(task, LOOP, tmp_path / "retriever")


def test_retrieval_collapse_is_refused(job_of: Any) -> None:
    dev = [replace(DEV[0], id=str(number)) for number in range(20)]
    task = RA_DIT.stages(job_of(dev=dev))[0].task(None, lambda _, __: None)
    with pytest.raises(CollapsedError, match="20 questions got 4 distinct passages"):
        task.evaluate()
    for allowed in ({"refuse_collapse": False}, {"limits": CollapseLimits(least_spread=0.0)}):
        assert RA_DIT.stages(job_of(dev=dev, **allowed))[0].task(None, lambda _, __: None).evaluate()["spread"] == 0


def test_the_order_depends_on_the_epoch_alone(job_of: Any) -> None:
    for stage in RA_DIT.stages(job_of()):
        one, two = (stage.task(None, lambda _, __: None) for _ in "ab")
        assert [one.ids(batch) for batch in one.batches(1)] == [two.ids(batch) for batch in two.batches(1)]
        assert [one.ids(batch) for batch in one.batches(0)] != [one.ids(batch) for batch in one.batches(1)]


@pytest.mark.parametrize(
    ("table", "wrong", "said"),
    [
        ("ra_dit", {"k": 0}, "k >= 1"),
        ("lm", {"k": 0}, r"k of \[lm\] is 0: use 1 or more"),
        ("lm", {"batch_size": 0}, r"batch_size of \[lm\]"),
        ("retriever", {"batch_size": 0}, r"batch_size of \[retriever\]"),
        ("retriever", {"text_share": 1.0}, "less than 1"),
        ("retriever", {"text_tokens": 0}, "1 or more"),
        ("retriever", {"preference_temperature": 0.0}, "more than 0"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(table: str, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        replace(SETTINGS, **{table: replace(getattr(SETTINGS, table), **wrong)})


def test_its_price_is_known_before(job_of: Any) -> None:
    both, lm, retriever = (
        estimate_work(Finetuning(RA_DIT, job_of(stages=stages))) for stages in ("both", "lm", "retriever")
    )
    assert (set(lm.stages), set(retriever.stages)) == ({"lm"}, {"score", "retriever"})
    assert set(both.stages) == {"lm", "score", "retriever"}
    assert both.operations == pytest.approx(lm.operations + retriever.operations)
    assert (both.sizes["steps"], lm.sizes["steps"]) == ("8", "4")
    assert both.disk == lm.disk + retriever.disk
    assert "s of a core" in both.sizes["scores of the generator"]
    assert "scores of the generator" not in lm.sizes
    texts = estimate_work(Finetuning(RA_DIT, job_of(stages="retriever", retriever={"text_share": 0.0})))
    assert texts.operations < retriever.operations, "plain texts are scored too"
