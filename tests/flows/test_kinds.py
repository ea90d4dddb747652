"""An index kind from an installed package works in every verb, without code for it in bookwheel.

The kind is `tests/fixtures/word_kind.py`: an inverted list of words, searched by text.
"""

import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows import cli
from rag_model.index import kind
from rag_model.index.kind import KINDS
from rag_model.plugins import Registry
from rag_model.retrieve.indexes import open_index
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures import word_kind
from tests.fixtures.plugin_package import install_package
from tests.flows.test_serve import PATIENCE, start_service

RECIPE = """
part_bytes = 50_000

[index.words]
factory = "WORDS"

[index.hnsw]
factory = "HNSW8"
"""
QUESTION = "political philosophy anarchism"


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install the kind as a package, for this process and those that it starts."""
    folder = tmp_path_factory.mktemp("site")
    install_package(folder, "index_kinds", "words = word_kind:KIND", word_kind.__file__)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        patch.setattr(KINDS, "_loaded", {})
        yield
    sys.modules.pop("word_kind", None)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe with an index of words, which is then the default retriever."""
    path = tmp_path / "words.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def library(plugin: None, mini_dump: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a snapshot that has an index of words; tests only read it."""
    folder = tmp_path_factory.mktemp("words")
    (folder / "words.toml").write_text(RECIPE)
    options = {"dump": mini_dump, "encoder": tiny, "recipe": folder / "words.toml", "store": folder / "store"}
    assert cli.run(["reindex", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]) == 0
    return folder / "store"


def read_words_index(store: Path) -> dict[str, Any]:
    with Snapshot.open(str(store)) as snapshot:
        words_index: dict[str, Any] = json.loads(snapshot.path("index/words.json").read_bytes())
    return words_index


def test_plugin_kind_is_built_gated_and_published(reindex: Any, recipe: Path, tmp_path: Path) -> None:
    """Only the stages of the kind run on the Beam worker, because the first build has recorded all others."""
    recipe_without_words = tmp_path / "others.toml"
    recipe_without_words.write_text(recipe.read_text().replace('[index.words]\nfactory = "WORDS"\n', ""))
    assert reindex(tmp_path / "store", recipe=recipe_without_words, ref="others").code == 0
    result = reindex(tmp_path / "store", beam=("--direct_num_workers=1",))
    assert result.code == 0, result.err
    metrics = result.json["metrics"]["words"]
    assert metrics["recall@20"] == 1.0
    assert metrics["source@20"] > 0.9
    with Snapshot.open(str(tmp_path / "store")) as snapshot:
        content = snapshot.manifest.content
        entry = content.indexes["words"]
        assert (entry["kind"], entry["over"], entry["file"]) == ("words", "text", "index/words.json")
        assert content.default_retriever == content.retriever == "words"
        assert "trained/words" not in content.files
        index = open_index(snapshot, "words")
        (row,) = index.search([QUESTION], 1)[1][0]
        assert snapshot.passages([int(row)])[0].title == "Anarchism"
        assert index.n == snapshot.n == read_words_index(tmp_path / "store")["n"]


def test_rebuild_reuses_pieces_of_unchanged_parts(store: Path, reindex: Any) -> None:
    pieces = {path: path.stat().st_mtime_ns for path in (store / "memo" / "scatter").iterdir()}
    result = reindex(store)
    with Snapshot.open(str(store)) as snapshot:
        assert result.json["snapshot"] == snapshot.id
    assert {path: path.stat().st_mtime_ns for path in (store / "memo" / "scatter").iterdir()} == pieces
    assert reindex(store, "--explain").code == 0


def test_takedown_removes_page_from_plugin_index(store: Path, bookwheel: Any) -> None:
    index_before = read_words_index(store)
    assert index_before["words"]["anarchism"]
    result = bookwheel("takedown", "12", "--store", store, "--yes", "--json")
    assert result.code == 0, result.err
    index_after = read_words_index(store)
    assert index_after["n"] < index_before["n"]
    assert len({*index_before["words"]} - {*index_after["words"]}) > 10, "words that only this page has"


def test_pulled_plugin_index_is_searched(library: Path, bookwheel: Any, tmp_path: Path) -> None:
    options = ("--store", library, "--index", "words", "--no-embeddings", "--json")
    result = bookwheel("pull", "latest", tmp_path / "pulled", *options)
    assert result.code == 0, result.err
    with Snapshot.from_folder(tmp_path / "pulled") as snapshot:
        scores, rows = open_index(snapshot, "words").search([QUESTION, "zzzz"], 3)
        assert scores[0][0] >= 2
        assert rows[1].tolist() == [-1, -1, -1]


def test_plugin_index_is_searched_fused_and_evaluated(store: Path, bookwheel: Any, tmp_path: Path) -> None:
    result = bookwheel("search", QUESTION, "--store", store, "-k", 3, "--json")
    assert result.code == 0, result.err
    hits = result.json["results"][0]["hits"]
    assert hits[0]["title"] == "Anarchism"
    assert hits[0]["score"] >= 2
    fused = bookwheel("search", QUESTION, "--store", store, "--retriever", "rrf(words:50, hnsw:50)", "--json")
    assert fused.code == 0, fused.err
    legs = {leg["leg"] for hit in fused.json["results"][0]["hits"] for leg in hit["legs"]}
    assert legs == {"words", "hnsw"}
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question": QUESTION, "answers": ["political philosophy"]}) + "\n")
    evaluation = bookwheel("evaluate", "--store", store, "--questions", questions, "--json")
    assert evaluation.code == 0, evaluation.err
    assert evaluation.json["metrics"]["Success@5"] == 1.0


@pytest.mark.xdist_group("processes")  # which share a fork server
def test_plugin_index_is_served(library: Path, tmp_path: Path) -> None:
    body = json.dumps({"questions": [QUESTION], "k": 2}).encode()
    with start_service(tmp_path, "--store", library, "--poll", 1) as service:
        service.wait_until(lambda: service.get("/readyz")[0] == 200)
        request = urllib.request.Request(service.url + "/search", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            (result,) = json.load(reply)["results"]
    assert result["hits"][0]["title"] == "Anarchism"


@pytest.mark.parametrize(
    ("retriever", "message"),
    [
        ("wrods", "has no index 'wrods': choose one of words, hnsw, exact"),
        ("rrf(words, hnsw", "does not fit its indexes"),
        ("rrf(words)", "two or more retrievers"),
    ],
)
def test_recipe_with_wrong_retriever_is_refused(
    retriever: str, message: str, reindex: Any, recipe: Path, tmp_path: Path
) -> None:
    recipe.write_text(f'retriever = "{retriever}"\n{RECIPE}')
    result = reindex(tmp_path / "store")
    assert (result.code, message in result.complaint) == (2, True), result.err
    assert not (tmp_path / "store").exists()


def test_recipe_can_record_fused_retriever(store: Path, reindex: Any, bookwheel: Any, recipe: Path) -> None:
    recipe.write_text(f'retriever = "rrf(words:50, hnsw:50, k=30)"\n{RECIPE}')
    assert reindex(store).code == 0
    result = bookwheel("search", QUESTION, "--store", store, "--json")
    assert {leg["leg"] for leg in result.json["results"][0]["hits"][0]["legs"]} <= {"words", "hnsw"}
    assert bookwheel("show", "--store", store, "--json").json["content"]["retriever"].startswith("rrf(")


def test_error_names_kind_of_missing_package(library: Path, bookwheel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registry_without_plugins = Registry("index kind", "bookwheel.none", {"hnsw": KINDS._built_in["hnsw"].value})
    monkeypatch.setattr(kind, "KINDS", registry_without_plugins)
    with Snapshot.open(str(library)) as snapshot, pytest.raises(Exception, match="no index kind 'words' here"):
        open_index(snapshot, "words")
    assert bookwheel("verify", "--store", library, "--json").json["ok"]
