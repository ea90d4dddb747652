"""docker/compose.yaml fits its schema, its mounts and the images of the project; its S3 server runs."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.machine.local import find_free_ports
from rag_model.serving.settings import ServiceSettings
from tests.fixtures.infra_files import PROJECT, ROOT, list_built_images, list_known_variables, read_dockerfile

FILE = ROOT / "docker/compose.yaml"
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SETTING = re.compile(r"\$\{(\w+)(:[?-])?([^}]*)\}")
_TIMEOUT = 300.0  # seconds that a busy machine gets
TAGS = {"REGISTRY": "", "TAG": PROJECT["version"]}


def _get_environment(service: dict[str, Any]) -> dict[str, str]:
    return dict(service.get("environment", {}))


def _is_ours(service: dict[str, Any]) -> bool:
    return "bookwheel-" in service["image"]


def test_the_files_fit_the_compose_schema() -> None:
    command = [str(Path(sys.executable).with_name("check-jsonschema")), "--builtin-schema", "vendor.compose-spec"]
    files = [str(FILE), str(FILE.with_name("compose.gpu.yaml"))]
    run = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_images_are_those_that_are_built_or_public_ones_that_are_pinned() -> None:
    overlay = yaml.safe_load(FILE.with_name("compose.gpu.yaml").read_text())["services"]
    assert set(overlay) <= set(SERVICES)
    for image in (service["image"] for service in [*SERVICES.values(), *overlay.values()]):
        if "bookwheel-" not in image:
            assert re.fullmatch(r"[\w/-]+:v?\d+\.\d+[\w.-]*", image), image
            continue
        defaults = {name: default for name, _, default in SETTING.findall(image)}
        assert defaults == TAGS
        assert SETTING.sub(lambda match: TAGS[match[1]], image) in list_built_images()


def test_flink_is_the_version_whose_job_server_the_launcher_has() -> None:
    version = SERVICES["jobmanager"]["image"].removeprefix("flink:").rpartition(".")[0].split("-")[0]
    minor = ".".join(version.split(".")[:2])
    assert f"flink{minor}_job_server" in read_dockerfile()[1]["job-server"].base
    assert f"--flink_version={minor}" in (ROOT / "infra/beam/flink.args").read_text().split()


def test_secrets_come_from_outside_and_nothing_starts_without_them() -> None:
    settings = {name: mark for name, mark, _ in SETTING.findall(FILE.read_text()) if name not in TAGS}
    secrets = {name for name in settings if re.search("KEY|SECRET|PASSWORD", name)}
    assert secrets == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "POSTGRES_PASSWORD", "GRAFANA_PASSWORD"}
    assert {settings[name] for name in secrets} == {":?"}
    for service in SERVICES.values():
        for name, value in _get_environment(service).items():
            assert not re.search("KEY|SECRET|PASSWORD", name) or value.startswith("${"), name
    example = FILE.with_name(".env.example").read_text()
    assert {line.partition("=")[0] for line in example.splitlines() if "=" in line} == set(settings)
    assert ".env" in FILE.with_name(".gitignore").read_text().split()


def test_variables_of_our_images_are_read() -> None:
    for name, service in SERVICES.items():
        if _is_ours(service):
            assert set(_get_environment(service)) <= list_known_variables(), name


def test_mounts_and_dependencies_exist() -> None:
    for name, service in SERVICES.items():
        for mount in service.get("volumes", ()):
            source = mount.partition(":")[0]
            exists = (FILE.parent / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
            assert exists, f"{name} mounts {source}"
        assert set(service.get("depends_on", ())) <= set(SERVICES), name
        assert {config["source"] for config in service.get("configs", ())} <= set(COMPOSE["configs"])
    for config in COMPOSE["configs"].values():
        assert yaml.safe_load(config["content"])["apiVersion"] == 1


def test_ports_are_published_on_loopback_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert len(ports) == len(set(ports))
    assert f"127.0.0.1:8000:{read_dockerfile()[1]['serve'].last('EXPOSE').split()[0]}" in SERVICES["serve"]["ports"]


def test_the_service_may_finish_its_requests_before_it_is_killed() -> None:
    defaults, grace_period = ServiceSettings(), SERVICES["serve"]["stop_grace_period"]
    assert int(grace_period.removesuffix("s")) > defaults.linger_seconds + defaults.drain_seconds


def test_our_containers_can_write_only_to_their_volumes() -> None:
    for name, service in SERVICES.items():
        if _is_ours(service):
            assert service["read_only"], name
            assert service["cap_drop"] == ["ALL"], name


def test_workers_of_beam_share_the_network_of_the_one_taskmanager() -> None:
    (pool,) = [service for service in SERVICES.values() if "bookwheel-worker" in service["image"]]
    assert pool["network_mode"] == "service:taskmanager"
    assert [name for name, service in SERVICES.items() if service.get("command") == "taskmanager"] == ["taskmanager"]
    properties = yaml.safe_load(_get_environment(SERVICES["taskmanager"])["FLINK_PROPERTIES"])
    assert properties["restart-strategy.type"] == "fixed-delay"
    assert properties["jobmanager.rpc.address"] in SERVICES
    port = json.loads(read_dockerfile()[1]["worker"].last("CMD"))[-1]
    flags = (ROOT / "infra/beam/flink.args").read_text().split()
    assert f"--environment_config=localhost:{port}" in flags
    (alias,) = SERVICES["jobmanager"]["networks"]["default"]["aliases"]
    assert f"--flink_master={alias}:8081" in flags
    assert f"--parallelism={properties['taskmanager.numberOfTaskSlots']}" in flags


def test_deployed_runs_use_the_flink_of_the_containers() -> None:
    flags = (ROOT / "infra/beam/flink.args").read_text().split()
    for name in ("worker-cpu", "worker-gpu"):
        assert _get_environment(SERVICES[name])["BOOKWHEEL_BEAM_OPTIONS"].split() == flags, name


def test_no_deployment_gets_an_empty_parameter() -> None:
    deployed = _get_environment(SERVICES["deployed"])
    variables = set(re.findall(r"\$(\w+)", (ROOT / "infra/prefect.yaml").read_text())) & set(deployed)
    assert variables == {"BOOKWHEEL_DUMP", "BOOKWHEEL_DOWNLOADS", "BOOKWHEEL_QUESTIONS", "BOOKWHEEL_STORE"}
    for name in variables:  # Prefect refuses a deployment whose dump or questions are empty
        assert SETTING.sub(lambda match: match[3], deployed[name]), name


def test_prometheus_finds_the_service() -> None:
    configuration = yaml.safe_load((ROOT / "infra/prometheus/prometheus.yml").read_text())
    (job,) = configuration["scrape_configs"]
    assert SERVICES["prometheus"]["network_mode"] == "service:serve"
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]
    assert [name for name in configuration["rule_files"] if not (ROOT / "infra/prometheus" / name).exists()] == []
    source = yaml.safe_load(COMPOSE["configs"]["grafana-source"]["content"])["datasources"][0]
    assert source["url"] == "http://serve:9090"
    assert "127.0.0.1:9090:9090" in SERVICES["serve"]["ports"]


def test_prefect_server_and_workers_have_the_same_image() -> None:
    assert {SERVICES[name]["image"] for name in ("prefect", "worker-cpu", "deployed")} == {SERVICES["bucket"]["image"]}


@contextmanager
def _run_s3(folder: Path) -> Iterator[dict[str, str]]:
    """Run the S3 service's own command, on loopback and free ports; yield the environment of its clients."""
    keys = {"AWS_ACCESS_KEY_ID": "a-key", "AWS_SECRET_ACCESS_KEY": "a-secret"}
    assert set(_get_environment(SERVICES["s3"])) == set(keys)
    options = {"-dir": folder, "-ip": "127.0.0.1", "-ip.bind": "127.0.0.1", "-s3.port.lance": 0}
    port_options = [f"-{name}.port{kind}" for name in ("s3", "master", "volume", "filer") for kind in ("", ".grpc")]
    options = {**options, **dict(zip(port_options, find_free_ports(len(port_options)), strict=True))}
    unchanged_options = [word for word in SERVICES["s3"]["command"] if word.partition("=")[0] not in options]
    command = [
        str(Path(sys.executable).with_name("weed")),
        *unchanged_options,
        *(f"{name}={value}" for name, value in options.items()),
    ]
    environment = {**{name: value for name, value in os.environ.items() if not name.startswith("AWS_")}, **keys}
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        endpoint = f"http://127.0.0.1:{options['-s3.port']}"
        check = SERVICES["s3"]["healthcheck"]["test"][-1].replace("http://127.0.0.1:8333", endpoint)
        deadline = time.monotonic() + _TIMEOUT
        while not _is_healthy(check):
            assert server.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, f"{check} does not answer"
            time.sleep(0.2)
        yield {**environment, "AWS_ENDPOINT_URL": endpoint, "AWS_DEFAULT_REGION": "us-east-1"}
    finally:
        server.kill()
        server.wait()
        for port in port_options:
            for path in Path("/tmp").glob(f"seaweedfs-*-{options[port]}.sock"):
                path.unlink(missing_ok=True)


def _is_healthy(url: str) -> bool:
    with suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def test_the_s3_service_takes_the_keys_of_its_environment_and_creates_the_bucket(tmp_path: Path) -> None:
    with _run_s3(tmp_path) as environment:
        deadline = time.monotonic() + _TIMEOUT
        _, option, code = SERVICES["bucket"]["command"]
        command = [sys.executable, option, code + "; print(s3fs.S3FileSystem().ls(''))"]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        while process.returncode and time.monotonic() < deadline:  # as compose does: `restart: on-failure`
            process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert process.stdout == "['library']\n", process.stderr
        wrong_keys = {**environment, "AWS_SECRET_ACCESS_KEY": "another"}
        refused_process = subprocess.run(command, env=wrong_keys, capture_output=True, text=True, check=False)
        assert refused_process.returncode, "a client without the key must be refused"


@pytest.mark.parametrize("name", ["prefect", "s3", "postgres"])
def test_services_that_others_wait_for_have_a_health_check(name: str) -> None:
    dependencies = [service.get("depends_on", {}) for service in SERVICES.values()]
    assert {dependency[name]["condition"] for dependency in dependencies if name in dependency} == {"service_healthy"}
    assert SERVICES[name]["healthcheck"]["test"]
