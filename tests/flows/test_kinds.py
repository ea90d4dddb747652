"""An index kind that an installed package brings goes the whole way, and no line of bookwheel knows of it.

The kind is `tests/fixtures/word_kind.py`: an inverted list of words, searched by text. It is built by Beam jobs, gated,
published, pulled, searched, served, inherited and taken down.
"""

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rag_model.index import kind
from rag_model.index.kind import KINDS
from rag_model.plugins import Registry
from rag_model.retrieve.indexes import open_index
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures import word_kind
from tests.flows.test_serve import PATIENCE, service

RECIPE = """
part_bytes = 50_000

[index.words]
factory = "WORDS"

[index.hnsw]
factory = "HNSW8"
"""
QUESTION = "political philosophy anarchism"


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The kind as an installed package, for this process and those that it starts."""
    folder = word_kind.install(tmp_path / "site")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(KINDS, "_loaded", {})
    yield folder
    import sys  # noqa: PLC0415

    sys.modules.pop("word_kind", None)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe with an index of words, which is then the default retriever."""
    path = tmp_path / "words.toml"
    path.write_text(RECIPE)
    return path


def words_in(store: Path, ref: str = "latest") -> dict[str, Any]:
    with Snapshot.open(str(store), ref) as snapshot:
        read: dict[str, Any] = json.loads(snapshot.path("index/words.json").read_bytes())
    return read


def test_a_kind_from_outside_is_built_gated_and_published(
    plugin: Path, reindex: Any, recipe: Path, tmp_path: Path
) -> None:
    """On a worker process of Beam's, which finds the kind by itself; all but its own stages are recorded already."""
    others = tmp_path / "others.toml"
    others.write_text(recipe.read_text().replace('[index.words]\nfactory = "WORDS"\n', ""))
    assert reindex(tmp_path / "store", recipe=others, ref="others").code == 0
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
        assert index.n == snapshot.n == words_in(tmp_path / "store")["n"]


def test_pieces_of_unchanged_parts_are_inherited(
    plugin: Path, reindex: Any, bookwheel: Any, tmp_path: Path, mini_dump: Path
) -> None:
    store = tmp_path / "store"
    first = reindex(store)
    assert first.code == 0, first.err
    pieces = [*(store / "memo" / "scatter").iterdir()]
    again = reindex(store)
    assert again.json["snapshot"] == first.json["snapshot"]
    assert [*(store / "memo" / "scatter").iterdir()] == pieces
    explained = bookwheel("reindex", "--dump", mini_dump, "--store", store, "--encoder", "tiny", "--explain", "--json")
    assert explained.code in (0, 1)


def test_a_takedown_takes_the_page_out_of_it(plugin: Path, reindex: Any, bookwheel: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert reindex(store).code == 0
    before = words_in(store)
    assert before["words"]["anarchism"]
    given = ("--store", store, "--yes", "--json")
    result = bookwheel("takedown", "12", *given)
    assert result.code == 0, result.err
    after = words_in(store)
    assert after["n"] < before["n"]
    only = {word for word, rows in before["words"].items()} - {*after["words"]}
    assert "anarchosyndicalism" in only or len(only) > 10  # words that stood on that page alone


def test_it_is_pulled_and_searched_from_a_folder(plugin: Path, reindex: Any, bookwheel: Any, tmp_path: Path) -> None:
    store, pulled = tmp_path / "store", tmp_path / "pulled"
    assert reindex(store).code == 0
    result = bookwheel("pull", "latest", pulled, "--store", store, "--index", "words", "--no-embeddings", "--json")
    assert result.code == 0, result.err
    with Snapshot.from_folder(pulled) as snapshot:
        index = open_index(snapshot, "words")
        scores, rows = index.search([QUESTION, "zzzz"], 3)
        assert scores[0][0] >= 2
        assert rows[1].tolist() == [-1, -1, -1]


def test_it_is_searched_fused_and_evaluated(plugin: Path, reindex: Any, bookwheel: Any, tmp_path: Path) -> None:
    """As the recorded default, under fusion with vectors, and by the questions of a file."""
    store, questions = tmp_path / "store", tmp_path / "questions.jsonl"
    assert reindex(store).code == 0
    plain = bookwheel("search", QUESTION, "--store", store, "-k", 3, "--json")
    assert plain.code == 0, plain.err
    hits = plain.json["results"][0]["hits"]
    assert hits[0]["title"] == "Anarchism"
    assert hits[0]["score"] >= 2
    fused = bookwheel("search", QUESTION, "--store", store, "--retriever", "rrf(words:50, hnsw:50)", "--json")
    assert fused.code == 0, fused.err
    legs = {leg["leg"] for hit in fused.json["results"][0]["hits"] for leg in hit["legs"]}
    assert legs == {"words", "hnsw"}
    questions.write_text(json.dumps({"question": QUESTION, "answers": ["political philosophy"]}) + "\n")
    asked = bookwheel("evaluate", "--store", store, "--questions", questions, "--json")
    assert asked.code == 0, asked.err
    assert asked.json["metrics"]["Success@5"] == 1.0


@pytest.mark.xdist_group("processes")  # which share a fork server
def test_it_is_served(plugin: Path, reindex: Any, tmp_path: Path) -> None:
    """By a service that encodes no question: nothing wants a vector."""
    store = tmp_path / "store"
    assert reindex(store).code == 0
    query_vectors = json.dumps({"questions": [QUESTION], "k": 2}).encode()
    with service(tmp_path, "--store", store, "--poll", 1) as served:
        served.until(lambda: served.get("/readyz")[0] == 200)
        request = urllib.request.Request(
            served.url + "/search", query_vectors, {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            (found,) = json.load(reply)["results"]
    assert found["hits"][0]["title"] == "Anarchism"


@pytest.mark.parametrize(
    ("retriever", "said"),
    [
        ("wrods", "has no index 'wrods': choose one of words, hnsw, exact"),
        ("rrf(words, hnsw", "does not fit its indexes"),
        ("rrf(words)", "two or more retrievers"),
    ],
)
def test_a_recorded_retriever_fits_the_recipe(
    retriever: str, said: str, plugin: Path, reindex: Any, recipe: Path, tmp_path: Path
) -> None:
    recipe.write_text(f'retriever = "{retriever}"\n{RECIPE}')
    result = reindex(tmp_path / "store")
    assert result.code == 2
    assert said in result.complaint
    assert not (tmp_path / "store").exists()


def test_a_fused_retriever_can_be_recorded(
    plugin: Path, reindex: Any, bookwheel: Any, recipe: Path, tmp_path: Path
) -> None:
    recipe.write_text(f'retriever = "rrf(words:50, hnsw:50, k=30)"\n{RECIPE}')
    store = tmp_path / "store"
    assert reindex(store).code == 0
    result = bookwheel("search", QUESTION, "--store", store, "--json")
    assert {leg["leg"] for leg in result.json["results"][0]["hits"][0]["legs"]} <= {"words", "hnsw"}
    assert bookwheel("show", "--store", store, "--json").json["content"]["retriever"].startswith("rrf(")


def test_without_the_package_the_kind_is_named(plugin: Path, reindex: Any, tmp_path: Path, bookwheel: Any) -> None:
    store = tmp_path / "store"
    assert reindex(store).code == 0
    without = Registry("index kind", "bookwheel.none", dict.fromkeys(KINDS._built_in, ""))
    without._built_in = KINDS._built_in
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "KINDS", without)
        with Snapshot.open(str(store)) as snapshot, pytest.raises(Exception, match="no index kind 'words' here"):
            open_index(snapshot, "words")
    assert bookwheel("verify", "--store", store, "--json").json["ok"]
    assert Store.open(str(store)).snapshots.list_ids()
