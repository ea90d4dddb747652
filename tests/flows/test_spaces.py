"""Snapshots with two encoder spaces, each with vectors, a question encoder, an index and gate checks."""

import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows import cli
from rag_model.retrieve.indexes import open_index
from rag_model.store.store import Store
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.manifest import question_encoder_path
from rag_model.store.versions.snapshot import Snapshot
from tests.flows.conftest import LibraryBuild

RECIPE = """
part_bytes = 50_000

[represent.small]
encoder = "{encoder}"
dtype = "float32"

[index.hnsw]
factory = "HNSW8"

[index.small]
factory = "Flat"
over = "small"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The path of a recipe that the test writes."""
    return tmp_path / "spaces.toml"


@pytest.fixture(scope="module")
def two_spaces(mini_dump: Path, tiny: Path, other_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> LibraryBuild:
    """A store with a snapshot of two spaces; tests only read it."""
    folder, out = tmp_path_factory.mktemp("spaces"), io.StringIO()
    (folder / "spaces.toml").write_text(RECIPE.format(encoder=other_tiny))
    options = ["--dump", mini_dump, "--encoder", tiny, "--recipe", folder / "spaces.toml", "--store", folder / "store"]
    with redirect_stdout(out):
        assert cli.run(["reindex", *map(str, options), "--json"]) == 0
    return LibraryBuild(folder / "store", json.loads(out.getvalue()))


@pytest.fixture
def store(two_spaces: LibraryBuild, tmp_path: Path) -> Path:
    """A copy of the store with two spaces."""
    return Path(shutil.copytree(two_spaces.store, tmp_path / "store"))


def read_vectors(snapshot: Snapshot, representation: str) -> Any:
    return np.concatenate([snapshot.embeddings(part.name, representation) for part in snapshot.parts])


def test_two_spaces_are_built_reused_and_taken_down(
    two_spaces: LibraryBuild, store: Path, reindex: Any, recipe: Path, bookwheel: Any, other_tiny: Path
) -> None:
    reply = two_spaces.reply
    assert reply["metrics"]["small"]["recall@20"] == 1.0
    assert {"embed", "embed small"} <= reply["seconds"].keys()
    with Snapshot.open(str(store)) as snapshot:
        content = snapshot.manifest.content
        spaces = [content.space_of(name) for name in ("embeddings", "small")]
        assert spaces[0]
        assert spaces[1]
        assert spaces[0]["digest"] != spaces[1]["digest"]
        assert content.representation_of("hnsw") == "embeddings" != content.representation_of("small") == "small"
        tiny_vectors, other_vectors = read_vectors(snapshot, "embeddings"), read_vectors(snapshot, "small")
        assert (tiny_vectors.dtype, other_vectors.dtype) == (np.float16, np.float32)
        assert snapshot.folder(question_encoder_path("small")).is_dir()
        scores = open_index(snapshot, "small").search(other_vectors[:5], 1)[0]
        assert scores[:, 0] == pytest.approx((other_vectors[:5] ** 2).sum(axis=1), rel=1e-4)

    recipe.write_text(RECIPE.format(encoder=other_tiny))
    rebuild = reindex(store).json
    assert (rebuild["snapshot"], rebuild["counts"]["embedded"]) == (reply["snapshot"], 0)

    result = bookwheel("takedown", "12", "--store", store, "--yes", "--json")
    assert result.code == 0, result.err
    with Snapshot.open(str(store)) as new_snapshot:
        vectors = read_vectors(new_snapshot, "small")
        assert len(read_vectors(new_snapshot, "embeddings")) == len(vectors) == new_snapshot.n
        assert 0 < new_snapshot.n < len(tiny_vectors)
        assert open_index(new_snapshot, "small").n == open_index(new_snapshot, "hnsw").n == new_snapshot.n
        assert {row.tobytes() for row in vectors} <= {row.tobytes() for row in other_vectors}
        snapshot_id = new_snapshot.id
    assert verify_version(Store.open(str(store)), snapshot_id) == []


def test_question_encoder_searches_only_its_own_space(
    two_spaces: LibraryBuild, bookwheel: Any, tiny: Path, other_tiny: Path
) -> None:
    command = ("search", "political philosophy", "--store", two_spaces.store, "--json", "--question-encoder")
    default_results = bookwheel(*command[:-1], "--index", "small").json["results"]
    assert bookwheel(*command, other_tiny, "--index", "small").json["results"] == default_results
    failure = bookwheel(*command, tiny, "--index", "small")
    assert (failure.code, "weights differ" in failure.complaint) == (3, True)
    assert bookwheel(*command, "/nowhere", "--index", "small").code == 1
    assert bookwheel(*command, tiny, "--retriever", "rrf(hnsw, small)").code == 0


def test_index_is_added_over_second_space(store: Path, recipe: Path, bookwheel: Any) -> None:
    command = ("add-index", "latest", "--recipe", recipe, "--store", store, "--json")
    recipe.write_text('retriever = "rrf(hnsw, lists)"\n[index.lists]\nfactory = "IVF4,Flat"\nover = "small"\n')
    result = bookwheel(*command)
    assert result.code == 0, result.err
    with Snapshot.open(str(store)) as snapshot:
        content = snapshot.manifest.content
        assert {*content.indexes} == {"hnsw", "small", "lists"}
        assert (content.representation_of("lists"), content.default_retriever) == ("small", "rrf(hnsw, lists)")
    recipe.write_text('[represent.third]\nencoder = "x"\n[index.lists]\nfactory = "IVF4,Flat"\nover = "third"\n')
    assert "has no representation 'third'" in bookwheel(*command).complaint
    recipe.write_text('[index.lists]\nfactory = "IVF4,Flat"\nover = "smal"\n')
    assert "choose from embeddings, small" in bookwheel(*command).complaint


def test_equal_spaces_of_two_dtypes_reuse_their_vectors(reindex: Any, recipe: Path, tmp_path: Path, tiny: Path) -> None:
    recipe.write_text(RECIPE.format(encoder=tiny).replace("small", "also"))
    store = tmp_path / "store"
    assert reindex(store).code == 0
    recipe.write_text(recipe.read_text().replace("part_bytes = 50_000", "part_bytes = 60_000"))
    second = reindex(store)
    assert second.code == 0, second.err
    encoded_counts = [json.loads(path.read_text())["facts"]["encoded"] for path in (store / "memo" / "embed").iterdir()]
    with Snapshot.open(str(store)) as snapshot:
        assert sum(encoded_counts) == 2 * snapshot.n, "the second build encodes nothing"


def test_equal_vectors_are_tuned_for_each_question_encoder(
    reindex: Any, recipe: Path, tmp_path: Path, tiny: Path
) -> None:
    """The two question encoders differ only in their prompt, so the vectors and the index files are equal."""
    prompt = 'spec = { question_prompt = "a theory of the king of the city by the river " }'
    table = '[index.{name}]\nfactory = "IVF16,Flat"\nrecall_target = 0.9\nover = "{over}"\n'
    preamble = f'[gate]\nfloors = {{}}\n[represent.asked]\nencoder = "{tiny}"\n{prompt}\n'
    tables = [table.format(name="plain", over="embeddings"), table.format(name="asked", over="asked")]
    searches = []
    for order in (tables, tables[::-1]):
        recipe.write_text("\n".join([preamble, *order]))
        store = tmp_path / f"store-{len(searches)}"
        assert reindex(store).code in (0, 3)
        with Snapshot.open(str(store), Store.open(str(store)).snapshots.list_ids()[0]) as snapshot:
            searches.append({name: entry["search"] for name, entry in snapshot.manifest.content.indexes.items()})
    assert searches[0] == searches[1]


@pytest.mark.parametrize(
    ("recipe_text", "message"),
    [
        ("[index.a]\nfactory = 'HNSW8'\nover = 'smal'", "index a is over 'smal', but HNSW8 takes vectors"),
        ("[index.a]\nfactory = 'HNSW8'\nover = 'text'", "choose from embeddings"),
        ("[represent.text]\nencoder = 'x'", "every snapshot has a representation text"),
        ("[represent.'../x']\nencoder = 'x'", "cannot name a representation"),
        ("[represent._x]\nencoder = 'x'", "cannot name a representation"),
        ("retriever = 'rerank(exact, /models/cross, 5)'", "names the folder /models/cross"),
        ("[represent.small]\ndtype = 'float16'", "[represent.small] of the recipe names no encoder"),
        ("[index.a]\nfactory = 'HNSW8'\nsettings = { a = 1 }", "settings do not apply to HNSW8"),
    ],
)
def test_wrong_representations_are_refused(
    recipe_text: str, message: str, reindex: Any, tmp_path: Path, recipe: Path
) -> None:
    recipe.write_text(recipe_text)
    result = reindex(tmp_path / "store")
    assert result.code == 2
    assert message in result.complaint
