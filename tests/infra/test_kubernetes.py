"""The manifests fit their schemas, one another, and the project's images."""

import json
import re
import zipfile
from importlib.metadata import distribution
from itertools import chain
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from rag_model.serving.settings import ServiceSettings
from tests.fixtures.infra_files import (
    KUBERNETES,
    PROJECT,
    REGISTRY,
    build_kustomization,
    iter_pods,
    list_built_images,
    list_containers,
    list_known_variables,
    read_dockerfile,
)

Document = dict[str, Any]
OVERLAYS = ("base", "gpu")
VERSION = "1.33.0"  # the first Kubernetes in which sidecars are stable
FLINK = json.loads((KUBERNETES.parents[1] / "tests/infra/schemas/flinkdeployment.json").read_text())


@pytest.fixture(params=OVERLAYS)
def manifests(request: pytest.FixtureRequest) -> list[Document]:
    return build_kustomization(request.param)


def _select(manifests: list[Document], kind: str) -> list[Document]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def _list_names(manifests: list[Document], kind: str) -> set[str]:
    return {manifest["metadata"]["name"] for manifest in _select(manifests, kind)}


def test_every_manifest_fits_its_schema(manifests: list[Document]) -> None:
    for manifest in manifests:
        if manifest["kind"] == "FlinkDeployment":
            jsonschema.validate(manifest, FLINK)
        else:
            kubernetes_validate.validate(manifest, VERSION, strict=True)
    for name, template in iter_pods(manifests):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, VERSION, strict=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec.update(flinkversion=spec.pop("flinkVersion")),
        lambda spec: spec["flinkConfiguration"].update({"taskmanager.numberOfTaskSlots": 2}),
        lambda spec: spec["taskManager"]["resource"].update(memory="2Gi"),
    ],
    ids=["field", "value", "unit"],
)
def test_the_schema_of_flink_refuses_what_the_operator_would(change: Any) -> None:
    (cluster,) = _select(build_kustomization("base"), "FlinkDeployment")
    change(cluster["spec"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(cluster, FLINK)


def test_every_referenced_name_exists(manifests: list[Document]) -> None:
    accounts, maps, secrets = (_list_names(manifests, kind) for kind in ("ServiceAccount", "ConfigMap", "Secret"))
    for name, template in iter_pods(manifests):
        spec = template["spec"]
        assert spec.get("serviceAccountName", "bookwheel-flink") in accounts, name
        volumes = {volume["name"] for volume in spec.get("volumes", ())}
        claims = [
            volume["persistentVolumeClaim"]["claimName"]
            for volume in spec.get("volumes", ())
            if "persistentVolumeClaim" in volume
        ]
        assert set(claims) <= _list_names(manifests, "PersistentVolumeClaim")
        for container in list_containers(template):
            sources = container.get("envFrom", ())
            assert {source["configMapRef"]["name"] for source in sources if "configMapRef" in source} <= maps
            assert {source["secretRef"]["name"] for source in sources if "secretRef" in source} <= secrets
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes, name
    for binding in _select(manifests, "RoleBinding"):
        assert binding["roleRef"]["name"] in _list_names(manifests, "Role")
        assert {subject["name"] for subject in binding["subjects"]} <= accounts
    for scaler in _select(manifests, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        assert target["name"] in _list_names(manifests, target["kind"])


def test_selectors_find_pods(manifests: list[Document]) -> None:
    labels = [template["metadata"].get("labels", {}) for _, template in iter_pods(manifests)]
    labels += [{"type": "flink-native-kubernetes"}]  # Flink sets it on all pods of a native cluster

    def selects_pod(selector: dict[str, str]) -> bool:
        return any(selector.items() <= pod_labels.items() for pod_labels in labels)

    for service in _select(manifests, "Service"):
        assert selects_pod(service["spec"]["selector"])
    for owner in chain(_select(manifests, "Deployment"), _select(manifests, "PodDisruptionBudget")):
        assert selects_pod(owner["spec"]["selector"]["matchLabels"])
    for policy in _select(manifests, "NetworkPolicy"):
        assert selects_pod(policy["spec"]["podSelector"].get("matchLabels", {}))


def test_images_are_those_that_are_built_or_public_ones_that_are_pinned(manifests: list[Document]) -> None:
    images = [
        container["image"]
        for _, template in iter_pods(manifests)
        for container in list_containers(template)
        if "image" in container
    ]
    images += [cluster["spec"]["image"] for cluster in _select(manifests, "FlinkDeployment")]
    assert {image for image in images if image.startswith(REGISTRY)} <= {
        REGISTRY + image for image in list_built_images()
    }
    assert all(re.search(r":[^:/]*\d+\.\d+", image) for image in images)
    assert all(image.startswith(("flink:", REGISTRY)) for image in images)


def test_all_parts_of_flink_have_the_same_version(manifests: list[Document]) -> None:
    (cluster,) = _select(manifests, "FlinkDeployment")
    minor = cluster["spec"]["flinkVersion"].removeprefix("v").replace("_", ".")
    assert cluster["spec"]["image"].startswith(f"flink:{minor}.")
    assert f"flink{minor}_job_server" in read_dockerfile()[1]["job-server"].base


def test_variables_are_read_and_no_secret_is_written(manifests: list[Document]) -> None:
    variables = list_known_variables()
    for manifest in chain(_select(manifests, "ConfigMap"), _select(manifests, "Secret")):
        assert set(manifest.get("data", {})) | set(manifest.get("stringData", {})) <= variables
    for _, template in iter_pods(manifests):
        for container in list_containers(template):
            assert {variable["name"] for variable in container.get("env", ())} <= variables
    text = "".join(file.read_text() for file in KUBERNETES.rglob("*.yaml"))
    assert not re.search(r"(?i)(secret|password|api_?key)\w*\s*[:=]\s*['\"]?\w{8,}", text.replace("secretRef", ""))


def test_pods_have_no_rights_that_they_do_not_need(manifests: list[Document]) -> None:
    for name, template in iter_pods(manifests):
        pod_context = template["spec"].get("securityContext", {})
        for container in list_containers(template):
            context = {**pod_context, **container["securityContext"]}
            assert (context["runAsNonRoot"], context["runAsUser"] > 0) == (True, True), name
            assert context["allowPrivilegeEscalation"] is False, name
            assert context["capabilities"] == {"drop": ["ALL"]}, name
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
            is_ours = container.get("image", "").startswith(REGISTRY)
            assert context.get("readOnlyRootFilesystem", False) == is_ours, (
                "only Flink writes into the folder of its program"
            )
            if is_ours:  # all that our images write
                assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/scratch", "/tmp"}
                assert container["resources"].keys() == {"requests", "limits"}


def test_probes_ask_the_ports_that_serve_listens_on(manifests: list[Document]) -> None:
    (template,) = (template for name, template in iter_pods(manifests) if name == "serve")
    (container,) = list_containers(template)
    port, health = container["ports"]
    image = read_dockerfile()[1]["serve"]
    assert [str(exposed_port["containerPort"]) for exposed_port in (port, health)] == image.last("EXPOSE").split()
    probes = {probe: container[probe]["httpGet"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {probe["port"] for probe in probes.values()} == {health["name"]}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/readyz",
        "readinessProbe": "/readyz",
        "livenessProbe": "/healthz",
    }
    scrape = template["metadata"]["annotations"]
    assert (scrape["prometheus.io/port"], scrape["prometheus.io/path"]) == (str(health["containerPort"]), "/metrics")
    (service,) = _select(manifests, "Service")
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    (policy,) = (policy for policy in _select(manifests, "NetworkPolicy") if policy["metadata"]["name"] == "serve")
    assert policy["spec"]["ingress"][0]["ports"] == [
        {"port": exposed_port["containerPort"]} for exposed_port in (port, health)
    ]
    _, pause = container["lifecycle"]["preStop"]["exec"]["command"]
    defaults = ServiceSettings()
    shutdown_seconds = int(pause) + defaults.linger_seconds + defaults.drain_seconds
    assert template["spec"]["terminationGracePeriodSeconds"] > shutdown_seconds, (
        "Kubernetes would kill it before it has answered all requests"
    )


def test_each_taskmanager_has_a_sidecar_pool_of_workers(manifests: list[Document]) -> None:
    (cluster,) = _select(manifests, "FlinkDeployment")
    spec = cluster["spec"]["taskManager"]["podTemplate"]["spec"]
    (pool,) = spec["initContainers"]
    assert pool["restartPolicy"] == "Always", "an init container that keeps running is a sidecar"
    assert [container["name"] for container in spec["containers"]] == ["flink-main-container"]
    port = pool["args"][pool["args"].index("--service_port") + 1]
    assert pool["startupProbe"]["tcpSocket"]["port"] == int(port)
    flags = (KUBERNETES.parent / "beam/flink.args").read_text().split()
    assert f"--environment_config=localhost:{port}" in flags
    assert f"--flink_master={cluster['metadata']['name']}-rest:8081" in flags
    settings = cluster["spec"]["flinkConfiguration"]
    assert settings["restart-strategy.type"] == "fixed-delay", "by default, the first fault fails the job"
    open_ports = {port["port"] for rule in _get_flink_policy(manifests)["ingress"] for port in rule["ports"]}
    assert int(port) not in open_ports, "a worker pool executes any code that it receives"
    assert open_ports == {8081, *(int(value) for name, value in settings.items() if name.endswith(".port"))}


def test_deployed_runs_use_the_flink_cluster(manifests: list[Document]) -> None:
    (settings,) = [
        manifest for manifest in _select(manifests, "ConfigMap") if manifest["metadata"]["name"] == "bookwheel-settings"
    ]
    flags = (KUBERNETES.parent / "beam/flink.args").read_text().split()
    assert settings["data"]["BOOKWHEEL_BEAM_OPTIONS"].split() == flags
    for pool in (KUBERNETES / "pools").glob("*.json"):
        template = json.loads(pool.read_text())["job_configuration"]["job_manifest"]["spec"]["template"]
        (container,) = template["spec"]["containers"]
        assert {"configMapRef": {"name": "bookwheel-settings"}} in container["envFrom"], pool
        assert template["metadata"]["labels"]["app.kubernetes.io/part-of"] == "bookwheel", "network.yaml admits it"


def _get_flink_policy(manifests: list[Document]) -> Document:
    (policy,) = (policy for policy in _select(manifests, "NetworkPolicy") if policy["metadata"]["name"] == "flink")
    spec: Document = policy["spec"]
    return spec


def test_only_the_jobmanager_may_start_pods() -> None:
    manifests = build_kustomization("base")
    (cluster,) = _select(manifests, "FlinkDeployment")
    workers = cluster["spec"]["flinkConfiguration"]["kubernetes.taskmanager.service-account"]
    assert workers != cluster["spec"]["serviceAccount"]
    bound_accounts = {
        subject["name"] for binding in _select(manifests, "RoleBinding") for subject in binding["subjects"]
    }
    assert bound_accounts == {cluster["spec"]["serviceAccount"], "bookwheel-prefect"}
    for account in _select(manifests, "ServiceAccount"):
        name = account["metadata"]["name"]
        assert account.get("automountServiceAccountToken", True) == (name in bound_accounts), name
    assert workers in _list_names(manifests, "ServiceAccount")


def test_flink_knows_every_setting() -> None:
    (cluster,) = _select(build_kustomization("base"), "FlinkDeployment")
    compose = yaml.safe_load((KUBERNETES.parents[1] / "docker/compose.yaml").read_text())
    properties = yaml.safe_load(compose["services"]["taskmanager"]["environment"]["FLINK_PROPERTIES"])
    folder = Path(distribution("apache-flink-libraries").locate_file("pyflink/lib"))
    (jar,) = folder.glob("flink-dist-*.jar")
    minor = cluster["spec"]["flinkVersion"].removeprefix("v").replace("_", ".")
    assert jar.name.startswith(f"flink-dist-{minor}.")
    with zipfile.ZipFile(jar) as archive:
        options = [name for name in archive.namelist() if re.fullmatch(r"org/apache/flink/[\w/]+Options\.class", name)]
        class_bytes = b"".join(archive.read(name) for name in options)
    settings = {**cluster["spec"]["flinkConfiguration"], **properties}
    assert [
        key for key in settings if len(key).to_bytes(2, "big") + key.encode() not in class_bytes
    ] == []  # a class file stores the length of a string before its bytes


def test_each_slot_has_a_python_process() -> None:
    (cluster,) = _select(build_kustomization("base"), "FlinkDeployment")
    slots = cluster["spec"]["flinkConfiguration"]["taskmanager.numberOfTaskSlots"]
    assert f"--sdk_worker_parallelism={slots}" in (KUBERNETES.parent / "beam/flink.args").read_text().split()


def test_each_gpu_worker_has_its_own_gpu() -> None:
    (cluster,) = _select(build_kustomization("gpu"), "FlinkDeployment")
    spec = cluster["spec"]["taskManager"]["podTemplate"]["spec"]
    (pool,) = spec["initContainers"]
    slots = cluster["spec"]["flinkConfiguration"]["taskmanager.numberOfTaskSlots"]
    assert pool["resources"]["limits"]["nvidia.com/gpu"] == slots == "1"
    assert spec["nodeSelector"]
    assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"
    entry = json.loads(read_dockerfile()[1]["worker"].last("ENTRYPOINT"))
    assert pool["command"] == entry, "the GPU image starts no pool by itself"


def test_images_have_the_version_of_the_project() -> None:
    text = "".join(file.read_text() for suffix in ("yaml", "json") for file in KUBERNETES.rglob(f"*.{suffix}"))
    assert set(re.findall(r"bookwheel-\w+:([\d.]+)", text)) == {PROJECT["version"]}
