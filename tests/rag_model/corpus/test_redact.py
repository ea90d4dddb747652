"""Redacting a part gives the same files as a build without the removed pages."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_model.corpus.chunk import ChunkRecipe, ChunkStats, chunk_part
from rag_model.corpus.passages import PASSAGE_SCHEMA, UNDATED_SCHEMA, PassageFile, PassageWriter
from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import Part, Siteinfo, hash_id
from rag_model.corpus.redact import PartFiles, may_contain, redact_part, select_pages

WORDS = " ".join(f"word{number}" for number in range(600))
DOCUMENTS = [f'{{"id": "doc-{i}", "title": "T", "text": "Some words of {i}."}}' for i in range(9)]


@pytest.fixture
def part(request: pytest.FixtureRequest, tmp_path: Path, page_xml: Any, export_xml: Any) -> tuple[Part, Siteinfo]:
    count = getattr(request, "param", 20)
    texts = ["One '''two'''.\n== Life ==\nThree.", "{{stub}}", *(f"{WORDS} {page}" for page in range(count))]
    pages = (page_xml(number, text) for number, text in enumerate(texts, start=1))
    (tmp_path / "dump.xml").write_bytes(export_xml(*pages))
    plan = plan_dump(str(tmp_path / "dump.xml"), workdir=tmp_path, stage=str, part_bytes=1 << 30)
    return plan.parts[0], plan.siteinfo


def chunk_without(part: Part, site: Siteinfo, folder: Path, *suppressed: str) -> tuple[ChunkStats, PartFiles]:
    folder.mkdir()
    files = PartFiles(folder / "passages.parquet", {}, folder / "articles.parquet")
    return chunk_part(part, site, ChunkRecipe(), files.passages, files.articles, None, suppressed), files


@pytest.mark.parametrize("part", [200], indirect=True)
@pytest.mark.parametrize("pages", [("1",), ("2", "7", "200"), ("999",)])
def test_redacted_part_equals_a_build_without_the_pages(
    part: tuple[Part, Siteinfo], tmp_path: Path, pages: tuple[str, ...]
) -> None:
    stats, expected = chunk_without(*part, tmp_path / "without", *pages)
    whole_stats, files = chunk_without(*part, tmp_path / "whole")
    (tmp_path / "redacted").mkdir()
    redacted, rows = redact_part(files, pages, tmp_path / "redacted")
    assert rows == stats.rows > 1024
    assert stats.dropped.get("taken_down", 0) == len({*pages} - {"999"})
    assert stats.newest_revision == whole_stats.newest_revision
    for actual_file, expected_file in ((redacted.passages, expected.passages), (redacted.articles, expected.articles)):
        assert actual_file is not None
        assert expected_file is not None
        assert actual_file.read_bytes() == expected_file.read_bytes()


@pytest.mark.parametrize("dated", [True, False])
def test_redacted_part_keeps_its_columns(part: tuple[Part, Siteinfo], tmp_path: Path, *, dated: bool) -> None:
    """All parts of a snapshot must have the same columns, so an undated part stays undated."""
    _, files = chunk_without(*part, tmp_path / "whole")
    _, expected = chunk_without(*part, tmp_path / "without", "7")
    for path in (files.passages, expected.passages):
        with (
            PassageFile(path) as file,
            PassageWriter(tmp_path / "own", PASSAGE_SCHEMA if dated else UNDATED_SCHEMA) as writer,
        ):
            for passage in list(file.iter_passages()):
                writer.write(passage)
        (tmp_path / "own").replace(path)
    redacted, _ = redact_part(files, {"7"}, tmp_path)
    assert redacted.passages.read_bytes() == expected.passages.read_bytes()
    with PassageFile(redacted.passages) as file:
        assert file.has_dates is dated
        assert {passage.revised is not None for passage in file.iter_passages()} == {dated}


def test_vectors_of_removed_passages_are_removed(part: tuple[Part, Siteinfo], tmp_path: Path) -> None:
    _, files = chunk_without(*part, tmp_path / "whole")
    with PassageFile(files.passages) as file:
        pages = [int(passage.page_id) for passage in file.iter_passages()]
    np.save(tmp_path / "vectors.npy", np.array(pages, dtype=np.float16)[:, None], allow_pickle=False)
    redacted, rows = redact_part(PartFiles(files.passages, {"small": tmp_path / "vectors.npy"}), {"3", "5"}, tmp_path)
    assert {*redacted.vectors} == {"small"}
    assert redacted.articles is None
    remaining = np.load(redacted.vectors["small"], allow_pickle=False)[:, 0].astype(int).tolist()
    with PassageFile(redacted.passages) as file:
        assert remaining == [int(passage.page_id) for passage in file.iter_passages()]
    assert rows == len(remaining) < len(pages)


@pytest.mark.parametrize("name", ["docs.jsonl", "psgs.tsv"])
def test_documents_and_passages_are_left_out(name: str, tmp_path: Path) -> None:
    if name == "docs.jsonl":
        (tmp_path / name).write_text("\n".join(DOCUMENTS))
    else:
        (tmp_path / name).write_text("id\ttext\ttitle\n" + "\n".join(f"{i}\tText {i}\tdoc-{i}" for i in range(9)))
    (part,) = plan_dump(str(tmp_path / name), workdir=tmp_path, stage=str, part_bytes=1 << 30).parts
    stats, files = chunk_without(part, Siteinfo("", "", ""), tmp_path / "out", "doc-4", "doc-8")
    with PassageFile(files.passages) as file:
        remaining = {passage.page_id for passage in file.iter_passages()}
    assert remaining == {f"doc-{i}" for i in range(9)} - {"doc-4", "doc-8"}
    assert stats.dropped == {"taken_down": 2}


def test_pages_are_selected_by_the_range_of_the_part() -> None:
    assert select_pages("wiki", 10, 20, ["9", "10", "20", "21", "x", "-11", "¹²"]) == ("10", "20")
    assert may_contain("documents", hash_id("doc"), hash_id("doc"), "doc")
    assert not may_contain("documents", 0, hash_id("doc") - 1, "doc")
    assert may_contain("passages", 1, 1, "any title")
