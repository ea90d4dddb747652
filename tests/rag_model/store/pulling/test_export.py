"""Exports can be read by other programs and contain all passages."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from rag_model.corpus.dump_formats.jsonl import FORMAT as JSONL
from rag_model.corpus.dump_formats.tsv import FORMAT as TSV
from rag_model.corpus.passages import to_seconds
from rag_model.corpus.records import Passage
from rag_model.errors import StoreError, UsageError
from rag_model.store import Content, Manifest, PartEntry, Snapshot, Store
from rag_model.store.pulling.export import Layout, export_snapshot
from tests.fixtures.store_files import build_parts, publish_articles, publish_content, publish_parts
from tests.fixtures.work_counters import measure_peaks

SPECIAL_TEXT = 'a "quoted" word,\ta tab, a \\ and\na second line,\ra carriage return – Ähärôn 𝔘'


@pytest.fixture
def snapshot(store: Store) -> Snapshot:
    return Snapshot.from_store(store, publish_parts(store))


@pytest.fixture
def special(store: Store) -> Snapshot:
    return publish_articles(store, {1: ["plain", SPECIAL_TEXT], 60: ["last"]}, (0, 50))


def read_passages(snapshot: Snapshot) -> list[Passage]:
    return snapshot.passages(range(snapshot.n))


def test_dpr_export_is_read_by_the_tsv_format(special: Snapshot, tmp_path: Path) -> None:
    export_snapshot(special, tmp_path / "out", "dpr")
    file = tmp_path / "out" / "psgs_w100.tsv"
    assert file.read_text().startswith("id\ttext\ttitle\n1:0\tplain\tTitle 1\n")
    assert list(TSV.read_records(str(file))) == [
        (passage.id, passage.title, passage.text, None) for passage in read_passages(special)
    ]


def test_dpr_vectors_have_ids(snapshot: Snapshot, tmp_path: Path) -> None:
    report = export_snapshot(snapshot, tmp_path / "out", "dpr")
    ids_and_vectors = []
    for number in range(3):
        ids, vectors = (
            np.load(report.path / f"wikipedia_passages_{number}{kind}.npy", allow_pickle=False) for kind in (".ids", "")
        )
        ids_and_vectors += [(str(passage_id), vector.tolist()) for passage_id, vector in zip(ids, vectors, strict=True)]
    assert ids_and_vectors == [(passage.id, [row] * 4) for row, passage in enumerate(read_passages(snapshot))]
    assert report.bytes == sum(path.stat().st_size for path in report.path.rglob("*"))


def test_jsonl_has_ids_and_contents(special: Snapshot, tmp_path: Path) -> None:
    export_snapshot(special, tmp_path / "out", "jsonl")
    lines = (tmp_path / "out" / "corpus.jsonl").read_bytes().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"id": passage.id, "contents": f"{passage.title}\n{passage.text}"} for passage in read_passages(special)
    ]


def test_jsonl_dates_are_read_by_the_jsonl_format(snapshot: Snapshot, tmp_path: Path) -> None:
    export_snapshot(snapshot, tmp_path / "out", "jsonl")
    dates = {passage.id: passage.revised for passage in read_passages(snapshot)}
    records = JSONL.read_records(str(tmp_path / "out" / "corpus.jsonl"))
    assert {passage_id: date for passage_id, _, _, date in records} == dates
    assert {date is None for date in dates.values()} == {True, False}


def test_datasets_have_typed_columns(snapshot: Snapshot, tmp_path: Path) -> None:
    export_snapshot(snapshot, tmp_path / "out", "datasets")
    table = ds.dataset(tmp_path / "out" / "data", format="parquet").to_table()
    assert table.schema.names == ["id", "text", "title", "page_id", "revised", "embeddings"]
    assert to_seconds(table["revised"]).to_pylist() == [passage.revised for passage in read_passages(snapshot)]
    assert table.schema.field("embeddings").type == pa.list_(pa.float32())
    assert table["text"].to_pylist() == [passage.text for passage in read_passages(snapshot)]
    assert table["embeddings"].to_pylist() == [[float(row)] * 4 for row in range(snapshot.n)]
    names = sorted(path.name for path in (tmp_path / "out" / "data").iterdir())
    assert names[0] == "train-00000-of-00003.parquet"


@pytest.mark.parametrize("layout", ["dpr", "datasets"])
def test_export_without_vectors(snapshot: Snapshot, tmp_path: Path, layout: Layout) -> None:
    export_snapshot(snapshot, tmp_path / "out", layout, embeddings=False)
    assert not [*(tmp_path / "out").glob("*.npy")]
    if layout == "datasets":
        assert ds.dataset(tmp_path / "out" / "data").schema.names == ["id", "text", "title", "page_id", "revised"]


def test_export_states_the_licence(store: Store, tmp_path: Path) -> None:
    corpus = {"kind": "wiki", "base": "https://en.wikipedia.org/wiki/Main_Page", "licence": "CC BY-SA 4.0"}
    empty = publish_content(store, Content(corpus, (), {}))
    export_snapshot(empty, tmp_path / "out", "jsonl")
    assert "CC BY-SA 4.0, by its authors" in (tmp_path / "out" / "README.md").read_text()


def test_damaged_part_leaves_no_folder(store: Store, snapshot: Snapshot, tmp_path: Path) -> None:
    ref = snapshot.manifest.content.files["passages/part-00002.parquet"]
    data = store.blobs.read(ref)
    store.files.write(ref.path, data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    with pytest.raises(StoreError, match=ref.id):
        export_snapshot(snapshot, tmp_path / "out", "jsonl")
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name or path.name.startswith(".")] == []


def test_existing_export_is_not_overwritten(snapshot: Snapshot, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    export_snapshot(snapshot, tmp_path / "empty", "jsonl")
    with pytest.raises(UsageError, match="exists already"):
        export_snapshot(snapshot, tmp_path / "empty", "jsonl")
    with pytest.raises(UsageError, match="no layout 'beir': choose from dpr, jsonl, datasets"):
        export_snapshot(snapshot, tmp_path / "new", "beir")  # type: ignore[arg-type]


def export_parts(store: Store, count: int, out: Path, layout: Layout) -> None:
    passage, vector, *_ = (store.blobs.put_bytes(data) for data in build_parts().values())
    names = [f"p{number}" for number in range(count)]
    files = {f"passages/{name}.parquet": passage for name in names} | {
        f"embeddings/{name}.npy": vector for name in names
    }
    content = Content({}, tuple(PartEntry(name, 0, 0, 1500) for name in names), files)
    with Snapshot.from_manifest(store, Manifest(content)) as snapshot:
        export_snapshot(snapshot, out, layout)


def test_memory_does_not_grow_with_the_corpus(store: Store, tmp_path: Path) -> None:
    layouts: tuple[Layout, ...] = ("dpr", "jsonl", "datasets")
    peaks = measure_peaks(*(
        partial(export_parts, store, count, tmp_path / f"{layout}-{turn}", layout)
        for layout in layouts for turn, count in enumerate((2, 2, 8))
    ))  # fmt: skip
    for first in range(0, len(peaks), 3):  # the first export of each layout is a warm-up
        assert peaks[first + 2] < peaks[first + 1] * 1.5, peaks
