"""RA-DIT over a small snapshot: what each stage trains, resuming, and what is refused."""

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
def read_only_store(store: Store) -> Store:
    """Return the store with a memo that computes nothing."""
    read_only = Store.open(store.url)
    read_only.memo = replace(read_only.memo, can_produce=False)
    return read_only


@pytest.fixture(scope="module")
def snapshot(store: Store, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    return publish_tiny(store, tiny, ARTICLES, tmp_path_factory.mktemp("work"))


@pytest.fixture(scope="module")
def build_job(store: Store, snapshot: Snapshot, tiny: Path, models: dict[str, Path]) -> Any:
    """Return a function that builds a job; `lm` and `retriever` change settings of one stage, others of both."""

    def build(
        *,
        family: str = "llama",
        train: Sequence[Example] = EXAMPLES,
        dev: Sequence[Example] = DEV,
        corpus: Snapshot | None = None,
        loop: LoopSettings = LOOP,
        lm: Mapping[str, Any] | None = None,
        retriever: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Job[RaDitTraining]:
        settings = replace(
            SETTINGS,
            loop=loop,
            lm_loop=loop,
            ra_dit=replace(SETTINGS.ra_dit, **changes),
            lm=replace(SETTINGS.lm, **(lm or {})),
            retriever=replace(SETTINGS.retriever, **(retriever or {})),
        )
        origins = InitialModels({"question": str(tiny), "generator": str(models[family])})
        return Job(store, corpus or snapshot, origins, settings, {"train": train, "dev": dev})

    return build


@pytest.fixture(scope="module")
def uninterrupted_run(build_job: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainingResult]:
    """Return the folder and the result of both stages, trained without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, Finetuning(RA_DIT, build_job()).run(folder)


def read_stages(folder: Path, *stages: str) -> list[dict[str, Any]]:
    return [row for stage in stages for row in read_metrics(folder / stage)]


@pytest.mark.parametrize("family", ["llama", "bart"])
def test_both_stages_train_one_reader(
    build_job: Any, store: Store, tmp_path: Path, family: str, models: dict[str, Path]
) -> None:
    loop = replace(LOOP, max_steps=6, evaluate_every=3)
    preference = {"preference": "mean_log_probability", "preference_temperature": 0.1}
    run = Finetuning(RA_DIT, build_job(family=family, loop=loop, dev=EXAMPLES, retriever=preference))
    result = run.run(tmp_path / "run")
    rows = read_stages(tmp_path / "run", "lm", "retriever")
    dev = [row for row in rows if row["kind"] == "dev"]
    assert dev[2]["nll"] < dev[0]["nll"], "the first stage makes the answers of the dev set more likely"
    assert dev[5]["kl"] < dev[3]["kl"], "the second stage approaches the generator's preference"
    assert dev[3]["nll"] == pytest.approx(dev[2]["nll"], abs=1e-4), "the second stage starts from the first"
    assert set(result.initial_measures) == {"nll", "Success@4", "distinct", "spread"} < set(result.best_measures)
    assert result.steps == 12
    published, _ = run.publish(result, tmp_path / "run", "reader", {})
    assert published.before["nll"] == dev[0]["nll"]
    folder = store.get_model_folder("reader")
    assert {"lm-metrics.jsonl", "retriever-metrics.jsonl"} <= {path.name for path in folder.iterdir()}
    card = (folder / "README.md").read_text()
    snapshot = run.snapshot.id[:12]
    assert f"### Stage lm\n\nTrained on 8 questions, each after 3 passages of snapshot {snapshot}. 6 steps" in card
    assert f"Trained on 8 questions and 8 plain texts of snapshot {snapshot}, each with 4 passages" in card
    rag = load_rag(folder, device="cpu")
    assert (rag.settings.kind, rag.settings.k, rag.settings.temperature) == ("sequence", 4, 0.1)
    assert rag.question.space().digest == (run.snapshot.space or {})["digest"]


def test_dev_losses_use_inner_products_and_ignore_scores(
    snapshot: Snapshot, tiny: Path, models: dict[str, Path]
) -> None:
    question = TrainableEncoder.load(tiny, "question", device="cpu")
    dev = DevSet(PassageMemory(snapshot, question), DEV, SETTINGS.ra_dit)
    questions = [example.question for example in dev.examples]
    retrieved = PassageMemory(snapshot, question).retrieve(questions, question.encode_questions(questions), 3)
    negated = [[replace(hit, score=-hit.score) for hit in hits] for hits in retrieved.hits]
    generator = load_generator(str(models["llama"]), device="cpu")
    assert dev.compute_losses(generator, replace(retrieved, hits=negated)) == dev.compute_losses(generator, retrieved)


def test_first_stage_trains_only_the_generator(build_job: Any, tmp_path: Path, tiny: Path, models: Any) -> None:
    run = Finetuning(RA_DIT, build_job(stages="lm"))
    rag = load_rag(run.run(tmp_path / "run").best_folder, device="cpu")
    assert not has_weights_of(rag.generator.module, models["llama"])
    assert (tmp_path / "run" / "lm").is_dir()
    assert not (tmp_path / "run" / "retriever").exists()
    initial = TrainableEncoder.load(tiny, "question", device="cpu")
    questions = ["who was king?"]
    assert (rag.question.encode_questions(questions) == initial.encode_questions(questions)).all()


def test_second_stage_trains_only_the_question_encoder(build_job: Any, tmp_path: Path, models: Any) -> None:
    preference = {"preference": "mean_log_probability", "preference_temperature": 0.1}
    run = Finetuning(RA_DIT, build_job(stages="retriever", dev=EXAMPLES, retriever=preference))
    result = run.run(tmp_path / "run")
    assert result.best_step > 0
    rag = load_rag(result.best_folder, device="cpu")
    assert has_weights_of(rag.generator.module, models["llama"])
    task = load_retriever_task(run.job)
    initial = task.module.state_dict()
    weights = rag.question.state_dict()
    assert sum(not torch.equal(weights[name], initial[name]) for name in weights) > 5


def has_weights_of(module: Any, folder: Path) -> bool:
    """Return whether a model has the weights of a folder."""
    weights_of_folder = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return all(torch.equal(weights, weights_of_folder[name]) for name, weights in module.state_dict().items())


def test_generator_is_published_as_it_was_trained(
    build_job: Any, tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU with bf16, the second stage uses the generator in bfloat16."""
    monkeypatch.setattr("rag_model.training.objectives.ra_dit.choose_frozen_dtype", lambda _: "bfloat16")
    for stages in ("both", "retriever"):
        result = Finetuning(RA_DIT, build_job(stages=stages)).run(tmp_path / stages)
        best_of_first_stage = sorted((tmp_path / stages / "lm").glob("best-*"))[-1:]
        published = load_rag(result.best_folder, device="cpu", dtype="float32").generator.module
        assert has_weights_of(
            published, best_of_first_stage[0] / "generator" if best_of_first_stage else models["llama"]
        )


def load_retriever_task(job: Job[RaDitTraining]) -> RetrieverTask:
    task = RA_DIT.stages(job)[-1].task(None, lambda _, __: None)
    assert isinstance(task, RetrieverTask)
    return task


def test_gradients_reach_only_the_question_encoder(build_job: Any) -> None:
    task = load_retriever_task(build_job(stages="retriever"))
    loss, measures = task.loss(task.batches(0)[0])
    loss.backward()  # type: ignore[no-untyped-call]
    norms = [float(weights.grad.norm()) for weights in task.module.parameters() if weights.grad is not None]
    assert max(norms) > 1e-6
    assert all(weights.grad is None for weights in task.generator.module.parameters())
    assert set(measures) == {"target_entropy", "prior_entropy"}
    trained_names = {name for name, weights in task.module.named_parameters() if weights.requires_grad}
    assert {name for name, weights in task.module.named_parameters() if weights.grad is not None} == trained_names


def test_loss_of_the_first_stage_equals_transformers(build_job: Any, models: dict[str, Path]) -> None:
    """Equation 3: the sum over passages of the answer's loss, each with one passage before the question."""
    task: Any = RA_DIT.stages(build_job())[0].task(None, lambda _, __: None)
    task.module.eval()
    (batch,) = [tuple(task._train[:2])]
    model, generator = AutoModelForCausalLM.from_pretrained(models["llama"]).eval(), task._generator
    total, tokens = 0.0, 0
    for example, passages in zip(batch, task._read_passages(batch, 3), strict=True):
        answer = generator.tokenizer(" " + example.answer, add_special_tokens=False)["input_ids"]
        answer.append(generator.end_token)
        for passage in passages:
            prompt = generator.encode_contexts([example.text], [[passage]]).tokens[0].tolist()
            labels = torch.tensor([[*[-100] * len(prompt), *answer]])
            with torch.no_grad():
                output = model(input_ids=torch.tensor([[*prompt, *answer]]), labels=labels)
            total += float(output.loss) * len(answer)
            tokens += len(answer)
    loss, measures = task.loss(batch)
    assert float(loss.detach()) == pytest.approx(total / 2, rel=1e-4)
    assert float(measures["token_nll"]) == pytest.approx(total / tokens, rel=1e-4)


class KilledError(BaseException):
    """Ends a training in place of SIGKILL."""


@pytest.mark.parametrize(
    ("stage", "kind", "at"), [("lm", "train", 3), ("score", "score", 1), ("retriever", "train", 3)]
)
def test_killed_run_resumes_to_the_same_losses(
    build_job: Any, uninterrupted_run: tuple[Path, TrainingResult], tmp_path: Path, stage: str, kind: str, at: int
) -> None:
    stages = list[str]()

    def kill(event: str, step: int, *_: Any) -> None:
        stages.extend(["lm" if not (tmp_path / "twice" / "retriever").exists() else "retriever"] * (event == "train"))
        if (event, step) == (kind, at) and (stage == "score" or stages[-1] == stage):
            raise KilledError

    with pytest.raises(KilledError):
        Finetuning(RA_DIT, build_job()).run(tmp_path / "twice", kill)
    resumed = Finetuning(RA_DIT, build_job()).run(tmp_path / "twice")
    assert read_stages(tmp_path / "twice", "lm", "retriever") == read_stages(uninterrupted_run[0], "lm", "retriever")
    assert (resumed.steps, resumed.best_measures) == (uninterrupted_run[1].steps, uninterrupted_run[1].best_measures)


@pytest.mark.usefixtures("uninterrupted_run")
def test_scores_and_lists_are_computed_once(build_job: Any, read_only_store: Store) -> None:
    """Other settings of the training reuse them; other lists do not."""
    task_counts = list[int]()

    def scorer(tasks: Sequence[ScoreBlock], on_progress: OnProgress) -> list[Mapping[str, Any]]:
        task_counts.extend([len(tasks)] if isinstance(tasks[0], ScoreBlock) else [])
        return [compute_once(task, read_only_store) for task in tasks]

    def start_training(**changes: Any) -> None:
        job = replace(build_job(**changes), store=read_only_store, runner=scorer)
        RA_DIT.stages(Finetuning(RA_DIT, job).prepare())[-1].task(None, lambda _, __: None)

    slower = replace(LOOP, learning_rate=1e-5)
    start_training(loop=slower, retriever={"preference": "mean_log_probability"}, temperature=0.5)
    assert task_counts == [1]
    for changes in ({"k": 3}, {"seed": 1}, {"train": EXAMPLES[1:]}, {"dev": DEV[1:]}):
        with pytest.raises(ResultNotRecordedError):
            start_training(**changes)


def test_recipe_chooses_the_scoring_generator(build_job: Any, uninterrupted_run: tuple[Path, TrainingResult]) -> None:
    """Section 5.2 of the paper uses the scores of the initial generator."""
    tuned = next((uninterrupted_run[0] / "lm").glob("best-*4"))
    scores = {}
    for name in ("initial", "tuned"):
        stage = RA_DIT.stages(build_job(retriever={"scored_by": name}))[-1]
        scores[name] = stage.task(tuned, lambda _, __: None).recipe()["scores"]
    second_stage_only = load_retriever_task(build_job(stages="retriever")).recipe()["scores"]
    assert second_stage_only == scores["initial"] != scores["tuned"]


def test_stage_can_start_from_a_published_model(build_job: Any, store: Store, tmp_path: Path) -> None:
    first = Finetuning(RA_DIT, build_job(stages="lm"))
    result = first.run(tmp_path / "lm")
    first.publish(result, tmp_path / "lm", "first", {})
    origins = RA_DIT.origins(store, first.snapshot, NamedModels(generator="model:first"))
    job = build_job(stages="retriever")
    names = {**job.origins.names, "generator": origins.names["generator"]}
    task = load_retriever_task(replace(job, origins=InitialModels(names)))
    with torch.no_grad():
        assert task.evaluate()["nll"] == pytest.approx(result.best_measures["nll"], abs=1e-4)
    with pytest.raises(UsageError, match="there is no generator"):
        RA_DIT.origins(store, first.snapshot, NamedModels())


def set_scores(task: RetrieverTask, *log_p: float, tokens: int = 1) -> tuple[PassageList, ...]:
    """Return the first batch of the task with other scores."""
    return tuple(replace(example, scores=AnswerScores(log_p, tokens)) for example in task.batches(0)[0])


def test_generator_with_equal_scores_is_logged(build_job: Any, caplog: pytest.LogCaptureFixture) -> None:
    """With equal scores the target is uniform, the loss is finite, and the entropy has its maximum."""
    task = load_retriever_task(build_job(stages="retriever"))
    batch = set_scores(task, *[-3.0] * 4)
    loss, measures = task.loss(batch)
    assert loss.isfinite()
    assert float(loss.detach()) > 0
    assert float(measures["target_entropy"]) == pytest.approx(math.log(4), rel=1e-6)
    with caplog.at_level(logging.WARNING):
        parts = task._question, lambda **_: task.generator, task._memory, batch, (task._dev_set, batch)
        RetrieverTask(*parts, task._recipe, task._shared_recipe)
    assert "100 % of the examples have a uniform target" in caplog.text


def test_probabilities_of_long_answers_underflow_and_means_do_not(build_job: Any) -> None:
    for name, uniform in (("probability", True), ("mean_log_probability", False)):
        task = load_retriever_task(build_job(stages="retriever", retriever={"preference": name}))
        loss, measures = task.loss(set_scores(task, -800.0, -900.0, -1000.0, -1100.0, tokens=100))
        assert loss.isfinite()
        assert (float(measures["target_entropy"]) == pytest.approx(math.log(4), rel=1e-6)) == uniform


def test_examples_without_answers_are_left_out_or_refused(build_job: Any) -> None:
    examples = [*EXAMPLES[:4], Example("bare", "why?")]
    lm, retriever = (stage.task(None, lambda _, __: None) for stage in RA_DIT.stages(build_job(train=examples)))
    for task in (lm, retriever):
        ids = {name for batch in task.batches(0) for name in task.ids(batch) if not name.startswith("text ")}
        assert ids == {"qa", "qb", "qc", "qd"}
    for stages in ("lm", "retriever"):
        with pytest.raises(InputError, match="no training example has an answer"):
            RA_DIT.task(build_job(train=examples[4:], stages=stages))
        with pytest.raises(UsageError, match="no dev example has an answer"):
            RA_DIT.task(build_job(dev=examples[4:], stages=stages))


def test_text_share_adds_plain_texts(build_job: Any) -> None:
    for share, texts in ((0.0, 0), (0.5, 8), (0.2, 2), (0.95, len(ARTICLES))):
        task = load_retriever_task(build_job(stages="retriever", retriever={"text_share": share}))
        ids = [name for batch in task.batches(0) for name in task.ids(batch)]
        assert sum(name.startswith("text ") for name in ids) == texts, "at most all passages of the snapshot"
        assert len(ids) == len(EXAMPLES) + texts


def test_one_passage_trains_only_the_first_stage(store: Store, tiny: Path, build_job: Any, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    single = publish_tiny(store, tiny, {"City a": "the king of city a was aaa."}, tmp_path / "one")
    lm = RA_DIT.stages(build_job(corpus=single, stages="lm"))[0].task(None, lambda _, __: None)
    assert lm.loss(lm.batches(0)[0])[0].isfinite()
    with pytest.raises(InputError, match="only one passage"):
        RA_DIT.task(build_job(corpus=single, stages="retriever"))


def test_examples_with_fewer_passages_do_not_change_the_loss_of_others(build_job: Any) -> None:
    lm: Any = RA_DIT.stages(build_job())[0].task(None, lambda _, __: None)
    full, shorter, *_ = lm.batches(0)[0]
    shorter = replace(shorter, rows=shorter.rows[:1])
    assert len(full.rows) > 1
    losses = [lm.loss((example,))[0].item() for example in (full, shorter)]
    assert lm.loss((full, shorter))[0].item() == pytest.approx(sum(losses) / 2, rel=1e-5)


def test_weights_that_are_not_finite_are_refused(build_job: Any, tmp_path: Path) -> None:
    lm: Any = RA_DIT.stages(build_job())[0].task(None, lambda _, __: None)
    with torch.no_grad():
        lm.module.lm_head.weight[3] = torch.nan
    with pytest.raises(RefusedError, match=r"because lm_head\.weight of the model is not finite"):
        train(lm, LOOP, tmp_path / "lm")


def test_loss_that_is_not_finite_names_the_examples(build_job: Any, tmp_path: Path) -> None:
    task = load_retriever_task(build_job(stages="retriever"))
    scores = AnswerScores((math.nan,) * 4, 1)
    task._train = tuple(replace(example, scores=scores) for batch in task.batches(0) for example in batch)
    with pytest.raises(RefusedError, match="the loss of step 1 is nan, of examples"):
        train(task, LOOP, tmp_path / "retriever")


def test_retrieval_collapse_is_refused(build_job: Any) -> None:
    dev = [replace(DEV[0], id=str(number)) for number in range(20)]
    task = RA_DIT.stages(build_job(dev=dev))[0].task(None, lambda _, __: None)
    with pytest.raises(CollapsedError, match="20 questions got 4 distinct passages"):
        task.evaluate()
    for settings in ({"refuse_collapse": False}, {"limits": CollapseLimits(least_spread=0.0)}):
        assert RA_DIT.stages(build_job(dev=dev, **settings))[0].task(None, lambda _, __: None).evaluate()["spread"] == 0


def test_batches_depend_on_the_epoch_alone(build_job: Any) -> None:
    for stage in RA_DIT.stages(build_job()):
        first, second = (stage.task(None, lambda _, __: None) for _ in "ab")
        assert [first.ids(batch) for batch in first.batches(1)] == [second.ids(batch) for batch in second.batches(1)]
        assert [first.ids(batch) for batch in first.batches(0)] != [first.ids(batch) for batch in first.batches(1)]


@pytest.mark.parametrize(
    ("table", "changes", "message"),
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
def test_invalid_setting_is_refused(table: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(SETTINGS, **{table: replace(getattr(SETTINGS, table), **changes)})


def test_work_is_estimated_for_each_stage(build_job: Any) -> None:
    both, lm, retriever = (
        estimate_work(Finetuning(RA_DIT, build_job(stages=stages))) for stages in ("both", "lm", "retriever")
    )
    assert (set(lm.stages), set(retriever.stages)) == ({"lm"}, {"score", "retriever"})
    assert set(both.stages) == {"lm", "score", "retriever"}
    assert both.operations == pytest.approx(lm.operations + retriever.operations)
    assert (both.sizes["steps"], lm.sizes["steps"]) == ("8", "4")
    assert both.disk == lm.disk + retriever.disk
    assert "s of a core" in both.sizes["scores of the generator"]
    assert "scores of the generator" not in lm.sizes
    without_texts = estimate_work(Finetuning(RA_DIT, build_job(stages="retriever", retriever={"text_share": 0.0})))
    assert without_texts.operations < retriever.operations, "plain texts are scored too"
