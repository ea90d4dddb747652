"""The serve image holds neither Prefect nor Beam: `bookwheel serve` must start with what its extras bring alone."""

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
from tests.fixtures.infra_files import PROJECT, containers, dockerfile, kustomized, pods

_BLOCKED = """
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


def _installed() -> list[Requirement]:
    """Return what the image's own install line names: the project's extras, and what else."""
    (line,) = [rest for word, rest in dockerfile()[1]["serve-venv"].instructions if word == "RUN"]
    (extras,) = re.findall(r"whl\)\[([\w,]+)\]", line)
    named = chain.from_iterable(PROJECT["optional-dependencies"][extra] for extra in extras.split(","))
    added = re.findall(r'"([\w-]+[><=]=[^"$]+)"', line)
    return [Requirement(text) for text in (*PROJECT["dependencies"], *named, *added)]


def _brought() -> set[str]:
    """Return the distributions in the image, by canonical name."""
    waiting, brought = _installed(), {canonicalize_name(PROJECT["name"])}
    seen = set()
    while waiting:
        expected = waiting.pop()
        asked = (canonicalize_name(expected.name), frozenset(expected.extras))
        if asked in seen:
            continue
        seen.add(asked)
        brought.add(asked[0])
        try:
            found = [Requirement(text) for text in requires(expected.name) or ()]
        except PackageNotFoundError:  # for another platform
            continue
        for each in found:
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *expected.extras)):
                waiting.append(each)
    return brought


def _run(code: str) -> subprocess.CompletedProcess[str]:
    brought = _brought()
    owners = {module: {canonicalize_name(name) for name in names} for module, names in packages_distributions().items()}
    blocked = sorted(module for module, names in owners.items() if not names & brought)
    assert {"prefect", "apache_beam"} <= set(blocked)
    assert not {"faiss", "torch", "fastapi", "uvicorn", "s3fs"} & set(blocked)
    command = [sys.executable, "-c", _BLOCKED + code, ",".join(blocked)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_service_starts() -> None:
    run = _run(_START)
    assert run.returncode == 0, run.stderr
    assert "--in-memory" in run.stdout


def test_what_the_manifests_set_reaches_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.cli import app  # noqa: PLC0415 - with its settings read late, as the command does

    documents = kustomized("base")
    (settings,) = (document["data"] for document in documents if document["kind"] == "ConfigMap")
    (template,) = (template for name, template in pods(documents) if name == "serve")
    (container,) = containers(template)
    stages = dockerfile()[1]
    baked = dict(part.split("=", 1) for name in ("base", "serve") for part in stages[name].last("ENV").split())
    told = {**baked, **settings, **{one["name"]: one["value"] for one in container["env"]}}
    for name, value in told.items():
        if name.startswith("BOOKWHEEL_"):
            monkeypatch.setenv(name, value)
    _, *words = json.loads(stages["serve"].last("ENTRYPOINT"))
    _, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    given = {"host": "0.0.0.0", "port": 8000, "health_port": 8001}
    assert bound.arguments == {"store": settings["BOOKWHEEL_STORE"], "ref": "latest", **given}
    ports = [str(bound.arguments[name]) for name in ("port", "health_port")]
    assert (stages["serve"].last("EXPOSE").split(), get_cache_folder()) == (ports, Path("/scratch/cache"))


def test_what_is_not_in_the_image_is_not_found() -> None:
    assert "No module named 'prefect'" in _run("import prefect").stderr
