"""`bookwheel serve` must start with only the packages of the serve image, which has neither Prefect nor Beam."""

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rag_model.store.objects.cache import get_cache_folder
from tests.fixtures.infra_files import PROJECT, build_kustomization, iter_pods, list_containers, read_dockerfile

_BLOCK_OTHER_PACKAGES = """
import sys
from importlib.machinery import PathFinder

BLOCKED = set(sys.argv.pop().split(","))

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in BLOCKED else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
"""
_START = """
from flows.cli import run
code = run(["serve", "--help"])
import rag_model.serving.run
sys.exit(code)
"""


def _read_requirements() -> list[Requirement]:
    """Return the requirements in the install line of the image: extras of the project and other packages."""
    (line,) = [rest for word, rest in read_dockerfile()[1]["serve-venv"].instructions if word == "RUN"]
    (extras,) = re.findall(r"whl\)\[([\w,]+)\]", line)
    extra_requirements = chain.from_iterable(PROJECT["optional-dependencies"][extra] for extra in extras.split(","))
    other_packages = re.findall(r'"([\w-]+[><=]=[^"$]+)"', line)
    return [Requirement(text) for text in (*PROJECT["dependencies"], *extra_requirements, *other_packages)]


def _list_distributions() -> set[str]:
    """Return the distributions in the image, by canonical name."""
    queue, names = _read_requirements(), {canonicalize_name(PROJECT["name"])}
    visited = set()
    while queue:
        requirement = queue.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in visited:
            continue
        visited.add(key)
        names.add(key[0])
        try:
            dependencies = [Requirement(text) for text in requires(requirement.name) or ()]
        except PackageNotFoundError:  # for another platform
            continue
        for dependency in dependencies:
            if dependency.marker is None or any(
                dependency.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)
            ):
                queue.append(dependency)
    return names


def _run(code: str) -> subprocess.CompletedProcess[str]:
    distributions = _list_distributions()
    owners = {module: {canonicalize_name(name) for name in names} for module, names in packages_distributions().items()}
    blocked = sorted(module for module, names in owners.items() if not names & distributions)
    assert {"prefect", "apache_beam"} <= set(blocked)
    assert not {"faiss", "torch", "fastapi", "uvicorn", "s3fs"} & set(blocked)
    command = [sys.executable, "-c", _BLOCK_OTHER_PACKAGES + code, ",".join(blocked)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_service_starts() -> None:
    run = _run(_START)
    assert run.returncode == 0, run.stderr
    assert "--in-memory" in run.stdout


def test_the_service_reads_the_settings_of_the_manifests(monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.cli import app  # noqa: PLC0415 - with its settings read late, as the command does

    documents = build_kustomization("base")
    (settings,) = (document["data"] for document in documents if document["kind"] == "ConfigMap")
    (template,) = (template for name, template in iter_pods(documents) if name == "serve")
    (container,) = list_containers(template)
    stages = read_dockerfile()[1]
    image = dict(part.split("=", 1) for name in ("base", "serve") for part in stages[name].last("ENV").split())
    variables = {**image, **settings, **{variable["name"]: variable["value"] for variable in container["env"]}}
    for name, value in variables.items():
        if name.startswith("BOOKWHEEL_"):
            monkeypatch.setenv(name, value)
    _, *arguments = json.loads(stages["serve"].last("ENTRYPOINT"))
    _, bound_arguments, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
    expected = {"host": "0.0.0.0", "port": 8000, "health_port": 8001}
    assert bound_arguments.arguments == {"store": settings["BOOKWHEEL_STORE"], "ref": "latest", **expected}
    ports = [str(bound_arguments.arguments[name]) for name in ("port", "health_port")]
    assert (stages["serve"].last("EXPOSE").split(), get_cache_folder()) == (ports, Path("/scratch/cache"))


def test_packages_outside_the_image_cannot_be_imported() -> None:
    assert "No module named 'prefect'" in _run("import prefect").stderr
