"""Measures of spans are those of sets of characters, and a character that is read twice matches once."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.span_measures import Span, count_shared, measure_spans, merge_spans

SPANS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(
        lambda start_and_length: (start_and_length[0], start_and_length[0] + start_and_length[1])
    ),
    max_size=6,
)


def list_characters(spans: list[Span]) -> set[int]:
    return {position for start, end in spans for position in range(start, end)}


@given(SPANS, SPANS)
def test_measures_of_spans_are_those_of_sets_of_characters(read_spans: list[Span], gold_spans: list[Span]) -> None:
    merged = merge_spans(read_spans)
    assert list_characters(merged) == list_characters(read_spans)
    assert all(current[1] < following[0] for current, following in pairwise(merged))
    n_shared = len(list_characters(read_spans) & list_characters(gold_spans))
    assert count_shared(read_spans, gold_spans) == n_shared
    measures = measure_spans(read_spans, gold_spans)
    n_read, n_gold = sum(end - start for start, end in read_spans), len(list_characters(gold_spans))
    assert measures.recall == (n_shared / n_gold if n_gold else 1.0)
    assert measures.precision == (n_shared / n_read if n_read else 0.0)
    assert measures.iou == pytest.approx(n_shared / max(1, n_read + n_gold - n_shared))


def test_an_answer_in_two_overlapping_passages_counts_once() -> None:
    once, twice = measure_spans([(0, 100)], [(50, 60)]), measure_spans([(0, 100), (40, 140)], [(50, 60)])
    assert (once.recall, once.precision) == (1.0, 0.1)
    assert (twice.recall, twice.precision) == (1.0, 0.05)
