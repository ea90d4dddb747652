"""Passages have the date of their page's revision, compared with an XML parser of the standard library."""

import bz2
from pathlib import Path
from xml.etree import ElementTree

from rag_model.corpus.chunk import ChunkRecipe, chunk_part
from rag_model.corpus.passages import PassageFile
from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import format_iso


def read_revisions(dump: Path) -> dict[str, tuple[int, str]]:
    """Return the revision and its time of every page in an export, by page id."""
    root = ElementTree.fromstring(bz2.decompress(dump.read_bytes()))
    space = root.tag.removesuffix("mediawiki")
    revisions = {}
    for page in root.iter(f"{space}page"):
        fields = {name: page.findtext(f"{space}revision/{space}{name}") or "" for name in ("id", "timestamp")}
        revisions[page.findtext(f"{space}id") or ""] = (int(fields["id"]), fields["timestamp"])
    return revisions


def test_dates_of_passages_equal_those_of_another_parser(small_dump: Path, tmp_path: Path) -> None:
    plan = plan_dump(str(small_dump), workdir=tmp_path, stage=str)
    revisions, newest, dates = read_revisions(small_dump), "", set()
    for part in plan.parts:
        stats = chunk_part(part, plan.siteinfo, ChunkRecipe(), tmp_path / part.name)
        newest = max(newest, stats.newest_revision)
        with PassageFile(tmp_path / part.name) as file:
            for passage in file.iter_passages():
                assert (passage.rev_id, format_iso(passage.revised)) == revisions[passage.page_id]
                dates.add(passage.revised)
    assert len(dates) > 15  # the dump has 22 articles
    assert newest == format_iso(max(date for date in dates if date is not None))
