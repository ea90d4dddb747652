"""Salient spans: links and dates of articles, beside the passages that hold them."""

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


def links(wikitext: str) -> list[list[str]]:
    found = clean_wikitext(wikitext, SITE, anchors=True)
    assert [one.text for one in found] == [one.text for one in clean_wikitext(wikitext, SITE)]
    return [[one.text[start:end] for start, end in one.links] for one in found]


def test_links_are_found_in_the_clean_text() -> None:
    told = (
        "'''Ada''' met [[Charles Babbage|''Babbage'']] in [[London]] [[File:a.png|thumb|of [[Turin]]]] & [[:Paris]]s."
    )
    assert links(told) == [["Babbage", "London", "Paris"]]
    assert links("* [[One]] and [[Two]]\n* [[Three]]\n== [[Life]] ==\n[[Four]]") == [["One", "Two", "Three"], ["Four"]]
    assert links("a [[ b ]] c [[d|]] ([[e (f)|]])") == [["b", "d", "e"]]
    assert links("{{nowrap|[[Hidden]]}} [[de:Haus]] [[Category:X]] [[|]] plain") == [[]]


@given(
    st.lists(st.sampled_from(["[[", "]]", "|", "a b", " ", "\n", "''", "(", ")", ",", "{{lang|fr|", "}}", "x", "<b>"]))
)
def test_links_never_change_the_text(pieces: list[str]) -> None:
    for told in links("".join(pieces)):
        assert all(one and one == one.strip() for one in told)


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
def test_dates(text: str, dates: list[str]) -> None:
    assert [text[one.start : one.end] for one in find_dates(text)] == dates


def test_of_spans_that_overlap_the_longer_is_kept() -> None:
    text = "the 1939 World Fair of 4 May 1939"
    assert find_spans(text, [(4, 19), (23, 28)]) == [SalientSpan(4, 19, LINK), SalientSpan(23, 33, DATE)]


words = st.lists(st.sampled_from(["a", "bb", "la", "Dr.", "end.", "x" * 130, "漢字" * 20]), max_size=40).map(" ".join)
SETTINGS = [("words", 3), ("sections", 3), ("recursive", 4), ("sentences", 4)]


@pytest.mark.parametrize(("name", "most"), SETTINGS)
@given(texts=st.lists(words.filter(str.strip), min_size=1, max_size=3), data=st.data())
def test_spans_follow_their_words_through_every_chunker(name: str, most: int, texts: list[str], data: Any) -> None:
    """Links of single words: each is found in the passage that holds this word, whichever words are the same."""
    sections = []
    for number, text in enumerate(texts):
        own, at = [], 0
        for word in text.split(" "):
            if len(word) < 9 and data.draw(st.booleans()):
                own.append((at, at + len(word)))
            at += len(word) + 1
        sections.append(Section(f"S{number}", text.replace(" ", "\n", 1), tuple(own)))
    article = Article("1", 1, "T", tuple(sections))
    passages = list(build_chunker(name, {"words": most}).open()(article))
    found = find_article_spans(article, passages)
    for passage, spans in zip(passages, found, strict=True):
        for span in spans:
            assert passage.text[span.start : span.end] in {"a", "bb", "la", "Dr.", "end."}
    linked = sorted(section.text[start:end] for section in sections for start, end in section.links)
    assert sorted(p.text[s.start : s.end] for p, own in zip(passages, found, strict=True) for s in own) == linked


@pytest.fixture
def part(tmp_path: Path, page_xml: Any, export_xml: Any) -> tuple[Part, Siteinfo]:
    texts = ["One [[two]] in 1999.\n== Life ==\n[[Three|Four]].", "{{stub}}", "Plain.", "[[Five]] " * 200]
    (tmp_path / "dump.xml").write_bytes(export_xml(*(page_xml(at, text) for at, text in enumerate(texts, start=1))))
    plan = plan_dump(str(tmp_path / "dump.xml"), workdir=tmp_path, stage=str, part_bytes=1 << 30)
    return plan.parts[0], plan.siteinfo


def cut(
    part: tuple[Part, Siteinfo], folder: Path, earlier: ReusableArticles | None = None, *, spans: bool = True
) -> tuple[PartFiles, int]:
    folder.mkdir()
    files = PartFiles(folder / "passages.parquet", {}, folder / "articles.parquet", folder / "spans.npy")
    recipe = ChunkRecipe(spans=spans)
    facts = chunk_part(*part, recipe, files.passages, files.articles, earlier, spans=files.spans)
    return files, facts.inherited


def told(files: PartFiles) -> list[list[str]]:
    assert files.spans is not None
    file, passages = SpanFile(files.spans), list(PassageFile(files.passages).iter_passages())
    return [[passage.text[s.start : s.end] for s in file.get_spans(row)] for row, passage in enumerate(passages)]


def test_a_part_has_its_spans_beside_the_same_passages(part: tuple[Part, Siteinfo], tmp_path: Path) -> None:
    with_spans, _ = cut(part, tmp_path / "with")
    without, _ = cut(part, tmp_path / "without", spans=False)
    assert without.spans is not None
    assert not without.spans.exists()
    assert with_spans.passages.read_bytes() == without.passages.read_bytes()
    found = told(with_spans)
    assert found[:2] == [["two", "1999", "Four"], []]
    assert [word for own in found[2:] for word in own] == ["Five"] * 200


def test_spans_are_inherited_with_their_articles(part: tuple[Part, Siteinfo], tmp_path: Path) -> None:
    files, _ = cut(part, tmp_path / "first")
    assert files.articles is not None
    assert files.spans is not None
    with ReusableArticles([(files.passages, files.articles, files.spans)]) as earlier:
        again, inherited = cut(part, tmp_path / "again", earlier)
    assert inherited == 3
    assert again.spans is not None
    assert again.spans.read_bytes() == files.spans.read_bytes()
    with ReusableArticles([(files.passages, files.articles)]) as gone:
        parsed, inherited = cut(part, tmp_path / "parsed", gone)
    assert inherited == 0, "their file is gone: dates alone would be less"
    assert told(parsed) == told(files)


def test_a_page_that_is_taken_down_takes_its_spans_along(part: tuple[Part, Siteinfo], tmp_path: Path) -> None:
    files, _ = cut(part, tmp_path / "whole")
    (tmp_path / "redacted").mkdir()
    made, rows = redact_part(files, {"1"}, tmp_path / "redacted")
    assert told(made) == told(files)[1:]
    assert rows == len(told(files)) - 1


def test_recipes_without_spans_are_as_they_were() -> None:
    assert "spans" not in ChunkRecipe().to_json()
    assert "spans" not in ChunkRecipe().get_identity()
    assert ChunkRecipe(spans=True).to_json() == {**ChunkRecipe().to_json(), "spans": True}


def test_a_file_that_holds_no_spans_is_one_sentence(tmp_path: Path) -> None:
    for name, data in (("text", b"no array"), ("short", b"\x93NUMPY")):
        (tmp_path / name).write_bytes(data)
    np.save(tmp_path / "wide.npy", np.zeros((3, 5), np.int32), allow_pickle=False)
    for name in ("text", "short", "wide.npy", "missing"):
        with pytest.raises(InputError, match=r"is not a span file .*: build or pull it again"):
            SpanFile(tmp_path / name)


def test_spans_are_read_by_row(tmp_path: Path) -> None:
    spans = [[SalientSpan(0, 3, LINK), SalientSpan(5, 9, DATE)], [], [SalientSpan(1, 2, LINK)]]
    writer = SpanWriter()
    for own in spans:
        writer.write(own)
    writer.save(tmp_path / "spans.npy")
    file = SpanFile(tmp_path / "spans.npy")
    assert [file.get_spans(row) for row in range(4)] == [*spans, []]
    assert file.get_range(1, 3) == spans[1:]
    assert file.rows.tolist() == [0, 2]
    SpanWriter().save(tmp_path / "none.npy")
    assert SpanFile(tmp_path / "none.npy").rows.tolist() == []


def test_a_section_without_links_equals_one_of_before() -> None:
    assert dataclasses.asdict(Section("h", "t"))["links"] == ()
