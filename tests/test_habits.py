"""Tests of the files around the code: the lock of versions, the commit hooks and the workflow that runs the gate."""

import re
import shlex
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
UNLOCKED = {"bookwheel", "torch", "faiss-gpu"}  # `make lock` omits them, because their build depends on the machine
REQUIREMENTS = [
    requirement
    for requirement in map(Requirement, chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()))
    if requirement.name not in UNLOCKED
]


def test_the_lock_has_a_valid_version_of_every_dependency() -> None:
    for requirement in REQUIREMENTS:
        versions = re.findall(rf"^{re.escape(canonicalize_name(requirement.name))}==([^\s;]+)", LOCK, re.MULTILINE)
        assert versions, f"requirements.lock does not have {requirement.name}: run `make lock`"
        assert all(Version(version) in requirement.specifier for version in versions), (
            f"requirements.lock has {versions} instead of {requirement}: run `make lock`"
        )


def test_every_locked_package_has_hashes_and_no_url() -> None:
    packages = re.split(r"\n(?=\S)", LOCK.split("\n", 2)[2].strip())
    assert len(packages) > len(REQUIREMENTS)
    for package in packages:
        assert re.match(r"[a-z0-9-]+==\S+ ", package)
        assert "--hash=sha256:" in package
    assert "://" not in LOCK


def test_hooks_run_installed_tools_of_the_project() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repository["repo"] for repository in config["repos"]] == ["local"]
    entries = [shlex.split(hook["entry"]) for hook in config["repos"][0]["hooks"]]
    assert [entry[0] for entry in entries] == [".venv/bin/ruff", ".venv/bin/ruff", ".venv/bin/pytest"]
    assert all((ROOT / word).exists() for entry in entries for word in entry if word.startswith("tests/"))


def test_the_workflow_runs_the_gate() -> None:
    file = ROOT / ".github/workflows/ci.yml"
    command = [Path(sys.executable).with_name("check-jsonschema"), "--builtin-schema", "vendor.github-workflows", file]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout
    assert ".ci/run" in [step.get("run") for step in yaml.safe_load(file.read_text())["jobs"]["gate"]["steps"]]
