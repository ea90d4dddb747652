"""The work pools' templates: Prefect fills them in as it would for a run, and out comes a Job that Kubernetes takes."""

from typing import Any

import kubernetes_validate
import pytest
import yaml
from prefect.utilities.templating import apply_values

from flows.machine.pools import job_variables
from rag_model.resources import RunResources, WorkEstimate
from tests.fixtures.infra_files import REGISTRY, ROOT, built, containers, documents, kustomized, pods, pool

VERSION = "1.33.0"
POOLS = ("cpu", "gpu")
PREFECT_OWN = {"name", "labels", "command", "namespace", "image", "env"}
ASKED = RunResources(WorkEstimate({}, {}), memory=48 * 2**30, cores=12, gpus=2, hours=1.0)


def _job(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the Job of a run, as the Kubernetes worker sends it: the environment as a list, the command as words."""
    variables = pool(name)["variables"]["properties"]
    defaults = {variable: told["default"] for variable, told in variables.items() if "default" in told}
    started = {"command": "prefect flow-run execute", "name": "run", "labels": {}, "env": {"A": "1"}}
    job: dict[str, Any] = apply_values(pool(name)["job_configuration"], {**defaults, **started, **values})[
        "job_manifest"
    ]
    spec = job["spec"]["template"]["spec"]
    expected = {
        name: spec.pop(name) for name in ("parallelism", "completions")
    }  # Kubernetes drops them: they are a Job's
    assert expected == {"parallelism": 1, "completions": 1}, (
        "Prefect's worker refuses a template without them just there"
    )
    (container,) = spec["containers"]
    container["env"] = [{"name": key, "value": value} for key, value in container["env"].items()]
    container["args"] = container["args"].split()
    return job


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("values", [{}, {"scratch": "2Ti"}], ids=["defaults", "larger"])
def test_a_run_is_a_job_that_kubernetes_takes(name: str, values: dict[str, Any]) -> None:
    job = _job(name, values)
    kubernetes_validate.validate(job, VERSION, strict=True)
    ((_, template),) = pods([job])
    assert template["spec"]["volumes"][0]["emptyDir"] == {"sizeLimit": values.get("scratch", "100Gi")}


def test_a_rebuild_gets_what_it_was_estimated_to_need() -> None:
    told = job_variables("kubernetes", ASKED)
    assert set(told) <= set(pool("gpu")["variables"]["properties"])
    job = _job("gpu", told)
    kubernetes_validate.validate(job, VERSION, strict=True)
    ((_, template),) = pods([job])
    (container,) = containers(template)
    assert container["resources"] == {
        "requests": {"cpu": "12", "memory": "49152Mi", "ephemeral-storage": told["scratch"]},
        "limits": {"cpu": "12", "memory": "49152Mi", "nvidia.com/gpu": 2},
    }
    assert template["spec"]["volumes"][0]["emptyDir"] == {"sizeLimit": told["scratch"]}
    assert {variable["name"] for variable in container["env"]} == set(told["env"])


@pytest.mark.parametrize("name", POOLS)
def test_a_run_finds_what_it_refers_to(name: str) -> None:
    job, manifests = _job(name, {}), kustomized("base")
    names = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    ((_, template),) = pods([job])
    (container,) = containers(template)
    assert container["image"] in {REGISTRY + image for image in built()}
    assert container["image"].startswith(f"{REGISTRY}bookwheel-{name}:")
    assert ("ServiceAccount", template["spec"]["serviceAccountName"]) in names
    assert ("ConfigMap", container["envFrom"][0]["configMapRef"]["name"]) in names
    assert ("Secret", container["envFrom"][1]["secretRef"]["name"]) in names
    assert ("Namespace", job["metadata"]["namespace"]) in names
    assert ("PersistentVolumeClaim", template["spec"]["volumes"][-1]["persistentVolumeClaim"]["claimName"]) in names
    assert template["metadata"]["labels"]["app.kubernetes.io/part-of"] == "bookwheel"  # whom network.yaml lets to Flink


def test_gpus_are_the_gpu_pool_s_only() -> None:
    ((_, template),) = pods([_job("gpu", {})])
    assert containers(template)[0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert template["spec"]["tolerations"]
    ((_, template),) = pods([_job("cpu", {"gpus": 1})])
    assert "nvidia.com/gpu" not in containers(template)[0]["resources"]["limits"]


def test_deployments_name_pools_that_have_a_worker_and_set_what_their_templates_take() -> None:
    started = {
        container["command"][container["command"].index("--pool") + 1]
        for name, template in pods(kustomized("base"))
        if name == "prefect-worker"
        for container in containers(template)
    }
    deployments = yaml.safe_load((ROOT / "infra/prefect.yaml").read_text())["deployments"]
    assert deployments
    for deployment in deployments:
        name = deployment["work_pool"]["name"]
        assert name in started
        taken = set(pool(name.removeprefix("bookwheel-"))["variables"]["properties"])
        assert set(deployment["work_pool"].get("job_variables", ())) <= taken | PREFECT_OWN


def test_both_workers_of_a_pod_answer_at_ports_of_their_own() -> None:
    (deployment,) = (one for one in documents(ROOT / "infra/kubernetes/base/prefect-worker.yaml"))
    found = deployment["spec"]["template"]["spec"]["containers"]
    told = [{one["name"]: one["value"] for one in each["env"]}["PREFECT_WORKER_WEBSERVER_PORT"] for each in found]
    assert told == [str(each["livenessProbe"]["httpGet"]["port"]) for each in found]
    assert len(set(told)) == len(found)
