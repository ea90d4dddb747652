import bz2
import gzip
from pathlib import Path

import fsspec
import pytest

from rag_model.corpus.articles import classify_page
from rag_model.corpus.dump_formats.mediawiki import FORMAT as MEDIAWIKI
from rag_model.corpus.plan import compute_source_digest, plan_dump
from rag_model.corpus.records import Page, Plan
from rag_model.errors import InputError, ResourceError, UsageError


def shape(plan: Plan) -> list[tuple[str, int, int, str]]:
    return [(part.name, part.first_page, part.last_page, compute_source_digest(part)) for part in plan.parts]


def articles(plan: Plan) -> list[Page]:
    pages = (page for part in plan.parts for page in MEDIAWIKI.read(part))
    return [page for page in pages if classify_page(page, plan.siteinfo) is page]


def check_tiling(plan: Plan) -> None:
    assert plan.parts[0].first_page == 0
    for before, after in zip(plan.parts, plan.parts[1:], strict=False):
        assert after.first_page == before.last_page + 1
    assert [part.name for part in plan.parts] == [f"part-{i:05d}" for i in range(len(plan.parts))]


def test_parts_tile_the_page_ids_in_about_equal_bytes(tmp_path, make_multistream, plan) -> None:
    made = plan(make_multistream(tmp_path, pages_a_stream=5, copies=2), part_bytes=400_000)
    check_tiling(made)
    sizes = [sum(piece.length for piece in part.slices) for part in made.parts]
    assert len(sizes) == 9
    assert max(sizes) < 1.5 * 400_000
    assert made.parts[-1].last_page == made.parts[-1].slices[-1].last_page


def test_streams_in_a_row_are_one_slice(tmp_path, make_multistream, plan) -> None:
    assert [len(part.slices) for part in plan(make_multistream(tmp_path)).parts] == [1] * 7


def test_a_part_may_span_files(tmp_path, make_multistream, small_dump, plan) -> None:
    (part,) = plan(make_multistream(tmp_path, small_dump, files=3), part_bytes=1 << 30).parts
    assert [piece.url[-6:] for piece in part.slices] == ["61.bz2", "83.bz2", "75.bz2"] or len(part.slices) == 3
    check_tiling(plan(make_multistream(tmp_path, small_dump, files=3), part_bytes=90_000))


def test_however_a_dump_is_packed_its_parts_are_the_same(tmp_path, demo_dump, plan) -> None:
    xml = bz2.decompress(demo_dump.read_bytes())
    (tmp_path / "a.xml").write_bytes(xml)
    (tmp_path / "b.xml.gz").write_bytes(gzip.compress(xml))
    plans = [plan(demo_dump), plan(tmp_path / "a.xml"), plan(tmp_path / "b.xml.gz")]
    assert shape(plans[0]) == shape(plans[1]) == shape(plans[2])
    check_tiling(plans[0])
    assert len(plans[0].parts) == 6


def test_a_plan_repeats(tmp_path, make_multistream, plan, small_dump) -> None:
    for dump in (make_multistream(tmp_path, small_dump), small_dump):
        assert shape(plan(dump)) == shape(plan(dump))


@pytest.mark.parametrize("limit", [1, 9, 1000])
def test_a_limit_takes_the_first_articles(tmp_path, make_multistream, plan, small_dump, limit: int) -> None:
    expected = articles(plan(small_dump))[:limit]
    assert articles(plan(small_dump, limit=limit)) == expected
    assert articles(plan(make_multistream(tmp_path, small_dump, files=2), limit=limit)) == expected


@pytest.mark.parametrize("limit", [1, 2, 5, 11, 12])
def test_a_limit_is_exact_when_ids_are_out_of_order(tmp_path, page_xml, export_xml, plan, limit: int) -> None:
    ids = [50, 3, 7, 1, 9, 2, 8, 4, 6, 5, 10, 11]
    redirect = page_xml(12, "#REDIRECT [[A]]")
    (tmp_path / "dump.xml").write_bytes(export_xml(*(page_xml(page_id, "Words.") for page_id in ids), redirect))
    read = articles(plan(tmp_path / "dump.xml", limit=limit))
    assert sorted(article.page_id for article in read) == sorted(ids)[:limit]


def test_a_limit_leaves_the_rest_of_the_dump_unread(tmp_path, make_multistream, small_dump, plan) -> None:
    dump = Path(make_multistream(tmp_path, small_dump, pages_a_stream=10))
    end = plan(dump, limit=3).parts[-1].slices[-1]
    whole = dump.read_bytes()
    dump.write_bytes(whole[: end.offset + end.length] + b"?" * (len(whole) - end.offset - end.length))
    assert len(articles(plan(dump, limit=3))) == 3


def test_a_multistream_dump_without_its_index_is_split(tmp_path, make_multistream, small_dump, plan) -> None:
    dump = Path(make_multistream(tmp_path, small_dump))
    with_index = articles(plan(dump))
    (tmp_path / dump.name.replace(".xml", "-index.txt")).unlink()
    assert articles(plan(dump)) == with_index
    assert {piece.codec for part in plan(dump).parts for piece in part.slices} == {"gzip"}


def test_no_file_is_left_behind(tmp_path, small_dump, plan) -> None:
    plan(small_dump)
    assert list((tmp_path / "work").iterdir()) == []


def test_a_stage_may_leave_files_where_they_are(tmp_path, small_dump) -> None:
    made = plan_dump(str(small_dump), workdir=tmp_path, stage=Path.as_uri)
    assert len(articles(made)) == 22


def test_the_memory_file_system_holds_dumps_too(tmp_path, make_multistream, small_dump, plan) -> None:
    make_multistream(tmp_path, small_dump)
    memory = fsspec.filesystem("memory")
    for path in tmp_path.glob("*.bz2"):
        memory.pipe_file(f"/dumps/{path.name}", path.read_bytes())
    assert articles(plan("memory://dumps/*.bz2")) == articles(plan(small_dump))
    memory.rm("/dumps", recursive=True)


def broken(xml: bytes, kind: str) -> bytes:
    packed = bz2.compress(xml)
    return {
        "truncated": packed[: len(packed) * 2 // 3],
        "corrupt": packed[:2000] + b"garbage" + packed[2007:],
        "not bz2": xml,
        "zero bytes": b"",
    }[kind]


@pytest.mark.parametrize("kind", ["truncated", "corrupt", "not bz2", "zero bytes"])
def test_a_broken_dump_is_one_sentence(tmp_path, small_dump, plan, kind: str) -> None:
    dump = tmp_path / "x.xml.bz2"
    dump.write_bytes(broken(bz2.decompress(small_dump.read_bytes())[:400_000], kind))
    with pytest.raises(InputError, match=r"^x\.xml\.bz2 is (truncated|corrupt|empty)[^\n]*download it again"):
        plan(dump)


def test_a_dump_without_pages_is_one_sentence(tmp_path, export_xml, plan) -> None:
    (tmp_path / "empty.xml").write_bytes(export_xml())
    with pytest.raises(InputError, match=r"^empty\.xml contains no pages: "):
        plan(tmp_path / "empty.xml")


def test_a_dump_without_siteinfo_is_one_sentence(tmp_path, page_xml, plan) -> None:
    (tmp_path / "x.xml").write_text(f"<mediawiki>{page_xml(1)}</mediawiki>")
    with pytest.raises(InputError, match=r"^x\.xml has no <siteinfo>"):
        plan(tmp_path / "x.xml")


def test_the_dumps_of_two_wikis_are_not_mixed(tmp_path, page_xml, export_xml, plan) -> None:
    (tmp_path / "a.xml").write_bytes(export_xml(page_xml(1)))
    (tmp_path / "b.xml").write_bytes(export_xml(page_xml(2), dbname="dewiki"))
    with pytest.raises(InputError, match=r"b\.xml is a dump of dewiki, but a\.xml of enwiki"):
        plan(tmp_path / "*.xml")


@pytest.mark.parametrize(
    ("names", "error", "says"),
    [
        ([], InputError, "no file matches"),
        (["a.zip"], UsageError, "not a dump of a known format"),
        (["a.json"], UsageError, "not a dump of a known format: give documents as JSONL"),
        (["a.xml", "b.jsonl"], UsageError, "several formats"),
        (["a-multistream-index.txt.bz2"], UsageError, "index files only"),
    ],
)
def test_what_is_no_corpus_is_refused(tmp_path, plan, names, error, says) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(error, match=says):
        plan(f"{tmp_path}/*.*")


def test_a_file_that_is_missing_is_one_sentence(tmp_path, plan) -> None:
    with pytest.raises(InputError, match=r"no file matches .*: check the path"):
        plan(tmp_path / "none.xml.bz2")
    with pytest.raises(InputError, match="cannot read nosuch://x"):
        plan("nosuch://x/y.xml")


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"limit": -1}, {"part_bytes": 0}])
def test_nothing_is_not_a_plan(small_dump, plan, wrong) -> None:
    with pytest.raises(UsageError, match="must be at least 1"):
        plan(small_dump, **wrong)


def test_a_disk_that_refuses_is_one_sentence(tmp_path, small_dump) -> None:
    with pytest.raises(ResourceError, match=r"cannot write to .*gone"):
        plan_dump(str(small_dump), workdir=tmp_path / "gone", stage=Path.as_uri)
