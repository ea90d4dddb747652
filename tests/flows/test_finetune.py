"""`bookwheel finetune`: encoder pairs, cross-encoders, readers and RA-DIT, their settings, and interrupted runs."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from prefect.client.orchestration import get_client

from flows.finetune import prepare_training
from flows.machine.local import find_free_ports
from rag_model.encoders.encoder import Encoder
from rag_model.errors import ResourceError, UsageError
from rag_model.generate.rag_folder import load_rag
from rag_model.retrieve.models import PairScorerCache
from rag_model.store.store import Store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.finetuning import Finetuning
from rag_model.training.loop.checkpoint import read_metrics
from rag_model.training.loop.loop import TrainingResult, train
from rag_model.training.loop.loop_settings import LoopSettings, compute_learning_rate
from rag_model.training.objectives.rag import LOOP
from rag_model.training.origins import NamedModels
from rag_model.training.settings import parse_settings
from tests.fixtures.forked_processes import ForkedCommand, check_killed, run_command
from tests.fixtures.tiny import save_cross_encoder
from tests.fixtures.tiny_generators import save_bart, save_llama
from tests.flows.conftest import IN_PROCESS, Bookwheel

DPR = """
[loop]
learning_rate = 1e-3
evaluate_every = 2
cpu = true

[dpr]
batch_size = 4

[negatives]
ranked = 20
"""
CROSS_ENCODER = DPR.replace("[dpr]", "[cross_encoder]")
MARGIN_MSE = DPR.replace("[dpr]", "[margin_mse]")
RAG = """
[loop]
learning_rate = 1e-3
evaluate_every = 2
cpu = true

[rag]
k = 2
batch_size = 2
answered = 2
max_new_tokens = 3
refuse_collapse = false
"""
RA_DIT = """
[loop]
learning_rate = 1e-3
cpu = true

[lm_loop]
learning_rate = 1e-3
cpu = true

[ra_dit]
k = 3
refuse_collapse = false

[retriever]
text_share = 0.5
text_tokens = 8
preference = "mean_log_probability"
goal = "kl"
"""


@pytest.fixture(scope="session")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bart(tmp_path_factory.mktemp("generator"))


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_cross_encoder(tmp_path_factory.mktemp("teacher") / "cross")


@pytest.fixture
def example_files(tmp_path: Path, library: Path) -> dict[str, Path]:
    """Training and dev files with questions about real passages; settings files are next to them."""
    passages = Snapshot.open(str(library)).passages(range(0, 120, 10))
    rows = [
        {
            "question": f"what {passage.title} {number}",
            "answers": [passage.text.split()[0]],
            "title": passage.title,
            "context": passage.text,
        }
        for number, passage in enumerate(passages)
    ]
    for name, split_rows in (("train", rows[:8]), ("dev", rows[8:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in split_rows))
    for name, text in (("dpr", DPR), ("cross", CROSS_ENCODER), ("margin", MARGIN_MSE), ("rag", RAG), ("ra", RA_DIT)):
        (tmp_path / f"{name}.toml").write_text(text)
    return {name: tmp_path / f"{name}.jsonl" for name in ("train", "dev")}


@pytest.fixture
def finetune(bookwheel: Bookwheel, store: Path, example_files: dict[str, Path], tmp_path: Path) -> Bookwheel:
    """Run `finetune KIND --json -- BEAM` on the copy of the store; `max_steps=2` becomes `--max-steps 2`."""

    def run(kind: str, *beam: str, **options: object) -> Any:
        recipe = tmp_path / f"{kind.partition('-')[0]}.toml"
        named_options = {"store": store, **example_files, "training": recipe, "max_steps": 2, **options}
        words = [word for name, value in named_options.items() for word in (f"--{name.replace('_', '-')}", value)]
        return bookwheel("finetune", kind, *words, "--json", *(("--", *beam) if beam else ()))

    return run


@pytest.mark.usefixtures("prefect_server")
def test_encoder_pair_is_trained_published_and_builds_a_snapshot(
    finetune: Bookwheel, store: Path, reindex: Bookwheel, bookwheel: Bookwheel
) -> None:
    result = finetune("dpr", name="kings")
    assert result.code == 0, result.err
    assert "DEBUG" not in result.err
    assert "mine completes 8 train and 4 dev examples with what `dpr` needs" in result.err
    assert "train evaluates the initial weights on 4 dev examples" in result.err
    assert "train evaluates the weights of step 2 on 4 dev examples" in result.err
    assert re.search(r"evaluated in \d+ s; 1 more \(.*\): about \d+ s", result.err)
    reply = result.json
    assert (reply["kind"], reply["name"], reply["number"]) == ("dpr", "kings", 1)
    assert (reply["steps"], reply["trained"]) == (2, True)
    assert set(reply["metrics"]) == {"before", "after"}
    assert {"Success@20", "average_rank", "loss"} <= set(reply["metrics"]["after"])
    report = Path(reply["report"].removeprefix("file://"))
    assert report == store / "reports" / f"{reply['model']}.html"
    assert "average_rank" in report.read_text()
    with get_client(sync_client=True) as client:
        links = client.request("POST", "/artifacts/filter", json={"artifacts": {"key": {"like_": "finetune-report"}}})
    assert report.name in links.text
    library = Store.open(str(store))
    snapshot = library.snapshots.resolve("latest")
    manifest = library.models.get(library.models.resolve("kings"))
    assert (manifest.id, reply["snapshot"], manifest.content.kind) == (reply["model"], snapshot, "dpr")
    assert manifest.content.lineage["snapshot"] == snapshot
    assert set(manifest.content.lineage["examples"]) == {"train", "dev"}
    assert manifest.metrics == reply["metrics"]
    assert {"README.md", "metrics.jsonl", "question/bookwheel.json"} <= set(manifest.content.files)
    folder = library.get_model_folder("kings")
    question = Encoder.load(folder / "question", "question", threads=1, device="cpu")
    passage = Encoder.load(folder / "passage", threads=1, device="cpu")
    assert question.space().digest == passage.space().digest == (manifest.content.space or {})["digest"]

    mismatch = bookwheel("search", "who", "--store", store, "--question-encoder", folder / "question")
    assert mismatch.code == 3
    assert "weights differ" in mismatch.complaint
    build = reindex(store, "--ref", "trained", encoder="model:kings")
    assert build.code == 0, build.err
    snapshot_of_model = Snapshot.open(str(store), "trained")
    assert (snapshot_of_model.space or {})["digest"] == (manifest.content.space or {})["digest"]
    assert bookwheel("search", "who was king", "--store", store, "--ref", "trained").code == 0


def test_repeated_training_is_reused_until_its_model_is_deleted(
    finetune: Bookwheel, store: Path, tmp_path: Path
) -> None:
    first = finetune("dpr").json
    second = finetune("dpr", name="twin").json
    assert (second["model"], second["metrics"], second["trained"]) == (first["model"], first["metrics"], False)
    assert (first["name"], second["name"], second["number"]) == ("dpr", "twin", 1)
    library = Store.open(str(store))
    collect_garbage(library, 0.0)
    assert finetune("dpr").json["trained"] is False, "gc keeps the record of a training whose model exists"
    assert Path(second["report"].removeprefix("file://")).is_file()
    library.files.delete_folder("models")
    retrained = finetune("dpr").json
    assert (retrained["trained"], retrained["model"]) == (True, first["model"]), "the same inputs, the same bytes"


@pytest.mark.parametrize("kind", ["dpr", "cross-encoder", "margin-mse"])
def test_killed_run_resumes_from_its_checkpoint(
    finetune: Bookwheel, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, teacher: Path
) -> None:
    options: dict[str, Any] = {"max_steps": 4, **({"teacher": teacher} if kind == "margin-mse" else {})}
    uninterrupted = finetune(kind, **options).json
    work, recipe = tmp_path / "work", tmp_path / f"{kind.partition('-')[0]}.toml"
    recipe.write_text(recipe.read_text().replace("evaluate_every = 2", "evaluate_every = 2\ncheckpoint_every = 1"))
    Store.open(str(store)).files.delete_folder("memo/finetune")

    class Killed(BaseException):
        """Ends the run, as a signal would."""

    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("rag_model.training.finetuning.put_model", kill)
        with pytest.raises(Killed):
            finetune(kind, **options, work=work)
    assert list((work / "checkpoints").iterdir())
    steps = (work / "metrics.jsonl").read_text()
    reply = finetune(kind, **options, work=work).json
    assert (work / "metrics.jsonl").read_text() == steps, "no step is taken again"
    assert (reply["metrics"], reply["model"]) == (uninterrupted["metrics"], uninterrupted["model"])


def test_training_resumes_on_another_machine(
    finetune: Bookwheel, bookwheel: Bookwheel, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first machine is lost in step 4 with its disk; the same command resumes from the checkpoint in the store."""
    uninterrupted = finetune("dpr", max_steps=6).json
    library = Store.open(str(store))
    library.files.delete_folder("memo/finetune")
    library.files.delete_folder("models")
    (tmp_path / "dpr.toml").write_text(DPR.replace("evaluate_every = 2", "evaluate_every = 2\ncheckpoint_every = 1"))

    def fail_in_step_4(settings: LoopSettings, step: int, steps: int) -> float:
        if step == 4:
            raise ResourceError("the machine is lost")
        return compute_learning_rate(settings, step, steps)

    with monkeypatch.context() as patch:
        patch.setenv("BOOKWHEEL_CACHE", str(tmp_path / "lost" / "cache"))
        patch.setattr("rag_model.training.loop.loop.compute_learning_rate", fail_in_step_4)
        assert finetune("dpr", max_steps=6).code == 1
    shutil.rmtree(tmp_path / "lost")
    (training,) = bookwheel("show", "--store", store, "--json").json["trainings"]
    assert (training["kind"], training["step"], training["steps"]) == ("dpr", 3, 6)
    text = bookwheel("show", f"training:{training['training'][:6]}", "--store", store)
    assert f"training  {training['training']}\nkind      dpr\n" in text.out
    assert "goes on   with the same `bookwheel finetune`, on any machine\nsignature not signed\n" in text.out
    assert bookwheel("show", "training:latest", "--store", store).code == 1
    assert bookwheel("expire", "--store", store, "--json").json["trainings"] == []
    collect_garbage(library, 0.0)

    resumed = finetune("dpr", max_steps=6)
    assert "goes on after step 3, whose checkpoint is in the store" in resumed.err
    assert (resumed.json["model"], resumed.json["metrics"]) == (uninterrupted["model"], uninterrupted["metrics"])
    assert list(library.files.iter_tree("trainings")) == [], "checkpoints are deleted when the model is published"
    assert bookwheel("show", "--store", store, "--json").json["trainings"] == []


def test_abandoned_training_expires(
    finetune: Bookwheel, bookwheel: Bookwheel, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("rag_model.training.finetuning.train", partial(_train_then_fail, train))
        assert finetune("dpr").code == 1
    (training,) = bookwheel("show", "--store", store, "--json").json["trainings"]
    dry_run = bookwheel("expire", "--store", store, "--older-than", "0d")
    assert f"training  {training['training'][:12]}\n" in dry_run.out
    assert "and 1 training; nothing was changed" in dry_run.out
    assert bookwheel("expire", "--store", store, "--older-than", "0d", "--yes").code == 0
    assert Store.open(str(store)).trainings.list_keys() == []


def _train_then_fail(train_model: Callable[..., TrainingResult], *arguments: Any) -> TrainingResult:
    train_model(*arguments)
    raise ResourceError("the machine is lost")


def _run_until_killed(checkpoints: str, *command: Any) -> None:
    """Run a command, and kill the process just before the checkpoint of step 3 gets its name."""

    def kill_at_rename(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and str(arguments[1]) == f"{checkpoints}/step-00000003":
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill_at_rename)
    run_command(*command)


@pytest.mark.xdist_group("processes")
def test_training_resumes_after_a_killed_process(
    finetune: Bookwheel, store: Path, example_files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "dpr.toml"
    settings.write_text(DPR.replace("evaluate_every = 2", "evaluate_every = 2\ncheckpoint_every = 1"))
    uninterrupted = finetune("dpr", max_steps=5, work=tmp_path / "whole").json
    Store.open(str(store)).files.delete_folder("memo/finetune")
    Store.open(str(store)).files.delete_folder("models")
    work = tmp_path / "work"
    options = {"store": store, **example_files, "training": settings, "max-steps": 5, "work": work}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    # Earlier tests may have set the number of threads of this process, and gradients depend on it.
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    command = (["finetune", "dpr", *words], [tmp_path / "out", tmp_path / "err"], dict(os.environ), Path.cwd())
    check_killed(_run_until_killed, str(work / "checkpoints"), *command)
    assert max(path.name for path in (work / "checkpoints").glob("step-*")) == "step-00000002"
    resumed = finetune("dpr", max_steps=5, work=work)
    assert resumed.json["trained"]
    assert (resumed.json["model"], resumed.json["metrics"]) == (uninterrupted["model"], uninterrupted["metrics"])
    assert read_metrics(work) == read_metrics(tmp_path / "whole")


def test_cross_encoder_is_trained_and_reranks(
    finetune: Bookwheel, store: Path, bookwheel: Bookwheel, tmp_path: Path
) -> None:
    result = finetune("cross-encoder", name="judge")
    assert result.code == 0, result.err
    reply = result.json
    assert set(reply["metrics"]["after"]) == {"loss", "MRR", "Success@1"}
    library = Store.open(str(store))
    content = library.models.get(library.models.resolve("judge")).content
    assert (content.kind, content.space) == ("cross-encoder", None)
    assert {"README.md", "cross-encoder/model.safetensors", "cross-encoder/tokenizer.json"} <= set(content.files)
    query = ("search", "who was king", "--store", store, "-k", 3, "--json")
    search = bookwheel(*query, "--retriever", "rerank(hnsw, model:judge, 5)")
    assert search.code == 0, search.err
    hits = search.json["results"][0]["hits"]
    scorer = PairScorerCache(library).load("model:judge")
    scores = scorer.scores(["who was king"] * 3, [hit["title"] for hit in hits], [hit["text"] for hit in hits])
    assert [hit["score"] for hit in hits] == pytest.approx(scores.tolist(), abs=1e-4)
    continued = finetune("cross-encoder", encoder="model:judge", name="again")
    assert continued.code == 0, continued.err
    assert continued.json["metrics"]["before"] == pytest.approx(reply["metrics"]["after"], abs=1e-4)


def test_cross_encoder_teaches_an_encoder_pair(finetune: Bookwheel, store: Path, teacher: Path, tmp_path: Path) -> None:
    assert finetune("cross-encoder", encoder=teacher, name="judge", max_steps=1).code == 0
    rejected = finetune("cross-encoder", encoder=teacher, teacher="model:judge", name="judge", max_steps=1)
    assert (rejected.code, "cross-encoder learns from no teacher" in rejected.complaint) == (2, True)
    result = finetune("margin-mse", teacher="model:judge", name="pupil")
    assert result.code == 0, result.err
    assert {"loss", "average_rank", "Success@20"} <= set(result.json["metrics"]["after"])
    library = Store.open(str(store))
    content = library.models.get(library.models.resolve("pupil")).content
    assert set(content.lineage["models"]) == {"question", "passage", "teacher"}
    folder = library.get_model_folder("pupil")
    question = Encoder.load(folder / "question", "question", threads=1, device="cpu")
    assert question.space().digest == (content.space or {})["digest"]
    second = finetune("margin-mse", teacher=save_cross_encoder(tmp_path / "other", seed=8), name="pupil").json
    assert (second["trained"], second["number"]) == (True, 2), "another teacher is another training"


def test_other_model_in_place_of_a_cross_encoder_is_rejected(
    finetune: Bookwheel, store: Path, bookwheel: Bookwheel
) -> None:
    assert finetune("dpr", name="finder").code == 0
    search = bookwheel("search", "who", "--store", store, "--retriever", "rerank(hnsw, model:finder)")
    message = "model:finder is not a cross-encoder"
    assert (search.code, f"{message}: name a model that" in search.complaint) == (2, True), search.err
    training = finetune("margin-mse", teacher="model:finder")
    assert (training.code, message in training.complaint) == (2, True), training.err


def test_reader_is_trained_and_answers(finetune: Bookwheel, store: Path, bookwheel: Bookwheel, generator: Path) -> None:
    kind = "rag-sequence"
    result = finetune(kind, generator=generator)
    assert result.code == 0, result.err
    reply = result.json
    assert {"nll", "EM", "F1", "Success@2", "spread", "distinct"} <= set(reply["metrics"]["after"])
    library = Store.open(str(store))
    rag = load_rag(library.get_model_folder(kind), device="cpu")
    assert f"rag-{rag.settings.kind}" == kind
    assert rag.settings.temperature == 0.05, "the encoder's vectors have unit length, and no temperature is set"
    assert rag.question.space().digest == (Snapshot.open(str(store)).space or {})["digest"]
    answer = bookwheel("answer", "who was king?", "--store", store, "--model", f"model:{kind}", "--json")
    assert answer.code == 0, answer.err
    assert (answer.json["model"], len(answer.json["answers"][0]["passages"])) == (reply["model"], 2)
    output = bookwheel("verify", f"model:{kind}", "--store", store).out
    assert output == f"model {reply['model'][:12]} is whole, not signed\n"
    text = bookwheel("show", f"model:{kind}", "--store", store)
    assert f"kind      {kind}" in text.out
    moves = bookwheel("log", "--ref", f"model:{kind}", "--store", store, "--json").json
    assert [(move["number"], move["model"]) for move in moves] == [(1, reply["model"])]


def test_ra_dit_stages_run_together_and_alone(
    finetune: Bookwheel, store: Path, bookwheel: Bookwheel, tmp_path: Path
) -> None:
    """RA-DIT runs both stages, with scores from Beam's workers; runs of single stages reuse these scores."""
    llama = save_llama(tmp_path / "llama")
    result = finetune("ra-dit", IN_PROCESS, generator=llama)
    assert result.code == 0, result.err
    reply, library = result.json, Store.open(str(store))
    assert (reply["steps"], reply["trained"]) == (4, True), "two steps a stage"
    assert {"nll", "Success@3", "kl", "target_entropy"} <= set(reply["metrics"]["after"])
    scores = library.files.list_names("memo/score")
    assert scores
    assert [file.path for file in library.files.iter_tree("runs") if "/score/" in file.path], "by workers"
    answer = bookwheel("answer", "who was king?", "--store", store, "--model", "model:ra-dit", "--json")
    assert answer.code == 0, answer.err
    assert len(answer.json["answers"][0]["passages"]) == 3
    recipe = tmp_path / "ra.toml"
    recipe.write_text(RA_DIT.replace("[ra_dit]", '[ra_dit]\nstages = "retriever"'))
    retriever_stage = finetune("ra-dit", generator=llama, name="finder")
    assert retriever_stage.code == 0, retriever_stage.err
    assert library.files.list_names("memo/score") == scores, "the scores of the initial generator are reused"
    recipe.write_text(RA_DIT.replace("[ra_dit]", '[ra_dit]\nstages = "lm"'))
    lm_stage = finetune("ra-dit", generator=llama, encoder="model:finder", name="reader")
    assert lm_stage.code == 0, lm_stage.err
    continued = finetune("ra-dit", generator="model:reader", name="reader")
    assert (continued.code, continued.json["number"]) == (0, 2), continued.err


def test_reader_that_ignores_its_passages_is_not_published(
    finetune: Bookwheel, store: Path, example_files: dict[str, Path], generator: Path, tmp_path: Path
) -> None:
    row = json.loads(example_files["dev"].read_text().splitlines()[0])
    example_files["dev"].write_text("".join(json.dumps({**row, "question": f"what {n}"}) + "\n" for n in range(20)))
    strict = RAG.replace("answered = 2", "answered = 20").replace("refuse_collapse = false", "refuse_collapse = true")
    limits = "\n[rag.limits]\nleast_spread = 0.0\nmost_unchanged = 0.0\n"  # a single unchanged answer is too many
    (tmp_path / "rag.toml").write_text(strict + limits)
    result = finetune("rag-token", generator=generator, work=tmp_path / "work")
    assert (result.code, "the model ignores its passages" in result.complaint) == (3, True)
    assert Store.open(str(store)).models.list_ids() == []
    assert list((tmp_path / "work" / "checkpoints").iterdir()), "checkpoints are kept for inspection"


def test_printed_recipe_of_a_model_gives_the_same_training(
    finetune: Bookwheel, store: Path, bookwheel: Bookwheel, generator: Path, tmp_path: Path
) -> None:
    first = finetune("rag-token", generator=generator).json
    text = bookwheel("show", "model:rag-token", "--recipe-only", "--store", store).out
    (tmp_path / "again.toml").write_text(text)
    second = finetune("rag-token", generator=generator, training=tmp_path / "again.toml", name="again").json
    assert (second["trained"], second["model"]) == (False, first["model"])


def test_reader_with_encoder_of_another_space_is_rejected(
    finetune: Bookwheel, store: Path, generator: Path, other_tiny: Path
) -> None:
    result = finetune("rag-token", generator=generator, encoder=other_tiny)
    assert result.code == 3
    assert "weights differ" in result.complaint
    assert Store.open(str(store)).models.list_ids() == []


@pytest.mark.parametrize(
    ("kind", "options", "code", "message"),
    [
        ("rag-token", {}, 2, "there is no generator"),
        ("margin-mse", {}, 2, "there is no teacher: name a cross-encoder with --teacher"),
        ("margin-mse", {"teacher": "nowhere"}, 1, "there is no model folder nowhere"),
        ("dpr", {"encoder": "model:missing"}, 1, "no model or ref 'missing'"),
        ("dpr", {"name": "a/b"}, 2, "not a ref name"),
        ("dpr", {"ref": "nothing"}, 1, "no snapshot or ref 'nothing'"),
        ("dpr", {"dev": "nowhere.jsonl"}, 1, "nowhere.jsonl"),
        ("dpr", {"training": "nowhere.toml"}, 2, "cannot read nowhere.toml"),
        ("dpr", {"max_steps": -1}, 2, "max_steps of a training is -1"),
    ],
)
def test_invalid_option_fails_with_one_sentence(
    finetune: Bookwheel, kind: str, options: dict[str, Any], code: int, message: str
) -> None:
    result = finetune(kind, **options)
    assert (result.code, message in result.complaint) == (code, True), result.complaint


def test_extra_argument_is_rejected(finetune: Bookwheel) -> None:
    result = finetune("ra-dit", "rag-token")
    assert (result.code, "finetune takes no argument 'rag-token'" in result.complaint) == (2, True), result.err


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"loop": {"learnrate": 1}}, "has no setting 'learnrate'"),
        ({"rag": {"k": "5"}}, "must be a whole number"),
        ({"rag": {"temperature": math.nan}}, "rag, temperature is nan: give a finite number"),
        ({"loop": {"learning_rate": math.inf}}, "learning_rate is inf: give a finite number"),
        ({"dpr": {"batch_size": 1}}, "has no setting 'dpr'"),
        ({"k": 5}, r"'k' is in no table: put it below \[rag\]"),
        ({"seed": 5}, r"'seed' is in no table: put it below \[loop\] or \[rag\]"),
        ({"bread": 5}, r"'bread' is in no table: the tables are \[loop\], \[rag\] .*--print-settings"),
        ({"loop": {"batch_size": 5}}, r"'batch_size' is in \[loop\]: put it below \[rag\]"),
        ({"rag": {"limits": {"least_spread": 2.0}}}, "collapse limits"),
    ],
)
def test_error_for_an_invalid_setting_names_it(tables: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_settings("rag-token", tables, None, unit_vectors=False)


def test_missing_settings_have_their_defaults() -> None:
    rag = parse_settings("rag-token", {"loop": {"seed": 7}}, 9, unit_vectors=False)
    assert (rag.loop.learning_rate, rag.loop.seed, rag.loop.max_steps) == (LOOP.learning_rate, 7, 9)
    ra_dit: Any = parse_settings("ra-dit", {"lm_loop": {"seed": 7}}, 9, unit_vectors=True)
    assert ra_dit.lm_loop.seed == 7
    assert (ra_dit.loop.max_steps, ra_dit.lm_loop.max_steps) == (9, 9), "the limit applies to each stage"
    assert (ra_dit.lm_loop.schedule, ra_dit.ra_dit.temperature) == ("cosine", 0.05)
    dpr = parse_settings("dpr", {}, None, unit_vectors=True)
    assert (dpr.dpr.temperature, dpr.loop.learning_rate) == (0.05, 2e-5)  # type: ignore[union-attr]
    dpr = parse_settings("dpr", {"dpr": {"temperature": 0.5}}, None, unit_vectors=True)
    assert dpr.dpr.temperature == 0.5  # type: ignore[union-attr]


def test_printed_settings_equal_the_defaults_and_need_no_store(bookwheel: Bookwheel, tmp_path: Path) -> None:
    result = bookwheel("finetune", "rag-token", "--print-settings")
    assert result.code == 0, result.err
    assert parse_settings("rag-token", tomllib.loads(result.out), None, unit_vectors=True) == parse_settings(
        "rag-token", {}, None, unit_vectors=True
    )
    result = bookwheel("finetune", "rag-token", "--store", tmp_path)
    assert (result.code, "--train and --dev are required" in result.complaint) == (2, True), result.complaint


def test_sampled_dev_examples_are_part_of_the_key(
    library: Path, example_files: dict[str, Path], tmp_path: Path
) -> None:
    store = Store.open(str(library))

    def prepare(**loop: int) -> Finetuning:
        files = str(example_files["train"]), str(example_files["dev"])
        return prepare_training(store, "dpr", *files, "latest", NamedModels(), {"loop": loop}, None)

    sampled, other_seed, all_examples = prepare(dev_examples=2), prepare(dev_examples=2, seed=5), prepare()
    assert [len(training.job.examples["dev"]) for training in (sampled, other_seed, all_examples)] == [2, 2, 4]
    assert sampled.key == prepare(dev_examples=2).key != all_examples.key
    assert prepare(dev_examples=4).key == all_examples.key


@pytest.mark.parametrize("kind", ["dpr", "cross-encoder", "margin-mse", "ra-dit"])
def test_bf16_trains_like_float32(
    finetune: Bookwheel, tmp_path: Path, generator: Path, teacher: Path, kind: str
) -> None:
    options: dict[str, Any] = {
        "margin-mse": {"teacher": teacher},
        "ra-dit": {"generator": generator},
    }.get(kind, {})
    recipe = tmp_path / f"{kind.partition('-')[0]}.toml"
    text, losses = recipe.read_text(), dict[str, list[float]]()
    for precision in ("no", "bf16"):
        recipe.write_text(text.replace("cpu = true", f'cpu = true\nprecision = "{precision}"'))
        result = finetune(kind, **options, work=tmp_path / precision)
        assert result.code == 0, result.err
        rows = [
            row
            for folder in (tmp_path / precision, *sorted((tmp_path / precision).glob("*/")))
            for row in (read_metrics(folder) if (folder / "metrics.jsonl").exists() else [])
        ]
        losses[precision] = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses["bf16"] == pytest.approx(losses["no"], rel=0.05, abs=1e-3)


@pytest.mark.xdist_group("processes")
def test_two_launched_processes_train_one_model(
    store: Path, example_files: dict[str, Path], executable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two forked processes get the variables that torchrun sets, so that they need not import torch again."""
    torchrun = [executable.with_name("torchrun"), "--standalone", "--nproc-per-node=2", "--no-python"]
    subprocess.run([*torchrun, "sh", "-c", f"env -0 > {tmp_path}/$RANK.env"], check=True, timeout=300)
    recipe = tmp_path / "dpr.toml"
    recipe.write_text(recipe.read_text().replace("cpu = true\n", ""))
    options = {"store": store, **example_files, "training": recipe, "max-steps": 2, "work": tmp_path / "work"}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]

    def launch() -> Any:
        variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        # The store of torchrun, over which its processes meet, ended with torchrun.
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_ports(1)[0])}
        variables["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        processes = []
        for rank in ("0", "1"):
            lines = (tmp_path / f"{rank}.env").read_text().split("\0")[:-1]
            with monkeypatch.context() as patch:
                for name, value in {**dict(line.split("=", 1) for line in lines), **variables}.items():
                    patch.setenv(name, value)
                processes.append(ForkedCommand(["finetune", "dpr", *words, "--json"], tmp_path))
        outputs, errors = zip(*[process.communicate(300) for process in processes], strict=True)
        assert [process.returncode for process in processes] == [0, 0], errors
        assert "".join(errors).count("completes 8 train and 4 dev examples") <= 1, "one process shows progress"
        return json.loads("".join(outputs))  # one process prints the reply

    outcome = launch()
    assert (outcome["steps"], outcome["number"], outcome["trained"]) == (2, 1, True)
    library = Store.open(str(store))
    assert library.models.resolve("dpr") == outcome["model"]
    record = json.loads((tmp_path / "work" / "training.json").read_text())
    assert '"processes": 2' in json.dumps(record), "their gradients are averaged"
    lineage = library.models.get(outcome["model"]).content.lineage
    assert lineage["processes"] == 2, "one process would train another model"
    assert [row["step"] for row in read_metrics(tmp_path / "work") if row["kind"] == "train"] == [1, 2]
    second = launch()
    assert (second["model"], second["trained"], second["number"]) == (outcome["model"], False, 1)
