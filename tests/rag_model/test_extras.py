"""The error for a missing extra names the command that installs it; a broken package keeps its own error."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest

from rag_model import extras
from rag_model.errors import MissingExtraError
from rag_model.extras import get_versions, hide_modules, list_faiss_packages, require


def test_a_missing_package_names_its_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'bookwheel\[model\]'"):
        require("a_package_that_does_not_exist", "model")


def test_an_installed_package_is_returned() -> None:
    assert require("json", "model") is sys.modules["json"]


def test_the_error_for_a_missing_dependency_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_installed.py").write_text("import something_it_needs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="something_it_needs"):
        require("half_installed", "model")


def write_distribution(folder: Path, name: str, version: str) -> Path:
    """Write the metadata of an installed distribution, as pip does."""
    metadata_folder = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata_folder.mkdir()
    (metadata_folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
    return folder


def test_two_installed_faiss_packages_are_named_with_the_repair(tmp_path: Path) -> None:
    (installed_name,) = list_faiss_packages()
    second_name = "faiss-gpu-cuvs" if installed_name != "faiss-gpu-cuvs" else "faiss-gpu"
    search_path = os.pathsep.join([str(write_distribution(tmp_path, second_name, "1.15.1")), *filter(None, sys.path)])
    command = [sys.executable, "-m", "flows.cli", "doctor"]
    result = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": search_path}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "are installed over each other" in result.stderr
    assert all(name in result.stderr.partition("pip uninstall --yes ")[2] for name in (installed_name, second_name))


def test_versions_of_a_gpu_faiss_have_the_name_of_memo_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(write_distribution(tmp_path, "faiss-gpu-cuvs", "9.8.7"))])
    extras._get_distribution_version.cache_clear()
    try:
        assert list_faiss_packages() == {"faiss-gpu-cuvs": "9.8.7"}
        assert get_versions("faiss-cpu", "numpy") == {"faiss-cpu": "9.8.7", "numpy": "none"}
    finally:
        extras._get_distribution_version.cache_clear()


def test_modules_are_hidden_from_one_thread_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needed_elsewhere.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with hide_modules("needed_elsewhere"):
        with pytest.raises(ModuleNotFoundError, match="needed_elsewhere"):
            import_module("needed_elsewhere")
        with ThreadPoolExecutor(1) as pool:  # a server imports modules while another thread compiles the search
            assert pool.submit(import_module, "needed_elsewhere").result().VALUE == 1
