"""A part becomes a passage file, and every dropped page is counted with its reason."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from rag_model.corpus.chunk import ChunkRecipe, ChunkStats, chunk_part
from rag_model.corpus.passages import PassageFile
from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import Passage, Plan
from rag_model.errors import InputError, UsageError

XML = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/" version="0.10" xml:lang="en">
<siteinfo><dbname>testwiki</dbname><base>https://t.org/wiki/Main</base>
<namespaces><namespace key="0" /><namespace key="6">File</namespace></namespaces></siteinfo>
{}</mediawiki>"""
PAGE = """<page><title>{title}</title><ns>{ns}</ns><id>{id}</id><revision><id>{id}0</id>
<timestamp>2026-01-0{id}T00:00:00Z</timestamp><model>wikitext</model><text>{text}</text></revision></page>
"""
MAX_CHARS = 3 << 17  # lower than the real limit, so that a hostile page is small
HOSTILE = "x" * (MAX_CHARS + 1)


@pytest.fixture(autouse=True)
def lower_page_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rag_model.corpus.wikitext.MAX_CHARS", MAX_CHARS)


def plan_texts(tmp_path: Path, *texts: str, name: str = "dump.xml") -> Plan:
    pages = (PAGE.format(id=i, ns=0, title=f"Page {i}", text=text) for i, text in enumerate(texts, 1))
    (tmp_path / name).write_text(XML.format("".join(pages)), encoding="utf-8")
    return plan_dump(str(tmp_path / name), workdir=tmp_path, stage=str)


def chunk(plan: Plan, tmp_path: Path, recipe: ChunkRecipe | None = None) -> tuple[ChunkStats, list[Passage]]:
    (part,) = plan.parts
    stats = chunk_part(part, plan.siteinfo, recipe or ChunkRecipe(), tmp_path / "out.parquet")
    return stats, list(PassageFile(tmp_path / "out.parquet").iter_passages())


def test_pages_become_passages_and_drops_are_counted(tmp_path: Path) -> None:
    plan = plan_texts(tmp_path, "One '''two''' three.\n== Life ==\nFour.", "#REDIRECT [[Page 1]]", "{{stub}}", HOSTILE)
    stats, passages = chunk(plan, tmp_path, ChunkRecipe(words=3))
    assert [(p.id, p.page_id, p.rev_id, p.title, p.section, p.text) for p in passages] == [
        ("1:0", "1", 10, "Page 1", "", "One two three."),
        ("1:Life.0", "1", 10, "Page 1", "Life", "Four."),
    ]
    assert stats.dropped == {"no_text": 1, "redirect": 1, "unparsable": 1}
    assert [(q.page_id, q.title) for q in stats.quarantined] == [("4", "Page 4")]
    assert "characters" in stats.quarantined[0].reason
    assert (stats.rows, stats.articles, stats.words) == (2, 1, 4)
    assert stats.newest_revision == "2026-01-03T00:00:00Z"
    assert stats.lengths == {"0": 2}


def test_stats_are_json(tmp_path: Path) -> None:
    stats, _ = chunk(plan_texts(tmp_path, "Text.", HOSTILE), tmp_path)
    assert json.loads(json.dumps(asdict(stats)))["quarantined"][0]["title"] == "Page 2"


def test_part_with_too_many_unparsable_pages_fails(tmp_path: Path) -> None:
    plan = plan_texts(tmp_path, "Text.", HOSTILE, HOSTILE)
    chunk(plan, tmp_path, ChunkRecipe(quarantine_floor=2))
    message = "2 pages of part-00000 cannot be parsed, but the recipe allows 1; the first is 'Page 2'"
    with pytest.raises(InputError, match=message):
        chunk(plan, tmp_path, ChunkRecipe(quarantine_floor=1))
    chunk(plan, tmp_path, ChunkRecipe(quarantine_floor=0, quarantine_share=0.7))


def test_recipe_determines_the_passages(tmp_path: Path) -> None:
    plan = plan_texts(tmp_path, "a b c d e\n== Life ==\nf")
    _, passages = chunk(plan, tmp_path, ChunkRecipe(chunker="words", words=4))
    assert [p.text for p in passages] == ["a b c d", "e f"]
    with pytest.raises(UsageError, match="no chunker"):
        chunk(plan, tmp_path, ChunkRecipe(chunker="none"))


def test_edit_changes_only_the_passages_of_its_section(tmp_path: Path) -> None:
    old_plan, new_plan = (
        plan_texts(tmp_path, f"Lead.\n== A ==\n{text}\n== B ==\nsame", name=f"{text}.xml") for text in ("a", "b c")
    )
    old_passages, new_passages = (chunk(plan, tmp_path, ChunkRecipe("sections"))[1] for plan in (old_plan, new_plan))
    hashes = {p.id: p.hash for p in old_passages}
    assert [p.id for p in new_passages if hashes.get(p.id) != p.hash] == ["1:A.0"]


def test_same_part_gives_the_same_file(demo_dump: Path, tmp_path: Path) -> None:
    plan = plan_dump(str(demo_dump), workdir=tmp_path, stage=str)
    outs = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    stats = [chunk_part(plan.parts[0], plan.siteinfo, ChunkRecipe(), out) for out in outs]
    assert stats[0] == stats[1]
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert stats[0].rows > 500
    assert sum(stats[0].lengths.values()) == stats[0].rows


def test_documents_are_chunked_and_passages_are_not(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(
        '{"id": "x", "title": "T", "text": "a b c"}\n{"id": "y", "title": "U", "text": ""}\n'
    )
    (tmp_path / "p.tsv").write_text('id\ttext\ttitle\n1\t"a ""b"""\tT\n')
    results = []
    for name in ("d.jsonl", "p.tsv"):
        plan = plan_dump(str(tmp_path / name), workdir=tmp_path, stage=str)
        out = tmp_path / "out.parquet"
        stats = [chunk_part(part, plan.siteinfo, ChunkRecipe(words=2), out) for part in plan.parts]
        results.append((sum(part.rows for part in stats), [p.text for p in PassageFile(out).iter_passages()]))
    assert results == [(2, ["a b", "c"]), (1, ['a "b"'])]
