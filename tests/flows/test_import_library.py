"""What was exported is imported again, or refused: passages, vectors and answers come back as they were."""

from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from rag_model.index.kind import get_kind_of_entry
from rag_model.retrieve.indexes import get_index_files
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot

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
    result = bookwheel("import", *given, "--store", store, "--encoder", tiny, "--recipe", recipe, "--json")
    assert result.code == 0, result.err
    with Snapshot.open(str(library)) as before, Snapshot.open(str(store)) as after:
        assert result.json["snapshot"] == after.id
        assert result.json["counts"]["embedded"] == 0
        assert after.space == before.space
        assert passages_of(after) == passages_of(before)
        dates = [passage.revised for passage in before.passages(range(before.n))]
        kept = [None] * before.n if layout == "dpr" else dates  # DPR's table has no place for them
        assert [passage.revised for passage in after.passages(range(after.n))] == kept
        assert None not in dates
        names_pages = layout == "datasets"  # else the passages of a title are a page
        pages = [passage.page_id if names_pages else passage.title for passage in before.passages(range(before.n))]
        assert [passage.page_id for passage in after.passages(range(after.n))] == pages
        ours, theirs = (
            np.concatenate([one.embeddings(part.name) for part in one.parts]).astype(np.float32)
            for one in (after, before)
        )
        assert np.array_equal(ours, theirs)
        assert after.manifest.content.corpus["kind"] == "imported"
        assert "chunk" not in after.manifest.content.recipe
    assert hits_of(bookwheel, store) == hits_of(bookwheel, library)


def test_what_was_taken_down_is_not_imported(
    exported: Path, library: Path, tiny: Path, recipe: Path, bookwheel: Any, tmp_path: Path
) -> None:
    with Snapshot.open(str(library)) as original:
        pages = {passage.title: passage.page_id for passage in original.passages(range(original.n))}
    store = Store.open(str(tmp_path / "store"), create=True)
    store.takedowns.add("", [pages["Anarchism"]], "", "me")
    given = [exported / "datasets" / "data" / "*.parquet", exported / "datasets" / "data"]
    result = bookwheel("import", *given, "--store", tmp_path / "store", "--encoder", tiny, "--recipe", recipe, "--json")
    assert result.code == 0, result.err
    gone = result.json["counts"]["dropped"]["taken_down"]
    with Snapshot.open(store.url) as snapshot:
        assert snapshot.n == 247 - gone
        assert "Anarchism" not in {passage.title for passage in snapshot.passages(range(snapshot.n))}
        assert sum(len(snapshot.embeddings(part.name)) for part in snapshot.parts) == snapshot.n
    store.takedowns.add("", [pages["Autism"], pages["Albedo"]], "", "me")
    told = bookwheel("import", *given, "--store", store.url, "--encoder", tiny, "--recipe", recipe)
    assert told.code == 1
    assert "there is nothing to import" in told.complaint


def passages_of(snapshot: Snapshot) -> list[tuple[str, str, str, str]]:
    return [(passage.id, passage.title, passage.text, passage.hash) for passage in snapshot.passages(range(snapshot.n))]


def hits_of(bookwheel: Any, store: Path) -> list[tuple[str, str]]:
    (answer,) = bookwheel("search", QUESTION, "--store", store, "--json").json["results"]
    return [(hit["id"], hit["text"]) for hit in answer["hits"]]


def test_another_encoders_vectors_are_refused(
    exported: Path, other_tiny: Path, recipe: Path, bookwheel: Any, tmp_path: Path
) -> None:
    given = [exported / "datasets" / "data" / "*.parquet", exported / "datasets" / "data"]
    result = bookwheel("import", *given, "--store", tmp_path, "--encoder", other_tiny, "--recipe", recipe, "--json")
    assert result.code == 3
    assert "the mean cosine of" in result.complaint


@pytest.mark.usefixtures("prefect_server")
def test_one_vector_a_passage(exported: Path, tiny: Path, bookwheel: Any, tmp_path: Path) -> None:
    vectors = np.load(exported / "dpr" / "wikipedia_passages_0.npy", allow_pickle=False)
    table = exported / "dpr" / "psgs_w100.tsv"
    for count, told in ((3, "more than 3 passages for 3 vectors"), (5000, "passages for 5000 vectors")):
        np.save(tmp_path / "vectors.npy", np.resize(vectors, (count, vectors.shape[1])), allow_pickle=False)
        given = (table, tmp_path / "vectors.npy", "--store", tmp_path / "store", "--encoder", tiny)
        result = bookwheel("import", *given)
        assert result.code == 1
        assert told in result.complaint


def read_vectors(exported: Path) -> Any:
    paths = sorted((exported / "dpr").glob("wikipedia_passages_?.npy"))
    return np.concatenate([np.load(path, allow_pickle=False) for path in paths]).astype(np.float32)


def write_index(path: Path, factory: str, vectors: Any, metric: int = faiss.METRIC_INNER_PRODUCT, **values: int) -> Any:
    """A file that plain faiss makes and writes, with values for faiss's ParameterSpace."""
    index = faiss.index_factory(vectors.shape[1], factory, metric)
    index.train(vectors)
    index.add(vectors)
    for name, value in values.items():
        faiss.ParameterSpace().set_index_parameter(index, name, value)
    faiss.write_index(index, str(path))
    return index


def test_published_index_files_become_indexes_with_faiss_hits(
    exported: Path, tiny: Path, bookwheel: Any, tmp_path: Path
) -> None:
    """The file's bytes are kept, and so are parameters that somebody chose; others are the recipe's or the defaults."""
    vectors, table = read_vectors(exported), exported / "dpr" / "psgs_w100.tsv"
    reference = {
        "graph": write_index(tmp_path / "graph", "HNSW16", vectors, efSearch=90),
        "lists": write_index(tmp_path / "lists", "IVF6,Flat", vectors, nprobe=5),
        "codes": write_index(tmp_path / "codes", "PCA24,IVF4,PQ4x4np", vectors),
        "plain": write_index(tmp_path / "plain", "Flat", vectors),
    }
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('retriever = "graph"\n[index.codes]\nfactory = "IVF,PQ4x4,Refine(vectors)"\n')
    files = [word for name in reference for word in ("--index-file", f"{name}={tmp_path / name}")]
    given = (table, *sorted((exported / "dpr").glob("*_?.npy")), "--store", tmp_path / "store", "--encoder", tiny)
    result = bookwheel("import", *given, "--recipe", recipe, *files, "--json")
    assert result.code == 0, result.err
    with Snapshot.open(str(tmp_path / "store")) as snapshot:
        entries = snapshot.manifest.content.indexes
        assert {name: (entry["kind"], entry["factory"], entry["search"]) for name, entry in entries.items()} == {
            "graph": ("hnsw", "HNSW16", {"efSearch": 90}),
            "lists": ("ivf", "IVF6,Flat", {"nprobe": 5}),
            "codes": ("ivf", "PCA24,IVF4,PQ4x4np", {"nprobe": 4, "refine": 10}),
            "plain": ("exact", "Flat", {}),
        }
        for name, plain in reference.items():
            paths = get_index_files(snapshot, name)
            assert paths.index.read_bytes() == (tmp_path / name).read_bytes()
            opened = get_kind_of_entry(entries[name]).open(paths, entries[name])
            hits = opened.search(vectors[::10], 20)
            if name == "codes":  # the snapshot's vectors rerank ten times as many candidates of faiss
                faiss.ParameterSpace().set_index_parameter(plain, "nprobe", 4)
                candidates = plain.search(vectors[::10], 200)[1]  # (q, 200)
                scores = np.einsum("qd,qcd->qc", vectors[::10], vectors[candidates])
                assert np.allclose(hits[0], -np.sort(-scores)[:, :20], atol=1e-5)
            else:
                assert np.array_equal(hits[1], plain.search(vectors[::10], 20)[1]), name
        assert snapshot.manifest.content.recipe["index"]["graph"]["factory"] == "HNSW16"
    (hit,) = bookwheel("search", QUESTION, "--store", tmp_path / "store", "-k", 1, "--json").json["results"][0]["hits"]
    taken = bookwheel("takedown", hit["page_id"], "--store", tmp_path / "store", "--yes")
    assert taken.code == 0, taken.err
    with Snapshot.open(str(tmp_path / "store")) as snapshot:  # its indexes are built without the page
        assert set(snapshot.manifest.content.indexes) == {*reference}
        assert snapshot.n < len(vectors)
    again = bookwheel("import", *given, "--recipe", recipe, *files)
    assert (again.code, "has the vectors of passages that were taken down in" in again.complaint) == (1, True)


@pytest.mark.parametrize(
    ("case", "code", "told"),
    [
        ("dimension", 1, "has 24 dimensions, and the vectors have 32"),
        ("count", 1, "holds 246 vectors for 247 passages"),
        ("type", 1, "holds faiss's IxPq"),
        ("ids", 1, "among 247 vectors: its ids must be the numbers of the passages"),
        ("twice", 1, "has no vector of passage 3, and another twice"),
        ("map", 1, "holds faiss's IwFl with a direct map"),
        ("truncated", 1, "is not a complete faiss index"),
        ("order", 3, "is not an index of these vectors in this order"),
        ("metric", 2, "of the recipe has metric 'ip', but"),
        ("factory", 2, "of the recipe asks for HNSW8, but"),
        ("unnamed", 2, "is not NAME=FILE"),
        ("missing", 1, "there is no index file"),
    ],
)
def test_an_index_file_that_does_not_fit_is_refused(
    case: str, code: int, told: str, exported: Path, tiny: Path, recipe: Path, bookwheel: Any, tmp_path: Path
) -> None:
    vectors, file = read_vectors(exported), tmp_path / "file"
    if case in ("ids", "twice", "map"):
        index = faiss.index_factory(vectors.shape[1], "IVF4,Flat", faiss.METRIC_INNER_PRODUCT)
        index.train(vectors)
        rows = np.arange(len(vectors))
        ids = {"ids": rows + 1000, "twice": np.where(rows == 3, 4, rows)}.get(case, rows)
        index.add_with_ids(vectors, ids)
        if case == "map":
            index.make_direct_map()
        faiss.write_index(index, str(file))
    else:
        chosen = {"dimension": vectors[:, :24], "count": vectors[1:], "order": vectors[::-1]}.get(case, vectors)
        metric = faiss.METRIC_L2 if case == "metric" else faiss.METRIC_INNER_PRODUCT
        factory = {"type": "PQ4x4", "factory": "HNSW16"}.get(case, "HNSW8")
        write_index(file, factory, np.ascontiguousarray(chosen), metric)
    if case == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    if case == "missing":
        file.unlink()
    given = (exported / "dpr" / "psgs_w100.tsv", *sorted((exported / "dpr").glob("*_?.npy")))
    value = str(file) if case == "unnamed" else f"hnsw={file}"
    settings = ("--store", tmp_path / "store", "--encoder", tiny, "--recipe", recipe)
    result = bookwheel("import", *given, *settings, "--index-file", value)
    assert result.code == code, result.err
    assert told in result.complaint
    store = Store.open(str(tmp_path / "store"), create=True)
    assert [*store.refs.list_names()] == []
