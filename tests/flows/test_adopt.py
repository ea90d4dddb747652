"""What was exported is imported again, or refused: passages, vectors and answers come back as they were."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot

pytestmark = pytest.mark.xdist_group("flows")  # one library for all of them

QUESTION = "what is anarchism?"


@pytest.fixture(scope="module")
def exported(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from flows import cli  # noqa: PLC0415 - with its settings read late, as the command does

    folder = tmp_path_factory.mktemp("exported")
    for layout in ("dpr", "datasets", "jsonl"):
        assert cli.run(["export", "latest", str(folder / layout), "--layout", layout, "--store", str(library)]) == 0
    return folder


@pytest.mark.parametrize("layout", ["dpr", "datasets", "jsonl"])
def test_an_export_is_imported_and_answers_as_before(
    layout: str, exported: Path, library: Path, tiny: Path, recipe: Path, bookwheel: Any, tmp_path: Path
) -> None:
    if layout == "datasets":
        given = [exported / "datasets" / "data" / "*.parquet", exported / "datasets" / "data"]
    else:
        vectors = sorted((exported / "dpr").glob("wikipedia_passages_?.npy"))
        texts = {"dpr": exported / "dpr" / "psgs_w100.tsv", "jsonl": exported / "jsonl" / "corpus.jsonl"}
        given = [texts[layout], *vectors]  # the one has no vectors of its own
    store = tmp_path / "store"
    ran = bookwheel("import", *given, "--store", store, "--encoder", tiny, "--recipe", recipe, "--json")
    assert ran.code == 0, ran.err
    with Snapshot.open(str(library)) as before, Snapshot.open(str(store)) as after:
        assert ran.json["snapshot"] == after.id
        assert ran.json["counts"]["embedded"] == 0
        assert after.space == before.space
        assert passages_of(after) == passages_of(before)
        dates = [passage.revised for passage in before.passages(range(before.n))]
        kept = [None] * before.n if layout == "dpr" else dates  # DPR's table has no place for them
        assert [passage.revised for passage in after.passages(range(after.n))] == kept
        assert None not in dates
        ours, theirs = (
            np.concatenate([one.embeddings(part.name) for part in one.parts]).astype(np.float32)
            for one in (after, before)
        )
        assert np.array_equal(ours, theirs)
        assert after.manifest.content.corpus["kind"] == "imported"
        assert "chunk" not in after.manifest.content.recipe
    assert hits_of(bookwheel, store) == hits_of(bookwheel, library)


def test_what_was_taken_down_is_not_imported(
    exported: Path, tiny: Path, recipe: Path, bookwheel: Any, tmp_path: Path
) -> None:
    """Of such passages the title stands for the page."""
    store = Store.open(str(tmp_path / "store"), create=True)
    store.takedowns.add("", ["Anarchism"], "", "me")
    given = [exported / "datasets" / "data" / "*.parquet", exported / "datasets" / "data"]
    ran = bookwheel("import", *given, "--store", tmp_path / "store", "--encoder", tiny, "--recipe", recipe, "--json")
    assert ran.code == 0, ran.err
    gone = ran.json["counts"]["dropped"]["taken_down"]
    with Snapshot.open(store.url) as snapshot:
        assert snapshot.n == 247 - gone
        assert "Anarchism" not in {passage.title for passage in snapshot.passages(range(snapshot.n))}
        assert sum(len(snapshot.embeddings(part.name)) for part in snapshot.parts) == snapshot.n
    store.takedowns.add("", ["Autism", "Albedo"], "", "me")
    told = bookwheel("import", *given, "--store", store.url, "--encoder", tiny, "--recipe", recipe)
    assert told.code == 1
    assert "there is nothing to import" in told.complaint


def passages_of(snapshot: Snapshot) -> list[tuple[str, str, str, str]]:
    return [(one.id, one.title, one.text, one.hash) for one in snapshot.passages(range(snapshot.n))]


def hits_of(bookwheel: Any, store: Path) -> list[tuple[str, str]]:
    (answer,) = bookwheel("search", QUESTION, "--store", store, "--json").json["results"]
    return [(hit["id"], hit["text"]) for hit in answer["hits"]]


def test_another_encoders_vectors_are_refused(
    exported: Path, other_tiny: Path, recipe: Path, bookwheel: Any, tmp_path: Path
) -> None:
    given = [exported / "datasets" / "data" / "*.parquet", exported / "datasets" / "data"]
    ran = bookwheel("import", *given, "--store", tmp_path, "--encoder", other_tiny, "--recipe", recipe, "--json")
    assert ran.code == 3
    assert "mean cosine is" in ran.complaint


@pytest.mark.usefixtures("prefect_server")
def test_one_vector_a_passage(exported: Path, tiny: Path, bookwheel: Any, tmp_path: Path) -> None:
    vectors = np.load(exported / "dpr" / "wikipedia_passages_0.npy", allow_pickle=False)
    table = exported / "dpr" / "psgs_w100.tsv"
    for count, told in ((3, "more than 3 passages for 3 vectors"), (5000, "passages for 5000 vectors")):
        np.save(tmp_path / "vectors.npy", np.resize(vectors, (count, vectors.shape[1])), allow_pickle=False)
        given = (table, tmp_path / "vectors.npy", "--store", tmp_path / "store", "--encoder", tiny)
        ran = bookwheel("import", *given)
        assert ran.code == 1
        assert told in ran.complaint
