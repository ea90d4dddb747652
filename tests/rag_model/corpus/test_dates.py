"""The date of a page's revision reaches its passages, as the standard library reads it from the dump."""

import bz2
from pathlib import Path
from xml.etree import ElementTree

from rag_model.corpus.chunk import ChunkRecipe, chunk_part
from rag_model.corpus.passages import PassageFile
from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import format_iso


def stamps_of(dump: Path) -> dict[str, tuple[int, str]]:
    """Return the revision and its time of every page in an export, by page id."""
    root = ElementTree.fromstring(bz2.decompress(dump.read_bytes()))
    space = root.tag.removesuffix("mediawiki")
    found = {}
    for page in root.iter(f"{space}page"):
        told = {name: page.findtext(f"{space}revision/{space}{name}") or "" for name in ("id", "timestamp")}
        found[page.findtext(f"{space}id") or ""] = (int(told["id"]), told["timestamp"])
    return found


def test_passages_of_a_real_dump_have_the_dates_that_another_parser_reads(small_dump: Path, tmp_path: Path) -> None:
    plan = plan_dump(str(small_dump), workdir=tmp_path, stage=str)
    known, newest, dates = stamps_of(small_dump), "", set()
    for part in plan.parts:
        facts = chunk_part(part, plan.siteinfo, ChunkRecipe(), tmp_path / part.name)
        newest = max(newest, facts.newest_revision)
        with PassageFile(tmp_path / part.name) as file:
            for passage in file.iter_passages():
                assert (passage.rev_id, format_iso(passage.revised)) == known[passage.page_id]
                dates.add(passage.revised)
    assert len(dates) > 15, "of 22 articles"
    assert newest == format_iso(max(date for date in dates if date is not None))
