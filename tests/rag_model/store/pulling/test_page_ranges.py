"""Parts that hold pages of a range: the same as by looking at all of them, without looking at all of them."""

import random

import pytest

from rag_model.store.pulling.overlap import PageRanges
from rag_model.store.versions.manifest import PartEntry
from tests.fixtures.work_counters import lines_run


def entries(bounds: list[tuple[int, int]]) -> list[PartEntry]:
    return [PartEntry(f"part-{number:05d}", first, last, 1) for number, (first, last) in enumerate(bounds)]


@pytest.mark.parametrize("seed", range(5))
def test_any_parts_are_found_as_by_looking_at_all(seed: int) -> None:
    chance = random.Random(seed)
    starts = [chance.randint(-50, 200) for _ in range(40)]
    parts = entries([(start, start + chance.randint(0, 30)) for start in (sorted(starts) if seed else starts)])
    ranges = PageRanges(parts)
    for first in range(-60, 240):
        last = first + chance.randint(0, 20)
        expected = [(n, part) for n, part in enumerate(parts) if part.first_page <= last and first <= part.last_page]
        assert list(ranges.find_within(first, last)) == expected


def test_no_parts_hold_nothing() -> None:
    assert list(PageRanges([]).find_within(0, 9)) == []


def test_ten_times_the_parts_are_no_more_work() -> None:
    few, many = (PageRanges(entries([(10 * n, 10 * n + 9) for n in range(count)])) for count in (100, 1000))
    assert lines_run(lambda: list(few.find_within(505, 525))) == lines_run(lambda: list(many.find_within(505, 525)))
