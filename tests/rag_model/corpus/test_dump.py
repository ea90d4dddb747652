import bz2
import gzip
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.corpus.dump import read_pages
from rag_model.corpus.pages import parse_pages
from rag_model.corpus.plan import source_digest
from rag_model.corpus.records import Page, Part, Plan
from rag_model.errors import InputError


def pages_of(plan: Plan) -> list[Page]:
    return [page for part in plan.parts for page in read_pages(part)]


@pytest.fixture(scope="module")
def demo_pages(demo_dump: Path) -> list[Page]:
    return list(parse_pages([bz2.decompress(demo_dump.read_bytes())], "demo"))


@pytest.mark.parametrize(("pages_a_stream", "files"), [(1, 1), (20, 4), (1000, 1)])
def test_parts_of_a_multistream_dump_hold_its_pages(
    tmp_path, make_multistream, plan, demo_pages, *, pages_a_stream: int, files: int
) -> None:
    pattern = make_multistream(tmp_path, pages_a_stream=pages_a_stream, files=files)
    assert pages_of(plan(pattern, part_bytes=100_000)) == demo_pages


def test_parts_of_a_plain_dump_hold_its_pages(tmp_path, demo_dump, plan, demo_pages) -> None:
    xml = tmp_path / "demo.xml"
    xml.write_bytes(bz2.decompress(demo_dump.read_bytes()))
    assert pages_of(plan(demo_dump)) == demo_pages
    assert pages_of(plan(xml)) == demo_pages


def test_a_worker_reads_the_streams_of_its_part_alone(tmp_path, make_multistream, plan, demo_pages) -> None:
    dump = Path(make_multistream(tmp_path))
    parts = plan(dump).parts
    part = parts[2]
    whole = dump.read_bytes()
    (own,) = part.slices
    dump.write_bytes(b"?" * own.offset + whole[own.offset : own.offset + own.length] + b"?" * 10)
    expected = [page for page in demo_pages if part.first_page <= page.page_id <= part.last_page]
    assert list(read_pages(part)) == expected
    with pytest.raises(InputError, match=f"bytes {parts[1].slices[0].offset} to .* is corrupt"):
        list(read_pages(parts[1]))


def test_a_part_survives_its_json(tmp_path, make_multistream, plan) -> None:
    for part in plan(make_multistream(tmp_path)).parts:
        assert Part.from_json(part.to_json()) == part


revisions = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=30)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(revisions=revisions, pages_a_stream=st.integers(1, 5), files=st.integers(1, 3), multistream=st.booleans())
def test_of_duplicates_the_highest_revision_wins_in_any_order(
    tmp_path, page_xml, export_xml, make_multistream, plan, *, revisions, pages_a_stream, files, multistream
) -> None:
    folder = tmp_path / "dumps"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    written = [page_xml(page_id, f"{page_id}.{rev} {'x' * 100_000}", rev_id=rev) for page_id, rev in revisions]
    source = folder / "all.xml"
    source.write_bytes(export_xml(*written))
    if multistream:
        make_multistream(folder, source, pages_a_stream=pages_a_stream, files=files)
        source.unlink()
    read = [(page.page_id, page.rev_id) for page in pages_of(plan(f"{folder}/*.*", part_bytes=1 + 200 * files))]
    newest = {page_id: max(rev for other, rev in revisions if other == page_id) for page_id, _ in revisions}
    assert dict(read) == newest
    assert len(read) == len(newest)


def test_unordered_ids_are_told_from_ordered_ones(tmp_path, page_xml, export_xml, plan) -> None:
    for name, ids in {"up": [1, 2, 9], "down": [9, 2, 1], "twice": [1, 2, 2]}.items():
        (tmp_path / f"{name}.xml").write_bytes(export_xml(*map(page_xml, ids)))
    assert [plan(tmp_path / f"{name}.xml").parts[0].ordered for name in ("up", "down", "twice")] == [
        True,
        False,
        False,
    ]


def test_pages_out_of_the_order_that_the_plan_saw_are_refused(tmp_path, page_xml, export_xml, plan) -> None:
    dump = tmp_path / "x.xml"
    dump.write_bytes(export_xml(page_xml(1), page_xml(2), page_xml(3)))
    (part,) = plan(dump).parts
    dump.write_bytes(export_xml(page_xml(1), page_xml(3), page_xml(2)))
    with pytest.raises(InputError, match="page 2 follows page 3 in part-00000"):
        list(read_pages(part))


@pytest.mark.parametrize(("now", "says"), [((1, 7, 3), "page 7 is there"), ((1, 2, 2), "only pages 1 to 2 are there")])
def test_pages_that_the_plan_did_not_see_are_refused(tmp_path, page_xml, export_xml, plan, *, now, says) -> None:
    dump = tmp_path / "x.xml"
    dump.write_bytes(export_xml(*map(page_xml, (1, 2, 3))))
    part = replace(plan(dump).parts[0], ordered=False)
    dump.write_bytes(export_xml(*map(page_xml, now)))
    with pytest.raises(InputError, match=f"should hold pages 1 to 3 by its index, but {says}"):
        list(read_pages(part))


def test_the_digest_is_of_a_parts_own_bytes(tmp_path, make_multistream, plan) -> None:
    dump = Path(make_multistream(tmp_path))
    first, second, *_ = plan(dump).parts
    before = [source_digest(first), source_digest(second)]
    changed = bytearray(dump.read_bytes())
    changed[second.slices[0].offset + 100] ^= 1
    dump.write_bytes(changed)
    after = [source_digest(first), source_digest(second)]
    assert before[0] == after[0]
    assert before[1] != after[1]
    assert source_digest(replace(first, last_page=first.last_page - 1)) != before[0]


def test_the_digest_of_a_split_part_does_not_hang_on_gzip(small_dump, plan) -> None:
    (part, *_) = plan(small_dump).parts
    before = source_digest(part)
    (own,) = part.slices
    path = Path(own.url.removeprefix("file://"))
    again = gzip.compress(gzip.decompress(path.read_bytes()[own.offset : own.offset + own.length]), 9)
    path.write_bytes(again)
    assert source_digest(replace(part, slices=(replace(own, offset=0, length=len(again)),))) == before
