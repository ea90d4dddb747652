"""The sources of the images exist and fit together; images contain no secrets and do not run as root."""

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.fixtures.infra_files import (
    DOCKERFILE,
    PROJECT,
    ROOT,
    Stage,
    list_known_variables,
    read_bake_file,
    read_dockerfile,
)

PACKAGES = ("flows", "beam_jobs", "rag_model")
SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL", re.IGNORECASE)
DEFAULTS, STAGES = read_dockerfile()
TARGETS = sorted({body["target"] for body in read_bake_file()[1].values()})


def _find_tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def test_hadolint_finds_nothing() -> None:
    run = subprocess.run([_find_tool("hadolint"), str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_every_base_is_a_stage_or_a_pinned_image(stage: Stage) -> None:
    _, colon, tag = stage.base.partition(":")
    assert stage.base in STAGES or (colon and re.search(r"\d", tag)), f"{stage.name} is built on {stage.base}"


def test_copies_come_from_stages_and_existing_files() -> None:
    for stage in STAGES.values():
        for word, rest in stage.instructions:
            if word != "COPY":
                continue
            *sources, _ = (part for part in rest.split() if not part.startswith("--"))
            origin = re.search(r"--from=(\S+)", rest)
            if origin:
                assert origin[1] in STAGES, f"{stage.name} copies from {origin[1]}"
            else:
                assert set(sources) <= set(_list_context()), "the build context lacks a file"
                assert [name for name in sources if not (ROOT / name).exists()] == []


def test_launcher_and_workers_have_the_same_python_and_the_pinned_beam() -> None:
    declared = [line.rpartition(":: ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert DEFAULTS["PYTHON"] in declared
    assert f"beam_python{DEFAULTS['PYTHON']}_sdk:" in STAGES["worker"].base + STAGES[STAGES["worker"].base].base
    assert STAGES["base"].base.startswith(f"python:{DEFAULTS['PYTHON']}-")
    requirements = map(Requirement, PROJECT["optional-dependencies"]["pipeline"])
    (beam,) = [requirement for requirement in requirements if "beam" in requirement.name]
    assert beam.specifier.contains(DEFAULTS["BEAM"])
    assert version("apache-beam") == DEFAULTS["BEAM"], "the images' Beam is not the one that the tests run"


def test_extras_are_those_of_the_project() -> None:
    extras = {extra for line in re.findall(r"whl\)\[([\w,]+)\]", DOCKERFILE.read_text()) for extra in line.split(",")}
    assert extras >= {"serve", "pipeline", "model", "s3"}
    assert extras <= set(PROJECT["optional-dependencies"])


def test_packages_of_the_images_have_the_bounds_of_the_project() -> None:
    requirements = [Requirement(text) for text in re.findall(r'"([\w-]+[><=]=[^"$]+)"', DOCKERFILE.read_text())]
    requirements.append(Requirement(read_bake_file()[0]["FAISS_GPU"]))
    extras = chain.from_iterable(PROJECT["optional-dependencies"].values())
    own_requirements = map(Requirement, (*PROJECT["dependencies"], *extras))
    bounds = {requirement.name: requirement.specifier for requirement in own_requirements}
    for requirement in requirements:
        assert {"<", ">="} <= {part.operator for part in requirement.specifier}, requirement.name
        assert requirement.specifier == bounds.get(requirement.name, requirement.specifier), requirement.name


def test_the_faiss_of_the_image_is_that_of_the_extra_and_has_the_cuda_of_its_torch() -> None:
    variables = read_bake_file()[0]
    (extra,) = map(Requirement, PROJECT["optional-dependencies"]["gpu"])
    image = Requirement(variables["FAISS_GPU"])
    assert (image.name, image.specifier) == (extra.name, extra.specifier)
    cuda_of_faiss = {"faiss-gpu": "12", "faiss-gpu-cuvs": "13"}  # what each wheel of 1.15.1 requires
    assert variables["CUDA"].removeprefix("cu")[:2] == cuda_of_faiss[image.name]


def test_targets_of_the_build_and_their_arguments_exist() -> None:
    variables, targets = read_bake_file()
    assert variables["TAG"] == PROJECT["version"]
    for name, body in targets.items():
        assert (ROOT / body["dockerfile"]) == DOCKERFILE
        assert body["target"] in STAGES, name
        stage_names, arguments = [body["target"]], set()
        while stage_names:  # a stage also takes the arguments of its base and of the stages that it copies from
            stage = STAGES[stage_names.pop()]
            arguments |= {rest.partition("=")[0] for word, rest in stage.instructions if word == "ARG"}
            stage_names += [stage.base] if stage.base in STAGES else []
            stage_names += [match[1] for _, rest in stage.instructions if (match := re.search(r"--from=(\S+)", rest))]
        assert set(body.get("args", ())) <= arguments, name
        assert set(body.get("args", {}).values()) <= set(variables), name


@pytest.mark.parametrize("name", TARGETS)
def test_only_the_dataflow_image_runs_as_root(name: str) -> None:
    user = STAGES[name].last("USER")
    assert user.isdecimal(), "by number: Kubernetes cannot tell from a name that it is not root"
    assert (int(user) == 0) == (name == "dataflow")


def test_no_secret_is_baked_in_and_every_variable_is_read() -> None:
    variables = list_known_variables()
    for stage in STAGES.values():
        for word, rest in stage.instructions:
            names = re.findall(r"(\w+)=", rest) if word == "ENV" else [rest.partition("=")[0]] if word == "ARG" else []
            assert [name for name in names if SECRET.search(name)] == []
            assert word != "ENV" or set(names) <= variables, f"no code reads {set(names) - variables}"


def test_the_health_check_asks_the_port_that_the_service_listens_on() -> None:
    stage = STAGES["serve"]
    variables = dict(part.split("=", 1) for part in stage.last("ENV").split())
    ports = [variables["BOOKWHEEL_PORT"], variables["BOOKWHEEL_HEALTH_PORT"]]
    assert stage.last("EXPOSE").split() == ports == ["8000", "8001"]
    assert f"http://127.0.0.1:{ports[1]}/healthz" in stage.last("HEALTHCHECK")


def _read_ignore_rules() -> list[str]:
    """Return the rules of the build context after the first, which excludes everything."""
    lines = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    first, *rules = [line for line in lines if line[:1] not in {"", "#"}]
    assert first == "*"
    return rules


def _list_context() -> list[str]:
    return [rule[1:] for rule in _read_ignore_rules() if rule.startswith("!")]


def _copy_context(folder: Path) -> None:
    """Copy the build context that docker would send."""
    patterns = [rule.removeprefix("**/") for rule in _read_ignore_rules() if rule.startswith("**/")]
    ignored = shutil.ignore_patterns(*patterns)
    for name in _list_context():
        source = ROOT / name
        shutil.copytree(source, folder / name, ignore=ignored) if source.is_dir() else shutil.copy(source, folder)


def test_the_wheel_of_the_build_context_holds_every_file_of_the_packages(tmp_path: Path) -> None:
    context, wheels = tmp_path / "context", tmp_path / "wheels"
    context.mkdir()
    _copy_context(context)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), str(context)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*") if file.is_file()]
    assert names == {str(file.relative_to(ROOT)) for file in files if "__pycache__" not in file.parts}
    assert {"rag_model/evaluation/reports/report.css", "rag_model/py.typed", "flows/demo/questions.jsonl"} <= names
