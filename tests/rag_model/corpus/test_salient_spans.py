"""Salient spans are the links and dates of articles, stored for the passages that contain them."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.corpus.article_log import ReusableArticles
from rag_model.corpus.chunk import ChunkRecipe, chunk_part
from rag_model.corpus.chunkers.chunker import build_chunker
from rag_model.corpus.passages import PassageFile
from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import Article, Part, Section, Siteinfo
from rag_model.corpus.redact import PartFiles, redact_part
from rag_model.corpus.salient_spans import (
    DATE,
    LINK,
    SalientSpan,
    SpanFile,
    SpanWriter,
    find_article_spans,
    find_dates,
    find_spans,
)
from rag_model.corpus.wikitext import clean_wikitext
from rag_model.errors import InputError

SITE = Siteinfo("enwiki", "en", "", {"file": 6, "category": 14})


def read_links(wikitext: str) -> list[list[str]]:
    sections = clean_wikitext(wikitext, SITE, anchors=True)
    assert [section.text for section in sections] == [section.text for section in clean_wikitext(wikitext, SITE)]
    return [[section.text[start:end] for start, end in section.links] for section in sections]


def test_links_are_found_in_the_clean_text() -> None:
    wikitext = (
        "'''Ada''' met [[Charles Babbage|''Babbage'']] in [[London]] [[File:a.png|thumb|of [[Turin]]]] & [[:Paris]]s."
    )
    assert read_links(wikitext) == [["Babbage", "London", "Paris"]]
    wikitext = "* [[One]] and [[Two]]\n* [[Three]]\n== [[Life]] ==\n[[Four]]"
    assert read_links(wikitext) == [["One", "Two", "Three"], ["Four"]]
    assert read_links("a [[ b ]] c [[d|]] ([[e (f)|]])") == [["b", "d", "e"]]
    assert read_links("{{nowrap|[[Hidden]]}} [[de:Haus]] [[Category:X]] [[|]] plain") == [[]]


@given(
    st.lists(st.sampled_from(["[[", "]]", "|", "a b", " ", "\n", "''", "(", ")", ",", "{{lang|fr|", "}}", "x", "<b>"]))
)
def test_reading_links_does_not_change_the_text(pieces: list[str]) -> None:
    for section_links in read_links("".join(pieces)):
        assert all(link and link == link.strip() for link in section_links)


@pytest.mark.parametrize(
    ("text", "dates"),
    [
        ("born 12 May 1940, died on May 3, 2001.", ["12 May 1940", "May 3, 2001"]),
        ("in 1969 and the 1970s, not 19690 nor 1,969 nor 1969.5", ["1969", "1970s"]),
        ("on 2026-11-01 and 4th July, in the 19th century", ["2026-11-01", "4th July", "19th century"]),
        ("in May 1968", ["May 1968"]),
        ("May we come in March? 12 Mayors", []),
    ],
)
def test_dates_are_found(text: str, dates: list[str]) -> None:
    assert [text[span.start : span.end] for span in find_dates(text)] == dates


def test_longer_of_overlapping_spans_is_kept() -> None:
    text = "the 1939 World Fair of 4 May 1939"
    assert find_spans(text, [(4, 19), (23, 28)]) == [SalientSpan(4, 19, LINK), SalientSpan(23, 33, DATE)]


words = st.lists(st.sampled_from(["a", "bb", "la", "Dr.", "end.", "x" * 130, "漢字" * 20]), max_size=40).map(" ".join)
SETTINGS = [("words", 3), ("sections", 3), ("recursive", 4), ("sentences", 4)]


@pytest.mark.parametrize(("name", "max_words"), SETTINGS)
@given(texts=st.lists(words.filter(str.strip), min_size=1, max_size=3), data=st.data())
def test_every_chunker_keeps_spans_with_their_words(name: str, max_words: int, texts: list[str], data: Any) -> None:
    """Each link covers one word, and must be found in the passage with this word, even if words repeat."""
    sections = []
    for number, text in enumerate(texts):
        word_spans, offset = [], 0
        for word in text.split(" "):
            if len(word) < 9 and data.draw(st.booleans()):
                word_spans.append((offset, offset + len(word)))
            offset += len(word) + 1
        sections.append(Section(f"S{number}", text.replace(" ", "\n", 1), tuple(word_spans)))
    article = Article("1", 1, "T", tuple(sections))
    passages = list(build_chunker(name, {"words": max_words}).open()(article))
    spans_by_passage = find_article_spans(article, passages)
    for passage, spans in zip(passages, spans_by_passage, strict=True):
        for span in spans:
            assert passage.text[span.start : span.end] in {"a", "bb", "la", "Dr.", "end."}
    linked = sorted(section.text[start:end] for section in sections for start, end in section.links)
    pairs = zip(passages, spans_by_passage, strict=True)
    assert sorted(p.text[s.start : s.end] for p, spans in pairs for s in spans) == linked


@pytest.fixture
def part(tmp_path: Path, page_xml: Any, export_xml: Any) -> tuple[Part, Siteinfo]:
    texts = ["One [[two]] in 1999.\n== Life ==\n[[Three|Four]].", "{{stub}}", "Plain.", "[[Five]] " * 200]
    pages = (page_xml(number, text) for number, text in enumerate(texts, start=1))
    (tmp_path / "dump.xml").write_bytes(export_xml(*pages))
    plan = plan_dump(str(tmp_path / "dump.xml"), workdir=tmp_path, stage=str, part_bytes=1 << 30)
    return plan.parts[0], plan.siteinfo


def chunk_with_spans(
    part: tuple[Part, Siteinfo], folder: Path, earlier: ReusableArticles | None = None, *, spans: bool = True
) -> tuple[PartFiles, int]:
    folder.mkdir()
    files = PartFiles(folder / "passages.parquet", {}, folder / "articles.parquet", folder / "spans.npy")
    recipe = ChunkRecipe(spans=spans)
    stats = chunk_part(*part, recipe, files.passages, files.articles, earlier, spans=files.spans)
    return files, stats.inherited


def read_span_texts(files: PartFiles) -> list[list[str]]:
    assert files.spans is not None
    file, passages = SpanFile(files.spans), list(PassageFile(files.passages).iter_passages())
    return [[passage.text[s.start : s.end] for s in file.get_spans(row)] for row, passage in enumerate(passages)]


def test_spans_do_not_change_the_passages(part: tuple[Part, Siteinfo], tmp_path: Path) -> None:
    with_spans, _ = chunk_with_spans(part, tmp_path / "with")
    plain, _ = chunk_with_spans(part, tmp_path / "without", spans=False)
    assert plain.spans is not None
    assert not plain.spans.exists()
    assert with_spans.passages.read_bytes() == plain.passages.read_bytes()
    span_texts = read_span_texts(with_spans)
    assert span_texts[:2] == [["two", "1999", "Four"], []]
    assert [word for texts in span_texts[2:] for word in texts] == ["Five"] * 200


def test_spans_are_reused_with_their_articles(part: tuple[Part, Siteinfo], tmp_path: Path) -> None:
    files, _ = chunk_with_spans(part, tmp_path / "first")
    assert files.articles is not None
    assert files.spans is not None
    with ReusableArticles([(files.passages, files.articles, files.spans)]) as earlier:
        reused, inherited = chunk_with_spans(part, tmp_path / "again", earlier)
    assert inherited == 3
    assert reused.spans is not None
    assert reused.spans.read_bytes() == files.spans.read_bytes()
    with ReusableArticles([(files.passages, files.articles)]) as without_spans:
        parsed, inherited = chunk_with_spans(part, tmp_path / "parsed", without_spans)
    assert inherited == 0, "without the span file, only dates could be found again"
    assert read_span_texts(parsed) == read_span_texts(files)


def test_spans_of_a_removed_page_are_removed(part: tuple[Part, Siteinfo], tmp_path: Path) -> None:
    files, _ = chunk_with_spans(part, tmp_path / "whole")
    (tmp_path / "redacted").mkdir()
    redacted, rows = redact_part(files, {"1"}, tmp_path / "redacted")
    assert read_span_texts(redacted) == read_span_texts(files)[1:]
    assert rows == len(read_span_texts(files)) - 1


def test_recipe_without_spans_is_unchanged() -> None:
    assert "spans" not in ChunkRecipe().to_json()
    assert "spans" not in ChunkRecipe().get_identity()
    assert ChunkRecipe(spans=True).to_json() == {**ChunkRecipe().to_json(), "spans": True}


def test_other_file_is_reported(tmp_path: Path) -> None:
    for name, data in (("text", b"no array"), ("short", b"\x93NUMPY")):
        (tmp_path / name).write_bytes(data)
    np.save(tmp_path / "wide.npy", np.zeros((3, 5), np.int32), allow_pickle=False)
    for name in ("text", "short", "wide.npy", "missing"):
        with pytest.raises(InputError, match=r"is not a span file .*: build or pull it again"):
            SpanFile(tmp_path / name)


def test_spans_are_read_by_row(tmp_path: Path) -> None:
    spans = [[SalientSpan(0, 3, LINK), SalientSpan(5, 9, DATE)], [], [SalientSpan(1, 2, LINK)]]
    writer = SpanWriter()
    for row_spans in spans:
        writer.write(row_spans)
    writer.save(tmp_path / "spans.npy")
    file = SpanFile(tmp_path / "spans.npy")
    assert [file.get_spans(row) for row in range(4)] == [*spans, []]
    assert file.get_range(1, 3) == spans[1:]
    assert file.rows.tolist() == [0, 2]
    SpanWriter().save(tmp_path / "none.npy")
    assert SpanFile(tmp_path / "none.npy").rows.tolist() == []


def test_section_without_links_is_unchanged() -> None:
    assert dataclasses.asdict(Section("h", "t"))["links"] == ()
