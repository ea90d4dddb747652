"""`bookwheel import`: exports keep passages, vectors and hits; vectors and indexes that do not fit are rejected."""

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
def exports(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from flows import cli  # noqa: PLC0415 - reads its settings when it is imported

    folder = tmp_path_factory.mktemp("exported")
    for layout in ("dpr", "datasets", "jsonl"):
        assert cli.run(["export", "latest", str(folder / layout), "--layout", layout, "--store", str(library)]) == 0
    return folder


@pytest.mark.parametrize("layout", ["dpr", "datasets", "jsonl"])
def test_imported_export_has_the_same_passages_vectors_and_hits(
    layout: str, exports: Path, library: Path, tiny: Path, recipe: Path, bookwheel: Any, tmp_path: Path
) -> None:
    if layout == "datasets":
        inputs = [exports / "datasets" / "data" / "*.parquet", exports / "datasets" / "data"]
    else:
        vectors = sorted((exports / "dpr").glob("wikipedia_passages_?.npy"))
        texts = {"dpr": exports / "dpr" / "psgs_w100.tsv", "jsonl": exports / "jsonl" / "corpus.jsonl"}
        inputs = [texts[layout], *vectors]
    store = tmp_path / "store"
    result = bookwheel("import", *inputs, "--store", store, "--encoder", tiny, "--recipe", recipe, "--json")
    assert result.code == 0, result.err
    with Snapshot.open(str(library)) as original, Snapshot.open(str(store)) as imported:
        assert result.json["snapshot"] == imported.id
        assert result.json["counts"]["embedded"] == 0
        assert imported.space == original.space
        assert list_passages(imported) == list_passages(original)
        for passage, source in zip(
            imported.passages(range(imported.n)), original.passages(range(original.n)), strict=True
        ):
            assert source.revised
            assert passage.revised == (None if layout == "dpr" else source.revised)  # DPR's table has no dates
            # Only the layout `datasets` has page ids; in the others, a title is a page.
            assert passage.page_id == (source.page_id if layout == "datasets" else source.title)
        assert np.array_equal(load_embeddings(imported), load_embeddings(original))
        assert imported.manifest.content.corpus["kind"] == "imported"
        assert "chunk" not in imported.manifest.content.recipe
    assert search_hits(bookwheel, store) == search_hits(bookwheel, library)


def test_import_skips_taken_down_pages(
    exports: Path, library: Path, tiny: Path, recipe: Path, bookwheel: Any, tmp_path: Path
) -> None:
    with Snapshot.open(str(library)) as original:
        pages = {passage.title: passage.page_id for passage in original.passages(range(original.n))}
    store = Store.open(str(tmp_path / "store"), create=True)
    store.takedowns.add("", [pages["Anarchism"]], "", "me")
    inputs = [exports / "datasets" / "data" / "*.parquet", exports / "datasets" / "data"]
    result = bookwheel(
        "import", *inputs, "--store", tmp_path / "store", "--encoder", tiny, "--recipe", recipe, "--json"
    )
    assert result.code == 0, result.err
    n_dropped = result.json["counts"]["dropped"]["taken_down"]
    with Snapshot.open(store.url) as snapshot:
        assert snapshot.n == len(load_embeddings(snapshot)) == 247 - n_dropped
        assert "Anarchism" not in {passage.title for passage in snapshot.passages(range(snapshot.n))}
    store.takedowns.add("", [pages["Autism"], pages["Albedo"]], "", "me")
    failure = bookwheel("import", *inputs, "--store", store.url, "--encoder", tiny, "--recipe", recipe)
    assert failure.code == 1
    assert "there is nothing to import" in failure.complaint


def list_passages(snapshot: Snapshot) -> list[tuple[str, str, str, str]]:
    return [(passage.id, passage.title, passage.text, passage.hash) for passage in snapshot.passages(range(snapshot.n))]


def load_embeddings(snapshot: Snapshot) -> Any:
    return np.concatenate([snapshot.embeddings(part.name) for part in snapshot.parts]).astype(np.float32)


def search_hits(bookwheel: Any, store: Path) -> list[tuple[str, str]]:
    (search_result,) = bookwheel("search", QUESTION, "--store", store, "--json").json["results"]
    return [(hit["id"], hit["text"]) for hit in search_result["hits"]]


def test_vectors_of_another_encoder_are_rejected(
    exports: Path, other_tiny: Path, recipe: Path, bookwheel: Any, tmp_path: Path
) -> None:
    inputs = [exports / "datasets" / "data" / "*.parquet", exports / "datasets" / "data"]
    result = bookwheel("import", *inputs, "--store", tmp_path, "--encoder", other_tiny, "--recipe", recipe, "--json")
    assert result.code == 3
    assert "the mean cosine of" in result.complaint


@pytest.mark.usefixtures("prefect_server")
def test_number_of_vectors_must_equal_number_of_passages(
    exports: Path, tiny: Path, bookwheel: Any, tmp_path: Path
) -> None:
    vectors = np.load(exports / "dpr" / "wikipedia_passages_0.npy", allow_pickle=False)
    table = exports / "dpr" / "psgs_w100.tsv"
    for count, message in ((3, "more than 3 passages for 3 vectors"), (5000, "passages for 5000 vectors")):
        np.save(tmp_path / "vectors.npy", np.resize(vectors, (count, vectors.shape[1])), allow_pickle=False)
        arguments = (table, tmp_path / "vectors.npy", "--store", tmp_path / "store", "--encoder", tiny)
        result = bookwheel("import", *arguments)
        assert result.code == 1
        assert message in result.complaint


def read_vectors(exports: Path) -> Any:
    paths = sorted((exports / "dpr").glob("wikipedia_passages_?.npy"))
    return np.concatenate([np.load(path, allow_pickle=False) for path in paths]).astype(np.float32)


def write_index(path: Path, factory: str, vectors: Any, metric: int = faiss.METRIC_INNER_PRODUCT, **values: int) -> Any:
    """Write an index that faiss built without this package; `values` are parameters of faiss's ParameterSpace."""
    index = faiss.index_factory(vectors.shape[1], factory, metric)
    index.train(vectors)
    index.add(vectors)
    for name, value in values.items():
        faiss.ParameterSpace().set_index_parameter(index, name, value)
    faiss.write_index(index, str(path))
    return index


def test_imported_index_files_give_the_hits_of_faiss(exports: Path, tiny: Path, bookwheel: Any, tmp_path: Path) -> None:
    """The import keeps the bytes of the file and its parameters; others come from the recipe or are defaults."""
    vectors, table = read_vectors(exports), exports / "dpr" / "psgs_w100.tsv"
    reference = {
        "graph": write_index(tmp_path / "graph", "HNSW16", vectors, efSearch=90),
        "lists": write_index(tmp_path / "lists", "IVF6,Flat", vectors, nprobe=5),
        "codes": write_index(tmp_path / "codes", "PCA24,IVF4,PQ4x4np", vectors),
        "plain": write_index(tmp_path / "plain", "Flat", vectors),
    }
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('retriever = "graph"\n[index.codes]\nfactory = "IVF,PQ4x4,Refine(vectors)"\n')
    files = [word for name in reference for word in ("--index-file", f"{name}={tmp_path / name}")]
    arguments = (table, *sorted((exports / "dpr").glob("*_?.npy")), "--store", tmp_path / "store", "--encoder", tiny)
    result = bookwheel("import", *arguments, "--recipe", recipe, *files, "--json")
    assert result.code == 0, result.err
    with Snapshot.open(str(tmp_path / "store")) as snapshot:
        entries = snapshot.manifest.content.indexes
        assert {name: (entry["kind"], entry["factory"], entry["search"]) for name, entry in entries.items()} == {
            "graph": ("hnsw", "HNSW16", {"efSearch": 90}),
            "lists": ("ivf", "IVF6,Flat", {"nprobe": 5}),
            "codes": ("ivf", "PCA24,IVF4,PQ4x4np", {"nprobe": 4, "refine": 10}),
            "plain": ("exact", "Flat", {}),
        }
        for name, faiss_index in reference.items():
            paths = get_index_files(snapshot, name)
            assert paths.index.read_bytes() == (tmp_path / name).read_bytes()
            index = get_kind_of_entry(entries[name]).open(paths, entries[name])
            hits = index.search(vectors[::10], 20)
            if name == "codes":  # The snapshot's vectors rerank ten times as many candidates.
                faiss.ParameterSpace().set_index_parameter(faiss_index, "nprobe", 4)
                candidates = faiss_index.search(vectors[::10], 200)[1]  # (q, 200)
                scores = np.einsum("qd,qcd->qc", vectors[::10], vectors[candidates])
                assert np.allclose(hits[0], -np.sort(-scores)[:, :20], atol=1e-5)
            else:
                assert np.array_equal(hits[1], faiss_index.search(vectors[::10], 20)[1]), name
        assert snapshot.manifest.content.recipe["index"]["graph"]["factory"] == "HNSW16"
    (hit,) = bookwheel("search", QUESTION, "--store", tmp_path / "store", "-k", 1, "--json").json["results"][0]["hits"]
    takedown = bookwheel("takedown", hit["page_id"], "--store", tmp_path / "store", "--yes")
    assert takedown.code == 0, takedown.err
    with Snapshot.open(str(tmp_path / "store")) as snapshot:  # The indexes were rebuilt without the page.
        assert set(snapshot.manifest.content.indexes) == {*reference}
        assert snapshot.n < len(vectors)
    second = bookwheel("import", *arguments, "--recipe", recipe, *files)
    assert (second.code, "has the vectors of passages that were taken down in" in second.complaint) == (1, True)


@pytest.mark.parametrize(
    ("case", "code", "message"),
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
def test_index_file_that_does_not_match_the_vectors_is_rejected(
    case: str, code: int, message: str, exports: Path, tiny: Path, recipe: Path, bookwheel: Any, tmp_path: Path
) -> None:
    vectors, file = read_vectors(exports), tmp_path / "file"
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
        indexed_vectors = {"dimension": vectors[:, :24], "count": vectors[1:], "order": vectors[::-1]}.get(
            case, vectors
        )
        metric = faiss.METRIC_L2 if case == "metric" else faiss.METRIC_INNER_PRODUCT
        factory = {"type": "PQ4x4", "factory": "HNSW16"}.get(case, "HNSW8")
        write_index(file, factory, np.ascontiguousarray(indexed_vectors), metric)
    if case == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    if case == "missing":
        file.unlink()
    inputs = (exports / "dpr" / "psgs_w100.tsv", *sorted((exports / "dpr").glob("*_?.npy")))
    value = str(file) if case == "unnamed" else f"hnsw={file}"
    settings = ("--store", tmp_path / "store", "--encoder", tiny, "--recipe", recipe)
    result = bookwheel("import", *inputs, *settings, "--index-file", value)
    assert result.code == code, result.err
    assert message in result.complaint
    store = Store.open(str(tmp_path / "store"), create=True)
    assert [*store.refs.list_names()] == []
