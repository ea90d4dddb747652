"""The manifests: each by its schema, and then against one another and against what our images have."""

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
    built,
    containers,
    dockerfile,
    known_variables,
    kustomized,
    pods,
)

Document = dict[str, Any]
OVERLAYS = ("base", "gpu")
VERSION = "1.33.0"  # of Kubernetes: sidecars are among what every cluster has from here on
FLINK = json.loads((KUBERNETES.parents[1] / "tests/infra/schemas/flinkdeployment.json").read_text())


@pytest.fixture(params=OVERLAYS)
def manifests(request: pytest.FixtureRequest) -> list[Document]:
    return kustomized(request.param)


def _of(manifests: list[Document], kind: str) -> list[Document]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def _named(manifests: list[Document], kind: str) -> set[str]:
    return {one["metadata"]["name"] for one in _of(manifests, kind)}


def test_every_manifest_is_one_of_its_kind(manifests: list[Document]) -> None:
    for manifest in manifests:
        if manifest["kind"] == "FlinkDeployment":
            jsonschema.validate(manifest, FLINK)
        else:
            kubernetes_validate.validate(manifest, VERSION, strict=True)
    for name, template in pods(manifests):
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
    (cluster,) = _of(kustomized("base"), "FlinkDeployment")
    change(cluster["spec"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(cluster, FLINK)


def test_every_name_that_is_referred_to_is_there(manifests: list[Document]) -> None:
    accounts, maps, secrets = (_named(manifests, kind) for kind in ("ServiceAccount", "ConfigMap", "Secret"))
    for name, template in pods(manifests):
        spec = template["spec"]
        assert spec.get("serviceAccountName", "bookwheel-flink") in accounts, name
        volumes = {volume["name"] for volume in spec.get("volumes", ())}
        claims = [
            volume["persistentVolumeClaim"]["claimName"]
            for volume in spec.get("volumes", ())
            if "persistentVolumeClaim" in volume
        ]
        assert set(claims) <= _named(manifests, "PersistentVolumeClaim")
        for container in containers(template):
            sources = container.get("envFrom", ())
            assert {source["configMapRef"]["name"] for source in sources if "configMapRef" in source} <= maps
            assert {source["secretRef"]["name"] for source in sources if "secretRef" in source} <= secrets
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes, name
    for binding in _of(manifests, "RoleBinding"):
        assert binding["roleRef"]["name"] in _named(manifests, "Role")
        assert {subject["name"] for subject in binding["subjects"]} <= accounts
    for scaler in _of(manifests, "HorizontalPodAutoscaler"):
        assert scaler["spec"]["scaleTargetRef"]["name"] in _named(manifests, scaler["spec"]["scaleTargetRef"]["kind"])


def test_selectors_find_pods(manifests: list[Document]) -> None:
    labels = [template["metadata"].get("labels", {}) for _, template in pods(manifests)]
    labels += [{"type": "flink-native-kubernetes"}]  # Flink's own, on all that a native cluster starts

    def found(selector: dict[str, str]) -> bool:
        return any(selector.items() <= each.items() for each in labels)

    for one in _of(manifests, "Service"):
        assert found(one["spec"]["selector"])
    for one in chain(_of(manifests, "Deployment"), _of(manifests, "PodDisruptionBudget")):
        assert found(one["spec"]["selector"]["matchLabels"])
    for one in _of(manifests, "NetworkPolicy"):
        assert found(one["spec"]["podSelector"].get("matchLabels", {}))


def test_images_are_those_that_are_built_or_public_ones_that_are_pinned(manifests: list[Document]) -> None:
    images = [
        container["image"]
        for _, template in pods(manifests)
        for container in containers(template)
        if "image" in container
    ]
    images += [one["spec"]["image"] for one in _of(manifests, "FlinkDeployment")]
    assert {image for image in images if image.startswith(REGISTRY)} <= {REGISTRY + image for image in built()}
    assert all(re.search(r":[^:/]*\d+\.\d+", image) for image in images)
    assert all(image.startswith(("flink:", REGISTRY)) for image in images)


def test_flink_is_one_version_in_every_place(manifests: list[Document]) -> None:
    (cluster,) = _of(manifests, "FlinkDeployment")
    minor = cluster["spec"]["flinkVersion"].removeprefix("v").replace("_", ".")
    assert cluster["spec"]["image"].startswith(f"flink:{minor}.")
    assert f"flink{minor}_job_server" in dockerfile()[1]["job-server"].base


def test_variables_are_read_and_no_secret_is_written(manifests: list[Document]) -> None:
    known = known_variables()
    for one in chain(_of(manifests, "ConfigMap"), _of(manifests, "Secret")):
        assert set(one.get("data", {})) | set(one.get("stringData", {})) <= known
    for _, template in pods(manifests):
        for container in containers(template):
            assert {variable["name"] for variable in container.get("env", ())} <= known
    text = "".join(file.read_text() for file in KUBERNETES.rglob("*.yaml"))
    assert not re.search(r"(?i)(secret|password|api_?key)\w*\s*[:=]\s*['\"]?\w{8,}", text.replace("secretRef", ""))


def test_pods_have_no_rights_that_they_do_not_need(manifests: list[Document]) -> None:
    for name, template in pods(manifests):
        whole = template["spec"].get("securityContext", {})
        for container in containers(template):
            own = {**whole, **container["securityContext"]}
            assert (own["runAsNonRoot"], own["runAsUser"] > 0) == (True, True), name
            assert own["allowPrivilegeEscalation"] is False, name
            assert own["capabilities"] == {"drop": ["ALL"]}, name
            assert own["seccompProfile"] == {"type": "RuntimeDefault"}, name
            actual = container.get("image", "").startswith(REGISTRY)
            assert own.get("readOnlyRootFilesystem", False) == actual, (
                "Flink writes beside its program; nothing of ours does"
            )
            if actual:  # all that our images write
                assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/scratch", "/tmp"}
                assert container["resources"].keys() == {"requests", "limits"}


def test_serve_is_asked_where_it_answers(manifests: list[Document]) -> None:
    (template,) = (template for name, template in pods(manifests) if name == "serve")
    (container,) = containers(template)
    port, health = container["ports"]
    image = dockerfile()[1]["serve"]
    assert [str(one["containerPort"]) for one in (port, health)] == image.last("EXPOSE").split()
    asked = {probe: container[probe]["httpGet"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {one["port"] for one in asked.values()} == {health["name"]}
    assert {probe: one["path"] for probe, one in asked.items()} == {
        "startupProbe": "/readyz",
        "readinessProbe": "/readyz",
        "livenessProbe": "/healthz",
    }
    scraped = template["metadata"]["annotations"]
    assert (scraped["prometheus.io/port"], scraped["prometheus.io/path"]) == (str(health["containerPort"]), "/metrics")
    (service,) = _of(manifests, "Service")
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    (policy,) = (one for one in _of(manifests, "NetworkPolicy") if one["metadata"]["name"] == "serve")
    assert policy["spec"]["ingress"][0]["ports"] == [{"port": one["containerPort"]} for one in (port, health)]
    _, pause = container["lifecycle"]["preStop"]["exec"]["command"]
    own = ServiceSettings()
    needed = int(pause) + own.linger_seconds + own.drain_seconds
    assert template["spec"]["terminationGracePeriodSeconds"] > needed, "or it is killed with questions under way"


def test_a_pool_of_workers_stands_beside_each_taskmanager(manifests: list[Document]) -> None:
    (cluster,) = _of(manifests, "FlinkDeployment")
    spec = cluster["spec"]["taskManager"]["podTemplate"]["spec"]
    (pool,) = spec["initContainers"]
    assert pool["restartPolicy"] == "Always", "a sidecar, not something to wait for"
    assert [container["name"] for container in spec["containers"]] == ["flink-main-container"]
    port = pool["args"][pool["args"].index("--service_port") + 1]
    assert pool["startupProbe"]["tcpSocket"]["port"] == int(port)
    flags = (KUBERNETES.parent / "beam/flink.args").read_text().split()
    assert f"--environment_config=localhost:{port}" in flags
    assert f"--flink_master={cluster['metadata']['name']}-rest:8081" in flags
    settings = cluster["spec"]["flinkConfiguration"]
    assert settings["restart-strategy.type"] == "fixed-delay", "without one the first fault fails the job"
    opened = {door["port"] for rule in _flink_policy(manifests)["ingress"] for door in rule["ports"]}
    assert int(port) not in opened, "a pool runs what it is told"
    assert opened == {8081, *(int(value) for name, value in settings.items() if name.endswith(".port"))}


def test_deployed_runs_use_the_flink_cluster(manifests: list[Document]) -> None:
    (settings,) = [one for one in _of(manifests, "ConfigMap") if one["metadata"]["name"] == "bookwheel-settings"]
    flags = (KUBERNETES.parent / "beam/flink.args").read_text().split()
    assert settings["data"]["BOOKWHEEL_BEAM_OPTIONS"].split() == flags
    for pool in (KUBERNETES / "pools").glob("*.json"):
        template = json.loads(pool.read_text())["job_configuration"]["job_manifest"]["spec"]["template"]
        (container,) = template["spec"]["containers"]
        assert {"configMapRef": {"name": "bookwheel-settings"}} in container["envFrom"], pool
        assert template["metadata"]["labels"]["app.kubernetes.io/part-of"] == "bookwheel", "network.yaml lets it in"


def _flink_policy(manifests: list[Document]) -> Document:
    (policy,) = (one for one in _of(manifests, "NetworkPolicy") if one["metadata"]["name"] == "flink")
    spec: Document = policy["spec"]
    return spec


def test_only_the_jobmanager_may_start_pods() -> None:
    manifests = kustomized("base")
    (cluster,) = _of(manifests, "FlinkDeployment")
    workers = cluster["spec"]["flinkConfiguration"]["kubernetes.taskmanager.service-account"]
    assert workers != cluster["spec"]["serviceAccount"]
    bound = {subject["name"] for one in _of(manifests, "RoleBinding") for subject in one["subjects"]}
    assert bound == {cluster["spec"]["serviceAccount"], "bookwheel-prefect"}
    for one in _of(manifests, "ServiceAccount"):
        name = one["metadata"]["name"]
        assert one.get("automountServiceAccountToken", True) == (name in bound), name
    assert workers in _named(manifests, "ServiceAccount")


def test_flink_knows_every_setting() -> None:
    (cluster,) = _of(kustomized("base"), "FlinkDeployment")
    compose = yaml.safe_load((KUBERNETES.parents[1] / "docker/compose.yaml").read_text())
    properties = yaml.safe_load(compose["services"]["taskmanager"]["environment"]["FLINK_PROPERTIES"])
    folder = Path(distribution("apache-flink-libraries").locate_file("pyflink/lib"))
    (jar,) = folder.glob("flink-dist-*.jar")
    minor = cluster["spec"]["flinkVersion"].removeprefix("v").replace("_", ".")
    assert jar.name.startswith(f"flink-dist-{minor}.")
    with zipfile.ZipFile(jar) as held:
        options = [name for name in held.namelist() if re.fullmatch(r"org/apache/flink/[\w/]+Options\.class", name)]
        known = b"".join(held.read(name) for name in options)
    told = {**cluster["spec"]["flinkConfiguration"], **properties}
    assert [
        key for key in told if len(key).to_bytes(2, "big") + key.encode() not in known
    ] == []  # as classes hold text


def test_there_is_a_python_process_for_each_slot() -> None:
    (cluster,) = _of(kustomized("base"), "FlinkDeployment")
    slots = cluster["spec"]["flinkConfiguration"]["taskmanager.numberOfTaskSlots"]
    assert f"--sdk_worker_parallelism={slots}" in (KUBERNETES.parent / "beam/flink.args").read_text().split()


def test_with_gpus_each_worker_has_one_of_its_own() -> None:
    (cluster,) = _of(kustomized("gpu"), "FlinkDeployment")
    spec = cluster["spec"]["taskManager"]["podTemplate"]["spec"]
    (pool,) = spec["initContainers"]
    slots = cluster["spec"]["flinkConfiguration"]["taskmanager.numberOfTaskSlots"]
    assert pool["resources"]["limits"]["nvidia.com/gpu"] == slots == "1"
    assert spec["nodeSelector"]
    assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"
    entry = json.loads(dockerfile()[1]["worker"].last("ENTRYPOINT"))
    assert pool["command"] == entry, "the GPU image starts no pool by itself"


def test_the_versions_of_the_images_are_the_project_s() -> None:
    text = "".join(file.read_text() for suffix in ("yaml", "json") for file in KUBERNETES.rglob(f"*.{suffix}"))
    assert set(re.findall(r"bookwheel-\w+:([\d.]+)", text)) == {PROJECT["version"]}
