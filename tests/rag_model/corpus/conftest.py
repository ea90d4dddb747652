"""Exports made by hand, and a folder that plans stage into."""

import bz2
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import Plan

HEAD = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-{schema}/"
  version="{schema}" xml:lang="{language}">
  <siteinfo>
    <sitename>Wikipedia</sitename>
    <dbname>{dbname}</dbname>
    <base>https://{language}.wikipedia.org/wiki/Main_Page</base>
    <case>first-letter</case>
    <namespaces>
      <namespace key="0" case="first-letter" />
      <namespace key="6" case="first-letter">{files}</namespace>
    </namespaces>
  </siteinfo>
"""
PAGE = """  <page>
    <title>{title}</title>
    <ns>{ns}</ns>
    <id>{page_id}</id>{redirect}
    <revision>
      <id>{rev_id}</id>
      <timestamp>2026-11-01T12:00:00Z</timestamp>
      <contributor><username>A</username><id>7</id></contributor>
      <model>{model}</model>
      <format>text/x-wiki</format>
      <text bytes="{length}" xml:space="preserve">{text}</text>
      <sha1>x</sha1>
    </revision>
  </page>
"""


@pytest.fixture(scope="session")
def small_dump(demo_dump: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 90 pages of the real extract, 1.7 MB of XML, 22 of them articles."""
    path = tmp_path_factory.mktemp("small") / "small.xml.bz2"
    pages = bz2.decompress(demo_dump.read_bytes()).split(b"</page>\n")[:90]
    path.write_bytes(bz2.compress(b"</page>\n".join([*pages, b"</mediawiki>\n"])))
    return path


@pytest.fixture(scope="session")
def page_xml() -> Callable[..., str]:
    """Return a function that writes one `<page>`."""

    def page(
        page_id: int, text: str = "Some words.", *, rev_id: int = 1, redirect: str = "", **fields: str
    ) -> str:
        target = f'\n    <redirect title="{escape(redirect)}" />' if redirect else ""
        values = {"title": f"Page {page_id}", "ns": "0", "model": "wikitext", **fields}
        return PAGE.format(
            page_id=page_id, rev_id=rev_id, redirect=target, text=escape(text), length=len(text), **values
        )

    return page


@pytest.fixture(scope="session")
def export_xml() -> Callable[..., bytes]:
    """Return a function that writes a whole export around pages."""

    def export(
        *pages: str, schema: str = "0.11", language: str = "en", dbname: str = "enwiki", files: str = "File"
    ) -> bytes:
        head = HEAD.format(schema=schema, language=language, dbname=dbname, files=files)
        return (head + "".join(pages) + "</mediawiki>\n").encode()

    return export


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Plan]:
    """Return a function that plans a dump; staged files land in a folder of their own."""
    staged, workdir = tmp_path / "staged", tmp_path / "work"
    staged.mkdir()
    workdir.mkdir()

    def stage(path: Path) -> str:
        return path.rename(staged / path.name).as_uri()

    def make(pattern: str | Path, *, limit: int | None = None, part_bytes: int | None = None) -> Plan:
        return plan_dump(str(pattern), workdir=workdir, stage=stage, limit=limit, part_bytes=part_bytes)

    return make
