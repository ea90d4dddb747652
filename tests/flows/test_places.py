"""Where it must run as well: on object storage, and with no more than the core installed."""

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

SEARCH_BY_VECTOR = """
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
    name: [hit.passage.id for hit in DenseRetriever(snapshot, None, name).search_vectors(vector[None], 3)[0]]
    for name in ("hnsw", "exact")
} | {"asked": snapshot.passages([7])[0].id}))
"""


@pytest.mark.parametrize("place", ["s3_store_url", "gcs_store_url", "azure_store_url"])
def test_a_library_in_a_cloud(
    place: str,
    request: pytest.FixtureRequest,
    reindex: Any,
    bookwheel: Any,
    library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = request.getfixturevalue(place)
    monkeypatch.setenv("BOOKWHEEL_CACHE", str(tmp_path / "cache"))
    made = reindex(url)
    assert made.code == 0, made.err
    assert made.json["snapshot"] == bookwheel("log", "--store", library, "--json").json[0]["snapshot"]
    assert bookwheel("verify", "--store", url).code == 0

    def hits(store: object) -> Any:
        return bookwheel("search", "Who wrote it?", "--store", store, "--json").json["results"]

    assert hits(url) == hits(library)
    pulled = bookwheel("pull", "latest", tmp_path / "pulled", "--store", url, "--json").json
    assert (Path(pulled["path"]) / "index" / "hnsw.faiss").is_file()
    again = reindex(url).json
    assert again["counts"]["embedded"] == 0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of bookwheel."""
    folder = tmp_path_factory.mktemp("wheel")
    _run_pip("wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds bookwheel without extras."""
    folder = tmp_path_factory.mktemp("core")
    venv.create(folder)
    python = folder / "bin" / "python"
    _run_pip("--python", python, "install", "--no-compile", wheel)
    return python


def _run_pip(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *map(str, arguments)], check=True, capture_output=True)


def test_the_wheel_holds_three_packages_and_the_demo(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"flows", "beam_jobs", "rag_model"}
    assert {"flows/demo/questions.jsonl", "rag_model/py.typed", "rag_model/evaluation/reports/report.css"} <= set(names)
    assert {f"rag_model/serving/http/page.{kind}" for kind in ("html", "css", "js")} <= set(names)


def test_the_core_pulls_and_searches_by_vector(core: Path, library: Path, tmp_path: Path) -> None:
    missing = ("torch", "transformers", "prefect", "apache_beam", "lxml", "mwparserfromhell", "cyclopts", "pydantic")
    find = f"import importlib.util as u; print([n for n in {missing} if u.find_spec(n)])"
    assert _out(core, "-c", find) == "[]\n"
    found = json.loads(_out(core, "-W", "error", "-c", SEARCH_BY_VECTOR, library, tmp_path / "pulled"))
    assert found["hnsw"] == found["exact"]
    assert found["asked"] in found["exact"]


def test_the_core_says_what_the_command_line_lacks(core: Path) -> None:
    result = subprocess.run([core.with_name("bookwheel"), "--help"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "pip install 'bookwheel[pipeline]'" in result.stderr
    assert "Traceback" not in result.stderr


def _out(*command: object) -> str:
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd="/")
    assert result.returncode == 0, result.stderr
    return result.stdout
