"""`bookwheel finetune` in this process: a pair of encoders, then a reader over the index that the pair made."""

import json
import math
import os
import re
import shutil
import subprocess
import time
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
from tests.fixtures.forked_processes import ForkedCommand
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
CROSS = DPR.replace("[dpr]", "[cross_encoder]")
MARGIN = DPR.replace("[dpr]", "[margin_mse]")
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
def given(tmp_path: Path, library: Path) -> dict[str, Path]:
    """Questions about real passages, as triples; and the settings."""
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
    for name, some in (("train", rows[:8]), ("dev", rows[8:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    for name, text in (("dpr", DPR), ("cross", CROSS), ("margin", MARGIN), ("rag", RAG), ("ra", RA_DIT)):
        (tmp_path / f"{name}.toml").write_text(text)
    return {name: tmp_path / f"{name}.jsonl" for name in ("train", "dev")}


@pytest.fixture
def finetune(bookwheel: Bookwheel, store: Path, given: dict[str, Path], tmp_path: Path) -> Bookwheel:
    """Run `finetune KIND --json -- BEAM` on the store's copy; `max_steps=2` becomes `--max-steps 2`."""

    def run(kind: str, *beam: str, **options: object) -> Any:
        recipe = tmp_path / f"{kind.partition('-')[0]}.toml"
        named = {"store": store, **given, "training": recipe, "max_steps": 2, **options}
        words = [word for name, value in named.items() for word in (f"--{name.replace('_', '-')}", value)]
        return bookwheel("finetune", kind, *words, "--json", *(("--", *beam) if beam else ()))

    return run


@pytest.mark.usefixtures("prefect_server")
def test_a_pair_is_trained_and_makes_an_index(
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
    assert (reply["kind"], reply["name"], reply["number"], reply["steps"], reply["trained"]) == (
        "dpr",
        "kings",
        1,
        2,
        True,
    )
    assert set(reply["metrics"]) == {"before", "after"}
    assert {"Success@20", "average_rank", "loss"} <= set(reply["metrics"]["after"])
    page = Path(reply["report"].removeprefix("file://"))
    assert page == store / "reports" / f"{reply['model']}.html"
    assert "average_rank" in page.read_text()
    with get_client(sync_client=True) as client:
        links = client.request("POST", "/artifacts/filter", json={"artifacts": {"key": {"like_": "finetune-report"}}})
    assert page.name in links.text
    opened = Store.open(str(store))
    snapshot = opened.snapshots.resolve("latest")
    manifest = opened.models.get(opened.models.resolve("kings"))
    assert (manifest.id, reply["snapshot"], manifest.content.kind) == (reply["model"], snapshot, "dpr")
    assert manifest.content.lineage["snapshot"] == snapshot
    assert set(manifest.content.lineage["examples"]) == {"train", "dev"}
    assert manifest.metrics == reply["metrics"]
    assert {"README.md", "metrics.jsonl", "question/bookwheel.json"} <= set(manifest.content.files)
    folder = opened.get_model_folder("kings")
    question = Encoder.load(folder / "question", "question", threads=1, device="cpu")
    passage = Encoder.load(folder / "passage", threads=1, device="cpu")
    assert question.space().digest == passage.space().digest == (manifest.content.space or {})["digest"]

    refused = bookwheel("search", "who", "--store", store, "--question-encoder", folder / "question")
    assert refused.code == 3
    assert "weights differ" in refused.complaint
    built = reindex(store, "--ref", "trained", encoder="model:kings")
    assert built.code == 0, built.err
    again = Snapshot.open(str(store), "trained")
    assert (again.space or {})["digest"] == (manifest.content.space or {})["digest"]
    assert bookwheel("search", "who was king", "--store", store, "--ref", "trained").code == 0


def test_what_was_trained_before_is_looked_up(finetune: Bookwheel, store: Path, tmp_path: Path) -> None:
    first = finetune("dpr").json
    again = finetune("dpr", name="twin").json
    assert (again["model"], again["metrics"], again["trained"]) == (first["model"], first["metrics"], False)
    assert (first["name"], again["name"], again["number"]) == ("dpr", "twin", 1)
    opened = Store.open(str(store))
    collect_garbage(opened, 0.0)
    assert finetune("dpr").json["trained"] is False, "gc keeps what tells of a model that is there"
    assert Path(again["report"].removeprefix("file://")).is_file()
    opened.files.delete_folder("models")
    relearned = finetune("dpr").json
    assert (relearned["trained"], relearned["model"]) == (True, first["model"]), "the same inputs, the same bytes"


@pytest.mark.parametrize("kind", ["dpr", "cross-encoder", "margin-mse"])
def test_a_run_that_died_goes_on(
    finetune: Bookwheel, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, teacher: Path
) -> None:
    options: dict[str, Any] = {"max_steps": 4, **({"teacher": teacher} if kind == "margin-mse" else {})}
    whole = finetune(kind, **options).json
    work, recipe = tmp_path / "work", tmp_path / f"{kind.partition('-')[0]}.toml"
    recipe.write_text(recipe.read_text().replace("evaluate_every = 2", "evaluate_every = 2\ncheckpoint_every = 1"))
    Store.open(str(store)).files.delete_folder("memo/finetune")

    class Died(BaseException):
        """As a signal would."""

    def die(*_: object) -> None:
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr("rag_model.training.finetuning.put_model", die)
        with pytest.raises(Died):
            finetune(kind, **options, work=work)
    assert list((work / "checkpoints").iterdir())
    steps = (work / "metrics.jsonl").read_text()
    reply = finetune(kind, **options, work=work).json
    assert (work / "metrics.jsonl").read_text() == steps, "no step is taken again"
    assert (reply["metrics"], reply["model"]) == (whole["metrics"], whole["model"])


def test_a_training_goes_on_on_another_machine(
    finetune: Bookwheel, bookwheel: Bookwheel, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One machine is lost in step 4, with its disk; the store shows what it has, and the same command goes on."""
    whole = finetune("dpr", max_steps=6).json
    opened = Store.open(str(store))
    opened.files.delete_folder("memo/finetune")
    opened.files.delete_folder("models")
    (tmp_path / "dpr.toml").write_text(DPR.replace("evaluate_every = 2", "evaluate_every = 2\ncheckpoint_every = 1"))

    def lost(settings: LoopSettings, step: int, steps: int) -> float:
        if step == 4:
            raise ResourceError("the machine is lost")
        return compute_learning_rate(settings, step, steps)

    with monkeypatch.context() as patch:
        patch.setenv("BOOKWHEEL_CACHE", str(tmp_path / "lost" / "cache"))
        patch.setattr("rag_model.training.loop.loop.compute_learning_rate", lost)
        assert finetune("dpr", max_steps=6).code == 1
    shutil.rmtree(tmp_path / "lost")
    (begun,) = bookwheel("show", "--store", store, "--json").json["trainings"]
    assert (begun["kind"], begun["step"], begun["steps"]) == ("dpr", 3, 6)
    shown = bookwheel("show", f"training:{begun['training'][:6]}", "--store", store)
    assert f"training  {begun['training']}\nkind      dpr\n" in shown.out
    assert "goes on   with the same `bookwheel finetune`, on any machine\nsignature not signed\n" in shown.out
    assert bookwheel("show", "training:latest", "--store", store).code == 1
    assert bookwheel("expire", "--store", store, "--json").json["trainings"] == []
    collect_garbage(opened, 0.0)

    again = finetune("dpr", max_steps=6)
    assert "goes on after step 3, whose checkpoint is in the store" in again.err
    assert (again.json["model"], again.json["metrics"]) == (whole["model"], whole["metrics"])
    assert list(opened.files.iter_tree("trainings")) == [], "its model is published"
    assert bookwheel("show", "--store", store, "--json").json["trainings"] == []


def test_an_abandoned_training_expires(
    finetune: Bookwheel, bookwheel: Bookwheel, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("rag_model.training.finetuning.train", partial(_refused_after, train))
        assert finetune("dpr").code == 1
    (begun,) = bookwheel("show", "--store", store, "--json").json["trainings"]
    told = bookwheel("expire", "--store", store, "--older-than", "0d")
    assert f"training  {begun['training'][:12]}\n" in told.out
    assert "and 1 training; nothing was changed" in told.out
    assert bookwheel("expire", "--store", store, "--older-than", "0d", "--yes").code == 0
    assert Store.open(str(store)).trainings.list_keys() == []


def _refused_after(done: Callable[..., TrainingResult], *given: Any) -> TrainingResult:
    done(*given)
    raise ResourceError("the machine is lost")


@pytest.mark.xdist_group("processes")
def test_a_killed_process_is_gone_on_with(
    finetune: Bookwheel, store: Path, given: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL in the middle, however far it has come: the next run ends with the model of one that was left alone."""
    frequent = DPR.replace("evaluate_every = 2", "evaluate_every = 20\ncheckpoint_every = 1")
    (tmp_path / "dpr.toml").write_text(frequent)
    whole = finetune("dpr", max_steps=60, work=tmp_path / "whole").json
    Store.open(str(store)).files.delete_folder("memo/finetune")
    Store.open(str(store)).files.delete_folder("models")
    work = tmp_path / "work"
    options = {"store": store, **given, "training": tmp_path / "dpr.toml", "max-steps": 60, "work": work}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    # What ran in this process before may have set its threads, and the last bits of a gradient depend on their number.
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    process = ForkedCommand(["finetune", "dpr", *words], tmp_path)
    try:
        deadline = time.monotonic() + 300
        while not list((work / "checkpoints").glob("step-*[1-9]*")):  # beyond step 0
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        process.kill()
        process.wait()
    assert len(read_metrics(work)) < len(read_metrics(tmp_path / "whole"))
    again = finetune("dpr", max_steps=60, work=work).json
    assert (again["model"], again["metrics"], again["trained"]) == (whole["model"], whole["metrics"], True)
    assert read_metrics(work) == read_metrics(tmp_path / "whole")


def test_a_cross_encoder_is_trained_and_reranks(
    finetune: Bookwheel, store: Path, bookwheel: Bookwheel, tmp_path: Path
) -> None:
    result = finetune("cross-encoder", name="judge")
    assert result.code == 0, result.err
    reply = result.json
    assert set(reply["metrics"]["after"]) == {"loss", "MRR", "Success@1"}
    opened = Store.open(str(store))
    content = opened.models.get(opened.models.resolve("judge")).content
    assert (content.kind, content.space) == ("cross-encoder", None)
    assert {"README.md", "cross-encoder/model.safetensors", "cross-encoder/tokenizer.json"} <= set(content.files)
    asked = ("search", "who was king", "--store", store, "-k", 3, "--json")
    found = bookwheel(*asked, "--retriever", "rerank(hnsw, model:judge, 5)")
    assert found.code == 0, found.err
    hits = found.json["results"][0]["hits"]
    scorer = PairScorerCache(opened).load("model:judge")
    again = scorer.scores(["who was king"] * 3, [one["title"] for one in hits], [one["text"] for one in hits])
    assert [one["score"] for one in hits] == pytest.approx(again.tolist(), abs=1e-4)
    goes_on = finetune("cross-encoder", encoder="model:judge", name="again")
    assert goes_on.code == 0, goes_on.err
    assert goes_on.json["metrics"]["before"] == pytest.approx(reply["metrics"]["after"], abs=1e-4)


def test_a_pair_is_taught_by_a_cross_encoder(finetune: Bookwheel, store: Path, teacher: Path, tmp_path: Path) -> None:
    assert finetune("cross-encoder", encoder=teacher, name="judge", max_steps=1).code == 0
    wrong = finetune("cross-encoder", encoder=teacher, teacher="model:judge", name="judge", max_steps=1)
    assert (wrong.code, "cross-encoder learns from no teacher" in wrong.complaint) == (2, True)
    result = finetune("margin-mse", teacher="model:judge", name="pupil")
    assert result.code == 0, result.err
    assert {"loss", "average_rank", "Success@20"} <= set(result.json["metrics"]["after"])
    opened = Store.open(str(store))
    content = opened.models.get(opened.models.resolve("pupil")).content
    assert set(content.lineage["models"]) == {"question", "passage", "teacher"}
    folder = opened.get_model_folder("pupil")
    question = Encoder.load(folder / "question", "question", threads=1, device="cpu")
    assert question.space().digest == (content.space or {})["digest"]
    other = finetune("margin-mse", teacher=save_cross_encoder(tmp_path / "other", seed=8), name="pupil").json
    assert (other["trained"], other["number"]) == (True, 2), "another teacher is another training"


def test_a_model_that_is_no_cross_encoder_is_refused(finetune: Bookwheel, store: Path, bookwheel: Bookwheel) -> None:
    assert finetune("dpr", name="finder").code == 0
    found = bookwheel("search", "who", "--store", store, "--retriever", "rerank(hnsw, model:finder)")
    assert (found.code, "model:finder is not a cross-encoder: name a model that" in found.complaint) == (2, True), (
        found.err
    )
    taught = finetune("margin-mse", teacher="model:finder")
    assert (taught.code, "model:finder is not a cross-encoder" in taught.complaint) == (2, True), taught.err


def test_a_reader_is_trained_and_answers(
    finetune: Bookwheel, store: Path, bookwheel: Bookwheel, generator: Path
) -> None:
    kind = "rag-sequence"
    result = finetune(kind, generator=generator)
    assert result.code == 0, result.err
    reply = result.json
    assert {"nll", "EM", "F1", "Success@2", "spread", "distinct"} <= set(reply["metrics"]["after"])
    opened = Store.open(str(store))
    rag = load_rag(opened.get_model_folder(kind), device="cpu")
    assert f"rag-{rag.settings.kind}" == kind
    assert rag.settings.temperature == 0.05, "the encoder's vectors have unit length, and no temperature is set"
    assert rag.question.space().digest == (Snapshot.open(str(store)).space or {})["digest"]
    answered = bookwheel("answer", "who was king?", "--store", store, "--model", f"model:{kind}", "--json")
    assert answered.code == 0, answered.err
    assert (answered.json["model"], len(answered.json["answers"][0]["passages"])) == (reply["model"], 2)
    output = bookwheel("verify", f"model:{kind}", "--store", store).out
    assert output == f"model {reply['model'][:12]} is whole, not signed\n"
    shown = bookwheel("show", f"model:{kind}", "--store", store)
    assert f"kind      {kind}" in shown.out
    logged = bookwheel("log", "--ref", f"model:{kind}", "--store", store, "--json").json
    assert [(move["number"], move["model"]) for move in logged] == [(1, reply["model"])]


def test_a_generator_and_then_its_retriever_are_tuned(
    finetune: Bookwheel, store: Path, bookwheel: Bookwheel, tmp_path: Path
) -> None:
    """RA-DIT in one run, scored by Beam's workers; and each stage as a run of its own, which scores nothing again."""
    llama = save_llama(tmp_path / "llama")
    result = finetune("ra-dit", IN_PROCESS, generator=llama)
    assert result.code == 0, result.err
    reply, opened = result.json, Store.open(str(store))
    assert (reply["steps"], reply["trained"]) == (4, True), "two steps a stage"
    assert {"nll", "Success@3", "kl", "target_entropy"} <= set(reply["metrics"]["after"])
    scores = opened.files.list_names("memo/score")
    assert scores
    assert [file.path for file in opened.files.iter_tree("runs") if "/score/" in file.path], "by workers"
    answered = bookwheel("answer", "who was king?", "--store", store, "--model", "model:ra-dit", "--json")
    assert answered.code == 0, answered.err
    assert len(answered.json["answers"][0]["passages"]) == 3
    recipe = tmp_path / "ra.toml"
    recipe.write_text(RA_DIT.replace("[ra_dit]", '[ra_dit]\nstages = "retriever"'))
    alone = finetune("ra-dit", generator=llama, name="finder")
    assert alone.code == 0, alone.err
    assert opened.files.list_names("memo/score") == scores, "the initial generator scored the same lists"
    recipe.write_text(RA_DIT.replace("[ra_dit]", '[ra_dit]\nstages = "lm"'))
    reads = finetune("ra-dit", generator=llama, encoder="model:finder", name="reader")
    assert reads.code == 0, reads.err
    again = finetune("ra-dit", generator="model:reader", name="reader")
    assert (again.code, again.json["number"]) == (0, 2), again.err


def test_a_reader_that_does_not_read_gets_no_name(
    finetune: Bookwheel, store: Path, given: dict[str, Path], generator: Path, tmp_path: Path
) -> None:
    row = json.loads(given["dev"].read_text().splitlines()[0])
    given["dev"].write_text("".join(json.dumps({**row, "question": f"what {n}"}) + "\n" for n in range(20)))
    strict = RAG.replace("answered = 2", "answered = 20").replace("refuse_collapse = false", "refuse_collapse = true")
    limits = "\n[rag.limits]\nleast_spread = 0.0\nmost_unchanged = 0.0\n"  # one answer that stays is one too many
    (tmp_path / "rag.toml").write_text(strict + limits)
    result = finetune("rag-token", generator=generator, work=tmp_path / "work")
    assert (result.code, "the model ignores its passages" in result.complaint) == (3, True)
    assert Store.open(str(store)).models.list_ids() == []
    assert list((tmp_path / "work" / "checkpoints").iterdir()), "to be looked at"


def test_the_recipe_of_a_model_trains_it_again(
    finetune: Bookwheel, store: Path, bookwheel: Bookwheel, generator: Path, tmp_path: Path
) -> None:
    first = finetune("rag-token", generator=generator).json
    text = bookwheel("show", "model:rag-token", "--recipe-only", "--store", store).out
    (tmp_path / "again.toml").write_text(text)
    again = finetune("rag-token", generator=generator, training=tmp_path / "again.toml", name="again").json
    assert (again["trained"], again["model"]) == (False, first["model"])


def test_a_reader_of_another_space_is_refused(
    finetune: Bookwheel, store: Path, generator: Path, other_tiny: Path
) -> None:
    refused = finetune("rag-token", generator=generator, encoder=other_tiny)
    assert refused.code == 3
    assert "weights differ" in refused.complaint
    assert Store.open(str(store)).models.list_ids() == []


@pytest.mark.parametrize(
    ("kind", "options", "code", "why"),
    [
        ("rag-token", {}, 2, "there is no generator"),
        ("margin-mse", {}, 2, "there is no teacher: name a cross-encoder with --teacher"),
        ("margin-mse", {"teacher": "nowhere"}, 1, "there is no model folder nowhere"),
        ("dpr", {"encoder": "model:nobody"}, 1, "no model or ref 'nobody'"),
        ("dpr", {"name": "a/b"}, 2, "not a ref name"),
        ("dpr", {"ref": "nothing"}, 1, "no snapshot or ref 'nothing'"),
        ("dpr", {"dev": "nowhere.jsonl"}, 1, "nowhere.jsonl"),
        ("dpr", {"training": "nowhere.toml"}, 2, "cannot read nowhere.toml"),
        ("dpr", {"max_steps": -1}, 2, "max_steps of a training is -1"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    finetune: Bookwheel, kind: str, options: dict[str, Any], code: int, why: str
) -> None:
    result = finetune(kind, **options)
    assert (result.code, why in result.complaint) == (code, True), result.complaint


def test_a_word_too_many_is_refused(finetune: Bookwheel) -> None:
    result = finetune("ra-dit", "rag-token")
    assert (result.code, "finetune takes no argument 'rag-token'" in result.complaint) == (2, True), result.err


@pytest.mark.parametrize(
    ("tables", "why"),
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
def test_a_setting_that_cannot_be_is_named(tables: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse_settings("rag-token", tables, None, unit_vectors=False)


def test_settings_that_are_left_out_are_those_of_the_paper() -> None:
    plain = parse_settings("rag-token", {"loop": {"seed": 7}}, 9, unit_vectors=False)
    assert (plain.loop.learning_rate, plain.loop.seed, plain.loop.max_steps) == (LOOP.learning_rate, 7, 9)
    staged: Any = parse_settings("ra-dit", {"lm_loop": {"seed": 7}}, 9, unit_vectors=True)
    assert (staged.loop.max_steps, staged.lm_loop.max_steps, staged.lm_loop.seed) == (9, 9, 7), "no stage takes more"
    assert (staged.lm_loop.schedule, staged.ra_dit.temperature) == ("cosine", 0.05)
    unit = parse_settings("dpr", {}, None, unit_vectors=True)
    assert (unit.dpr.temperature, unit.loop.learning_rate) == (0.05, 2e-5)  # type: ignore[union-attr]
    own = parse_settings("dpr", {"dpr": {"temperature": 0.5}}, None, unit_vectors=True)
    assert own.dpr.temperature == 0.5  # type: ignore[union-attr]


def test_settings_are_printed_without_a_store_and_train_as_no_settings_do(bookwheel: Bookwheel, tmp_path: Path) -> None:
    result = bookwheel("finetune", "rag-token", "--print-settings")
    assert result.code == 0, result.err
    assert parse_settings("rag-token", tomllib.loads(result.out), None, unit_vectors=True) == parse_settings(
        "rag-token", {}, None, unit_vectors=True
    )
    lacking = bookwheel("finetune", "rag-token", "--store", tmp_path)
    assert (lacking.code, "--train and --dev are required" in lacking.complaint) == (2, True), lacking.complaint


def test_dev_examples_are_drawn_and_are_part_of_the_inputs(
    library: Path, given: dict[str, Path], tmp_path: Path
) -> None:
    store = Store.open(str(library))

    def prepared(**loop: int) -> Finetuning:
        files = str(given["train"]), str(given["dev"])
        return prepare_training(store, "dpr", *files, "latest", NamedModels(), {"loop": loop}, None)

    drawn, other, every = prepared(dev_examples=2), prepared(dev_examples=2, seed=5), prepared()
    assert [len(one.job.examples["dev"]) for one in (drawn, other, every)] == [2, 2, 4]
    assert drawn.key == prepared(dev_examples=2).key != every.key
    assert prepared(dev_examples=4).key == every.key


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
def test_two_processes_of_a_launcher_train_one_model(
    store: Path, given: dict[str, Path], executable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = [executable.with_name("torchrun"), "--standalone", "--nproc-per-node=2", "--no-python", executable]
    options = {"store": store, **given, "training": tmp_path / "dpr.toml", "max_steps": 2}
    options["work"] = tmp_path / "work"
    recipe = tmp_path / "dpr.toml"
    recipe.write_text(recipe.read_text().replace("cpu = true\n", ""))
    words = [str(word) for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}

    def launch() -> Any:
        done = subprocess.run(
            [*launcher, "finetune", "dpr", *words, "--json"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("completes 8 train and 4 dev examples") <= 1, "one process shows progress"
        return json.loads(done.stdout)

    outcome = launch()
    assert (outcome["steps"], outcome["number"], outcome["trained"]) == (2, 1, True)
    opened = Store.open(str(store))
    assert opened.models.resolve("dpr") == outcome["model"]
    record = json.loads((tmp_path / "work" / "training.json").read_text())
    assert '"processes": 2' in json.dumps(record), "their gradients are averaged"
    lineage = opened.models.get(outcome["model"]).content.lineage
    assert lineage["processes"] == 2, "one process would train another model"
    assert [row["step"] for row in read_metrics(tmp_path / "work") if row["kind"] == "train"] == [1, 2]

    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **environment}
    variables["MASTER_PORT"] = str(find_free_ports(1)[0])
    processes = []
    for rank in ("0", "1"):  # as torchrun does, which imports torch once more for each
        with monkeypatch.context() as launched:
            for name, value in {**variables, "RANK": rank, "LOCAL_RANK": rank}.items():
                launched.setenv(name, value)
            processes.append(ForkedCommand(["finetune", "dpr", *words, "--json"], tmp_path))
    outputs = [process.communicate(300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    again = json.loads("".join(output for output, _ in outputs))  # one process prints it
    assert (again["model"], again["trained"], again["number"]) == (outcome["model"], False, 1)
