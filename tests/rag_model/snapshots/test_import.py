"""Passages and vectors from other programs are imported as parts of a store, and invalid ones are refused."""

import json
import resource
from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rag_model.corpus.passages import PassageFile
from rag_model.corpus.records import format_iso
from rag_model.digest import digest_file
from rag_model.errors import InputError
from rag_model.index.files.intake import PART_BYTES, VectorInput, inspect_vectors
from rag_model.snapshots import imported
from rag_model.snapshots.imported import (
    ImportedParts,
    ImportTask,
    collect_parts,
    digest_ids,
    import_in_sequence,
    import_part,
    list_urls,
    plan_import,
)
from rag_model.snapshots.stage_results import EmbedResult
from rag_model.store.store import Store
from rag_model.toml import from_table


def import_parts(store: Store, passages: str, vectors: VectorInput, part_bytes: int = PART_BYTES) -> ImportedParts:
    tasks = plan_import(store, passages, vectors, part_bytes=part_bytes)
    return collect_parts(store, passages, list(import_in_sequence(store, passages, tasks)), vectors.dtype.name)


def plan_parquet(store: Store, passages: str) -> list[ImportTask]:
    """Plan small parts of Parquet files with passages and vectors."""
    return plan_import(store, passages, inspect_vectors(list(map(Path, list_urls(passages)))), part_bytes=SMALL_PART)


def test_too_long_passage_is_refused(store: Store, tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", np.ones((1, 4), np.float32))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "a", "text": "x" * 100_001}))
    with pytest.raises(InputError, match="passage a has 100,001 characters, but at most 100,000 are allowed"):
        import_parts(store, str(tmp_path / "rows.jsonl"), inspect_vectors([tmp_path / "vectors.npy"]))


def test_imported_passages_keep_their_dates(store: Store, tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", np.ones((2, 4), np.float32))
    rows = [{"id": "a", "text": "x", "revised": "2026-11-01T12:00:00Z"}, {"id": "b", "text": "y"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    vector_input = inspect_vectors([tmp_path / "vectors.npy"])
    (chunk_result,) = import_parts(store, str(tmp_path / "rows.jsonl"), vector_input).passages
    with PassageFile(store.blobs.get_local_path(chunk_result.passages)) as file:
        assert [format_iso(passage.revised) for passage in file.iter_passages()] == ["2026-11-01T12:00:00Z", None]


ROWS, DIM = 50, 8
SMALL_PART = 4 * DIM * 12  # the bytes of 12 rows


def draw_vectors(count: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, DIM), dtype=np.float32)


def save_wiki_dpr(folder: Path, vectors: np.ndarray, sizes: tuple[int, ...] = (20, 0, 30), group: int = 7) -> str:
    """Write files like those of `facebook/wiki_dpr`, with passages and vectors in row groups."""
    folder.mkdir()
    first = 0
    for number, size in enumerate(sizes):
        rows = range(first, first + size)
        columns = {
            "id": pa.array([str(row + 1) for row in rows], pa.string()),
            "text": pa.array([f"text of {row}" for row in rows], pa.string()),
            "title": pa.array([f"title {row // 3}" for row in rows], pa.string()),
            "embeddings": pa.array([vectors[row].tolist() for row in rows], pa.list_(pa.float32())),
        }
        pq.write_table(pa.table(columns), folder / f"train-{number:05d}-of-00003.parquet", row_group_size=group)
        first += size
    return f"{folder}/*.parquet"


def write_row(path: Path, passage_id: str, vector: list[float]) -> None:
    """Write a Parquet file with one passage and its vector."""
    schema = pa.schema([("id", pa.string()), ("text", pa.string()), ("embeddings", pa.list_(pa.float32()))])
    pq.write_table(pa.table({"id": [passage_id], "text": ["t"], "embeddings": [vector]}, schema), path)


def read_imported(store: Store, imported: ImportedParts) -> tuple[list[tuple[str, str, str]], np.ndarray]:
    passages, vectors = [], []
    for chunk_result, embed_result in zip(imported.passages, imported.embeddings, strict=True):
        with PassageFile(store.blobs.get_local_path(chunk_result.passages)) as file:
            passages += [(passage.id, passage.title, passage.text) for passage in file.iter_passages()]
        vectors.append(np.load(store.blobs.get_local_path(embed_result.vectors)))
    return passages, np.concatenate(vectors)


def test_passages_and_vectors_in_one_parquet_file_are_imported_by_part(store: Store, tmp_path: Path) -> None:
    vectors = draw_vectors(ROWS)
    passages = save_wiki_dpr(tmp_path / "wiki", vectors)
    tasks = plan_parquet(store, passages)
    assert [task.rows for task in tasks] == [10] * 5
    reports = [import_part(task, store) for task in reversed(tasks)][::-1]  # in any order
    passages_and_vectors = read_imported(store, collect_parts(store, passages, reports, "float32"))
    assert passages_and_vectors[0] == [(str(row + 1), f"title {row // 3}", f"text of {row}") for row in range(ROWS)]
    np.testing.assert_array_equal(passages_and_vectors[1], vectors)
    for report in reports:
        stored = from_table(EmbedResult, report["vectors"], "a report").vectors
        assert digest_file(store.files.local_path(stored.path)) == stored.id
    repeated_reports = [import_part(task, store) for task in tasks]
    assert not any(report["passages"]["is_new"] for report in repeated_reports), "recorded parts are not imported again"
    store.takedowns.add("", ["title 4"], "", "me")
    reports = [import_part(task, store) for task in plan_parquet(store, passages)]
    remaining = read_imported(store, collect_parts(store, passages, reports, "float32"))
    assert [row for row, _, _ in remaining[0]] == [str(row + 1) for row in range(ROWS) if row // 3 != 4]
    np.testing.assert_array_equal(remaining[1], np.delete(vectors, [12, 13, 14], axis=0))


def test_import_continues_after_a_full_disk(store: Store, tmp_path: Path) -> None:
    vectors = draw_vectors(ROWS)
    passages = save_wiki_dpr(tmp_path / "wiki", vectors)
    tasks = plan_import(store, passages, inspect_vectors([tmp_path / "wiki"]), part_bytes=SMALL_PART)
    import_part(tasks[0], store)
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))  # in bytes; writing a longer file fails as on a full disk
    try:
        with pytest.raises(OSError, match="File too large"):
            import_part(tasks[1], store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == files
    reports = [import_part(task, store) for task in tasks]
    assert [report["passages"]["is_new"] for report in reports] == [False, True, True, True, True]
    np.testing.assert_array_equal(read_imported(store, collect_parts(store, passages, reports, "float32"))[1], vectors)


def test_equal_files_in_another_folder_are_not_imported_again(store: Store, tmp_path: Path) -> None:
    vectors = draw_vectors(ROWS)

    def import_from(name: str) -> ImportedParts:
        passages = save_wiki_dpr(tmp_path / name, vectors)
        reports = [import_part(task, store) for task in plan_parquet(store, passages)]
        return collect_parts(store, passages, reports, "float32")

    first, second = import_from("here"), import_from("there")
    assert not any(part.is_new for part in second.passages)
    assert [part.passages for part in second.passages] == [part.passages for part in first.passages]
    records = "".join(path.read_text() for path in (tmp_path / "store" / "memo" / "import").iterdir())
    assert str(tmp_path) not in records
    vectors[49, 0] += 1  # The changed file has the same size and perhaps the same modification time.
    changed = import_from("elsewhere")
    assert [part.is_new for part in changed.embeddings] == [False, False, True, True, True]  # the changed file's parts


@pytest.mark.parametrize("metric", [faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2])
def test_flat_index_with_ids_is_imported(store: Store, tmp_path: Path, metric: int) -> None:
    """The files have the format of Pyserini and Search-R1: `index`, `docid`, and JSONL with `contents`."""
    vectors, folder = draw_vectors(ROWS), tmp_path / "pyserini"
    folder.mkdir()
    index = faiss.index_factory(DIM, "Flat", metric)
    index.add(vectors)
    faiss.write_index(index, str(folder / "index"))
    (folder / "docid").write_text("".join(f"{row}\n" for row in range(ROWS)))
    lines = [json.dumps({"id": row, "contents": f'"A ""{row}"""\nText of {row}.'}) for row in range(ROWS)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    source = str(tmp_path / "corpus.jsonl")
    passages_and_vectors = read_imported(store, import_parts(store, source, inspect_vectors([folder]), SMALL_PART))
    assert passages_and_vectors[0] == [(str(row), f'A "{row}"', f"Text of {row}.") for row in range(ROWS)]
    np.testing.assert_array_equal(passages_and_vectors[1], vectors)
    assert not any(part.is_new for part in import_parts(store, source, inspect_vectors([folder]), SMALL_PART).passages)
    (folder / "docid").write_text("".join(f"{(row + 1) % ROWS}\n" for row in range(ROWS)))
    with pytest.raises(InputError, match=r"row 0 of .*index is of passage '1', but the passage there is '0': give the"):
        import_parts(store, source, inspect_vectors([folder]), SMALL_PART)  # The memo key includes the ids.
    (folder / "docid").write_text("0\n1\n")
    with pytest.raises(InputError, match="docid has 2 ids for 50 vectors: take both from one index"):
        inspect_vectors([folder])


@pytest.mark.parametrize(
    ("names", "ids", "message"),
    [
        (["id", "text"], ["a", "b", "a"], "the id 'a' occurs twice in the corpus"),
        (["id", "text", "text"], ["a", "b", "c"], "columns with the same name among id, text, text: write it again"),
    ],
)
def test_repeated_ids_and_columns_are_refused(
    store: Store, tmp_path: Path, names: list[str], ids: list[str], message: str
) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array(ids)] * len(names), names), tmp_path / "passages.parquet")
    np.save(tmp_path / "vectors.npy", draw_vectors(3))
    for task in plan_import(store, f"{tmp_path}/passages.parquet", inspect_vectors([tmp_path / "vectors.npy"])):
        with pytest.raises(InputError, match=message):
            import_part(task, store)


@pytest.mark.parametrize("ranges", [1, 8])
@pytest.mark.parametrize("names", ["{}", "page-{}"])
def test_id_that_is_repeated_in_another_part_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str, ranges: int
) -> None:
    monkeypatch.setattr(imported, "_DIGESTS_PER_RANGE", ROWS // ranges + 1)
    vectors, ids = draw_vectors(ROWS), [names.format(row) for row in range(ROWS)]
    np.save(tmp_path / "vectors.npy", vectors)
    vector_input = inspect_vectors([tmp_path / "vectors.npy"])
    source = tmp_path / "passages.parquet"
    pq.write_table(pa.table({"id": ids, "text": ids}), source)
    assert len(import_parts(store, str(source), vector_input, SMALL_PART).passages) > 2
    repeated = names.format(3)
    pq.write_table(pa.table({"id": [*ids[:-1], repeated], "text": ids}), source)
    with pytest.raises(InputError, match=f"the id '{repeated}' occurs twice in the corpus"):
        import_parts(store, str(source), vector_input, SMALL_PART)


def test_different_ids_may_have_the_same_digest(store: Store, tmp_path: Path) -> None:
    multiplier = int(digest_ids(pa.chunked_array([["1"]]))[0])
    for name in (f"page-{i}" for i in range(1_000)):  # 5 % of the names share their digest with an 18-digit number
        number = int(digest_ids(pa.chunked_array([[name]]))[0]) * pow(multiplier, -1, 1 << 64) % (1 << 64)
        if number < 10**18:
            break
    ids = [*map(str, range(ROWS - 2)), name, str(number)]
    assert len(np.unique(digest_ids(pa.chunked_array([ids])))) == ROWS - 1
    np.save(tmp_path / "vectors.npy", draw_vectors(ROWS))
    ids[0], ids[-2] = ids[-2], ids[0]  # in different parts
    pq.write_table(pa.table({"id": ids, "text": ids}), tmp_path / "passages.parquet")
    vector_input = inspect_vectors([tmp_path / "vectors.npy"])
    assert len(import_parts(store, f"{tmp_path}/passages.parquet", vector_input, SMALL_PART).passages) > 2


def test_mismatched_and_damaged_files_are_refused(store: Store, tmp_path: Path) -> None:
    vectors = draw_vectors(ROWS)

    def inspect_and_import(passages: str, paths: list[Path] | None = None) -> None:
        inspected = inspect_vectors(paths or list(map(Path, list_urls(passages))))
        for task in plan_import(store, passages, inspected, part_bytes=SMALL_PART):
            import_part(task, store)

    nan_vectors = vectors.copy()
    nan_vectors[33, 2] = np.nan
    with pytest.raises(InputError, match=r"row 13 of .*train-00002.*holds a NaN or an infinity: correct it, or remove"):
        inspect_and_import(save_wiki_dpr(tmp_path / "nan", nan_vectors))
    save_wiki_dpr(tmp_path / "wide", vectors)
    write_row(tmp_path / "wide" / "train-00001-of-00003.parquet", "x", [1.0] * 9)
    with pytest.raises(InputError, match=r"has 9 dimensions and .* has 8: give vectors of one encoder"):
        inspect_and_import(f"{tmp_path}/wide/*.parquet")
    save_wiki_dpr(tmp_path / "short", vectors)
    path = tmp_path / "short" / "train-00000-of-00003.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="is not a complete Parquet file: copy it again"):
        inspect_and_import(f"{tmp_path}/short/*.parquet")
    np.save(tmp_path / "few.npy", vectors[:-1])
    with pytest.raises(InputError, match="holds 50 passages for 49 vectors: give one vector per passage"):
        inspect_and_import(f"{tmp_path}/nan/*.parquet", [tmp_path / "few.npy"])
    for row, name in ((0, "first"), (25, "second")):  # the same files in another order than the passages
        (tmp_path / "mixed").mkdir(exist_ok=True)
        write_row(tmp_path / "mixed" / f"{name}.parquet", str(row + 1), vectors[row].tolist())
    reversed_paths = [tmp_path / "mixed" / "second.parquet", tmp_path / "mixed" / "first.parquet"]
    with pytest.raises(InputError, match="of passage '26', but the passage there is '1'"):
        inspect_and_import(f"{tmp_path}/mixed/*.parquet", reversed_paths)
    index = faiss.index_factory(DIM, "HNSW8", faiss.METRIC_INNER_PRODUCT)
    index.add(vectors)
    faiss.write_index(index, str(tmp_path / "graph.faiss"))
    with pytest.raises(InputError, match="is a faiss index of another type than Flat: give a Flat index"):
        inspect_vectors([tmp_path / "graph.faiss"])
    flat = faiss.index_factory(DIM, "Flat")
    flat.add(vectors)
    faiss.write_index(flat, str(tmp_path / "flat.faiss"))
    data = (tmp_path / "flat.faiss").read_bytes()
    (tmp_path / "flat.faiss").write_bytes(data[:-9])
    with pytest.raises(InputError, match="is not a complete faiss index"):
        inspect_vectors([tmp_path / "flat.faiss"])
