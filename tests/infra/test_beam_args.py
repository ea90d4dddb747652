"""Beam knows every option in infra/beam, and the images that they name are bookwheel's."""

import argparse
from pathlib import Path

import pytest
from apache_beam.options.pipeline_options import FlinkRunnerOptions, PipelineOptions
from packaging.version import Version

from beam_jobs.options import build_pipeline_options, check_flags
from tests.fixtures.infra_files import PROJECT, ROOT, read_bake_file, read_dockerfile

FILES = sorted((ROOT / "infra/beam").glob("*.args"))


def _parse_strictly(words: list[str]) -> argparse.Namespace:
    """Parse Beam's options, and refuse unknown ones, of which Beam only warns."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for kind in _list_subclasses(PipelineOptions):
        if kind.__module__ == PipelineOptions.__module__:
            kind._add_argparse_args(parser)
    return parser.parse_args(words)


def _list_subclasses(kind: type) -> list[type]:
    return [
        subclass
        for child in kind.__subclasses__()
        for subclass in (child, *_list_subclasses(child))
        if "_add_argparse_args" in vars(subclass)
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_beam_knows_every_option(file: Path) -> None:
    words = file.read_text().split()
    assert words == file.read_text().splitlines(), "a shell splits the file at spaces, so options contain none"
    assert check_flags(words)
    options = vars(_parse_strictly(words))
    for word in words:
        name, _, value = word.removeprefix("--").partition("=")
        assert value
        assert value in str(options[name]), f"{name} became {options[name]}"


def test_an_option_that_beam_does_not_know_is_refused() -> None:
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        _parse_strictly(["--runner=FlinkRunner", "--flink_mastre=here:8081"])


def test_flink_gets_the_job_server_that_is_in_the_image() -> None:
    options = _parse_strictly((ROOT / "infra/beam/flink.args").read_text().split())
    assert options.flink_version in FlinkRunnerOptions.PUBLISHED_FLINK_VERSIONS
    stage = read_dockerfile()[1]["flows"]
    assert any(options.flink_job_server_jar in rest for word, rest in stage.instructions if word == "RUN")
    assert (options.environment_type, options.environment_config.partition(":")[0]) == ("EXTERNAL", "localhost")


def test_dataflow_gets_the_image_with_the_code_of_the_launcher() -> None:
    options = _parse_strictly((ROOT / "infra/beam/dataflow.args").read_text().split())
    name, _, tag = options.sdk_container_image.rpartition("/")[2].partition(":")
    assert (name, tag) == ("bookwheel-dataflow", PROJECT["version"])
    assert Version(tag)
    assert name in read_bake_file()[1]["dataflow"]["tags"][0]
    assert options.sdk_location == "container", "the image has Beam already, and Beam must not install itself again"
    assert options.number_of_worker_harness_threads == 1, "each thread would load its own encoder"
    (accelerator,) = options.dataflow_service_options
    assert accelerator.startswith("worker_accelerator=type:nvidia-")
    assert accelerator.endswith(";count:1;install-nvidia-driver")


@pytest.mark.parametrize("uses_gpu", [True, False])
def test_only_a_stage_that_uses_a_gpu_holds_machines_with_one(uses_gpu: bool) -> None:
    flags = (ROOT / "infra/beam/dataflow.args").read_text().split()
    options = build_pipeline_options(flags, 4, uses_gpu=uses_gpu).get_all_options()
    assert bool(options["dataflow_service_options"]) == uses_gpu
    assert options["machine_type"] == ("g2-standard-8" if uses_gpu else "n2-standard-8")
