"""`PageRanges` finds the parts with pages of a range without reading the ranges of all parts."""

import random

import pytest

from rag_model.store.pulling.overlap import PageRanges
from rag_model.store.versions.manifest import PartEntry
from tests.fixtures.work_counters import count_lines


def make_parts(bounds: list[tuple[int, int]]) -> list[PartEntry]:
    return [PartEntry(f"part-{number:05d}", first, last, 1) for number, (first, last) in enumerate(bounds)]


@pytest.mark.parametrize("seed", range(5))
def test_parts_agree_with_a_linear_search(seed: int) -> None:
    rng = random.Random(seed)
    starts = [rng.randint(-50, 200) for _ in range(40)]
    parts = make_parts([(start, start + rng.randint(0, 30)) for start in (sorted(starts) if seed else starts)])
    ranges = PageRanges(parts)
    for first in range(-60, 240):
        last = first + rng.randint(0, 20)
        expected = [(n, part) for n, part in enumerate(parts) if part.first_page <= last and first <= part.last_page]
        assert list(ranges.find_within(first, last)) == expected


def test_no_parts_have_no_pages() -> None:
    assert list(PageRanges([]).find_within(0, 9)) == []


def test_work_does_not_grow_with_the_number_of_parts() -> None:
    few, many = (PageRanges(make_parts([(10 * n, 10 * n + 9) for n in range(count)])) for count in (100, 1000))
    assert count_lines(lambda: list(few.find_within(505, 525))) == count_lines(lambda: list(many.find_within(505, 525)))
