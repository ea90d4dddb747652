"""An objective that another package registers: offered, deployed with a form, trained, resumed and kept, as our own."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists, PrefectHTTPStatusError

from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.loop.checkpoint import read_metrics
from rag_model.training.objectives.objective import list_objective_names
from tests.flows.conftest import Bookwheel, Ran

ROOT = Path(__file__).parents[2]
TOY = """
[loop]
learning_rate = 0.05
max_steps = 12
evaluate_every = 4
checkpoint_every = 2
cpu = true

[toy]
batch_size = 2
"""


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which a package `toy` is installed: a module, and the metadata that registers it."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copy(ROOT / "tests" / "fixtures" / "toy_objective.py", folder)
    about = folder / "toy-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[bookwheel.objectives]\ntoy = toy_objective:TOY\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


@pytest.fixture(scope="module")
def given(library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Questions about real passages, as triples; the settings; and a store of their own."""
    folder = tmp_path_factory.mktemp("given")
    passages = Snapshot.open(str(library)).passages(range(0, 120, 10))
    rows = [
        {"question": passage.title, "answers": ["x"], "title": passage.title, "context": passage.text}
        for passage in passages
    ]
    for name, some in (("train", rows[:8]), ("dev", rows[8:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    (folder / "toy.toml").write_text(TOY)
    store = Path(shutil.copytree(library, folder / "store"))
    return {
        "train": folder / "train.jsonl",
        "dev": folder / "dev.jsonl",
        "training": folder / "toy.toml",
        "store": store,
    }


# Runs commands in children that it forks, so that they share an import of torch. A line of its input has the arguments
# of `run_command`; a line of its output is an exit code.
COMMANDS = """
import json, os, sys
import accelerate, flows.finetune, flows.verbs.finetune, torch, transformers
from tests.fixtures.forked_processes import run_command
for line in sys.stdin:
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    try:
        run_command(*json.loads(line))
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code or 0)
"""


@pytest.fixture(scope="module")
def command(registered: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Ran]]:
    """Run a verb in a process of its own, with the package installed."""
    folder, environment = tmp_path_factory.mktemp("commands"), {**os.environ, **registered}
    outputs = [str(folder / "out"), str(folder / "err")]
    with subprocess.Popen(
        [sys.executable, "-c", COMMANDS], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(*words: object, **variables: str) -> Ran:
            arguments = [[str(word) for word in words], outputs, {**environment, **variables}, str(folder)]
            print(json.dumps(arguments), file=process.stdin, flush=True)
            code = int(process.stdout.readline())
            return Ran(code, *(Path(path).read_text() for path in outputs))

        yield run
        process.stdin.close()


@pytest.fixture
def toy(command: Callable[..., Ran], given: dict[str, Path]) -> Callable[..., Ran]:
    """Run `finetune toy --json`."""

    def run(*words: object, **environment: str) -> Ran:
        named = [word for name, path in given.items() for word in (f"--{name}", path)]
        return command("finetune", "toy", *named, *words, "--json", **environment)

    return run


def test_help_offers_it(command: Callable[..., Ran], bookwheel: Bookwheel) -> None:
    assert "toy" not in bookwheel("finetune", "--help").out  # here it is not installed
    told = " ".join(command("finetune", "--help").out.replace("│", " ").split())
    assert "toy: a bag of words" in told
    assert "dpr: a question and a passage encoder, --encoder; colbert: " in told
    refused = command("finetune", "toi")
    known = ", ".join(f'"{name}"' for name in [*list_objective_names(), "toy"])
    assert (refused.code, known in refused.complaint) == (2, True), refused.err


def test_it_trains_resumes_after_a_kill_and_is_kept_with_a_card(
    toy: Callable[..., Ran], given: dict[str, Path], tmp_path: Path
) -> None:
    killed = toy("--work", tmp_path / "work", TOY_KILLED_AT="8")
    assert killed.code == -signal.SIGKILL, killed.err
    assert [row["step"] for row in read_metrics(tmp_path / "work") if row["kind"] == "train"] == list(range(1, 8))
    result = toy("--work", tmp_path / "work")
    assert result.code == 0, result.err
    reply = result.json
    assert (reply["kind"], reply["name"], reply["steps"], reply["trained"]) == ("toy", "toy", 12, True)
    assert reply["metrics"]["after"]["loss"] < reply["metrics"]["before"]["loss"]

    store = Store.open(str(given["store"]))
    content = store.models.get(store.models.resolve("toy")).content
    assert set(content.files) == {"README.md", "metrics.jsonl", "words/model.safetensors"}
    card = (store.get_model_folder("toy") / "README.md").read_text()
    for said in (
        "# toy, trained by bookwheel",
        "A bag of words (an example, 2026).",
        "text-ranking",
        reply["snapshot"],
    ):
        assert said in card

    store.files.delete_folder("memo/finetune")
    whole = toy("--work", tmp_path / "whole", "--name", "twin").json
    assert (whole["model"], whole["metrics"]) == (reply["model"], reply["metrics"])
    assert read_metrics(tmp_path / "work") == read_metrics(tmp_path / "whole")
    steps = [row for row in read_metrics(tmp_path / "work") if row["kind"] == "train"]
    assert {row["snapshot"] for row in steps} == {reply["snapshot"]}
    assert [row["age"] for row in steps] == [row["step"] for row in steps]


def test_an_option_that_it_does_not_take_changes_nothing(toy: Callable[..., Ran]) -> None:
    """`bookwheel.toml` and the environment may set it for other verbs."""
    ran = toy("--max-steps", 2, "--generator", "nowhere").json
    again = toy("--max-steps", 2, BOOKWHEEL_ENCODER="model:none").json
    assert (again["model"], ran["trained"], again["trained"]) == (ran["model"], True, False)


@pytest.fixture(scope="module")
def deployment(
    prefect_url: str, registered: dict[str, str], given: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> str:
    """`finetune` as `infra/prefect.yaml` deploys it where the package is installed."""
    with get_client(sync_client=True) as client, suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name="bookwheel-gpu", type="process", base_job_template={}))
    words = [
        "--no-prompt",
        "deploy",
        "-n",
        "finetune/finetune-library",
        "--prefect-file",
        str(ROOT / "infra/prefect.yaml"),
    ]
    done = subprocess.run(
        [Path(sys.executable).with_name("prefect"), *words],
        env={**os.environ, **registered, "PREFECT_API_URL": prefect_url, "BOOKWHEEL_STORE": str(given["store"])},
        cwd=tmp_path_factory.mktemp("elsewhere"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return "finetune/finetune-library"


@pytest.mark.usefixtures("prefect_server")
def test_a_deployment_has_a_form_for_it(deployment: str) -> None:
    with get_client(sync_client=True) as client:
        deployed = client.read_deployment_by_name(deployment)
        schema: Any = deployed.parameter_openapi_schema
        assert schema["properties"]["kind"]["enum"] == [*list_objective_names(), "toy"]
        forms = {form.get("title"): form for form in schema["properties"]["recipe"]["anyOf"]}
        shared = {"rag-sequence", "rag-token"}
        assert set(forms) == {*list_objective_names(), "rag-sequence, rag-token", "toy", None} - shared
        preference = forms["ra-dit"]["properties"]["retriever"]["properties"]["preference"]
        assert preference["enum"] == ["probability", "mean_log_probability"]
        steps = forms["ra-dit"]["properties"]["lm_loop"]["properties"]["max_steps"]
        assert steps["description"].endswith("; by default 500")
        width = forms["toy"]["properties"]["toy"]["properties"]["width"]
        assert (width["type"], width["description"]) == ("integer", "of a word's vector; by default 16")
        assert forms["toy"]["properties"]["loop"]["properties"]["epochs"]["description"].endswith("; by default 3")
        assert forms["rag-sequence, rag-token"]["properties"]["loop"]["properties"]["epochs"]["description"].endswith(
            "100"
        )

        run = {"kind": "toy", "store": "s", "train": "t", "dev": "d", "recipe": {"toy": {"width": 8}}}
        started = client.create_flow_run_from_deployment(deployed.id, parameters=run)
        assert started.parameters == run
        for wrong in ({"toy": {"width": "wide"}}, {"toy": {"breadth": 8}}, {"words": {}}):
            with pytest.raises(PrefectHTTPStatusError, match="recipe"):
                client.create_flow_run_from_deployment(deployed.id, parameters={**run, "recipe": wrong})
        with pytest.raises(PrefectHTTPStatusError, match="kind"):
            client.create_flow_run_from_deployment(deployed.id, parameters={**run, "kind": "toi"})


LAUNCH = """
import json, sys
from flows.launch_model import launch_finetune
from rag_model.resources import RunLimits
told = launch_finetune("toy", **json.loads(sys.argv[1]), most=RunLimits("8GB", 2))
print(json.dumps([told.run, dict(told.needs.work.sizes)]))
"""


@pytest.mark.usefixtures("prefect_server")
def test_it_is_weighed_and_launched(registered: dict[str, str], given: dict[str, Path], deployment: str) -> None:
    what = {name: str(given[name]) for name in ("store", "train", "dev")}
    words = [json.dumps({**what, "max_steps": 5, "deployment": deployment})]
    environment = {**os.environ, **registered}
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    run, work = json.loads(done.stdout.splitlines()[-1])
    assert work == {"steps": "5", "examples": "8"}
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(run).parameters == {"kind": "toy", **what, "ref": "latest", "max_steps": 5}
