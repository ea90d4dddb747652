"""A rebuild is sized before it is launched: what its dump and its encoder need is what Prefect's workers are told."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prefect import Flow, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterKey,
    DeploymentFilter,
    DeploymentFilterName,
)
from prefect.exceptions import ObjectAlreadyExists
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema

from beam_jobs.workers import worker_memory
from flows.evaluate import evaluate
from flows.finetune import finetune
from flows.launch import estimate_rebuild, launch
from flows.launch_model import estimate_evaluation_run, estimate_training_run, launch_evaluate, launch_finetune
from flows.machine.pools import LaunchedRun, job_variables
from flows.maintain import watch
from flows.reindex import reindex
from flows.stage import deployment_flow
from rag_model.encoders.architecture import read_architecture
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import ResourceError, UsageError
from rag_model.evaluation.answers.ablation import AblationSettings
from rag_model.evaluation.answers.settings import EvaluationSettings
from rag_model.generate.decoding import DecodingSettings
from rag_model.generate.load import load_generator
from rag_model.generate.prompts import PaperTemplate
from rag_model.generate.rag import Rag, RagSettings
from rag_model.generate.rag_folder import save_rag
from rag_model.process import count_cores
from rag_model.resources import PASSAGE_TOKENS, PROCESS_BYTES, QUESTION_TOKENS, RunLimits, RunResources, WorkEstimate
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.dump_server import serving
from tests.fixtures.tiny import save_cross_encoder, save_onnx
from tests.fixtures.tiny_generators import save_bart

ROOT = Path(__file__).parents[2]
OWN = ["deployment", "most", "hours"]
LAST = ["disk", "hours, about"]
MOST = RunLimits(memory="64GB", cores=16, gpus=2)


@pytest.fixture
def deployment(prefect_server: None) -> Callable[..., str]:
    """Deploy a flow into a work pool of a type, with no worker; return the deployment's name."""

    def deploy(kind: str, flow_name: str = "reindex") -> str:
        with get_client(sync_client=True) as client:
            with suppress(ObjectAlreadyExists):
                client.create_work_pool(WorkPoolCreate(name=f"launch-{kind}", type=kind, base_job_template={}))
            flow = client.create_flow_from_name(flow_name)
            client.create_deployment(flow, kind, work_pool_name=f"launch-{kind}", job_variables={"env": {"KEPT": "1"}})
        return f"{flow_name}/{kind}"

    return deploy


def started(deployment: str, dump: Path, tiny: Path, **options: Any) -> tuple[LaunchedRun, Any]:
    """Launch; return what was told, and the run as the server has it."""
    told = launch(str(dump), str(dump.parent / "store"), str(tiny), deployment=deployment, **options)
    with get_client(sync_client=True) as client:
        return told, client.read_flow_run(told.run)  # type: ignore[arg-type]


def test_a_launched_run_carries_what_the_estimate_gave_and_that_grows_with_the_dump(
    deployment: Callable[..., str], mini_dump: Path, tiny: Path, tmp_path: Path
) -> None:
    name = deployment("kubernetes")
    most = RunLimits(memory="200GB", cores=64)
    small, run = started(name, mini_dump, tiny, most=most, hours=0.1)
    assert run.job_variables == small.job_variables
    assert run.parameters == {
        "dump": str(mini_dump),
        "store": str(mini_dump.parent / "store"),
        "encoder": str(tiny),
    } | {"ref": "latest", "rebuild_graphs": False}
    assert run.state.name == "Scheduled"
    asked = run.job_variables
    assert asked["memory_request"] == asked["memory_limit"] == f"{-(-small.needs.memory // 2**20)}Mi"
    assert asked["cpu_request"] == asked["cpu_limit"] == str(small.needs.cores)
    assert asked["env"]["BOOKWHEEL_WORKER_MEMORY"] == str(small.needs.memory - PROCESS_BYTES)
    dump = tmp_path / "enwiki.xml.bz2"
    with dump.open("wb") as file:
        file.truncate(2 << 30)  # its size is all that is looked at
    large, run = started(name, dump, tiny, most=most, hours=0.1)
    assert large.needs.memory > small.needs.memory
    assert large.needs.cores > small.needs.cores
    assert run.job_variables["memory_request"] == f"{-(-large.needs.memory // 2**20)}Mi"
    with get_client(sync_client=True) as client:
        shown = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["launch-needs"])))
    told = {row["what"]: row["value"] for one in shown for row in json.loads(str(one.data))}
    assert told.keys() == {"passages, about", *(f"memory, {stage}" for stage in large.needs.work.stages), *LAST}
    assert any(f"{large.needs.cores} × core" in (one.description or "") for one in shown)


@pytest.mark.parametrize(
    ("launched", "target", "left_out"),
    [(launch, reindex, {"dry_run", "base"}), (launch_finetune, finetune, {"work"}), (launch_evaluate, evaluate, set())],
    ids=["reindex", "finetune", "evaluate"],
)
def test_the_form_of_a_launch_is_that_of_its_run_with_the_limits(
    launched: Flow[..., LaunchedRun], target: Flow[..., Any], left_out: set[str]
) -> None:
    asked, run = parameter_schema(launched), parameter_schema(target)
    assert list(asked.properties) == [*(name for name in run.properties if name not in left_out), *OWN]
    assert asked.required == run.required
    assert all(one["description"] for one in asked.properties.values())
    assert all(
        asked.properties[name] | {"position": 0} == one | {"position": 0}
        for name, one in run.properties.items()
        if name not in left_out
    )
    assert asked.properties["deployment"]["default"] == f"{target.name}/{target.name}-library"
    entrypoint = f"{launched.fn.__module__}:{launched.fn.__name__}"
    assert load_flow_from_entrypoint(entrypoint).name == launched.name


def test_a_launch_that_is_tried_again_starts_no_second_run(
    deployment: Callable[..., str], mini_dump: Path, tiny: Path
) -> None:
    given = (str(mini_dump), str(mini_dump.parent / "store"), str(tiny))
    name = deployment("process")

    @deployment_flow("tries")
    def tries() -> set[str]:
        return {launch.fn(*given, deployment=name).run for _ in range(2)}

    assert len(tries()) == 1
    assert tries() != tries()


def test_workers_elsewhere_are_not_this_runs_to_count(mini_dump: Path, tiny: Path) -> None:
    given: dict[str, Any] = {"dump": str(mini_dump), "store": "", "encoder": str(tiny), "limit": None, "recipe": None}
    here, there = (estimate_rebuild(8 << 30, **given, beam_options=flags) for flags in ([], ["--runner=FlinkRunner"]))
    assert set(here.stages) > {"chunk", "embed", "train", "scatter", "merge"}
    assert there.compute_stage_memory(8) == {"launcher": PROCESS_BYTES}
    assert (there.operations, there.seconds, there.disk) == (0, 0, here.disk)


@pytest.mark.parametrize("pool", ["cpu", "gpu"])
def test_our_kubernetes_pools_know_what_they_are_told(pool: str) -> None:
    template = json.loads((ROOT / "infra" / "kubernetes" / "pools" / f"{pool}.json").read_text())
    known = set(template["variables"]["properties"])
    told = job_variables("kubernetes", needs_with(gpus=1 if pool == "gpu" else 0))
    assert set(told) - {"gpus"} <= known
    assert ("gpus" in known) == (pool == "gpu")
    assert template["job_configuration"]["env"] == "{{ env }}"


def needs_with(gpus: int) -> RunResources:
    work = WorkEstimate({"passages, about": "1,000"}, stages={"embed": 1 << 30}, disk=200 << 30)
    return RunResources(work, memory=4 << 30, cores=3, gpus=gpus, hours=1.5)


def test_docker_and_processes_are_told_in_their_own_words() -> None:
    told = {"BOOKWHEEL_CORES": "3", "BOOKWHEEL_WORKER_MEMORY": str((4 << 30) - PROCESS_BYTES), "OMP_NUM_THREADS": "3"}
    assert job_variables("docker", needs_with(gpus=0)) == {
        "env": told,
        "mem_limit": f"{4 << 30}b",
        "container_create_kwargs": {"nano_cpus": 3 * 10**9},
    }
    asked = job_variables("docker", needs_with(gpus=2))["container_create_kwargs"]["device_requests"]
    assert asked == [{"count": 2, "capabilities": [["gpu"]]}]
    assert job_variables("process", needs_with(gpus=2)) == {"env": told}
    assert job_variables("process", needs_with(gpus=0)) == {"env": told | {"CUDA_VISIBLE_DEVICES": ""}}
    assert job_variables("kubernetes", needs_with(gpus=2))["scratch"] == "300Gi"


def test_what_a_run_was_given_is_what_its_workers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOKWHEEL_CORES", "1")
    monkeypatch.setenv("BOOKWHEEL_WORKER_MEMORY", "12345")
    assert (count_cores(), worker_memory(())) == (1, 12345)
    monkeypatch.setenv("BOOKWHEEL_CORES", "4096")
    monkeypatch.setenv("BOOKWHEEL_WORKER_MEMORY", str(1 << 60))
    assert count_cores() < 4096
    assert (worker_memory(()) or 0) < 1 << 60


def test_what_cannot_fit_is_refused_and_nothing_is_started(
    deployment: Callable[..., str], mini_dump: Path, tiny: Path
) -> None:
    name = deployment("docker")
    with pytest.raises(ResourceError, match="raise the limit"):
        started(name, mini_dump, tiny, most=RunLimits("1500MB", 1))
    with get_client(sync_client=True) as client:
        assert (
            client.read_flow_runs(deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=["docker"]))) == []
        )


@pytest.mark.parametrize(
    ("most", "says"),
    [
        (None, "give their size in `most`"),
        (RunLimits("much", 4), "not an amount of memory"),
        (RunLimits("8GB", 0), "a run needs a core"),
        (RunLimits("8GB", 10**9), "cannot have 1000000000 cores"),
    ],
)
def test_limits_that_are_none_are_refused(
    deployment: Callable[..., str], mini_dump: Path, tiny: Path, most: RunLimits | None, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        started(deployment("docker"), mini_dump, tiny, most=most)


@pytest.mark.usefixtures("prefect_server")
def test_a_deployment_that_is_not_there_is_said_so(mini_dump: Path, tiny: Path) -> None:
    with pytest.raises(UsageError, match="there is no deployment reindex/nowhere"):
        started("reindex/nowhere", mini_dump, tiny, most=MOST)


def test_the_watcher_launches_a_sized_run_of_what_it_fetched(
    deployment: Callable[..., str], mini_dump: Path, tiny: Path, tmp_path: Path
) -> None:
    name = deployment("process")
    with serving() as site:
        site.run("20261101", {"testwiki-20261101-pages-articles-multistream.xml.bz2": mini_dump.read_bytes()})
        told = watch(site.url, str(tmp_path / "store"), str(tmp_path / "dumps"), str(tiny), deployment=name)
    assert (told.dump, told.built) == ("20261101", None)
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(told.launched.run)
    assert Path(run.parameters["dump"]).read_bytes() == mini_dump.read_bytes()
    assert run.job_variables == told.launched.job_variables
    told_env = {"BOOKWHEEL_CORES", "BOOKWHEEL_WORKER_MEMORY", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"}
    assert set(run.job_variables["env"]) == told_env


@pytest.fixture
def examples(library: Path, tmp_path: Path) -> dict[str, str]:
    """Questions about real passages, as triples."""
    passages = Snapshot.open(str(library)).passages(range(0, 120, 10))
    rows = [
        {
            "question": f"what is {passage.title}",
            "answers": [passage.text.split()[0]],
            "title": passage.title,
            "context": passage.text,
        }
        for passage in passages
    ]
    for name, some in (("train", rows[:8]), ("dev", rows[8:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "dev")}


def test_a_fine_tuning_gets_what_its_models_and_batches_need(
    deployment: Callable[..., str], library: Path, examples: dict[str, str], tmp_path: Path
) -> None:
    name, bart = deployment("kubernetes", "finetune"), str(save_bart(tmp_path / "bart"))

    def launched(batch: int) -> tuple[LaunchedRun, Any]:
        given: dict[str, Any] = {"recipe": {"rag": {"batch_size": batch}}, "generator": bart, "max_steps": 5}
        told = launch_finetune("rag-token", str(library), **examples, **given, deployment=name, most=MOST)
        with get_client(sync_client=True) as client:
            return told, client.read_flow_run(told.run)  # type: ignore[arg-type]

    small, run = launched(2)
    assert run.parameters == {
        "kind": "rag-token",
        "store": str(library),
        **examples,
        "ref": "latest",
        "generator": bart,
        "recipe": {"rag": {"batch_size": 2}},
        "max_steps": 5,
    }
    assert run.job_variables == small.job_variables
    assert run.job_variables["memory_limit"] == f"{-(-small.needs.memory // 2**20)}Mi"
    assert run.job_variables["env"]["OMP_NUM_THREADS"] == str(small.needs.cores)
    large, run = launched(400)
    assert large.needs.memory > small.needs.memory
    assert run.job_variables["memory_limit"] == f"{-(-large.needs.memory // 2**20)}Mi"
    with pytest.raises(ResourceError, match=r"stage train needs .* GB of memory, and a run may use 64\.0 GB"):
        launched(1_000_000)


def test_a_training_that_rebuilds_its_index_is_told_what_a_rebuild_needs(
    library: Path, examples: dict[str, str], tmp_path: Path
) -> None:
    common: dict[str, Any] = {"store": str(library), "ref": "latest", "recipe": None, "max_steps": 2, **examples}
    common |= {"encoder": None, "generator": str(save_bart(tmp_path / "bart")), "teacher": None}
    work = estimate_training_run(16 << 30, kind="rag-end2end", **common)
    content = Snapshot.open(str(library)).manifest.content
    over = [name for name in content.indexes if content.representation_of(name) == "embeddings"]
    assert work.stages["rebuild"] > work.stages["train"] + PROCESS_BYTES
    assert work.disk > sum(content.files[content.index_file(name)].size for name in over)
    assert re.fullmatch(r"[\d.]+ GB of memory, \d+ MB of disk", work.sizes["a rebuild takes"])
    plain = estimate_training_run(16 << 30, kind="rag-token", **common)
    assert ("rebuild" in plain.stages, "a rebuild takes" in plain.sizes) == (False, False)


def test_trainings_that_rerank_are_weighed_with_their_teacher(
    deployment: Callable[..., str], library: Path, examples: dict[str, str], tmp_path: Path
) -> None:
    name, cross = deployment("kubernetes", "finetune"), save_cross_encoder(tmp_path / "cross")
    graph = save_onnx(cross, tmp_path / "graph")
    shutil.copy(cross / "config.json", graph)
    common: dict[str, Any] = {**examples, "max_steps": 5, "deployment": name, "most": MOST}
    alone = launch_finetune("cross-encoder", str(library), **common, encoder=str(cross))
    assert set(alone.needs.work.stages) == {"train", "mine"}
    for teacher in (cross, graph):
        taught = launch_finetune("margin-mse", str(library), **common, teacher=str(teacher))
        assert set(taught.needs.work.stages) == {"train", "mine", "teach"}
        with get_client(sync_client=True) as client:
            assert client.read_flow_run(taught.run).parameters["teacher"] == str(teacher)  # type: ignore[arg-type]


def test_a_teacher_s_scores_are_work(library: Path, examples: dict[str, str], tmp_path: Path) -> None:
    cross = save_cross_encoder(tmp_path / "cross")
    common: dict[str, Any] = {"store": str(library), "ref": "latest", "max_steps": 5, **examples}
    common |= {"encoder": None, "generator": None, "teacher": str(cross)}

    def work(scored: int) -> float:
        recipe = {"margin_mse": {"scored": scored}}
        return estimate_training_run(16 << 30, kind="margin-mse", recipe=recipe, **common).operations

    pair = read_architecture(cross).operations_per_token * (QUESTION_TOKENS + PASSAGE_TOKENS)
    many = sum(len(Path(path).read_text().splitlines()) for path in examples.values())
    assert work(24) - work(8) == pytest.approx(16 * many * pair)


def test_an_evaluation_gets_what_its_model_and_questions_need(
    deployment: Callable[..., str], library: Path, examples: dict[str, str], tiny: Path, tmp_path: Path
) -> None:
    generator = load_generator(save_bart(tmp_path / "bart"), PaperTemplate(max_answer=16), device="cpu")
    question = TrainableEncoder.load(tiny, "question", device="cpu")
    save_rag(Rag(question, generator, RagSettings(k=3)), tmp_path / "rag", question.space())
    name = deployment("docker", "evaluate")

    def launched(settings: EvaluationSettings | None) -> tuple[LaunchedRun, Any]:
        what = (str(library), str(tmp_path / "rag"), examples["dev"])
        told = launch_evaluate(*what, settings=settings, deployment=name, most=MOST)
        with get_client(sync_client=True) as client:
            return told, client.read_flow_run(told.run)  # type: ignore[arg-type]

    plain, run = launched(None)
    assert "settings" not in run.parameters
    assert run.job_variables["mem_limit"] == f"{plain.needs.memory}b"
    swept, run = launched(
        EvaluationSettings(ablations=AblationSettings(sweep=(1, 50)), decoding=DecodingSettings(beams=4))
    )
    assert run.parameters["settings"]["ablations"]["sweep"] == [1, 50]
    assert swept.needs.memory > plain.needs.memory
    assert swept.needs.hours > plain.needs.hours
    with pytest.raises(UsageError, match="has no index 'none': choose one of hnsw"):
        launched(EvaluationSettings(index="none"))
    with pytest.raises(UsageError, match="there is no deployment evaluate/nowhere"):
        launch_evaluate(str(library), str(tmp_path / "rag"), examples["dev"], deployment="evaluate/nowhere", most=MOST)


def test_a_generator_alone_is_weighed_and_an_endpoint_weighs_nothing(
    library: Path, examples: dict[str, str], tmp_path: Path
) -> None:
    def weighed(model: str, *readers: Any) -> WorkEstimate:
        settings = EvaluationSettings(readers=readers)
        return estimate_evaluation_run(
            0, store=str(library), model=model, questions=examples["dev"], ref="latest", settings=settings
        )

    alone, behind = weighed(str(save_bart(tmp_path / "bart")), "concat"), weighed("openai:any")
    assert alone.stages["answer"] > alone.stages["retrieve"], "decoding takes memory"
    assert behind.stages["answer"] == behind.stages["retrieve"] < alone.stages["retrieve"]
    assert (behind.operations, alone.operations > 0) == (0, True)
