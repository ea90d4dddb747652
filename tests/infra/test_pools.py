"""The templates of the work pools, filled in by Prefect as for a run, are valid Kubernetes Jobs."""

from typing import Any

import kubernetes_validate
import pytest
import yaml
from prefect.utilities.templating import apply_values

from flows.machine.pools import build_job_variables
from rag_model.resources import RunResources, WorkEstimate
from tests.fixtures.infra_files import (
    REGISTRY,
    ROOT,
    build_kustomization,
    iter_pods,
    list_built_images,
    list_containers,
    read_pool_template,
    read_yaml_documents,
)

VERSION = "1.33.0"
POOLS = ("cpu", "gpu")
PREFECT_OWN = {"name", "labels", "command", "namespace", "image", "env"}
RESOURCES = RunResources(WorkEstimate({}, {}), memory=48 * 2**30, cores=12, gpus=2, hours=1.0)


def _fill_template(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the Job of a run as the Kubernetes worker sends it."""
    variables = read_pool_template(name)["variables"]["properties"]
    defaults = {variable: schema["default"] for variable, schema in variables.items() if "default" in schema}
    run_values = {"command": "prefect flow-run execute", "name": "run", "labels": {}, "env": {"A": "1"}}
    job: dict[str, Any] = apply_values(
        read_pool_template(name)["job_configuration"], {**defaults, **run_values, **values}
    )["job_manifest"]
    spec = job["spec"]["template"]["spec"]
    # Prefect's worker requires these fields of a Job in the pod's spec, from which Kubernetes removes them.
    assert [spec.pop(name) for name in ("parallelism", "completions")] == [1, 1]
    (container,) = spec["containers"]
    container["env"] = [{"name": key, "value": value} for key, value in container["env"].items()]
    container["args"] = container["args"].split()
    return job


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("values", [{}, {"scratch": "2Ti"}], ids=["defaults", "larger"])
def test_a_run_is_a_job_that_kubernetes_takes(name: str, values: dict[str, Any]) -> None:
    job = _fill_template(name, values)
    kubernetes_validate.validate(job, VERSION, strict=True)
    ((_, template),) = iter_pods([job])
    assert template["spec"]["volumes"][0]["emptyDir"] == {"sizeLimit": values.get("scratch", "100Gi")}


def test_a_rebuild_gets_its_estimated_resources() -> None:
    variables = build_job_variables("kubernetes", RESOURCES)
    assert set(variables) <= set(read_pool_template("gpu")["variables"]["properties"])
    job = _fill_template("gpu", variables)
    kubernetes_validate.validate(job, VERSION, strict=True)
    ((_, template),) = iter_pods([job])
    (container,) = list_containers(template)
    assert container["resources"] == {
        "requests": {"cpu": "12", "memory": "49152Mi", "ephemeral-storage": variables["scratch"]},
        "limits": {"cpu": "12", "memory": "49152Mi", "nvidia.com/gpu": 2},
    }
    assert template["spec"]["volumes"][0]["emptyDir"] == {"sizeLimit": variables["scratch"]}
    assert {variable["name"] for variable in container["env"]} == set(variables["env"])


@pytest.mark.parametrize("name", POOLS)
def test_every_name_that_a_run_references_exists(name: str) -> None:
    job, manifests = _fill_template(name, {}), build_kustomization("base")
    names = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    ((_, template),) = iter_pods([job])
    (container,) = list_containers(template)
    assert container["image"] in {REGISTRY + image for image in list_built_images()}
    assert container["image"].startswith(f"{REGISTRY}bookwheel-{name}:")
    assert ("ServiceAccount", template["spec"]["serviceAccountName"]) in names
    assert ("ConfigMap", container["envFrom"][0]["configMapRef"]["name"]) in names
    assert ("Secret", container["envFrom"][1]["secretRef"]["name"]) in names
    assert ("Namespace", job["metadata"]["namespace"]) in names
    assert ("PersistentVolumeClaim", template["spec"]["volumes"][-1]["persistentVolumeClaim"]["claimName"]) in names
    assert template["metadata"]["labels"]["app.kubernetes.io/part-of"] == "bookwheel"  # network.yaml admits it to Flink


def test_only_the_gpu_pool_requests_gpus() -> None:
    ((_, template),) = iter_pods([_fill_template("gpu", {})])
    assert list_containers(template)[0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert template["spec"]["tolerations"]
    ((_, template),) = iter_pods([_fill_template("cpu", {"gpus": 1})])
    assert "nvidia.com/gpu" not in list_containers(template)[0]["resources"]["limits"]


def test_deployments_name_pools_with_workers_and_set_variables_of_their_templates() -> None:
    pools = {
        container["command"][container["command"].index("--pool") + 1]
        for name, template in iter_pods(build_kustomization("base"))
        if name == "prefect-worker"
        for container in list_containers(template)
    }
    deployments = yaml.safe_load((ROOT / "infra/prefect.yaml").read_text())["deployments"]
    assert deployments
    for deployment in deployments:
        name = deployment["work_pool"]["name"]
        assert name in pools
        template_variables = set(read_pool_template(name.removeprefix("bookwheel-"))["variables"]["properties"])
        assert set(deployment["work_pool"].get("job_variables", ())) <= template_variables | PREFECT_OWN


def test_workers_of_a_pod_have_different_ports() -> None:
    (deployment,) = (document for document in read_yaml_documents(ROOT / "infra/kubernetes/base/prefect-worker.yaml"))
    containers_of_pod = deployment["spec"]["template"]["spec"]["containers"]
    ports = [
        {variable["name"]: variable["value"] for variable in container["env"]}["PREFECT_WORKER_WEBSERVER_PORT"]
        for container in containers_of_pod
    ]
    assert ports == [str(container["livenessProbe"]["httpGet"]["port"]) for container in containers_of_pod]
    assert len(set(ports)) == len(containers_of_pod)
