import csv
import gzip
import json
from datetime import date
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.corpus.dump_formats import record_format
from rag_model.corpus.dump_formats.jsonl import FORMAT as JSONL
from rag_model.corpus.dump_formats.parquet import FORMAT as PARQUET
from rag_model.corpus.dump_formats.parquet import WIKI_DPR
from rag_model.corpus.dump_formats.record_format import find_record_format
from rag_model.corpus.plan import compute_source_digest, plan_dump
from rag_model.corpus.records import ID_HASHES, Article, Passage, Plan, Section, hash_id
from rag_model.corpus.source import MAX_LINE
from rag_model.errors import InputError
from tests.fixtures.work_counters import measure_peaks


def read_articles(plan: Plan) -> list[Article]:
    return [article for part in plan.parts for article in JSONL.read(part)]


def read_passages(plan: Plan) -> list[Passage]:
    return [passage for part in plan.parts for passage in JSONL.read(part)]


def write_jsonl(path: Path, rows: list[object]) -> Path:
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


ROWS = [{"_id": f"doc {i}", "title": f"Title {i}", "text": f"Text é {i}.", "metadata": {}} for i in range(500)]
EXPECTED = {Article(f"doc {i}", 0, f"Title {i}", (Section("", f"Text é {i}."),)) for i in range(500)}


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz", "corpus.parquet"])
def test_documents_are_read_completely(tmp_path, plan, name: str) -> None:
    path = tmp_path / name
    if path.suffix == ".parquet":
        columns = {key: [row[key] for row in ROWS] for key in ("_id", "title", "text")}
        pq.write_table(pa.table({**columns, "vector": [[0.5]] * len(ROWS)}), path)
    else:
        write_jsonl(path, ROWS)
    document_plan = plan(path, part_bytes=1000)
    articles = read_articles(document_plan)
    assert document_plan.kind == "documents"
    assert set(articles) == EXPECTED
    assert len(articles) == len(EXPECTED)
    assert len(document_plan.parts) > 5


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.parquet"])
def test_contents_are_split_into_title_and_text(tmp_path, plan, name: str) -> None:
    """Pyserini and FlashRAG write such files."""
    rows = [
        {"id": "a", "contents": "Title\nFirst line.\nSecond line."},
        {"id": "b", "contents": "A text without a title."},
        {"id": "c", "contents": "\nNo title."},
        {"id": "d", "title": "Its own", "contents": "Title\nText."},
        {"id": "e", "title": "Its own", "text": "Its own text.", "contents": "Title\nText."},
        {"id": "f", "contents": "Title\n"},
    ]
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows, pa.schema([(key, pa.string()) for key in rows[4]])), tmp_path / name)
    else:
        write_jsonl(tmp_path / name, list(rows))
    documents = {
        article.page_id: (article.title, [part.text for part in article.sections])
        for article in read_articles(plan(tmp_path / name))
    }
    assert documents == {
        "a": ("Title", ["First line.\nSecond line."]),
        "b": ("", ["A text without a title."]),
        "c": ("", ["No title."]),
        "d": ("Its own", ["Text."]),
        "e": ("Its own", ["Its own text."]),
        "f": ("", ["Title"]),
    }


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        (
            "x.jsonl",
            json.dumps({"id": "a", "title": "T" * 1_001, "text": "x"}),
            "line 1 of x.jsonl has a title of 1,001 ",
        ),
        ("x.jsonl", json.dumps({"id": "a" * 1_001, "text": "x"}), "line 1 of x.jsonl has an id of 1,001 characters"),
        ("x.tsv", "1\ttext\t" + "T" * 1_001, "line 1 of x.tsv has a title of 1,001 characters, but at most 1,000 are"),
        ("x.tsv", "1" * 1_001 + "\ttext\tT", "line 1 of x.tsv has an id of 1,001 characters"),
        ("x.tsv", "1\t" + "t" * 100_001 + "\tT", "a text of 100,001 characters, but .*: cut it into passages"),
    ],
)
def test_length_of_ids_and_titles_is_limited(tmp_path, plan, name: str, row: str, message: str) -> None:
    (tmp_path / name).write_text(row + "\n")
    with pytest.raises(InputError, match=message):
        plan(tmp_path / name)


def test_long_first_line_of_contents_is_text(tmp_path, plan) -> None:
    contents = "T" * 1_001 + "\nmore"
    (article,) = read_articles(plan(write_jsonl(tmp_path / "x.jsonl", [{"id": "a", "contents": contents}])))
    assert (article.title, article.sections) == ("", (Section("", contents),))


def test_part_of_a_document_depends_on_its_id(tmp_path, plan) -> None:
    document_plan = plan(write_jsonl(tmp_path / "x.jsonl", ROWS), part_bytes=1000)
    assert document_plan.parts[0].first_page == 0
    assert document_plan.parts[-1].last_page == ID_HASHES - 1
    for previous_part, next_part in zip(document_plan.parts, document_plan.parts[1:], strict=False):
        assert next_part.first_page == previous_part.last_page + 1
    for part in document_plan.parts:
        ids = [article.page_id for article in JSONL.read(part)]
        assert all(part.first_page <= hash_id(document_id) <= part.last_page for document_id in ids)
        assert ids == sorted(ids, key=lambda document_id: int(document_id[4:]))


def test_edit_changes_one_part_of_the_plan(tmp_path, plan) -> None:
    path = tmp_path / "x.jsonl"
    first = list(map(compute_source_digest, plan(write_jsonl(path, ROWS), part_bytes=1000).parts))
    second = list(map(compute_source_digest, plan(write_jsonl(path, ROWS), part_bytes=1000).parts))
    edited = [*ROWS[:7], {**ROWS[7], "text": "Text è 7."}, *ROWS[8:]]
    third = list(map(compute_source_digest, plan(write_jsonl(path, edited), part_bytes=1000).parts))
    assert first == second
    assert sum(a != b for a, b in zip(first, third, strict=True)) == 1


def test_documents_beyond_the_buffer_are_appended_to_files(tmp_path, plan, monkeypatch) -> None:
    monkeypatch.setattr(record_format, "MAX_BUFFERED_BYTES", 2000)
    path = write_jsonl(tmp_path / "x.jsonl", ROWS)
    assert set(read_articles(plan(path, part_bytes=1000))) == EXPECTED


def plan_with_small_buffer(path: Path, workdir: Path) -> None:
    record_format.MAX_BUFFERED_BYTES = 1 << 20
    plan_dump(str(path), workdir=workdir, stage=Path.as_uri)


def test_planning_needs_little_memory(tmp_path) -> None:
    small, large = (write_jsonl(tmp_path / f"{count}.jsonl", [{"id": i, "text": "word " * 200} for i in range(count)])
                    for count in (10, 11_000))  # fmt: skip
    _, peak = measure_peaks(*(partial(plan_with_small_buffer, path, tmp_path) for path in (small, large)))
    assert peak < 10 << 20 < large.stat().st_size


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.tsv.gz"])
def test_file_of_blank_lines_is_refused_early(tmp_path, plan, name) -> None:
    lines = b'{"id": 1, "text": "words"}\n' if "jsonl" in name else b"1\twords\ttitle\n"
    (tmp_path / name).write_bytes(gzip.compress(lines) + gzip.compress(b"\n" * (1 << 20)))
    with pytest.raises(InputError, match=r"blank lines: remove them|line 2 of x\.tsv\.gz has 0 columns"):
        plan(tmp_path / name)


def test_sections_and_numeric_ids_are_read(tmp_path, plan) -> None:
    sections = [{"heading": "", "text": "Lead."}, {"heading": "Life", "text": "Born."}, "Plain."]
    rows = [{"id": 7, "title": "T", "sections": sections}, {"id": "8", "text": None}, {"id": "9"}]
    articles = {article.page_id: article for article in read_articles(plan(write_jsonl(tmp_path / "x.jsonl", rows)))}
    assert articles["7"].sections == (Section("", "Lead."), Section("Life", "Born."), Section("", "Plain."))
    assert articles["8"] == Article("8", 0, "", ())
    assert articles["9"].sections == ()


def test_lone_surrogate_is_replaced(tmp_path, plan) -> None:
    (tmp_path / "x.jsonl").write_text('{"id": "1", "text": "a \\ud800 \\ud83d\\ude00"}\n')
    assert read_articles(plan(tmp_path / "x.jsonl"))[0].sections == (Section("", "a \N{REPLACEMENT CHARACTER} 😀"),)


def test_docid_is_read_as_id(tmp_path: Path) -> None:
    """Mr. TyDi and castorini/odqa-wiki-corpora have such files."""
    (tmp_path / "a.jsonl").write_text('{"docid": "12#0", "title": "a", "text": "b"}\n')
    pq.write_table(pa.table({"docid": ["12#0"], "title": ["a"], "text": ["b"]}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        record_format = find_record_format(str(tmp_path / name))
        assert record_format is not None
        assert [record[0] for record in record_format.iter_records(str(tmp_path / name))] == ["12#0"]


@pytest.mark.parametrize(
    "column",
    [
        {"title": ["a", None, "", "é" * 1_000]},
        {"text": ["a \x1c b", None, "", '"quoted" \\']},
        {"id": ["1", "", "3", "4"]},
        {"id": [1, 2, 3, 4]},
        {"id": ["1", None, "3", "4"]},
        {"title": ["x" * 1_001, "", "", ""]},
        {"id": ["i" * 1_001, "2", "3", "4"]},
    ],
)
def test_columns_and_rows_give_the_same_records(tmp_path: Path, column: dict[str, list[object]]) -> None:
    columns = {"id": ["1", "2", "3", "4"], "title": ["a"] * 4, "text": ["b"] * 4, **column}

    def read_table(name: str, columns: dict[str, list[object]]) -> list[object] | str:
        pq.write_table(pa.table(columns), tmp_path / name)
        try:
            return list(PARQUET.read_records(str(tmp_path / name)))
        except InputError as error:
            return str(error).replace(name, "x.parquet")

    # With a column of dates, the reader parses row by row.
    records = read_table("x.parquet", columns)
    assert records == read_table("dated.parquet", {**columns, "revised": [None] * 4})
    if isinstance(records, list):
        blocks = list(PARQUET.read_columns(str(tmp_path / "x.parquet"), 1, 3))
        rows = [row for block in blocks for row in zip(*(column.to_pylist() for column in block), strict=True)]
        texts = ["".join(text for _, text in body) for _, _, body, _ in records]
        assert rows == [(*record[:2], text, record[3], "") for record, text in zip(records, texts, strict=True)][1:3]


@pytest.mark.parametrize(
    ("page_ids", "expected"),
    [
        (["7", None, "", "7"], ["7", "", "", "7"]),
        ([7, None, 8, 7], ["7", "", "8", "7"]),  # whole numbers are read row by row
    ],
)
def test_page_ids_of_passages_are_read(tmp_path: Path, page_ids: list[object], expected: list[str]) -> None:
    columns = {"id": ["1", "2", "3", "4"], "title": ["a"] * 4, "text": ["b"] * 4, "embeddings": [[1.0]] * 4}
    pq.write_table(pa.table({**columns, "page_id": page_ids}), tmp_path / "x.parquet")
    (block,) = PARQUET.read_columns(str(tmp_path / "x.parquet"), 0, 4)
    assert block[4].to_pylist() == expected
    records = list(WIKI_DPR.read_records(str(tmp_path / "x.parquet")))
    assert [record[4].get("page_id", "") if len(record) > 4 else "" for record in records] == expected


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    text = pa.array([b"a", b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"id": ["1", "2"], "title": ["", ""], "text": text}), tmp_path / "x.parquet")
    for rows in (PARQUET.read_rows, PARQUET.read_columns):
        with pytest.raises(InputError, match=r"^x\.parquet is not readable as Parquet"):
            list(rows(str(tmp_path / "x.parquet"), 0, 2))


def test_sections_in_parquet_are_read(tmp_path, plan) -> None:
    sections = [{"heading": "Life", "text": "Born."}]
    rows = pa.table({"id": ["1", "2", "3"], "sections": [sections] * 3})
    pq.write_table(rows, tmp_path / "x.parquet", row_group_size=2)
    expected = {Article(name, 0, "", (Section("Life", "Born."),)) for name in ("1", "2", "3")}
    assert {*read_articles(plan(tmp_path / "x.parquet"))} == expected


def test_date_of_a_document_is_read(tmp_path, plan) -> None:
    noon = 1_793_534_400
    dates = ["2026-11-01T12:00:00Z", "2026-11-01T13:00:00+01:00", noon, "2026-11-01", None, ""]
    rows = [{"id": str(i), "text": "x", "revised": date} for i, date in enumerate(dates)] + [{"id": "6", "text": "x"}]
    articles = read_articles(plan(write_jsonl(tmp_path / "x.jsonl", rows)))
    midnight = noon - 12 * 3600
    assert {article.page_id: article.revised for article in articles} == dict(
        zip("0123456", [noon, noon, noon, midnight, None, None, None], strict=True)
    )


@pytest.mark.parametrize(
    "kind",
    [
        *(pa.timestamp(unit, tz) for unit in ("s", "ms", "us", "ns") for tz in (None, "UTC", "Europe/Berlin")),
        *(pa.date32(), pa.date64(), pa.int64(), pa.string()),
    ],
    ids=str,
)
def test_dates_in_parquet_are_read(tmp_path, plan, kind: pa.DataType) -> None:
    day = 1_793_491_200  # 2026-11-01, in UTC
    if pa.types.is_timestamp(kind):
        dates = pa.array([day, None], pa.timestamp("s", kind.tz)).cast(kind)
    elif kind == pa.int64():
        dates = pa.array([day, None], kind)
    else:
        dates = pa.array([date(2026, 11, 1), None]).cast(kind)
    pq.write_table(pa.table({"id": ["1", "2"], "text": ["x", "y"], "revised": dates}), tmp_path / "x.parquet")
    assert {article.page_id: article.revised for article in read_articles(plan(tmp_path / "x.parquet"))} == {
        "1": day,
        "2": None,
    }


@pytest.mark.parametrize("revised", ["March 2021", "2026-02-30", 1e9, True, [], {}, 10**12, -(10**30), "x" * 10_000])
def test_invalid_date_is_reported(tmp_path, plan, revised: object) -> None:
    """Milliseconds are refused too: as seconds they would mean the year 33658."""
    message = (
        r"^line 1 of x\.jsonl has '.{1,40}' as its `revised`: give a date such as 2026-11-01 or 2026-11-01T12:00:00Z$"
    )
    with pytest.raises(InputError, match=message):
        plan(write_jsonl(tmp_path / "x.jsonl", [{"id": "1", "text": "x", "revised": revised}]))


def test_limit_takes_the_first_documents_of_all_files(tmp_path, plan) -> None:
    write_jsonl(tmp_path / "a2.jsonl", ROWS[:10])
    write_jsonl(tmp_path / "a10.jsonl", ROWS[10:])
    articles = read_articles(plan(tmp_path / "*.jsonl", limit=12))
    assert sorted(article.page_id for article in articles) == sorted(f"doc {i}" for i in range(12))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2 of x\.jsonl is not JSON"),
        ("[1]", r"line 2 of x\.jsonl is not a JSON object"),
        ('{"text": "no id"}', r"line 2 of x\.jsonl has no `id` or `_id`"),
        ('{"id": {}, "text": "x"}', r"line 2 of x\.jsonl has no `id` or `_id`"),
        ('{"id": true, "text": "x"}', r"line 2 of x\.jsonl has no `id` or `_id`"),
        ('{"id": 1.5, "text": "x"}', r"line 2 of x\.jsonl has no `id` or `_id`"),
        ('{"id": "b", "title": 5}', r"line 2 of x\.jsonl has no readable"),
        ('{"id": "b", "text": 5}', r"line 2 of x\.jsonl has no readable"),
        ('{"id": "b", "text": {"a": "x"}}', r"line 2 of x\.jsonl has no readable"),
        ('{"id": "b", "sections": [{"heading": "x"}]}', r"line 2 of x\.jsonl has no readable"),
        ('{"id": "b", "sections": [{"text": 1}]}', r"line 2 of x\.jsonl has no readable"),
        ("\xff", r"line 2 of x\.jsonl is not JSON"),
    ],
)
def test_invalid_document_is_reported(tmp_path, plan, line: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"id": "a", "text": "x"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(InputError, match=message) as error:
        plan(tmp_path / "x.jsonl")
    assert "\n" not in str(error.value)


def test_duplicate_id_is_reported(tmp_path, plan) -> None:
    document_plan = plan(write_jsonl(tmp_path / "x.jsonl", [*ROWS[:3], ROWS[1]]))
    with pytest.raises(InputError, match="the id 'doc 1' occurs twice"):
        read_articles(document_plan)


@pytest.mark.parametrize("name", ["x.jsonl", "x.tsv"])
def test_file_without_records_is_reported(tmp_path, plan, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match="contains no records"):
        plan(tmp_path / name)


def test_file_that_is_not_parquet_is_reported(tmp_path, plan) -> None:
    (tmp_path / "x.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(InputError, match=r"^x\.parquet is not readable as Parquet"):
        plan(tmp_path / "x.parquet")


def test_passages_are_read_unchanged(tmp_path, plan) -> None:
    path = tmp_path / "psgs_w100.tsv.gz"
    rows = 'id\ttext\ttitle\n1\t"He said ""yes"" to it."\tAaron\n2\tMore words\tAaron\n'
    path.write_bytes(gzip.compress(rows.encode()))
    passage_plan = plan(path)
    assert passage_plan.kind == "passages"
    assert read_passages(passage_plan) == [
        Passage(
            "1", "Aaron", 0, "Aaron", "", 'He said "yes" to it.', 0, 5, Passage.hash_of("Aaron", 'He said "yes" to it.')
        ),
        Passage("2", "Aaron", 0, "Aaron", "", "More words", 0, 2, Passage.hash_of("Aaron", "More words")),
    ]


CELLS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), max_size=20)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=20))
def test_tsv_of_the_csv_module_is_read(tmp_path, plan, rows: list[tuple[str, str]]) -> None:
    path = tmp_path / "x.tsv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(["id", "text", "title"])
        writer.writerows([str(i), *row] for i, row in enumerate(rows))
    rows_read = {int(passage.id): (passage.text, passage.title) for passage in read_passages(plan(path))}
    assert rows_read == dict(enumerate(rows))


def test_header_determines_the_order_of_columns(tmp_path, plan) -> None:
    (tmp_path / "x.tsv").write_text("title\tid\ttext\nT\t5\tWords\n")
    (passage,) = read_passages(plan(tmp_path / "x.tsv"))
    assert (passage.id, passage.title, passage.text) == ("5", "T", "Words")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"1\tonly two", r"line 2 of x\.tsv has 2 columns"),
        (b'1\t"no end\tx\n', "badly quoted"),
        (b'1\t"a" b\tx', "badly quoted"),
        (b"1\t\xff\tx", "not UTF-8"),
    ],
)
def test_invalid_row_is_reported(tmp_path, plan, line: bytes, message: str) -> None:
    (tmp_path / "x.tsv").write_bytes(b"id\ttext\ttitle\n" + line)
    with pytest.raises(InputError, match=message):
        plan(tmp_path / "x.tsv")


def test_deeply_nested_json_is_reported_with_its_line(tmp_path, plan) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("[" * 200_000)
    with pytest.raises(InputError, match=r"line 1 of x\.jsonl is not JSON"):
        plan(path)


def test_byte_order_mark_is_ignored(tmp_path, plan) -> None:
    path = tmp_path / "passages.tsv"
    path.write_text("\ufeffid\ttext\ttitle\n1\tSome text\tTitle\n", encoding="utf-8")
    assert [passage.id for passage in read_passages(plan(path))] == ["1"]


def test_passage_without_an_id_is_refused(tmp_path, plan) -> None:
    path = tmp_path / "passages.tsv"
    path.write_text("id\ttext\ttitle\n \tSome text\tTitle\n")
    with pytest.raises(InputError, match="has no id"):
        plan(path)


def test_huge_limit_takes_all_documents(tmp_path, plan) -> None:
    assert len(read_articles(plan(write_jsonl(tmp_path / "x.jsonl", ROWS), limit=10**30))) == len(ROWS)


def read_long_texts(path: Path) -> None:
    assert sum(len(record[2][0][1]) for record in PARQUET.read_records(str(path))) == 60 * (5 << 20)


def test_repeated_long_text_needs_little_memory(tmp_path: Path) -> None:
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 60, pa.int32()), pa.array(["x" * (5 << 20)]))
    table = pa.table({"id": [str(row) for row in range(60)], "text": text})
    pq.write_table(table, tmp_path / "long.parquet", compression="zstd")
    assert (tmp_path / "long.parquet").stat().st_size < 100_000
    (peak,) = measure_peaks(partial(read_long_texts, tmp_path / "long.parquet"))
    assert peak < 3 * MAX_LINE, "the texts of all rows need 300 MB"


@pytest.mark.parametrize("nested", [False, True])
def test_huge_row_is_reported(nested: bool, tmp_path: Path) -> None:
    """A file of a few kilobytes can have such a row if a list repeats one text of a dictionary."""
    text = pa.array(["x" * (1 << 20 if nested else (64 << 20) + 1)])
    if nested:
        repeated_texts = pa.DictionaryArray.from_arrays(pa.array([0] * 100, pa.int32()), text)
        text = pa.ListArray.from_arrays(pa.array([0, 100], pa.int32()), repeated_texts)
    pq.write_table(pa.table({"id": ["1"], "sections": text}), tmp_path / "row.parquet", compression="zstd")
    with pytest.raises(InputError, match=r"row\.parquet has a row of more than 64 MiB: give one document per row"):
        list(PARQUET.read_records(str(tmp_path / "row.parquet")))


@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_BYTE_ARRAY"])
def test_parquet_bomb_is_refused(encoding: str, tmp_path: Path) -> None:
    """A page of plain texts states its size; delta-encoded texts may each be as long as the previous one."""
    path, text = tmp_path / "bomb.parquet", pa.array(["x" * (3 << 20)] * 90)
    pq.write_table(
        pa.table({"id": [str(row) for row in range(90)], "text": text}),
        path,
        compression="zstd",
        use_dictionary=False,
        column_encoding={"text": encoding},
        data_page_size=1 << 30,
        write_statistics=False,
    )
    assert path.stat().st_size < 100_000
    with pytest.raises(InputError, match=r"bomb\.parquet decodes to more than \d+ MiB, far more than its size"):
        list(PARQUET.read_records(str(path)))
