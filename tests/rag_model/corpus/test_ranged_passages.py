"""Passages that are read from parts of row groups equal those of the whole file."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rag_model.corpus.passages import FULL_SCHEMA, PASSAGE_SCHEMA, ROW_GROUP, DecodedCache, PassageFile, PassageWriter
from rag_model.corpus.ranged_passages import RangedPassages, has_cuts, list_cuts
from rag_model.corpus.records import Passage
from rag_model.errors import InputError
from rag_model.ranges import BlockLayout, RangeCache, digest_blocks

ROWS, BLOCK = 2 * ROW_GROUP + 300, 4096
WORDS = [f"wörd{number}" for number in range(2_000)]


def write_passages(path: Path, schema: pa.Schema = PASSAGE_SCHEMA, words: int = 90) -> None:
    """Write passages, some with equal texts, without text, or without a date."""
    rng = random.Random(words)
    with PassageWriter(path, schema) as writer:
        for row in range(ROWS):
            text = "the same text" if row % 50 == 7 else " ".join(rng.choices(WORDS, k=words)) * (row % 90 > 0)
            date = None if row % 3 or row >= 2 * ROW_GROUP else 1_600_000_000 + row
            passage = Passage(
                f"{row // 5}:{row % 5}",
                str(row // 5),
                row,
                f"Pagé {row // 5}",
                "",
                text,
                row,
                words,
                f"{row:032x}",
                date,
            )
            writer.write(passage)


def build_outline(path: Path) -> dict[str, Any]:
    with PassageFile(path) as file:
        outline, columns = file.build_outline() or {}, file.schema.names
    return outline | {"columns": columns, "cuts": list_cuts(path, columns, outline["ranges"])}


def open_ranged(path: Path, outline: dict[str, Any], cache: RangeCache) -> RangedPassages:
    data = path.read_bytes()
    layout, digests = BlockLayout(len(data), BLOCK), digest_blocks(data, BLOCK)
    file = cache.open(path.name, path.name, layout, digests, lambda a, b: data[a:b])
    return RangedPassages(file, outline, ROWS, DecodedCache(32 << 20))


@pytest.mark.parametrize(("schema", "words"), [(PASSAGE_SCHEMA, 90), (FULL_SCHEMA, 90), (PASSAGE_SCHEMA, 300)])
def test_rows_equal_those_of_the_whole_file(tmp_path: Path, schema: pa.Schema, words: int) -> None:
    path, cache = tmp_path / "passages.parquet", RangeCache(tmp_path / "cache", 1 << 30)
    write_passages(path, schema, words)
    outline = build_outline(path)
    assert has_cuts(outline)
    assert all(1 < len(cuts) <= 8 for cuts in outline["cuts"])
    ranged, rows = open_ranged(path, outline, cache), [5, 1030, 6, ROWS - 1, ROW_GROUP - 1, 57, 7, 2 * ROW_GROUP]
    with PassageFile(path) as file:
        for row in rows:
            assert ranged.read_rows([row]) == file.read_rows([row])
        assert ranged.read_rows(range(ROWS)) == file.read_rows(range(ROWS))


def test_first_rows_of_a_group_need_a_part_of_it_and_one_round(tmp_path: Path) -> None:
    path, cache = tmp_path / "passages.parquet", RangeCache(tmp_path / "cache", 1 << 30)
    write_passages(path)
    ranged = open_ranged(path, build_outline(path), cache)
    ranges = ranged.list_ranges([3, ROW_GROUP + 3])
    ranged.read_rows([3, ROW_GROUP + 3])
    assert sum(end - start for start, end in ranges) < path.stat().st_size / 4
    assert cache.fetched_bytes < path.stat().st_size / 4
    assert ranged.list_ranges([4, 2]) == []
    fetched_before = cache.fetched_bytes
    ranged.read_rows([4, 2])
    assert cache.fetched_bytes == fetched_before


def test_file_of_another_layout_has_no_cuts(tmp_path: Path) -> None:
    path = tmp_path / "passages.parquet"
    write_passages(path)
    table = pq.ParquetFile(path).read()
    pq.write_table(table, path, row_group_size=ROW_GROUP, compression="zstd", use_dictionary=False)
    assert build_outline(path)["cuts"] == []
    pq.write_table(table, path, row_group_size=ROW_GROUP, compression="gzip")
    assert build_outline(path)["cuts"] == []


def test_changed_file_is_refused(tmp_path: Path) -> None:
    path, rng, refused_count = tmp_path / "passages.parquet", random.Random(1), 0
    write_passages(path)
    data, outline = path.read_bytes(), build_outline(path)
    for number in range(60):  # the digests match the changed bytes
        start, end = outline["ranges"][0]
        changed = bytearray(data)
        for _ in range(1 + number % 3):
            text_start = start + outline["cuts"][0][0][1]
            offsets = [rng.randrange(start, start + 2000), rng.randrange(end - 30_000, end), text_start]
            changed[rng.choice(offsets)] ^= 255
        path.write_bytes(changed)
        cache = RangeCache(tmp_path / f"cache{number}", 1 << 30)
        try:
            open_ranged(path, outline, cache).read_rows([number, 40, 900])
        except InputError:
            refused_count += 1
        cache.close()
    assert refused_count > 10


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 7},
        {"rows": -1},
        {"rows": None},
        {"cuts": [[]] * 3},
        {"cuts": [[[ROW_GROUP, 9000], [ROW_GROUP, 50_000]]] * 3},
        {"columns": []},
    ],
)
def test_outline_of_another_file_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path, cache = tmp_path / "passages.parquet", RangeCache(tmp_path / "cache", 1 << 30)
    write_passages(path)
    outline = build_outline(path) | change
    with pytest.raises(InputError, match="cannot be read by ranges"):
        open_ranged(path, outline, cache).read_rows([40])
