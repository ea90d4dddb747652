"""A mapped copy has the passages of its part, also those of earlier versions, and damage in it is reported."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from rag_model.corpus.passages import PASSAGE_SCHEMA, UNDATED_SCHEMA, PassageWriter
from rag_model.corpus.records import LATEST, Passage
from rag_model.errors import InputError
from rag_model.store.versions.mapped import MappedPassages, write_mapped_copy
from tests.fixtures.work_counters import count_pages_in_memory, drop_from_memory

DATES = (1_793_534_400, None, -1)
PASSAGES = [
    Passage(
        f"{n}-0", str(n), 2**40 + n, title, "", text, n, len(text.split()), Passage.hash_of(title, text), DATES[n - 1]
    )
    for n, (title, text) in enumerate([("Zürich", "漢字 𝛑"), ("", ""), ("a\0b", "x" * 70_000)], start=1)
]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Write a mapped copy of three passages."""
    with PassageWriter(tmp_path / "part.parquet") as writer:
        for passage in PASSAGES:
            writer.write(passage)
    write_mapped_copy(tmp_path / "part.parquet", tmp_path / "part.arrow")
    return tmp_path / "part.arrow"


def test_passages_are_read_in_any_order(copy: Path) -> None:
    file = MappedPassages(copy)
    assert file.read_rows([2, 0, 1, 0]) == [PASSAGES[n] for n in (2, 0, 1, 0)]
    file.close()
    with pytest.raises(IndexError, match="row 3 is outside a copy of 3 passages"):
        MappedPassages(copy).read_rows([3])


def test_reading_a_passage_loads_no_neighbouring_pages(tmp_path: Path) -> None:
    passages = [replace(PASSAGES[2], id=f"{n}-0", text=f"{n} " * 10_000) for n in range(200)]
    with PassageWriter(tmp_path / "part.parquet") as writer:
        for passage in passages:
            writer.write(replace(passage, hash=Passage.hash_of(passage.title, passage.text)))
    write_mapped_copy(tmp_path / "part.parquet", copy := tmp_path / "part.arrow")
    drop_from_memory(copy)
    file, rows = MappedPassages(copy), [*range(0, 200, 20)]
    header_pages = count_pages_in_memory(copy)
    assert [passage.text for passage in file.read_rows(rows)] == [passages[row].text for row in rows]
    text_pages = sum(len(passages[row].text) for row in rows) // 4096
    assert count_pages_in_memory(copy) <= header_pages + text_pages + 20 * len(rows)


def test_slices_and_missing_values_are_read(tmp_path: Path) -> None:
    """Files of other writers may have a mask of missing values for a column without any."""
    columns = [pa.array([None, *(getattr(passage, name) for passage in PASSAGES)]) for name in PASSAGE_SCHEMA.names]
    columns[-1] = columns[-1].cast(pa.timestamp("s", tz="UTC"))
    slices = [column.cast(field.type)[1:] for column, field in zip(columns, PASSAGE_SCHEMA, strict=True)]
    with pa.OSFile(str(tmp_path / "other.arrow"), "wb") as sink, pa.ipc.new_file(sink, PASSAGE_SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(slices, schema=PASSAGE_SCHEMA))
    assert MappedPassages(tmp_path / "other.arrow").read_rows([0, 1, 2]) == PASSAGES


@pytest.mark.parametrize("undated_file", ["part", "copy"])
def test_undated_passages_are_read(tmp_path: Path, undated_file: str) -> None:
    """Either the part or its mapped copy was written by an earlier version."""
    with PassageWriter(tmp_path / "part", UNDATED_SCHEMA) as writer:
        for passage in PASSAGES:
            writer.write(passage)
    write_mapped_copy(tmp_path / "part", tmp_path / "copy")
    if undated_file == "copy":
        with pa.memory_map(str(tmp_path / "copy")) as source:
            table = pa.ipc.open_file(source).read_all().select(UNDATED_SCHEMA.names)
            with pa.OSFile(str(tmp_path / "old"), "wb") as sink, pa.ipc.new_file(sink, UNDATED_SCHEMA) as file:
                file.write_table(table)
        (tmp_path / "old").replace(tmp_path / "copy")
    assert MappedPassages(tmp_path / "copy").read_rows([2, 0]) == [replace(PASSAGES[n], revised=None) for n in (2, 0)]


def test_impossible_date_is_reported(tmp_path: Path) -> None:
    column = pa.array([(LATEST + 1) * 1000], pa.int64()).cast(PASSAGE_SCHEMA.field("revised").type)
    columns = [pa.array([getattr(PASSAGES[0], field.name)], field.type) for field in UNDATED_SCHEMA]
    with pa.OSFile(str(tmp_path / "copy"), "wb") as sink, pa.ipc.new_file(sink, PASSAGE_SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([*columns, column], schema=PASSAGE_SCHEMA))
    with pytest.raises(InputError, match=r"row 0 of .* is damaged \(a time outside .*\): pull it again"):
        MappedPassages(tmp_path / "copy").read_rows([0])


def test_invalid_utf8_is_reported(copy: Path) -> None:
    copy.write_bytes(copy.read_bytes().replace("漢".encode(), b"\xff\xff\xff"))
    with pytest.raises(InputError, match=r"row 0 of .*part\.arrow is damaged .*: pull it again"):
        MappedPassages(copy).read_rows([0])
