"""Flows that estimate the resources of a run and give them to Prefect's workers as job variables."""

import json
import re
import shutil
import tomllib
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

from beam_jobs.workers import get_worker_memory
from flows.evaluate import evaluate
from flows.finetune import finetune
from flows.machine.pools import StartedRun, build_job_variables
from flows.maintain import watch
from flows.reindex import reindex
from flows.stage import deployment_flow
from flows.start_model_run import estimate_evaluation_run, estimate_training_run, start_evaluate, start_finetune
from flows.start_reindex import estimate_rebuild, start_reindex
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
from rag_model.snapshots.recipe import Recipe
from rag_model.store.versions.snapshot import Snapshot
from rag_model.toml import from_table
from tests.fixtures.dump_server import serve_dumps
from tests.fixtures.tiny import save_cross_encoder, save_onnx
from tests.fixtures.tiny_generators import save_bart

ROOT = Path(__file__).parents[2]
START_PARAMETERS = ["deployment", "most", "hours"]
LIMITS = RunLimits(memory="64GB", cores=16, gpus=2)


@pytest.fixture
def deployment(prefect_server: None) -> Callable[..., str]:
    """Deploy a flow into a work pool of a type, with no worker; return the deployment's name."""

    def deploy(kind: str, flow_name: str = "reindex", **parameters: Any) -> str:
        with get_client(sync_client=True) as client:
            with suppress(ObjectAlreadyExists):
                client.create_work_pool(WorkPoolCreate(name=f"launch-{kind}", type=kind, base_job_template={}))
            flow = client.create_flow_from_name(flow_name)
            pool, variables = f"launch-{kind}", {"env": {"KEPT": "1"}}
            client.create_deployment(flow, kind, parameters=parameters, work_pool_name=pool, job_variables=variables)
        return f"{flow_name}/{kind}"

    return deploy


def start_and_read_run(deployment: str, dump: Path, tiny: Path, **options: Any) -> tuple[StartedRun, Any]:
    """Start a rebuild; return its report, and the run from the server."""
    report = start_reindex(str(dump), str(dump.parent / "store"), str(tiny), deployment=deployment, **options)
    with get_client(sync_client=True) as client:
        return report, client.read_flow_run(report.run)  # type: ignore[arg-type]


def test_started_run_has_estimated_resources_that_grow_with_dump(
    deployment: Callable[..., str], mini_dump: Path, tiny: Path, tmp_path: Path
) -> None:
    name = deployment("kubernetes")
    limits = RunLimits(memory="200GB", cores=64)
    small, run = start_and_read_run(name, mini_dump, tiny, most=limits, hours=0.1)
    assert run.job_variables == small.job_variables
    assert run.parameters == {
        "dump": str(mini_dump),
        "store": str(mini_dump.parent / "store"),
        "encoder": str(tiny),
    }
    assert run.state.name == "Scheduled"
    variables = run.job_variables
    assert variables["memory_request"] == variables["memory_limit"] == f"{-(-small.needs.memory // 2**20)}Mi"
    assert variables["cpu_request"] == variables["cpu_limit"] == str(small.needs.cores)
    assert variables["env"]["BOOKWHEEL_WORKER_MEMORY"] == str(small.needs.memory - PROCESS_BYTES)
    dump = tmp_path / "enwiki.xml.bz2"
    with dump.open("wb") as file:
        file.truncate(2 << 30)  # The estimate only needs the size.
    large, run = start_and_read_run(name, dump, tiny, most=limits, hours=0.1)
    assert large.needs.memory > small.needs.memory
    assert large.needs.cores > small.needs.cores
    assert run.job_variables["memory_request"] == f"{-(-large.needs.memory // 2**20)}Mi"
    with get_client(sync_client=True) as client:
        artifacts = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["launch-needs"])))
    row_names = {row["what"] for artifact in artifacts for row in json.loads(str(artifact.data))}
    stages = {f"memory, {stage}" for stage in large.needs.work.stages}
    assert row_names == {"passages, about", *stages, "disk", "hours, about"}
    assert any(f"{large.needs.cores} × core" in (artifact.description or "") for artifact in artifacts)


@pytest.mark.parametrize(
    ("start_flow", "target_flow", "left_out"),
    [
        (start_reindex, reindex, {"dry_run", "base"}),
        (start_finetune, finetune, {"work"}),
        (start_evaluate, evaluate, set()),
    ],
    ids=["reindex", "finetune", "evaluate"],
)
def test_start_flow_takes_parameters_of_its_run_and_limits(
    start_flow: Flow[..., StartedRun], target_flow: Flow[..., Any], left_out: set[str]
) -> None:
    start_schema, run_schema = parameter_schema(start_flow), parameter_schema(target_flow)
    expected = {name: parameter for name, parameter in run_schema.properties.items() if name not in left_out}
    assert list(start_schema.properties) == [*expected, *START_PARAMETERS]
    assert start_schema.required == run_schema.required
    assert all(parameter["description"] for parameter in start_schema.properties.values())
    for name, parameter in expected.items():
        assert start_schema.properties[name] | {"position": 0} == parameter | {"position": 0}
    assert start_schema.properties["deployment"]["default"] == f"{target_flow.name}/{target_flow.name}-library"
    entrypoint = f"{start_flow.fn.__module__}:{start_flow.fn.__name__}"
    assert load_flow_from_entrypoint(entrypoint).name == start_flow.name


def test_retried_start_flow_starts_no_second_run(deployment: Callable[..., str], mini_dump: Path, tiny: Path) -> None:
    arguments = (str(mini_dump), str(mini_dump.parent / "store"), str(tiny))
    name = deployment("process")

    @deployment_flow("tries")
    def start_twice() -> set[str]:
        return {start_reindex.fn(*arguments, deployment=name).run for _ in range(2)}

    assert len(start_twice()) == 1
    assert start_twice() != start_twice()


def test_estimate_leaves_out_work_of_flink_workers(mini_dump: Path, tiny: Path) -> None:
    options: dict[str, Any] = {"dump": str(mini_dump), "store": "", "encoder": str(tiny), "limit": None, "recipe": None}
    local_work = estimate_rebuild(8 << 30, **options, beam_options=[])
    flink_work = estimate_rebuild(8 << 30, **options, beam_options=["--runner=FlinkRunner"])
    assert set(local_work.stages) > {"chunk", "embed", "train", "scatter", "merge"}
    assert flink_work.compute_stage_memory(8) == {"launcher": PROCESS_BYTES}
    assert (flink_work.operations, flink_work.seconds, flink_work.disk) == (0, 0, local_work.disk)


@pytest.mark.parametrize("pool", ["cpu", "gpu"])
def test_kubernetes_pools_declare_all_job_variables(pool: str) -> None:
    template = json.loads((ROOT / "infra" / "kubernetes" / "pools" / f"{pool}.json").read_text())
    known_variables = set(template["variables"]["properties"])
    variables = build_job_variables("kubernetes", make_resources(gpus=1 if pool == "gpu" else 0))
    assert set(variables) - {"gpus"} <= known_variables
    assert ("gpus" in known_variables) == (pool == "gpu")
    assert template["job_configuration"]["env"] == "{{ env }}"


def make_resources(gpus: int) -> RunResources:
    work = WorkEstimate({"passages, about": "1,000"}, stages={"embed": 1 << 30}, disk=200 << 30)
    return RunResources(work, memory=4 << 30, cores=3, gpus=gpus, hours=1.5)


def test_job_variables_fit_pool_type() -> None:
    environment = {"BOOKWHEEL_CORES": "3", "OMP_NUM_THREADS": "3"}
    environment["BOOKWHEEL_WORKER_MEMORY"] = str((4 << 30) - PROCESS_BYTES)
    assert build_job_variables("docker", make_resources(gpus=0)) == {
        "env": environment,
        "mem_limit": f"{4 << 30}b",
        "container_create_kwargs": {"nano_cpus": 3 * 10**9},
    }
    container_arguments = build_job_variables("docker", make_resources(gpus=2))["container_create_kwargs"]
    device_requests = container_arguments["device_requests"]
    assert device_requests == [{"count": 2, "capabilities": [["gpu"]]}]
    assert build_job_variables("process", make_resources(gpus=2)) == {"env": environment}
    assert build_job_variables("process", make_resources(gpus=0)) == {"env": environment | {"CUDA_VISIBLE_DEVICES": ""}}
    assert build_job_variables("kubernetes", make_resources(gpus=2))["scratch"] == "300Gi"


def test_workers_respect_limits_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOKWHEEL_CORES", "1")
    monkeypatch.setenv("BOOKWHEEL_WORKER_MEMORY", "12345")
    assert (count_cores(), get_worker_memory(())) == (1, 12345)
    monkeypatch.setenv("BOOKWHEEL_CORES", "4096")
    monkeypatch.setenv("BOOKWHEEL_WORKER_MEMORY", str(1 << 60))
    assert count_cores() < 4096
    assert (get_worker_memory(()) or 0) < 1 << 60


def test_run_above_limits_is_refused_and_not_started(
    deployment: Callable[..., str], mini_dump: Path, tiny: Path
) -> None:
    name = deployment("docker")
    with pytest.raises(ResourceError, match="raise the limit"):
        start_and_read_run(name, mini_dump, tiny, most=RunLimits("1500MB", 1))
    with get_client(sync_client=True) as client:
        docker = DeploymentFilter(name=DeploymentFilterName(any_=["docker"]))
        assert client.read_flow_runs(deployment_filter=docker) == []


@pytest.mark.parametrize(
    ("most", "message"),
    [
        (None, "give their size in `most`"),
        (RunLimits("much", 4), "not an amount of memory"),
        (RunLimits("8GB", 0), "a run needs a core"),
        (RunLimits("8GB", 10**9), "cannot have 1000000000 cores"),
    ],
)
def test_invalid_limits_are_refused(
    deployment: Callable[..., str], mini_dump: Path, tiny: Path, most: RunLimits | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        start_and_read_run(deployment("docker"), mini_dump, tiny, most=most)


@pytest.mark.usefixtures("prefect_server")
def test_missing_deployment_is_refused(mini_dump: Path, tiny: Path) -> None:
    with pytest.raises(UsageError, match="there is no deployment reindex/nowhere"):
        start_and_read_run("reindex/nowhere", mini_dump, tiny, most=LIMITS)


def test_watch_starts_sized_run_of_downloaded_dump(
    deployment: Callable[..., str], mini_dump: Path, tiny: Path, tmp_path: Path
) -> None:
    name = deployment("process")
    with serve_dumps() as site:
        site.publish_run("20261101", {"testwiki-20261101-pages-articles-multistream.xml.bz2": mini_dump.read_bytes()})
        report = watch(site.url, str(tmp_path / "store"), str(tmp_path / "dumps"), str(tiny), deployment=name)
    assert (report.dump, report.built) == ("20261101", None)
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(report.launched.run)
    assert Path(run.parameters["dump"]).read_bytes() == mini_dump.read_bytes()
    assert run.job_variables == report.launched.job_variables
    variable_names = {"BOOKWHEEL_CORES", "BOOKWHEEL_WORKER_MEMORY", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"}
    assert set(run.job_variables["env"]) == variable_names


def test_parameters_with_defaults_keep_values_of_deployment(
    deployment: Callable[..., str], mini_dump: Path, tiny: Path, tmp_path: Path
) -> None:
    recipe = {"chunk": {"words": 10}, "index": {"hnsw": {"factory": "HNSW8"}}}
    name = deployment("process", ref="nightly", encoder=str(tiny), recipe=recipe, base="nightly")
    dump, store = str(mini_dump), str(tmp_path / "store")
    report = start_reindex(dump, store, deployment=name)
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(report.run)  # type: ignore[arg-type]
        deployed = client.read_deployment(run.deployment_id).parameters
    assert run.parameters == {**deployed, "dump": dump, "store": store}
    assert (deployed["ref"], deployed["encoder"], deployed["recipe"]) == ("nightly", str(tiny), recipe)
    work = estimate_rebuild(8 << 30, dump, store, str(tiny), None, (), recipe=from_table(Recipe, recipe, "recipe"))
    assert report.needs.work.sizes == work.sizes
    with get_client(sync_client=True) as client:
        other = start_reindex(dump, store, ref="monthly", deployment=name)
        assert client.read_flow_run(other.run).parameters["ref"] == "monthly"  # type: ignore[arg-type]


def test_watch_follows_ref_of_deployment(
    deployment: Callable[..., str], mini_dump: Path, tiny: Path, recipe: Path, tmp_path: Path
) -> None:
    recipe_table, store = tomllib.loads(recipe.read_text()), str(tmp_path / "store")
    name = deployment("process", ref="nightly", encoder=str(tiny), recipe=recipe_table)
    with serve_dumps() as site:
        site.publish_run("20261101", {"testwiki-20261101-pages-articles-multistream.xml.bz2": mini_dump.read_bytes()})
        report = watch(site.url, store, str(tmp_path / "dumps"), deployment=name)
        with get_client(sync_client=True) as client:
            parameters = client.read_flow_run(report.launched.run).parameters
        assert (parameters["ref"], parameters["encoder"]) == ("nightly", str(tiny))
        reindex(**parameters)
        assert watch(site.url, store, str(tmp_path / "dumps"), deployment=name).dump is None


@pytest.fixture
def examples(library: Path, tmp_path: Path) -> dict[str, str]:
    """Files with questions about real passages, by option."""
    passages = Snapshot.open(str(library)).passages(range(0, 120, 10))
    rows = [
        {"question": f"what is {p.title}", "answers": [p.text.split()[0]], "title": p.title, "context": p.text}
        for p in passages
    ]
    for name, split_rows in (("train", rows[:8]), ("dev", rows[8:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in split_rows))
    return {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "dev")}


def test_training_memory_grows_with_batch_size(
    deployment: Callable[..., str], library: Path, examples: dict[str, str], tmp_path: Path
) -> None:
    name, bart = deployment("kubernetes", "finetune"), str(save_bart(tmp_path / "bart"))

    def start_training(batch: int) -> tuple[StartedRun, Any]:
        options: dict[str, Any] = {"recipe": {"rag": {"batch_size": batch}}, "generator": bart, "max_steps": 5}
        report = start_finetune("rag-token", str(library), **examples, **options, deployment=name, most=LIMITS)
        with get_client(sync_client=True) as client:
            return report, client.read_flow_run(report.run)  # type: ignore[arg-type]

    small, run = start_training(2)
    assert run.parameters == {
        "kind": "rag-token",
        "store": str(library),
        **examples,
        "generator": bart,
        "recipe": {"rag": {"batch_size": 2}},
        "max_steps": 5,
    }
    assert run.job_variables == small.job_variables
    assert run.job_variables["memory_limit"] == f"{-(-small.needs.memory // 2**20)}Mi"
    assert run.job_variables["env"]["OMP_NUM_THREADS"] == str(small.needs.cores)
    large, run = start_training(400)
    assert large.needs.memory > small.needs.memory
    assert run.job_variables["memory_limit"] == f"{-(-large.needs.memory // 2**20)}Mi"
    with pytest.raises(ResourceError, match=r"stage train needs .* GB of memory, and a run may use 64\.0 GB"):
        start_training(1_000_000)


def test_training_estimate_includes_rebuilds(library: Path, examples: dict[str, str], tmp_path: Path) -> None:
    common: dict[str, Any] = {"store": str(library), "ref": "latest", "recipe": None, "max_steps": 2, **examples}
    common |= {"encoder": None, "generator": str(save_bart(tmp_path / "bart")), "teacher": None}
    work = estimate_training_run(16 << 30, kind="rag-end2end", **common)
    content = Snapshot.open(str(library)).manifest.content
    vector_indexes = [name for name in content.indexes if content.representation_of(name) == "embeddings"]
    assert work.stages["rebuild"] > work.stages["train"] + PROCESS_BYTES
    assert work.disk > sum(content.files[content.index_file(name)].size for name in vector_indexes)
    assert re.fullmatch(r"[\d.]+ GB of memory, \d+ MB of disk", work.sizes["a rebuild takes"])
    rag_work = estimate_training_run(16 << 30, kind="rag-token", **common)
    assert ("rebuild" in rag_work.stages, "a rebuild takes" in rag_work.sizes) == (False, False)


def test_training_estimate_includes_teacher(
    deployment: Callable[..., str], library: Path, examples: dict[str, str], tmp_path: Path
) -> None:
    name, cross_encoder = deployment("kubernetes", "finetune"), save_cross_encoder(tmp_path / "cross")
    graph = save_onnx(cross_encoder, tmp_path / "graph")
    shutil.copy(cross_encoder / "config.json", graph)
    common: dict[str, Any] = {**examples, "max_steps": 5, "deployment": name, "most": LIMITS}
    without_teacher = start_finetune("cross-encoder", str(library), **common, encoder=str(cross_encoder))
    assert set(without_teacher.needs.work.stages) == {"train", "mine"}
    for teacher in (cross_encoder, graph):
        with_teacher = start_finetune("margin-mse", str(library), **common, teacher=str(teacher))
        assert set(with_teacher.needs.work.stages) == {"train", "mine", "teach"}
        with get_client(sync_client=True) as client:
            assert client.read_flow_run(with_teacher.run).parameters["teacher"] == str(teacher)  # type: ignore[arg-type]


def test_estimate_counts_operations_of_teacher_scores(library: Path, examples: dict[str, str], tmp_path: Path) -> None:
    cross_encoder = save_cross_encoder(tmp_path / "cross")
    common: dict[str, Any] = {"store": str(library), "ref": "latest", "max_steps": 5, **examples}
    common |= {"encoder": None, "generator": None, "teacher": str(cross_encoder)}

    def estimate_operations(scored: int) -> float:
        recipe = {"margin_mse": {"scored": scored}}
        return estimate_training_run(16 << 30, kind="margin-mse", recipe=recipe, **common).operations

    operations_per_pair = read_architecture(cross_encoder).operations_per_token * (QUESTION_TOKENS + PASSAGE_TOKENS)
    n_examples = sum(len(Path(path).read_text().splitlines()) for path in examples.values())
    assert estimate_operations(24) - estimate_operations(8) == pytest.approx(16 * n_examples * operations_per_pair)


def test_evaluation_resources_grow_with_settings(
    deployment: Callable[..., str], library: Path, examples: dict[str, str], tiny: Path, tmp_path: Path
) -> None:
    generator = load_generator(save_bart(tmp_path / "bart"), PaperTemplate(max_answer=16), device="cpu")
    question = TrainableEncoder.load(tiny, "question", device="cpu")
    save_rag(Rag(question, generator, RagSettings(k=3)), tmp_path / "rag", question.space())
    name = deployment("docker", "evaluate")
    arguments = (str(library), str(tmp_path / "rag"), examples["dev"])

    def start_evaluation(settings: EvaluationSettings | None) -> tuple[StartedRun, Any]:
        report = start_evaluate(*arguments, settings=settings, deployment=name, most=LIMITS)
        with get_client(sync_client=True) as client:
            return report, client.read_flow_run(report.run)  # type: ignore[arg-type]

    plain, run = start_evaluation(None)
    assert "settings" not in run.parameters
    assert run.job_variables["mem_limit"] == f"{plain.needs.memory}b"
    sweep, beams = AblationSettings(sweep=(1, 50)), DecodingSettings(beams=4)
    swept, run = start_evaluation(EvaluationSettings(ablations=sweep, decoding=beams))
    assert run.parameters["settings"]["ablations"]["sweep"] == [1, 50]
    assert swept.needs.memory > plain.needs.memory
    assert swept.needs.hours > plain.needs.hours
    with pytest.raises(UsageError, match="has no index 'none': choose one of hnsw"):
        start_evaluation(EvaluationSettings(index="none"))
    with pytest.raises(UsageError, match="there is no deployment evaluate/nowhere"):
        start_evaluate(*arguments, deployment="evaluate/nowhere", most=LIMITS)


def test_estimate_counts_local_generator_but_not_endpoint(
    library: Path, examples: dict[str, str], tmp_path: Path
) -> None:
    def estimate_evaluation(model: str, *readers: Any) -> WorkEstimate:
        settings = EvaluationSettings(readers=readers)
        return estimate_evaluation_run(
            0, store=str(library), model=model, questions=examples["dev"], ref="latest", settings=settings
        )

    local_work = estimate_evaluation(str(save_bart(tmp_path / "bart")), "concat")
    endpoint_work = estimate_evaluation("openai:any")
    assert local_work.stages["answer"] > local_work.stages["retrieve"], "decoding takes memory"
    assert endpoint_work.stages["answer"] == endpoint_work.stages["retrieve"] < local_work.stages["retrieve"]
    assert (endpoint_work.operations, local_work.operations > 0) == (0, True)
