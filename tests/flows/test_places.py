"""Stores on object storage, and an installation without extras."""

import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.slow]

ROOT = Path(__file__).parents[2]

PULL_AND_SEARCH_BY_VECTOR = """
import json, sys
from pathlib import Path
import numpy as np
from rag_model.retrieve.dense import DenseRetriever
from rag_model.store.pulling.pull import pull
from rag_model.store.versions.snapshot import Snapshot
from rag_model.store.store import Store

store = Store.open(sys.argv[1])
report = pull(store, store.snapshots.resolve("latest"), Path(sys.argv[2]))
snapshot = Snapshot.from_folder(report.path)
vector = np.asarray(snapshot.embeddings(snapshot.manifest.content.parts[0].name)[7], dtype=np.float32)
print(json.dumps({
    index: [hit.passage.id for hit in DenseRetriever(snapshot, None, index).search_vectors(vector[None], 3)[0]]
    for index in ("hnsw", "exact")
} | {"source": snapshot.passages([7])[0].id}))
"""


@pytest.mark.parametrize("url_fixture", ["s3_store_url", "gcs_store_url", "azure_store_url"])
def test_store_on_object_storage_is_built_searched_and_pulled(
    url_fixture: str,
    request: pytest.FixtureRequest,
    reindex: Any,
    bookwheel: Any,
    library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = request.getfixturevalue(url_fixture)
    monkeypatch.setenv("BOOKWHEEL_CACHE", str(tmp_path / "cache"))
    build = reindex(url)
    assert build.code == 0, build.err
    assert build.json["snapshot"] == bookwheel("log", "--store", library, "--json").json[0]["snapshot"]
    assert bookwheel("verify", "--store", url).code == 0

    def search(store: object) -> Any:
        return bookwheel("search", "Who wrote it?", "--store", store, "--json").json["results"]

    assert search(url) == search(library)
    pulled = bookwheel("pull", "latest", tmp_path / "pulled", "--store", url, "--json").json
    assert (Path(pulled["path"]) / "index" / "hnsw.faiss").is_file()
    second_build = reindex(url).json
    assert second_build["counts"]["embedded"] == 0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of bookwheel."""
    folder = tmp_path_factory.mktemp("wheel")
    run_pip("wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def core_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with bookwheel without extras."""
    folder = tmp_path_factory.mktemp("core")
    venv.create(folder)
    python = folder / "bin" / "python"
    run_pip("--python", python, "install", "--no-compile", wheel)
    return python


def run_pip(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *map(str, arguments)], check=True, capture_output=True)


def test_wheel_contains_packages_and_demo(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"flows", "beam_jobs", "rag_model"}
    assert {"flows/demo/questions.jsonl", "rag_model/py.typed", "rag_model/evaluation/reports/report.css"} <= set(names)
    assert {f"rag_model/serving/http/page.{kind}" for kind in ("html", "css", "js")} <= set(names)


def test_core_pulls_and_searches_by_vector(core_python: Path, library: Path, tmp_path: Path) -> None:
    optional_packages = (
        "torch",
        "transformers",
        "prefect",
        "apache_beam",
        "lxml",
        "mwparserfromhell",
        "cyclopts",
        "pydantic",
    )
    program = f"import importlib.util as u; print([n for n in {optional_packages} if u.find_spec(n)])"
    assert read_output(core_python, "-c", program) == "[]\n"
    arguments = (PULL_AND_SEARCH_BY_VECTOR, library, tmp_path / "pulled")
    hits = json.loads(read_output(core_python, "-W", "error", "-c", *arguments))
    assert hits["hnsw"] == hits["exact"]
    assert hits["source"] in hits["exact"]


def test_core_command_names_missing_extra(core_python: Path) -> None:
    result = subprocess.run([core_python.with_name("bookwheel"), "--help"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "pip install 'bookwheel[pipeline]'" in result.stderr
    assert "Traceback" not in result.stderr


def read_output(*command: object) -> str:
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd="/")
    assert result.returncode == 0, result.stderr
    return result.stdout
