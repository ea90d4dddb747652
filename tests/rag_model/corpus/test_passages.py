"""Passage files keep the order of rows, return single rows quickly, and refuse files that are damaged or hostile."""

import gc
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.corpus.passages import (
    PASSAGE_SCHEMA,
    ROW_GROUP,
    UNDATED_SCHEMA,
    DecodedCache,
    PassageFile,
    PassageWriter,
    count_words,
    hash_passages,
)
from rag_model.corpus.records import EARLIEST, LATEST, Passage
from rag_model.errors import InputError
from rag_model.parquet_pages import (
    ParquetError,
    _build_page_header,
    _parse_struct,
    _parse_usual_header,
    check_footer,
    open_random_access,
)
from rag_model.store.versions.mapped import write_mapped_copy

DATES = (1_793_534_400, None, -1, EARLIEST, LATEST)  # None for sources without dates


def build_passage(i: int) -> Passage:
    text = f"word {i} é"
    revised = DATES[i % len(DATES)]
    return Passage(f"1:{i}", "1", 5, "Title", "Héading", text, i, 3, Passage.hash_of("Title", text), revised)


def write_rows(path: Path, rows: int) -> str:
    with PassageWriter(path) as writer:
        for i in range(rows):
            writer.write(build_passage(i))
    assert writer.rows == rows
    return writer.digest


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("passages") / "part.parquet"
    write_rows(path, 2 * ROW_GROUP + 100)
    return path


def test_rows_are_read_as_written(path: Path) -> None:
    with PassageFile(path) as file:
        assert file.n_rows == 2 * ROW_GROUP + 100
        assert list(file.iter_passages()) == [build_passage(i) for i in range(file.n_rows)]


def test_rows_are_read_in_the_requested_order(path: Path) -> None:
    expected = [2100, 0, ROW_GROUP, 2100, ROW_GROUP - 1]
    with path.open("rb") as source, PassageFile(source) as file:
        assert file.read_rows(expected) == [build_passage(i) for i in expected]
        assert file.read_rows(np.array([3, 1]).tolist()) == [build_passage(3), build_passage(1)]
        assert file.read_rows([]) == []


def test_only_needed_row_groups_are_read(path: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.parquet"
    data = bytearray(path.read_bytes())
    metadata = pq.ParquetFile(path).metadata
    first = metadata.row_group(0).column(0)
    start = first.dictionary_page_offset or first.data_page_offset
    data[start : start + 64] = bytes(64)
    damaged.write_bytes(data)
    assert PassageFile(damaged).read_rows([ROW_GROUP + 5]) == [build_passage(ROW_GROUP + 5)]
    with pytest.raises(InputError, match="not a readable passage file"):
        PassageFile(damaged).read_rows([5])


@pytest.mark.parametrize(("max_bytes", "is_cached"), [(1 << 20, True), (1, False)])
def test_rows_of_a_cached_group_need_no_file(path: Path, tmp_path: Path, max_bytes: int, is_cached: bool) -> None:
    copy = tmp_path / "other.parquet"
    copy.write_bytes(path.read_bytes())
    with PassageFile(copy, group_cache=DecodedCache(max_bytes)) as file:
        assert file.read_rows([3, ROW_GROUP + 1]) == [build_passage(3), build_passage(ROW_GROUP + 1)]
        with copy.open("r+b") as damaged:
            damaged.write(b"PAR1" + bytes(copy.stat().st_size - 4))
        if is_cached:
            assert file.read_rows([ROW_GROUP, 4]) == [build_passage(ROW_GROUP), build_passage(4)]
        else:
            with pytest.raises(InputError):
                file.read_rows([4])


@pytest.mark.filterwarnings("ignore")  # gc.get_objects() touches deprecated objects
def test_footer_is_freed_with_its_file(path: Path) -> None:
    """Arrow needs tens of kilobytes for a footer, and a comparison of snapshots reads thousands of files."""

    def count_footers() -> int:
        return sum(isinstance(candidate, pq.FileMetaData) for candidate in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        count_before = count_footers()
        file = PassageFile(path)
        assert [*file.iter_batches(["id", "hash"])]
        assert [*file.iter_selected([0], ["title", "text"])]
        assert file.read_rows([0])
        assert count_footers() > count_before
        del file
        assert count_footers() == count_before
    finally:
        gc.enable()


@pytest.mark.parametrize("row", [-1, 2 * ROW_GROUP + 100])
def test_row_outside_the_file_is_refused(path: Path, row: int) -> None:
    with pytest.raises(IndexError, match="outside"):
        PassageFile(path).read_rows([row])


def test_batches_have_the_requested_columns(path: Path) -> None:
    batches = list(PassageFile(path).iter_batches(["title", "text"], max_rows=500))
    assert sum(batch.num_rows for batch in batches) == 2 * ROW_GROUP + 100
    assert max(batch.num_rows for batch in batches) <= 500
    assert batches[0].schema.names == ["title", "text"]


def test_file_is_plain_parquet_with_small_row_groups(path: Path) -> None:
    file = pq.ParquetFile(path)
    assert file.schema_arrow.equals(PASSAGE_SCHEMA)
    assert [file.metadata.row_group(i).num_rows for i in range(3)] == [ROW_GROUP, ROW_GROUP, 100]


def write_undated(path: Path, rows: int) -> list[Passage]:
    """Write a file without the column of dates, and return its passages."""
    passages = [replace(build_passage(i), revised=None) for i in range(rows)]
    with PassageWriter(path, UNDATED_SCHEMA) as writer:
        for passage in passages:
            writer.write(passage)
    return passages


def test_undated_file_is_read(tmp_path: Path) -> None:
    expected = write_undated(tmp_path / "old", ROW_GROUP + 3)
    assert pq.ParquetFile(tmp_path / "old").schema_arrow.equals(UNDATED_SCHEMA)
    with PassageFile(tmp_path / "old") as file:
        assert not file.has_dates
        assert list(file.iter_passages()) == expected
        assert file.read_rows([3, 1]) == [expected[3], expected[1]]
        for names in (None, ["title", "revised"]):
            (first, second) = file.iter_batches(names)
            assert first.schema == PASSAGE_SCHEMA if names is None else first.schema.names == names
            assert (first["revised"].null_count, second["revised"].null_count) == (ROW_GROUP, 3)
        (selected,) = file.iter_selected([2], ["hash", "revised"])
        assert selected.to_pylist() == [{"hash": expected[2].hash, "revised": None}]


@pytest.mark.parametrize(
    ("dates", "message"),
    [
        (pa.array([LATEST + 1], pa.timestamp("s", tz="UTC")), "a time outside of the years 1 to 9999"),
        (pa.array([-(1 << 63)], pa.int64()), "a time outside of the years 1 to 9999"),
        (pa.array([1_001], pa.timestamp("ms", tz="UTC")), "would lose data"),
        (pa.array(["yesterday"]), "yesterday"),
        (pa.array([[1]], pa.list_(pa.int64())), "cast"),
    ],
)
def test_impossible_date_is_reported(tmp_path: Path, dates: pa.Array, message: str) -> None:
    write_undated(tmp_path / "old", 1)
    table = pq.read_table(tmp_path / "old")
    pq.write_table(table.append_column("revised", dates), tmp_path / "new")
    with PassageFile(tmp_path / "new") as file:
        for read in (lambda: file.read_rows([0]), lambda: list(file.iter_passages())):
            with pytest.raises(InputError, match=rf"not a readable passage file \(.*{message}.*\): build"):
                read()


def test_equal_rows_give_equal_bytes_and_digests(tmp_path: Path) -> None:
    assert write_rows(tmp_path / "a", 1500) == write_rows(tmp_path / "b", 1500)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert write_rows(tmp_path / "c", 1499) != write_rows(tmp_path / "d", 1500)


def test_digest_depends_on_the_order_of_rows(tmp_path: Path) -> None:
    digests = []
    for rows in ([0, 1], [1, 0]):
        with PassageWriter(tmp_path / "rows") as writer:
            for i in rows:
                writer.write(build_passage(i))
        digests.append(writer.digest)
    assert digests[0] != digests[1]
    assert digests[0].startswith("sha256:")


def test_empty_part_is_a_file_without_rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "empty", 0)
    file = PassageFile(tmp_path / "empty")
    assert (file.n_rows, list(file.iter_passages())) == (0, [])


def test_failed_write_leaves_no_file(tmp_path: Path) -> None:
    def fail_midway() -> None:
        with PassageWriter(tmp_path / "part") as writer:
            writer.write(build_passage(0))
            raise KeyError

    with pytest.raises(KeyError):
        fail_midway()
    assert list(tmp_path.iterdir()) == []


def test_other_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no parquet")
    with pytest.raises(InputError, match="not a readable passage file"):
        PassageFile(tmp_path / "text")
    pq.write_table(pa.table({"id": ["1"]}), tmp_path / "other")
    with pytest.raises(InputError, match="lacks the columns page_id"):
        PassageFile(tmp_path / "other")


VALUE_BY_TYPE = {pa.string(): "", pa.int64(): 1, pa.int32(): 1, pa.timestamp("ms", tz="UTC"): None}


def _write_bomb(path: Path, rows: int, length: int) -> Path:
    """Write a small file that repeats one long text in every row and decodes to gigabytes."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * length]))
    columns = {field.name: pa.array([VALUE_BY_TYPE[field.type]] * rows, field.type) for field in PASSAGE_SCHEMA} | {
        "text": texts
    }
    pq.write_table(pa.table(columns), path, row_group_size=ROW_GROUP, compression="zstd")
    return path


def test_text_repeated_thousands_of_times_is_refused_before_copying(tmp_path: Path) -> None:
    path = _write_bomb(tmp_path / "bomb.parquet", 5_000, 1 << 20)
    assert path.stat().st_size < 30_000
    bytes_before = pa.total_allocated_bytes()
    with PassageFile(path) as file:
        with pytest.raises(InputError, match=r"decodes to more than 25. MiB, far more than its size"):
            list(file.iter_batches())
        with pytest.raises(InputError, match="decodes to more than"):
            file.read_rows(range(600))
        assert [len(passage.text) for passage in file.read_rows([3, 4_000])] == [1 << 20] * 2, "rows that fit are read"
    with pytest.raises(InputError, match="decodes to more than"):
        write_mapped_copy(path, tmp_path / "mapped.arrow")
    assert [path.name for path in tmp_path.iterdir()] == ["bomb.parquet"]
    assert pa.total_allocated_bytes() - bytes_before < 64 << 20


def _write_huge_pages(path: Path, **options: bool) -> Path:
    """Write a small file of three rows whose texts have 10 MiB each."""
    columns = {field.name: pa.array([VALUE_BY_TYPE[field.type]] * 3, field.type) for field in PASSAGE_SCHEMA}
    columns["text"] = pa.array(["x" * (10 << 20)] * 3)
    pq.write_table(pa.table(columns), path, compression="zstd", use_dictionary=False, **options)
    return path


@pytest.fixture
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limit of decoded bytes from 256 to 24 MiB, so that small files exceed it."""
    for module in ("rag_model.corpus.passages", "rag_model.parquet_pages"):
        monkeypatch.setattr(f"{module}.BASE_DECODED_BYTES", 24 << 20)


@pytest.mark.usefixtures("low_limit")
def test_huge_pages_are_refused_before_decompression(tmp_path: Path) -> None:
    path = _write_huge_pages(tmp_path / "pages.parquet")
    assert path.stat().st_size < 100_000
    with pytest.raises(InputError, match="decodes to more than"):
        PassageFile(path)


def _encode_varint(value: int) -> bytes:
    """Return a number in the encoding of Thrift's compact protocol."""
    remaining, out = value << 1, bytearray()
    while remaining >= 128:
        out.append(remaining & 127 | 128)
        remaining >>= 7
    return bytes([*out, remaining])


@pytest.mark.usefixtures("low_limit")
def test_huge_pages_with_a_false_footer_are_refused_before_decompression(tmp_path: Path) -> None:
    path = _write_huge_pages(tmp_path / "false.parquet", write_statistics=False)
    group = pq.read_metadata(path).row_group(0)
    data, footer = path.read_bytes(), int.from_bytes(path.read_bytes()[-8:-4], "little") + 8
    false_footer = data[-footer:]
    for size in (group.total_byte_size, group.column(5).total_uncompressed_size):
        actual_size = _encode_varint(size)
        assert actual_size in false_footer
        false_size = b"\x82" + b"\x80" * (len(actual_size) - 2) + b"\x00"  # encodes 1 in the same number of bytes
        false_footer = false_footer.replace(actual_size, false_size)
    path.write_bytes(data[:-footer] + false_footer)
    peak_before = pa.default_memory_pool().max_memory()
    with PassageFile(path) as file:
        for read in (lambda: list(file.iter_batches(["text"])), lambda: file.read_rows([0])):
            with pytest.raises(InputError, match=r"decodes to more than 2. MiB, far more than its size"):
                read()
        assert file.n_rows == 3
        assert len(list(file.iter_selected([1], ["title"]))) == 1, "rows that fit are read"
    assert pa.default_memory_pool().max_memory() == peak_before


@given(st.binary(max_size=80))
def test_headers_of_pages_are_read_or_refused(data: bytes) -> None:
    try:
        fields, end = _parse_struct(data, 0)
    except (IndexError, ParquetError):
        return
    assert end > 0
    assert all(isinstance(number, int) for number in fields)


_HEADERS = [  # a dictionary page, and data pages with short, long and no statistics
    b"\x15\x04\x15\xd4\x8e\x01\x15\xee\x09\x15\xe2\xbf\x9cP<\x15\x80\x10\x15\x00\x12\x00\x00",
    b"\x15\x00\x15\x88\x14\x15\x9c\x14\x15\xea\xc4\x83\xdb\x0e\x1c\x15\x80\x10\x15\x10\x15\x06\x15\x06\x1c6\x00(\x017\x18\x017\x11\x11\x00\x00\x00",
    b"\x15\x00\x15\x88\x14\x15\x9c\x14,\x15\x80\x10\x15\x10\x15\x06\x15\x06\x1c(\x96\x01"
    + b"u" * 150
    + b"\x00\x00\x00",
    b"\x15\x00\x15\x88\x14\x15\x9c\x14,\x15\x80\x10\x15\x10\x15\x06\x15\x06\x00\x00",
]


@pytest.mark.parametrize("header", _HEADERS)
def test_fast_header_parser_agrees_with_the_general_one(header: bytes) -> None:
    assert _parse_usual_header(header + b"\x05") == _build_page_header(*_parse_struct(header, 0))


@given(st.sampled_from(_HEADERS), st.integers(0, 60), st.binary(max_size=4))
def test_header_parsers_agree_on_changed_headers(header: bytes, offset: int, data: bytes) -> None:
    changed = header[:offset] + data + header[offset + len(data) :] + bytes(8)
    try:
        usual = _parse_usual_header(changed)
    except (IndexError, ParquetError):
        return
    if usual:
        assert usual == _build_page_header(*_parse_struct(changed, 0))


def test_long_texts_are_read_in_small_batches(tmp_path: Path) -> None:
    with PassageWriter(tmp_path / "part.parquet") as writer:
        for i in range(ROW_GROUP):
            writer.write(replace(build_passage(i), text=f"{i} " * 150))
    with PassageFile(tmp_path / "part.parquet") as file:
        batches = list(file.iter_batches())
        assert [len(batch) for batch in batches] == [ROW_GROUP // 2] * 2
        assert [row["text"] for batch in batches for row in batch.to_pylist()] == [
            f"{i} " * 150 for i in range(ROW_GROUP)
        ]


@pytest.mark.parametrize("text", ["The same sentence again and again. " * 18, " ".join(["x" * 99] * 100)], ids=len)
def test_equal_passages_are_not_taken_for_a_bomb(text: str, tmp_path: Path) -> None:
    with PassageWriter(tmp_path / "equal.parquet") as writer:
        for number in range(20_000):
            writer.write(Passage(f"{number}", "1", 7, "T", "", text, 0, 100, Passage.hash_of("T", text)))
    with PassageFile(tmp_path / "equal.parquet") as file:
        assert sum(len(batch) for batch in file.iter_batches()) == 20_000


def test_more_rows_than_bytes_are_refused(tmp_path: Path) -> None:
    path = _write_bomb(tmp_path / "rows.parquet", 200_000, 1)
    if path.stat().st_size < 200_000:
        with pytest.raises(InputError, match="claims 200,000 rows in"):
            PassageFile(path)


def test_damaged_page_is_reported_in_one_line(tmp_path: Path) -> None:
    with PassageWriter(tmp_path / "part.parquet") as writer:
        writer.write(Passage("1", "1", 7, "T", "", "text", 0, 1, Passage.hash_of("T", "text")))
    data = bytearray((tmp_path / "part.parquet").read_bytes())
    data[40] ^= 1
    (tmp_path / "part.parquet").write_bytes(data)
    with PassageFile(tmp_path / "part.parquet") as file, pytest.raises(InputError, match="is not a readable") as error:
        list(file.iter_passages())
    assert "\n" not in str(error.value)


def test_footer_with_invalid_histograms_is_refused() -> None:
    """Without the check, `metadata.row_group(0).column(0)` would end the process."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": ["a", None, "b"]}), sink)
    valid = sink.getvalue().to_pybytes()
    check_footer(pq.read_metadata(pa.BufferReader(valid)), len(valid))
    length = int.from_bytes(valid[-8:-4], "little")
    messages = set()
    for offset in range(len(valid) - 8 - length, len(valid) - 8):
        broken = bytearray(valid)
        broken[offset] ^= 0x10
        try:
            metadata = pq.read_metadata(pa.BufferReader(bytes(broken)))
        except (pa.ArrowException, OSError):
            continue
        try:
            check_footer(metadata, len(valid))
        except ParquetError as error:
            messages.add(str(error))
    assert any("histogram" in message for message in messages), messages


_STRINGS = st.lists(st.text(st.sampled_from('ab"\\\n\t\x00\x7f \x1c\x85\xa0\u1680\u2003\u200b\u2014\u3000\u3001é中😀')))


@given(texts=_STRINGS, first=st.integers(0, 5))
def test_words_and_hashes_of_a_column_equal_those_of_its_rows(texts: list[str], first: int) -> None:
    titles = texts[::-1]
    columns = [pa.array(strings, pa.string())[first:] for strings in (titles, texts)]
    rows = list(zip(titles, texts, strict=True))[first:]
    assert count_words(columns[1]).tolist() == [len(text.split()) for _, text in rows]
    assert hash_passages(*columns).to_pylist() == [Passage.hash_of(*row) for row in rows]


def test_words_end_at_white_space_of_python() -> None:
    characters = [chr(code) for code in (*range(0xD800), *range(0xE000, 0x10400))]
    texts = [*(f"a{character}b" for character in characters), *characters]
    assert count_words(pa.array(texts, pa.string())).tolist() == [len(text.split()) for text in texts]


def test_truncating_an_open_file_does_not_crash(tmp_path: Path) -> None:
    write_rows(tmp_path / "part.parquet", 3 * ROW_GROUP)
    size = (tmp_path / "part.parquet").stat().st_size
    with PassageFile(tmp_path / "part.parquet") as file, open_random_access(tmp_path / "part.parquet") as read:
        os.truncate(tmp_path / "part.parquet", size // 2)
        assert read(size - 100, 100) == b""
        assert file.read_rows([0]) == [build_passage(0)]
        with pytest.raises(
            InputError, match=r"part\.parquet is not a readable passage file .*: build or pull it again"
        ):
            file.read_rows([3 * ROW_GROUP - 1])
