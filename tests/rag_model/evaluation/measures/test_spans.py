"""Measures of spans are those of sets of characters, and repeated reading counts once as a match."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.span_measures import Span, count_shared, measure_spans, merge_spans

SPANS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda one: (one[0], one[0] + one[1])), max_size=6
)


def characters(spans: list[Span]) -> set[int]:
    return {at for start, end in spans for at in range(start, end)}


@given(SPANS, SPANS)
def test_as_sets_of_characters(read: list[Span], wanted: list[Span]) -> None:
    joined = merge_spans(read)
    assert characters(joined) == characters(read)
    assert all(one[1] < other[0] for one, other in pairwise(joined))
    found = len(characters(read) & characters(wanted))
    assert count_shared(read, wanted) == found
    measured = measure_spans(read, wanted)
    every, answer = sum(end - start for start, end in read), len(characters(wanted))
    assert measured.recall == (found / answer if answer else 1.0)
    assert measured.precision == (found / every if every else 0.0)
    assert measured.iou == pytest.approx(found / max(1, every + answer - found))


def test_an_answer_in_two_overlapping_passages_counts_once() -> None:
    once, twice = measure_spans([(0, 100)], [(50, 60)]), measure_spans([(0, 100), (40, 140)], [(50, 60)])
    assert (once.recall, once.precision) == (1.0, 0.1)
    assert (twice.recall, twice.precision) == (1.0, 0.05)
