"""A folder of documents is a dump: its files are parsed, split into sections, or dropped with a reason."""

import io
import os
import struct
import sys
from datetime import datetime
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import odfdo
import pypdfium2
import pytest

from flows.outcome import BuildOutcome
from rag_model.corpus.chunk import ChunkRecipe, chunk_part
from rag_model.corpus.dump_formats.document_files import DocumentFiles, DroppedFileError, _get_worker
from rag_model.corpus.dump_formats.dump_format import get_part_format
from rag_model.corpus.dump_formats.markup_files import HTML, MARKDOWN
from rag_model.corpus.dump_formats.office import OFFICE
from rag_model.corpus.dump_formats.pdf import PDF
from rag_model.corpus.dump_formats.pdf_tables import split_page
from rag_model.corpus.dump_formats.source_code import _GRAMMAR_BY_ENDING, SOURCE_CODE
from rag_model.corpus.passages import PassageFile
from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import Passage, Plan
from rag_model.errors import InputError, MissingExtraError, UsageError
from rag_model.snapshots.planning import plan_dry_run
from rag_model.snapshots.recipe import Recipe
from tests.fixtures.browser import open_page


def plan_folder(dump: Path | str, workdir: Path) -> Plan:
    workdir.mkdir(exist_ok=True)
    return plan_dump(str(dump), workdir=workdir, stage=str)


def list_ids(plan: Plan) -> list[str]:
    return sorted(str(item.page_id) for part in plan.parts for item in get_part_format(part).read(part))  # type: ignore[union-attr]


def list_passages(dump: Path | str, workdir: Path, **recipe: Any) -> list[Passage]:
    plan, passages = plan_folder(dump, workdir), list[Passage]()
    for part in plan.parts:
        chunk_part(part, plan.siteinfo, ChunkRecipe(**recipe), workdir / "passages.parquet")
        with PassageFile(workdir / "passages.parquet") as file:
            passages += file.iter_passages()
    return passages


GUIDE = """---
title: The guide
description: All about it.
lastmod: 2026-11-01
tags: [setup, 7]
lang: en
bomb: &a [x, x]
more: [*a, *a]
---
# The guide

A paragraph with `code`, a [link](https://example.org) and an ![image](a.png),
wrapped over *two* lines.

## Install

Run this:

```python
def f(x):

    return x
```

| name | value |
| ---- | ----- |
| `a`  | 1     |
| b    |       |

- first
  - nested
- second

  with more

## Empty
### Deep

<div>Some <b>HTML</b> &amp; text</div><!-- hidden -->

## Only a heading

Install
=======

The last.
"""


def test_markdown_is_split_into_sections() -> None:
    document = MARKDOWN.parse(GUIDE.replace("\n", "\r\n").encode("utf-8-sig"), "guide.md")
    assert document.revised == 1793491200
    assert document.metadata == {"language": "en", "categories": ["setup"]}
    assert document.sections == [
        ("The guide", "The guide\nAll about it."),
        ("The guide", "The guide\nA paragraph with code, a link and an image, wrapped over two lines."),
        (
            "The guide > Install",
            "The guide > Install\nRun this:\ndef f(x):\n    return x\n\n"
            "name | value\na | 1\nb |\n\n- first\n  - nested\n- second\n  with more",
        ),
        ("The guide > Empty > Deep", "The guide > Empty > Deep\n Some  HTML  & text"),
        ("The guide > Only a heading", "The guide > Only a heading"),
        ("The guide > Install", "The guide > Install\nThe last."),
    ]


@pytest.mark.parametrize("line_break", ["<br>", "<br/>", "<BR />"])
def test_line_break_of_markdown_separates_words(line_break: str) -> None:
    text = f"# One{line_break}two\n\nThree{line_break}four\n\n| a |\n| - |\n| five{line_break}six |\n\n- 7{line_break}8"
    assert MARKDOWN.parse(text.encode(), "a.md").sections == [
        ("One two", "One two\nThree\nfour\n\na\nfive six\n\n- 7\n  8")
    ]


def test_scripts_and_styles_of_markdown_are_left_out() -> None:
    text = "<script>\nlet a = 1;\n\nalert(a)\n</script>\n\nOne.\n\n<div>two<STYLE>p {color: red}</STYLE></div>\n"
    text += "\nThree <script>inline()</script>four.\n\n<style>\nb {}"
    assert MARKDOWN.parse(text.encode(), "a.md").sections == [("", "One.\n\n two\n\nThree four.")]


INVALID_FRONT_MATTER = {
    "deep": "---\ntitle: [" + "[" * 2_000 + "]" * 2_000 + "]\n---\n",
    "deep list": "---\n" + "- " * 2_000 + "\n---\n",
    "code": "---\ntitle: !!python/object/apply:os.system ['false']\n---\n",
    "YAML": "---\ntitle: {a: [b\n---\n",
    "TOML": "+++\ntitle = \n+++\n",
    "no table": "---\njust text\n---\n",
}


@pytest.mark.parametrize("front_matter", INVALID_FRONT_MATTER.values(), ids=INVALID_FRONT_MATTER)
def test_invalid_front_matter_is_ignored(front_matter: str) -> None:
    assert MARKDOWN.parse(f"{front_matter}Words.".encode(), "a.md").sections == [("", "Words.")]


def test_toml_front_matter_gives_a_title() -> None:
    document = MARKDOWN.parse(b'+++\ntitle = "Notes"\ndate = 2026-11-01\n+++\nWords.', "a.md")
    assert (document.sections, document.revised) == ([("Notes", "Notes\nWords.")], 1793491200)


def test_sections_tables_and_code_that_fit_are_not_split(tmp_path: Path) -> None:
    filler = "Some words of a paragraph that fill it up to the limit. " * 3
    table = "\n".join(["| a | b |", "| - | - |", *(f"| row {i} | value |" for i in range(5))])
    code = "```\nif a:\n\n    for b in c:\n        print(b)\n```"
    text = f"# One\n\n{filler}\n\n{table}\n\n{filler}\n\n{code}\n\n{filler}\n\n# Two\n\nShort.\n"
    (tmp_path / "a.md").write_text(text)
    texts = [passage.text for passage in list_passages(tmp_path / "a.md", tmp_path / "work", words=45)]
    assert max(len(text.split()) for text in texts) <= 45
    assert (
        sum("row 0 | value\nrow 1 | value\nrow 2 | value\nrow 3 | value\nrow 4 | value" in text for text in texts) == 1
    )
    assert sum("if a:\n    for b in c:\n        print(b)" in text for text in texts) == 1
    assert texts[-1] == "Two\nShort."


ROWS = [(f"name {i}", str(i), "a value" if i % 3 else "") for i in range(80)]
LONG_TABLES = {
    "a.md": "# T\n\nThe table:\n\n| Name | Number | Text |\n| --- | --- | --- |\n"
    + "".join(f"| {' | '.join(row)} |\n" for row in ROWS),
    "a.html": "<h1>T</h1><p>The table:</p><table><caption>Names</caption><thead><tr><th>Name<th>Number<th>Text</thead>"
    + "".join(f"<tr><td>{'<td>'.join(row)}</tr>" for row in ROWS)
    + "</table>",
}


@pytest.mark.parametrize("name", LONG_TABLES)
def test_each_passage_of_a_long_table_has_the_column_names(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(LONG_TABLES[name])
    passages = list_passages(tmp_path / name, tmp_path / "work")
    assert len(passages) > 3
    head = ["Name | Number | Text"] if name == "a.md" else ["Names", "Name | Number | Text"]
    rows: list[str] = []
    for passage in passages:
        assert len(passage.text.split()) <= 120
        lines = passage.text[passage.text.index(head[0]) :].split("\n")
        assert lines[: len(head)] == head
        rows += lines[len(head) :]
    assert rows == [" | ".join(row).rstrip() for row in ROWS]


def test_tags_of_front_matter_are_categories_of_passages(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("---\ntags: [setup]\naliases: [First steps]\n---\n# A\n\n    x = 1\n    y = 2\n")
    (passage,) = list_passages(tmp_path / "a.md", tmp_path / "work", metadata=("categories", "aliases"))
    assert passage.text == "First steps.\n\nA\nx = 1\ny = 2"
    assert passage.categories == "setup"


def test_edit_changes_only_the_passages_of_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    (folder / "deep").mkdir(parents=True)
    for i in range(5):
        (folder / f"deep/{i}.md").write_text(f"# Title {i}\n\nText {i}.\n\n## More\n\n" + "Words. " * 200)
    first = {passage.id: passage for passage in list_passages(folder, tmp_path / "work")}
    assert "deep/3.md:Title_3_>_More.0" in first
    assert {passage.title for passage in first.values()} == {f"deep/{i}.md" for i in range(5)}
    (folder / "deep/3.md").write_text("# Title 3\n\nAnother text.")
    (folder / "new.md").write_text("New.")
    os.utime(folder / "deep/1.md", (1, 1))
    edited = {passage.id: passage for passage in list_passages(folder, tmp_path / "work")}
    assert {key for key in edited if edited[key] != first.get(key)} == {"deep/3.md:Title_3.0", "new.md:0"}
    assert {key.partition(":")[0] for key in first if key not in edited} == {"deep/3.md"}


def test_document_ids_are_relative_to_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs/a").mkdir(parents=True)
    (tmp_path / "docs/a/b.md").write_text("B")
    assert list_ids(plan_folder(f"{tmp_path}/docs/**/*.md", tmp_path / "work")) == ["a/b.md"]
    assert list_ids(plan_folder(tmp_path / "docs/a/b.md", tmp_path / "work")) == ["b.md"]
    monkeypatch.chdir(tmp_path)
    assert list_ids(plan_folder("docs/", tmp_path / "work")) == ["a/b.md"]


def test_hostile_files_of_a_folder_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    (folder / "sub dir").mkdir(parents=True)
    (folder / "sub dir/a\nb 100%.md").write_text("Words.")
    (folder / ".git").mkdir()
    (folder / ".git/config.md").write_text("hidden")
    (folder / "loop").symlink_to(folder)
    (tmp_path / "secret.md").write_text("secret")
    (folder / "secret.md").symlink_to(tmp_path / "secret.md")
    (folder / "self.md").symlink_to(folder / "self.md")
    (folder / "binary.md").write_bytes(b"\x7fELF\0\1")
    (folder / "latin.md").write_bytes("Zürich".encode("latin-1"))
    (folder / "utf16.md").write_text("Words.", encoding="utf-16")
    (folder / "empty.md").touch()
    (folder / "comment.md").write_text("<!-- nothing -->")
    with (folder / "large.md").open("wb") as file:
        file.truncate(1 << 30)
    (folder / "a.bin").touch()
    os.mkfifo(folder / "pipe.md")
    (folder / "a::b.md").write_text("a name that fsspec would read as two URLs")
    (folder / os.fsdecode(b"\xff.md")).write_text("Words.")
    plan = plan_folder(folder, tmp_path / "work")
    assert list_ids(plan) == ["sub%20dir/a%0Ab%20100%25.md"]
    assert plan.dropped == {
        "bad_name": 2,
        "binary": 2,
        "hidden": 1,
        "link": 3,
        "no_text": 2,
        "not_utf8": 1,
        "too_large": 1,
        "unknown_format": 1,
        "unreadable": 1,
    }
    assert Plan.from_json(plan.to_json()) == plan
    assert BuildOutcome.from_plan(*plan_dry_run(str(folder), Recipe()), "main").counts["dropped"] == plan.dropped
    (passage,) = list_passages(folder, tmp_path / "work")
    assert passage.title == "sub dir/a b 100%.md"


def test_folder_without_documents_is_reported(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    with pytest.raises(InputError, match=r"docs has no documents \(it is empty\): give folders of Markdown"):
        plan_folder(tmp_path / "docs", tmp_path / "work")
    (tmp_path / "docs/a.xml").write_text("<mediawiki/>")
    (tmp_path / "docs/b.md").write_text("\0")
    with pytest.raises(InputError, match=r"has no documents \(binary: 1, of an unknown format: 1\)"):
        plan_folder(tmp_path / "docs", tmp_path / "work")
    (tmp_path / "docs/b.md").write_text("Words.")
    with (tmp_path / "docs/large.md").open("wb") as file:
        file.truncate(1 << 30)
    assert plan_folder(f"{tmp_path}/docs/*.md", tmp_path / "work").dropped == {"too_large": 1}
    with pytest.raises(UsageError, match="files of several formats"):
        plan_folder(f"{tmp_path}/docs/*", tmp_path / "work")


PAGE = """<!DOCTYPE html><html><head><title>The  guide</title><style>p {}</style></head><body>
<nav><ul><li>Home</ul></nav><header>Top</header>
<main><p>A paragraph with <b>bold</b> and <a href="/">a
link</a>.</p>
<h2 id="x">Install <span hidden>#</span></h2>
<p>Run this:</p>
<pre><code><span>def</span> f(x):

    return x &lt; 1
</code></pre>
<table><tr><th>name</th><th>value</th></tr><tr><td>a <i>b</i></td><td>1<br>2<p>3<b>4</b></p>5</td></tr></table>
<ul><li><p>first</p><p>more</p><ol><li>nested</li></ol></li><li>second</li></ul>
<div>One<br>two<div>three</div>four</div>
<table><tr><td><h3>Deep</h3><p>In a layout.</p></td></tr></table>
<script>alert("x")</script><form><label>Search <input></label><select><option>All</select><button>Go</button></form>
</main><footer>Bottom</footer></body></html>"""


def test_html_is_split_into_sections() -> None:
    assert HTML.parse(PAGE.encode(), "a.html").sections == [
        ("The guide", "The guide\nA paragraph with bold and a link."),
        (
            "The guide > Install",
            "The guide > Install\nRun this:\ndef f(x):\n    return x < 1\n\nname | value\na b | 1 2 34 5\n\n"
            "- first\n  more\n  - nested\n- second\n\nOne\ntwo\n\nthree\n\nfour",
        ),
        ("The guide > Install > Deep", "The guide > Install > Deep\nIn a layout."),
    ]


def test_text_of_a_form_is_read_without_its_controls() -> None:
    page = """<body><form id="aspnetForm"><header><a href="/">Home</a></header><h1>Title</h1><p>Words.</p>
    <fieldset><legend>Options</legend><label>Name</label><textarea>typed</textarea></fieldset>
    <table><tr><td>cell</td><td><label>Size</label><select><option>10</select></td></tr></table></form>"""
    assert HTML.parse(page.encode(), "a.aspx.html").sections == [("Title", "Title\nWords.\n\ncell |")]


@pytest.mark.parametrize("element", ["article", "main"])
def test_header_of_an_article_is_read(element: str) -> None:
    page = f"<header>Site</header><{element}><header><h1>Title</h1></header><p>Words.</p></{element}>"
    assert HTML.parse(page.encode(), "a.html").sections == [("Title", "Title\nWords.")]
    page = f"{page}<article><header><h2>Second</h2></header><p>More.</p></article>"
    expected = [("Title", "Title\nWords.")] + [("Title > Second", "Title > Second\nMore.")] * (element == "article")
    assert HTML.parse(page.encode(), "a.html").sections == expected


def test_html_in_a_declared_encoding_is_read() -> None:
    page = "<meta charset='{}'><p>Zürich — Genève"
    for encoding in ("utf-8", "windows-1252"):
        assert HTML.parse(page.format(encoding).encode(encoding), "a.htm").sections == [("", "Zürich — Genève")]
    for declared in ("", "zlib", "no-such-code", "utf-16"):
        with pytest.raises(DroppedFileError, match="not_utf8"):
            HTML.parse(page.format(declared).encode("windows-1252"), "a.htm")


@pytest.mark.parametrize(
    ("markup", "text"),
    [("<ul><ul><li>a</ul></ul>", "  - a"), ("<ul><div><li>a</div><li>b</ul>", "- a\n- b"), ("<ol><p>a</ol>", "a")],
)
def test_html_list_may_start_with_a_block(markup: str, text: str) -> None:
    sections = HTML.parse(f"<p>Before</p>{markup}<p>After</p>".encode(), "a.html").sections
    assert sections == [("", f"Before\n\n{text}\n\nAfter")]


@pytest.mark.parametrize(
    ("declared", "encoding", "text"),
    [
        ("iso-8859-1", "cp1252", "Zürich – “quoted” …"),
        ("latin1", "cp1252", "5 €"),
        ("ascii", "cp1252", "Genève"),
        ("iso-8859-9", "cp1254", "İstanbul – Iğdır"),
        ("gb2312", "gb18030", "朱镕基"),
        ("x-gbk", "gb18030", "5 € 㐀"),
        ("Shift_JIS", "cp932", "①髙橋"),
        ("euc-kr", "cp949", "똠방각하"),
        ("tis-620", "cp874", "ไทย – “ก”"),
        ("iso-8859-8-i", "iso8859-8", "שלום"),
    ],
)
def test_html_is_decoded_as_in_a_browser(declared: str, encoding: str, text: str) -> None:
    for head in (f'<meta charset="{declared}">', f'<?xml version="1.0" encoding="{declared}"?>'):
        assert HTML.parse(f"{head}<p>{text}".encode(encoding), "a.xhtml").sections == [("", text)]


@pytest.mark.parametrize("mark", ["utf-16-le", "utf-16-be"])
def test_html_in_utf_16_with_a_byte_order_mark_is_read(mark: str) -> None:
    assert HTML.parse("\ufeff<p>Zürich".encode(mark), "a.html").sections == [("", "Zürich")]


def test_only_a_meta_element_declares_an_encoding() -> None:
    head = b'<!-- <meta charset="utf-8"> --><script src="a.js" charset="utf-8"></script><meta charset=windows-1251>'
    assert HTML.parse(head + "<p>Москва".encode("cp1251"), "a.html").sections == [("", "Москва")]
    with pytest.raises(DroppedFileError):
        HTML.parse(b"<meta charset=unicode_escape><p>\\u0041\xff", "a.html")


def test_undefined_bytes_of_an_encoding_are_skipped() -> None:
    assert HTML.parse(b"<meta charset=latin1><p>a\x81b \x93c\x94", "a.html").sections == [("", "ab “c”")]


HOSTILE_PAGES = {
    "deep": "<div>" * 20_000 + "Words.",
    "attributes": "<p " + "a=1 " * 20_000 + ">Words.",
    "nested tables": "<table><tr><td>" * 5_000 + "Words.",
    "nested lists": "<ul><li>" * 5_000 + "x",
    "open comment": "<!-- ",
    "only ends": "</p></li></ul>",
}


@pytest.mark.parametrize("page", HOSTILE_PAGES.values(), ids=HOSTILE_PAGES)
def test_hostile_html_does_not_stop_a_build(page: str, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(page)
    (tmp_path / "b.html").write_text("<p>Words.")
    plan = plan_folder(f"{tmp_path}/*.html", tmp_path / "work")
    assert "b.html" in list_ids(plan)
    assert ("a.html" in list_ids(plan)) != bool(plan.dropped)


PYTHON = '''"""A module."""

import os

LIMIT = 3


# The largest.
@decorated
def first(x):
    """Return it."""

    def inner():
        return x

    return inner


class Outer(Base):
    """A class."""

    size = 1

    def method(self):
        a = 1
        return a

    class Inner:
        def deep(self):
            b = 2
            return b


if True:
    def late():
        return 1

print(first)
'''
SOURCES = {
    "a.sh": ("greet() {\n  echo hi\n}\n", ["greet"]),
    "a.c": ("#include <a.h>\n\nstatic int *add(int a)\n{\n  return a;\n}\n", ["", "add"]),
    "a.cs": ("namespace N {\n  class A {\n    void F() {\n      G();\n    }\n  }\n}\n", ["N > A", "N > A > F"]),
    "a.hpp": ("class A {\n  int f() {\n    return 1;\n  }\n};\n", ["A > f"]),
    "a.go": ("package a\n\nfunc (a T) F() int {\n\treturn 1\n}\n", ["", "F"]),
    "A.java": ("class A {\n  A() {\n    x();\n  }\n\n  int f() {\n    return 1;\n  }\n}\n", ["A > A", "A > f"]),
    "a.mjs": ("export const f = (x) => {\n  return x;\n};\n\nclass A {\n  g() {\n    f();\n  }\n}\n", ["f", "A > g"]),
    "a.php": ("<?php\nclass A {\n  function f() {\n    g();\n  }\n}\n", ["A", "A > f"]),
    "a.py": (PYTHON, ["", "first", "Outer", "Outer > method", "Outer > Inner > deep", "late", ""]),
    "a.rb": ("module M\n  class A\n    def f\n      1\n    end\n  end\nend\n", ["M > A", "M > A > f"]),
    "a.rs": ("impl A {\n    fn f() {\n        g();\n    }\n}\n", ["A > f"]),
    "a.ts": ("interface I {\n  a: 1;\n}\nfunction f(): I {\n  g();\n}\n", ["I", "f"]),
    "a.tsx": ("function F() {\n  return <b>x</b>;\n}\n", ["F"]),
}


@pytest.mark.parametrize("name", SOURCES)
def test_source_code_is_split_at_functions_and_classes(name: str) -> None:
    source, headings = SOURCES[name]
    sections = SOURCE_CODE.parse(source.encode(), name).sections
    assert [heading for heading, _ in sections] == headings
    lines = [line for _, text in sections for line in text.split("\n") if line.strip()]
    assert lines == [line for line in source.split("\n") if line.strip()]


def test_every_grammar_has_a_source_in_this_test() -> None:
    grammars = {grammar for ending, grammar in _GRAMMAR_BY_ENDING.items() if f"a{ending}" in {*map(str.lower, SOURCES)}}
    assert grammars == {*_GRAMMAR_BY_ENDING.values()}


def test_definition_keeps_its_comment_and_decorator(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(PYTHON)
    passages = list_passages(tmp_path / "a.py", tmp_path / "work", words=20)
    texts = [passage.text for passage in passages]
    assert any(text.endswith("size = 1\n\n    def method(self):\n        a = 1\n        return a") for text in texts)
    assert any(text.startswith("    class Inner:\n        def deep(self):\n            b = 2") for text in texts)
    assert any(text.startswith("# The largest.\n@decorated\ndef first(x):") for text in texts)
    (method,) = [
        passage
        for passage in list_passages(tmp_path / "a.py", tmp_path / "work", words=7)
        if "> method" in passage.section
    ]
    assert method.text == "def method(self):\n    a = 1\n    return a", "the indentation of the class is removed"
    assert all(passage.n_words <= 20 for passage in passages)


def test_minified_code_is_dropped() -> None:
    with pytest.raises(DroppedFileError, match="minified"):
        SOURCE_CODE.parse(b"a();" * 5_000, "a.min.js")


def build_pdf(pages: list[list[str]], extra: str = "", drawing: str = "", rotation: int = 0) -> bytes:
    """Return a PDF with the given lines on its pages; all pages except the last are in the outline.

    Each page is rotated, and has the drawing at twice its size.
    """
    outline = range(len(pages) - 1)
    entries = [
        f"{100 + i} 0 obj <</Title (Chapter {i + 1}) /Parent 99 0 R /Dest [{10 + i} 0 R /Fit] "
        + (f"/Next {101 + i} 0 R" if i + 1 in outline else "")
        + ">> endobj"
        for i in outline
    ]
    texts = [" ".join(f"({line}) Tj 0 -20 Td" for line in lines) for lines in pages]
    streams = [f"q 1 0 0 1 50 700 cm /X Do Q BT /F 12 Tf 50 700 Td {text} ET" for text in texts]
    kids = " ".join(f"{10 + i} 0 R" for i in range(len(pages)))
    objects = [
        "1 0 obj <</Type /Catalog /Pages 2 0 R /Outlines 99 0 R>> endobj",
        f"2 0 obj <</Type /Pages /Kids [{kids}] /Count {len(pages)}>> endobj",
        "3 0 obj <</Type /Font /Subtype /Type1 /BaseFont /Helvetica>> endobj",
        "4 0 obj <</ModDate (D:20261101120000Z)>> endobj",
        "5 0 obj <</Type /XObject /Subtype /Form /BBox [-999 -999 999 999] /Matrix [2 0 0 2 0 0] "
        f"/Length {len(drawing)}>> stream\n{drawing}\nendstream endobj",
        f"99 0 obj <</First 100 0 R /Last {98 + len(pages)} 0 R>> endobj",
        *entries,
        *(
            f"{10 + i} 0 obj <</Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] /Contents {50 + i} 0 R "
            f"/Rotate {rotation} /Resources <</Font <</F 3 0 R>> /XObject <</X 5 0 R>>>>>> endobj\n"
            f"{50 + i} 0 obj <</Length {len(stream)}>> "
            f"stream\n{stream}\nendstream endobj"
            for i, stream in enumerate(streams)
        ),
    ]
    return ("%PDF-1.7\n" + "\n".join(objects) + f"\ntrailer <</Root 1 0 R /Info 4 0 R {extra}>>\n%%EOF").encode()


def test_pdf_has_a_section_per_page_with_its_chapter() -> None:
    document = PDF.parse(
        build_pdf([["First line", "second line."], ["Contents . . . . . . . 7"], [], ["Last."]]), "a.pdf"
    )
    assert document.sections == [
        ("Chapter 1 (page 1)", "First line second line."),
        ("Chapter 2 (page 2)", "Contents 7"),
        ("Chapter 3 (page 4)", "Last."),
    ]
    assert document.revised == 1793534400


PRINTED = """<style>table {border-collapse: collapse} td, th {padding: 4px 8px}
.ruled td, .ruled th {border: 1px solid} .striped tr:nth-child(odd) > * {background: #ccc}
.inner tr + tr td, .inner tr + tr th {border-top: 1px dotted} .inner td {border-left: 1px dotted}</style>
<p>Ports and cities.<table class=ruled style="width: 16em">
<tr><th>Region<th>City<th>Remark<tr><td rowspan=2>Europe<td>Berlin<td>A remark of several lines.
<tr><td><u>Paris</u><td><tr><td colspan=2>Somewhere else<td>None.</table>
<p>A striped table:<table class=striped><tr><th>Port<th>Use<tr><td>5432<td>the catalog<tr><td>80
<td>a <b>web</b> page \U0001d518
</table><p>Inner lines.<table class=inner><tr><th>k<td>1<tr><th>m<td>2</table>
<div style="border: 3px solid; padding: 9px"><h1 style="background: #ccc">A slide</h1>Its <u>text</u>.</div>
<style>div p {border: 1px solid}</style><div style="display: flex; gap: 3em"><p>One box. <p>Two boxes.</div>
<table class=ruled style="transform: rotate(90deg); width: 7em; margin: 3em 0">
<tr><td>Gamma<td>Delta<tr><td>Kappa<td>Lambda</table>
<svg height=80><path d="M0 0V60H90V0z" fill=none stroke=#000 />
<path d="M9 60V9H30V60zM30 60V30H50V60z" /><text y=75>Bars"""


def test_ruled_tables_of_a_printed_page_are_blocks_and_boxes_are_text() -> None:
    with open_page() as page:
        page.set_content(PRINTED)
        ((_, text),) = PDF.parse(page.pdf(), "a.pdf").sections
    assert text.split("\n\n") == [
        "Ports and cities.",
        "Region | City | Remark\nEurope | Berlin | A remark of several lines.\n | Paris\nSomewhere else |  | None.",
        "A striped table:\nPort | Use\n5432 | the catalog\n80 | a web page \U0001d518",
        "Inner lines.",
        "k | 1\nm | 2",
        "A slide\nIts text.\nOne box. Two boxes.\nBars\nGamma Delta\nKappa Lambda",
    ]


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_lines_of_a_form_between_texts_are_a_table(rotation: int) -> None:
    texts = ["before", "a) Tj 80 0 Td (b", ") Tj -80 0 Td (c) Tj 80 0 Td (d", ") Tj -80 0 Td (After"]
    lines = (
        "0 -1 m 0 -21 l S 30 -1 m 30 -21 l S 70 -1 m 70 -21 l S -5 -2 80 1 re -5 -11 80 1 re f 0 -20.5 m 70 -20.5 l S"
    )
    expected = {0: "a | b\nc | d", 180: "d | c\nb | a", 90: "c | a\nd | b", 270: "b | d\na | c"}[rotation]
    ((_, text), _) = PDF.parse(build_pdf([texts, ["b"]], drawing=lines, rotation=rotation), "a.pdf").sections
    assert sorted(text.split("\n\n")) == sorted(["before", expected, "After"])


def test_rows_without_a_line_between_them_are_separated() -> None:
    first_row, *rows = [["name", "use"], ["postgres", "catalog"], ["redis", "cache"]]
    texts = [") Tj 80 0 Td (".join(first_row), *(f") Tj -80 0 Td ({') Tj 80 0 Td ('.join(row)}" for row in rows)]
    lines = " ".join(f"-5 {y} m 80 {y} l S" for y in (10, -2, -23)) + " "
    lines += " ".join(f"{x} 10 m {x} -23 l S" for x in (-5, 35, 80))
    ((_, text), _) = PDF.parse(build_pdf([texts, ["b"]], drawing=lines), "a.pdf").sections
    assert text == "name | use\npostgres | catalog\nredis | cache"


def test_pages_after_very_many_objects_have_no_tables() -> None:
    texts = ["a) Tj 80 0 Td (b", ") Tj -80 0 Td (c) Tj 80 0 Td (d"]
    lines = "-5 8 80 -28 re 30 8 m 30 -20 l S -5 -4 m 75 -4 l S"
    budget = iter(range(60))  # a page needs 34
    with pypdfium2.PdfDocument(build_pdf([texts] * 3, drawing=lines)) as document:
        pages = [[*split_page(pypdfium2.raw, page, page.get_textpage(), budget)] for page in document]
    assert [page[0] for page in pages] == [[["a", "b"], ["c", "d"]], "a\r\nb\r\ncd", "a\r\nb\r\ncd"]


def test_page_with_too_many_paths_has_no_tables() -> None:
    lines = "0 0 m 1 1 l S " * 100_001
    ((_, text),) = PDF.parse(build_pdf([["Some text", "of a page."], []], drawing=lines), "a.pdf").sections
    assert text == "Some text of a page."


def test_unreadable_pdf_is_dropped() -> None:
    key = "<" + "00" * 32 + ">"
    encrypt = f"/Encrypt <</Filter /Standard /V 1 /R 2 /O {key} /U {key} /P -1>> /ID [<00> <00>]"
    for data, reason in [
        (build_pdf([["a"], ["b"]], encrypt), "encrypted"),
        (build_pdf([["a"], ["b"]])[:60], "damaged"),
        (b"not a PDF", "damaged"),
    ]:
        with pytest.raises(DroppedFileError, match=reason):
            PDF.parse(data, "a.pdf")
    assert PDF.parse(build_pdf([[], []]), "a.pdf").sections == []


def test_next_pdf_is_read_after_a_crash_of_the_parser() -> None:
    data = build_pdf([["Words."], []])
    assert PDF.parse(data, "a.pdf").sections
    process = _get_worker(PDF.module)._process
    assert process is not None
    process.kill()
    with pytest.raises(DroppedFileError, match="damaged"):
        PDF.parse(data, "a.pdf")
    assert PDF.parse(data, "a.pdf").sections


WORD_NAMESPACE = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
WORD_DOCUMENT = f"""<w:document xmlns:w="{WORD_NAMESPACE}"><w:body>{{}}</w:body>
</w:document>"""
WORD_TYPE = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
RELATIONS = "http://schemas.openxmlformats.org/package/2006/relationships"


def build_docx(
    *paragraphs: str, prolog: str = "", encoding: str = "utf-8", styles: str = "", folder: str = "word"
) -> bytes:
    """Return a Word file; a paragraph that starts with `#` is a heading, one with `|` a row of a table."""
    body = ""
    for text in paragraphs:
        style = '<w:pPr><w:pStyle w:val="Heading1"/></w:pPr>' if text.startswith("#") else ""
        cells = [f"<w:p>{style}<w:r><w:t>{cell.strip('# ')}</w:t></w:r></w:p>" for cell in text.strip("|").split("|")]
        row = "".join(f"<w:tc>{cell}</w:tc>" for cell in cells)
        body += f"<w:tbl><w:tr>{row}</w:tr></w:tbl>" if text.startswith("|") else cells[0]
    files = {
        "[Content_Types].xml": '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
        f'<Override PartName="/{folder}/document.xml" ContentType="{WORD_TYPE}"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{RELATIONS}"><Relationship Id="r1" Target="{folder}/document.xml" '
        'Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"/></Relationships>',
        f"{folder}/document.xml": (prolog + WORD_DOCUMENT.format(body)).encode(encoding),
        f"{folder}/styles.xml": f'<w:styles xmlns:w="{WORD_NAMESPACE}">{styles}</w:styles>',
        "docProps/core.xml": '<p><dcterms:modified xsi:type="a">2026-11-01T12:00:00Z</dcterms:modified></p>',
    }
    file = io.BytesIO()
    with ZipFile(file, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return file.getvalue()


def test_word_file_is_split_at_headings() -> None:
    document = OFFICE.parse(build_docx("Before.", "# Rivers", "Long ones.", "|Nile|6650", "|"), "a.DOCX")
    assert document.sections == [("", "Before."), ("Rivers", "Rivers\nLong ones.\n\nNile | 6650")]
    assert document.revised == 1793534400


def test_hidden_and_deleted_text_of_a_word_file_is_omitted() -> None:
    runs = (
        "<w:r><w:rPr><w:vanish/><w:vanish/></w:rPr><w:t>Hidden. </w:t></w:r>"
        "<w:del><w:r><w:delText>Deleted. </w:delText></w:r></w:del>"
        '<w:r><w:rPr><w:vanish w:val="0"/></w:rPr><w:t>Shown. </w:t></w:r>'
        "<w:ins><w:r><w:t>Inserted.</w:t></w:r></w:ins>"
    )
    document = OFFICE.parse(build_docx(f"Text.</w:t></w:r></w:p><w:p>{runs}<w:r><w:t>"), "a.docx")
    assert document.sections == [("", "Text.\n\nShown. Inserted.")]


def test_text_hidden_by_a_style_of_a_word_file_is_omitted() -> None:
    names, hides, shows = ("Note", "Aside", "Reply", "Loop"), "<w:vanish/>", '<w:vanish w:val="false"/>'
    styles = "".join(
        f'<w:style w:type="character" w:styleId="{name}"><w:basedOn w:val="{base}"/><w:rPr>{vanish}</w:rPr></w:style>'
        for name, base, vanish in zip(names, ("", "Note", "Note", "Loop"), (hides, "", shows, ""), strict=True)
    )
    runs = "".join(
        f'<w:r><w:rPr><w:rStyle w:val="{style}"/>{vanish}</w:rPr><w:t>{style} </w:t></w:r>'
        for style, vanish in [*((name, "") for name in names), ("Note", "<w:vanish w:val='0'/>")]
    )
    hidden = '<w:p><w:pPr><w:pStyle w:val="Aside"/></w:pPr><w:r><w:t>Hidden.</w:t></w:r></w:p>'
    file = build_docx(f"Text.</w:t></w:r></w:p>{hidden}<w:p>{runs}<w:r><w:t>", styles=styles)
    assert OFFICE.parse(file, "a.docx").sections == [("", "Text.\n\nReply Loop Note")]


@pytest.mark.parametrize("unusual", [{"encoding": "utf-16"}, {"folder": "text"}])
def test_hidden_text_of_an_unusual_word_file_is_omitted(unusual: dict[str, str]) -> None:
    hidden_run = "<w:r><w:rPr><w:vanish/></w:rPr><w:t>Hidden.</w:t></w:r>"
    file = build_docx(f"Text.</w:t></w:r>{hidden_run}<w:r><w:t>", **unusual)
    assert OFFICE.parse(file, "a.docx").sections == [("", "Text.")]


def test_workbook_has_a_table_per_visible_sheet() -> None:
    import openpyxl  # noqa: PLC0415 - importing it takes 0.2 s

    workbook = openpyxl.Workbook()
    rivers, hidden = workbook.active, workbook.create_sheet("Hidden")
    workbook.create_sheet("Empty")
    rivers.title, hidden.sheet_state = "Rivers", "hidden"
    hidden.append(["secret"])
    rows = [
        ["The longest"],
        ["River", "Length", "Since"],
        [],
        ["Nile", 6650.0, datetime(2026, 1, 2)],
        [None, 0.1 + 0.2],
    ]
    for row in rows:
        rivers.append(row)
    workbook.save(file := io.BytesIO())
    assert OFFICE.parse(file.getvalue(), "a.xlsx").sections == [
        ("Rivers", "Rivers\nThe longest\nRiver | Length | Since\nNile | 6650 | 2026-01-02\n | 0.3")
    ]


def test_presentation_has_a_section_per_slide() -> None:
    import pptx  # noqa: PLC0415 - importing it takes 0.1 s

    presentation = pptx.Presentation()
    slide = presentation.slides.add_slide(presentation.slide_layouts[1])
    slide.shapes.title.text, slide.placeholders[1].text = "Plan", "First\nSecond"
    table = slide.shapes.add_table(1, 2, 0, 0, 9, 9).table
    table.cell(0, 0).text, table.cell(0, 1).text = "a", "b"
    slide.shapes.add_group_shape().shapes.add_textbox(0, 0, 1, 1).text_frame.text = "In a group"
    slide.notes_slide.notes_text_frame.text = "A note."
    presentation.slides.add_slide(presentation.slide_layouts[6]).shapes.add_textbox(0, 0, 1, 1).text = "Untitled"
    presentation.save(file := io.BytesIO())
    assert OFFICE.parse(file.getvalue(), "a.pptx").sections == [
        ("Plan (slide 1)", "Plan (slide 1)\nFirst\nSecond\n\na | b\n\nIn a group\n\nA note."),
        ("slide 2", "slide 2\nUntitled"),
    ]


def test_open_document_is_split_at_headings() -> None:
    document = odfdo.Document("text")
    document.body.clear()
    table = odfdo.Table("T")
    table.set_values([["a", "b"], ["1", "2"]])
    for block in (odfdo.Header(1, "Intro"), odfdo.Paragraph("Words."), odfdo.Header(2, "Deep"), table):
        document.body.append(block)
    document.save(file := io.BytesIO())
    assert OFFICE.parse(file.getvalue(), "a.odt").sections == [
        ("Intro", "Intro\nWords."),
        ("Intro > Deep", "Intro > Deep\na | b\n1 | 2"),
    ]


ENTITIES = "".join(f"<!ENTITY e{i} '{f'&e{i - 1};' * 10 if i else 'words' * 10}'>" for i in range(10))


def declare_size(data: bytes, size: int) -> bytes:
    """Return an archive whose list of contents declares this size of its first file."""
    start = data.index(b"PK\x01\x02")
    return data[: start + 24] + struct.pack("<I", size) + data[start + 28 :]


def test_hostile_office_file_is_dropped() -> None:
    plain = build_docx("Words.")
    for data, reason in [
        (b"not an archive", "damaged"),
        (plain[: len(plain) // 2], "damaged"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "encrypted"),
        (declare_size(plain, 1 << 30), "too_large"),
        (build_docx("&e9;", prolog=f"<!DOCTYPE d [{ENTITIES}]>"), "damaged"),
    ]:
        with pytest.raises(DroppedFileError, match=reason):
            OFFICE.parse(data, "a.docx")
    for name in ("a.odt", "a.pptx", "a.xlsx"):
        with pytest.raises(DroppedFileError, match="damaged"):
            OFFICE.parse(plain, name)


def test_folder_with_several_formats(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.pdf").write_bytes(build_pdf([["Text of a page."], []]))
    (tmp_path / "docs/b.PY").write_text("x = 1")
    (tmp_path / "docs/c.md").write_text("Words.")
    (tmp_path / "docs/d.pdf").write_bytes(b"%PDF-")
    plan = plan_folder(tmp_path / "docs", tmp_path / "work")
    assert (list_ids(plan), plan.dropped) == (["a.pdf", "b.PY", "c.md"], {"damaged": 1})
    assert list_ids(plan_folder(f"{tmp_path}/docs/*", tmp_path / "work")) == ["a.pdf", "b.PY", "c.md"]


LIBRARIES = [
    (MARKDOWN, "markdown_it", "markdown"),
    (SOURCE_CODE, "tree_sitter_python", "code"),
    (PDF, "pypdfium2", "pdf"),
    (OFFICE, "mammoth", "office"),
]


@pytest.mark.parametrize(("dump_format", "module", "extra"), LIBRARIES)
def test_missing_library_is_reported(
    dump_format: DocumentFiles, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"bookwheel\[{extra}\]"):
        dump_format.parse(b"Words.", "a.py" if dump_format is SOURCE_CODE else f"a{min(dump_format.endings)}")


def test_single_damaged_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"a.md is not UTF-8: give a file with text"):
        list(MARKDOWN.read_records((tmp_path / "a.md").as_uri()))
    with pytest.raises(DroppedFileError):
        MARKDOWN.parse(b"\xff", "a.md")
