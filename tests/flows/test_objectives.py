"""An objective from an installed package works as a built-in one: in the help, in training, in a deployment."""

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
from tests.fixtures.plugin_package import install_package
from tests.flows.conftest import Bookwheel, CommandResult

pytestmark = pytest.mark.xdist_group("server")  # One process runs the commands of all these tests.

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
def inputs(library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Examples about real passages, settings and a store, by option of `finetune`."""
    folder = tmp_path_factory.mktemp("inputs")
    passages = Snapshot.open(str(library)).passages(range(0, 120, 10))
    rows = [{"question": p.title, "answers": ["x"], "title": p.title, "context": p.text} for p in passages]
    for name, split_rows in (("train", rows[:8]), ("dev", rows[8:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in split_rows))
    (folder / "toy.toml").write_text(TOY)
    store = Path(shutil.copytree(library, folder / "store"))
    paths = {name: folder / f"{name}.jsonl" for name in ("train", "dev")}
    return {**paths, "training": folder / "toy.toml", "store": store}


# Each line of the input has a program, its arguments, two output files and environment variables; each line of the
# output is an exit code. Programs run in forked children, which share one import of torch, transformers and Prefect.
COMMANDS = """
import json, os, sys
import prefect.cli  # before flows, which otherwise are plain functions without a server
import accelerate, flows.finetune, flows.verbs.finetune, torch, transformers
from flows import cli
from flows.start_model_run import start_finetune
from prefect.context import refresh_global_settings_context
from rag_model.resources import RunLimits

def deploy(arguments):
    sys.argv = ["prefect", *arguments]
    prefect.cli.app()

def launch(arguments):
    launched = start_finetune("toy", **json.loads(arguments[0]), most=RunLimits("8GB", 2))
    print(json.dumps([launched.run, dict(launched.needs.work.sizes)]))

programs = {"bookwheel": cli.main, "prefect": deploy, "launch": launch}
for line in sys.stdin:
    program, arguments, outputs, variables = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    code = 1
    try:
        os.environ.update(variables)
        refresh_global_settings_context()
        for descriptor, path in enumerate(outputs, start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        programs[program](arguments)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
"""


@pytest.fixture(scope="module")
def run_program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., CommandResult]]:
    """Run `bookwheel`, `prefect` or `launch` in a process where the package `toy` is installed."""
    folder, working_folder = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("working")
    module = ROOT / "tests" / "fixtures" / "toy_objective.py"
    install_package(folder, "objectives", "toy = toy_objective:TOY", module, name="toy")
    outputs = [str(working_folder / "out"), str(working_folder / "err")]
    with subprocess.Popen(
        [sys.executable, "-c", COMMANDS],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
        cwd=working_folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(program: str, *words: object, **variables: str) -> CommandResult:
            request = (program, [str(word) for word in words], outputs, variables)
            print(json.dumps(request), file=process.stdin, flush=True)
            code = int(process.stdout.readline())
            return CommandResult(code, *(Path(path).read_text() for path in outputs))

        yield run
        process.stdin.close()


@pytest.fixture
def finetune_toy(run_program: Callable[..., CommandResult], inputs: dict[str, Path]) -> Callable[..., CommandResult]:
    """Run `finetune toy --json`."""

    def run(*words: object, **variables: str) -> CommandResult:
        options = [word for name, path in inputs.items() for word in (f"--{name}", path)]
        return run_program("bookwheel", "finetune", "toy", *options, *words, "--json", **variables)

    return run


def test_help_lists_installed_objective(run_program: Callable[..., CommandResult], bookwheel: Bookwheel) -> None:
    assert "toy" not in bookwheel("finetune", "--help").out  # The package is not installed for this process.
    output = " ".join(run_program("bookwheel", "finetune", "--help").out.replace("│", " ").split())
    assert "toy: a bag of words" in output
    assert "dpr: a question and a passage encoder, --encoder; colbert: " in output
    refused = run_program("bookwheel", "finetune", "toi")
    names = ", ".join(f'"{name}"' for name in [*list_objective_names(), "toy"])
    assert (refused.code, names in refused.complaint) == (2, True), refused.err


def test_killed_training_resumes_and_stores_model_with_card(
    finetune_toy: Callable[..., CommandResult], inputs: dict[str, Path], tmp_path: Path
) -> None:
    killed = finetune_toy("--work", tmp_path / "work", TOY_KILLED_AT="8")
    assert killed.code == -signal.SIGKILL, killed.err
    assert [row["step"] for row in read_metrics(tmp_path / "work") if row["kind"] == "train"] == list(range(1, 8))
    result = finetune_toy("--work", tmp_path / "work")
    assert result.code == 0, result.err
    reply = result.json
    assert (reply["kind"], reply["name"], reply["steps"], reply["trained"]) == ("toy", "toy", 12, True)
    assert reply["metrics"]["after"]["loss"] < reply["metrics"]["before"]["loss"]

    store = Store.open(str(inputs["store"]))
    content = store.models.get(store.models.resolve("toy")).content
    assert set(content.files) == {"README.md", "metrics.jsonl", "words/model.safetensors"}
    card = (store.get_model_folder("toy") / "README.md").read_text()
    for text in (
        "# toy, trained by bookwheel",
        "A bag of words (an example, 2026).",
        "text-ranking",
        reply["snapshot"],
    ):
        assert text in card

    store.files.delete_folder("memo/finetune")
    undisturbed = finetune_toy("--work", tmp_path / "undisturbed", "--name", "twin").json
    assert (undisturbed["model"], undisturbed["metrics"]) == (reply["model"], reply["metrics"])
    assert read_metrics(tmp_path / "work") == read_metrics(tmp_path / "undisturbed")
    steps = [row for row in read_metrics(tmp_path / "work") if row["kind"] == "train"]
    assert {row["snapshot"] for row in steps} == {reply["snapshot"]}
    assert [row["age"] for row in steps] == [row["step"] for row in steps]


def test_option_that_objective_does_not_take_changes_nothing(finetune_toy: Callable[..., CommandResult]) -> None:
    """`bookwheel.toml` and the environment may set it for other verbs."""
    first = finetune_toy("--max-steps", 2, "--generator", "nowhere").json
    second = finetune_toy("--max-steps", 2, BOOKWHEEL_ENCODER="model:none").json
    assert (second["model"], first["trained"], second["trained"]) == (first["model"], True, False)


@pytest.fixture(scope="module")
def deployment(prefect_url: str, run_program: Callable[..., CommandResult], inputs: dict[str, Path]) -> str:
    """Deploy `finetune` with `infra/prefect.yaml`; return the name of the deployment."""
    with get_client(sync_client=True) as client, suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name="bookwheel-gpu", type="process", base_job_template={}))
    words = ["--no-prompt", "deploy", "-n", "finetune/finetune-library", "--prefect-file", ROOT / "infra/prefect.yaml"]
    result = run_program("prefect", *words, PREFECT_API_URL=prefect_url, BOOKWHEEL_STORE=str(inputs["store"]))
    assert result.code == 0, result.out + result.err
    return "finetune/finetune-library"


@pytest.mark.usefixtures("prefect_server")
def test_deployment_has_form_of_objective(deployment: str) -> None:
    with get_client(sync_client=True) as client:
        deployed = client.read_deployment_by_name(deployment)
        schema: Any = deployed.parameter_openapi_schema
        assert schema["properties"]["kind"]["enum"] == [*list_objective_names(), "toy"]
        forms = {form.get("title"): form for form in schema["properties"]["recipe"]["anyOf"]}
        objectives_of_one_form = {"rag-sequence", "rag-token"}
        assert set(forms) == {*list_objective_names(), "rag-sequence, rag-token", "toy", None} - objectives_of_one_form
        preference = forms["ra-dit"]["properties"]["retriever"]["properties"]["preference"]
        assert preference["enum"] == ["probability", "mean_log_probability"]
        steps = forms["ra-dit"]["properties"]["lm_loop"]["properties"]["max_steps"]
        assert steps["description"].endswith("; by default 500")
        width = forms["toy"]["properties"]["toy"]["properties"]["width"]
        assert (width["type"], width["description"]) == ("integer", "of a word's vector; by default 16")
        for title, epochs in (("toy", 3), ("rag-sequence, rag-token", 100)):
            loop = forms[title]["properties"]["loop"]["properties"]
            assert loop["epochs"]["description"].endswith(f"; by default {epochs}")

        run = {"kind": "toy", "store": "s", "train": "t", "dev": "d", "recipe": {"toy": {"width": 8}}}
        flow_run = client.create_flow_run_from_deployment(deployed.id, parameters=run)
        assert flow_run.parameters == run
        for wrong in ({"toy": {"width": "wide"}}, {"toy": {"breadth": 8}}, {"words": {}}):
            with pytest.raises(PrefectHTTPStatusError, match="recipe"):
                client.create_flow_run_from_deployment(deployed.id, parameters={**run, "recipe": wrong})
        with pytest.raises(PrefectHTTPStatusError, match="kind"):
            client.create_flow_run_from_deployment(deployed.id, parameters={**run, "kind": "toi"})


@pytest.mark.usefixtures("prefect_server")
def test_training_is_estimated_and_launched(
    run_program: Callable[..., CommandResult], inputs: dict[str, Path], deployment: str, prefect_url: str
) -> None:
    options = {name: str(inputs[name]) for name in ("store", "train", "dev")}
    arguments = json.dumps({**options, "max_steps": 5, "deployment": deployment})
    result = run_program("launch", arguments, PREFECT_API_URL=prefect_url)
    assert result.code == 0, result.err
    run, sizes = json.loads(result.out.splitlines()[-1])
    assert sizes == {"steps": "5", "examples": "8"}
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(run).parameters == {"kind": "toy", **options, "max_steps": 5}
