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


def describe_parts(plan: Plan) -> list[tuple[str, int, int, str]]:
    return [(part.name, part.first_page, part.last_page, compute_source_digest(part)) for part in plan.parts]


def read_articles(plan: Plan) -> list[Page]:
    pages = (page for part in plan.parts for page in MEDIAWIKI.read(part))
    return [page for page in pages if classify_page(page, plan.siteinfo) is page]


def check_tiling(plan: Plan) -> None:
    assert plan.parts[0].first_page == 0
    for previous_part, next_part in zip(plan.parts, plan.parts[1:], strict=False):
        assert next_part.first_page == previous_part.last_page + 1
    assert [part.name for part in plan.parts] == [f"part-{i:05d}" for i in range(len(plan.parts))]


def test_parts_cover_the_page_ids_in_about_equal_bytes(tmp_path, make_multistream, plan) -> None:
    dump_plan = plan(make_multistream(tmp_path, pages_a_stream=5, copies=2), part_bytes=400_000)
    check_tiling(dump_plan)
    sizes = [sum(piece.length for piece in part.slices) for part in dump_plan.parts]
    assert len(sizes) == 9
    assert max(sizes) < 1.5 * 400_000
    assert dump_plan.parts[-1].last_page == dump_plan.parts[-1].slices[-1].last_page


def test_consecutive_streams_are_one_slice(tmp_path, make_multistream, plan) -> None:
    assert [len(part.slices) for part in plan(make_multistream(tmp_path)).parts] == [1] * 7


def test_part_may_span_files(tmp_path, make_multistream, small_dump, plan) -> None:
    (part,) = plan(make_multistream(tmp_path, small_dump, files=3), part_bytes=1 << 30).parts
    assert len(part.slices) == 3
    check_tiling(plan(make_multistream(tmp_path, small_dump, files=3), part_bytes=90_000))


def test_parts_do_not_depend_on_compression(tmp_path, demo_dump, plan) -> None:
    xml = bz2.decompress(demo_dump.read_bytes())
    (tmp_path / "a.xml").write_bytes(xml)
    (tmp_path / "b.xml.gz").write_bytes(gzip.compress(xml))
    plans = [plan(demo_dump), plan(tmp_path / "a.xml"), plan(tmp_path / "b.xml.gz")]
    assert describe_parts(plans[0]) == describe_parts(plans[1]) == describe_parts(plans[2])
    check_tiling(plans[0])
    assert len(plans[0].parts) == 6


def test_plan_is_reproducible(tmp_path, make_multistream, plan, small_dump) -> None:
    for dump in (make_multistream(tmp_path, small_dump), small_dump):
        assert describe_parts(plan(dump)) == describe_parts(plan(dump))


@pytest.mark.parametrize("limit", [1, 9, 1000])
def test_limit_takes_the_first_articles(tmp_path, make_multistream, plan, small_dump, limit: int) -> None:
    expected = read_articles(plan(small_dump))[:limit]
    assert read_articles(plan(small_dump, limit=limit)) == expected
    assert read_articles(plan(make_multistream(tmp_path, small_dump, files=2), limit=limit)) == expected


@pytest.mark.parametrize("limit", [1, 2, 5, 11, 12])
def test_limit_is_exact_for_unordered_ids(tmp_path, page_xml, export_xml, plan, limit: int) -> None:
    ids = [50, 3, 7, 1, 9, 2, 8, 4, 6, 5, 10, 11]
    redirect = page_xml(12, "#REDIRECT [[A]]")
    (tmp_path / "dump.xml").write_bytes(export_xml(*(page_xml(page_id, "Words.") for page_id in ids), redirect))
    articles = read_articles(plan(tmp_path / "dump.xml", limit=limit))
    assert sorted(article.page_id for article in articles) == sorted(ids)[:limit]


def test_limit_leaves_the_rest_of_the_dump_unread(tmp_path, make_multistream, small_dump, plan) -> None:
    dump = Path(make_multistream(tmp_path, small_dump, pages_a_stream=10))
    end = plan(dump, limit=3).parts[-1].slices[-1]
    data = dump.read_bytes()
    dump.write_bytes(data[: end.offset + end.length] + b"?" * (len(data) - end.offset - end.length))
    assert len(read_articles(plan(dump, limit=3))) == 3


def test_multistream_dump_without_its_index_is_split(tmp_path, make_multistream, small_dump, plan) -> None:
    dump = Path(make_multistream(tmp_path, small_dump))
    with_index = read_articles(plan(dump))
    (tmp_path / dump.name.replace(".xml", "-index.txt")).unlink()
    assert read_articles(plan(dump)) == with_index
    assert {piece.codec for part in plan(dump).parts for piece in part.slices} == {"gzip"}


def test_temporary_files_are_deleted(tmp_path, small_dump, plan) -> None:
    plan(small_dump)
    assert list((tmp_path / "work").iterdir()) == []


def test_stage_may_leave_files_in_place(tmp_path, small_dump) -> None:
    dump_plan = plan_dump(str(small_dump), workdir=tmp_path, stage=Path.as_uri)
    assert len(read_articles(dump_plan)) == 22


def test_dump_in_the_memory_file_system_is_read(tmp_path, make_multistream, small_dump, plan) -> None:
    make_multistream(tmp_path, small_dump)
    memory = fsspec.filesystem("memory")
    for path in tmp_path.glob("*.bz2"):
        memory.pipe_file(f"/dumps/{path.name}", path.read_bytes())
    assert read_articles(plan("memory://dumps/*.bz2")) == read_articles(plan(small_dump))
    memory.rm("/dumps", recursive=True)


def damage_dump(xml: bytes, kind: str) -> bytes:
    packed = bz2.compress(xml)
    return {
        "truncated": packed[: len(packed) * 2 // 3],
        "corrupt": packed[:2000] + b"garbage" + packed[2007:],
        "not bz2": xml,
        "zero bytes": b"",
    }[kind]


@pytest.mark.parametrize("kind", ["truncated", "corrupt", "not bz2", "zero bytes"])
def test_damaged_dump_is_reported(tmp_path, small_dump, plan, kind: str) -> None:
    dump = tmp_path / "x.xml.bz2"
    dump.write_bytes(damage_dump(bz2.decompress(small_dump.read_bytes())[:400_000], kind))
    with pytest.raises(InputError, match=r"^x\.xml\.bz2 is (truncated|corrupt|empty)[^\n]*download it again"):
        plan(dump)


def test_dump_without_pages_is_reported(tmp_path, export_xml, plan) -> None:
    (tmp_path / "empty.xml").write_bytes(export_xml())
    with pytest.raises(InputError, match=r"^empty\.xml contains no pages: "):
        plan(tmp_path / "empty.xml")


def test_dump_without_siteinfo_is_reported(tmp_path, page_xml, plan) -> None:
    (tmp_path / "x.xml").write_text(f"<mediawiki>{page_xml(1)}</mediawiki>")
    with pytest.raises(InputError, match=r"^x\.xml has no <siteinfo>"):
        plan(tmp_path / "x.xml")


def test_dumps_of_two_wikis_are_refused(tmp_path, page_xml, export_xml, plan) -> None:
    (tmp_path / "a.xml").write_bytes(export_xml(page_xml(1)))
    (tmp_path / "b.xml").write_bytes(export_xml(page_xml(2), dbname="dewiki"))
    with pytest.raises(InputError, match=r"b\.xml is a dump of dewiki, but a\.xml of enwiki"):
        plan(tmp_path / "*.xml")


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ([], InputError, "no file matches"),
        (["a.zip"], UsageError, "not a dump of a known format"),
        (["a.json"], UsageError, "not a dump of a known format: give documents as JSONL"),
        (["a.xml", "b.jsonl"], UsageError, "several formats"),
        (["a-multistream-index.txt.bz2"], UsageError, "index files only"),
    ],
)
def test_other_files_are_refused(tmp_path, plan, names, error, message) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(error, match=message):
        plan(f"{tmp_path}/*.*")


def test_missing_file_is_reported(tmp_path, plan) -> None:
    with pytest.raises(InputError, match=r"no file matches .*: check the path"):
        plan(tmp_path / "none.xml.bz2")
    with pytest.raises(InputError, match="cannot read nosuch://x"):
        plan("nosuch://x/y.xml")


@pytest.mark.parametrize("settings", [{"limit": 0}, {"limit": -1}, {"part_bytes": 0}])
def test_zero_as_limit_or_size_is_refused(small_dump, plan, settings) -> None:
    with pytest.raises(UsageError, match="must be at least 1"):
        plan(small_dump, **settings)


def test_failed_write_is_reported(tmp_path, small_dump) -> None:
    with pytest.raises(ResourceError, match=r"cannot write to .*gone"):
        plan_dump(str(small_dump), workdir=tmp_path / "gone", stage=Path.as_uri)
