"""Measures of retrieved characters against gold characters, for the benchmark of chunkers.

They follow Smith & Troynikov 2024, "Evaluating Chunking Strategies for Retrieval" (Chroma), who
count tokens: recall, precision and intersection over union (IoU).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Span = tuple[int, int]  # [start, end) in characters of one text


@dataclass(frozen=True, slots=True)
class SpanMeasures:
    """Measures of the retrieved characters against the gold characters, each in [0, 1]."""

    recall: float  # share of the gold characters that were retrieved
    # Share of the retrieved characters, duplicates included, that are gold, each counted once.
    precision: float
    iou: float  # shared / (retrieved + gold - shared), with duplicates in `retrieved`


def measure_spans(spans: Sequence[Span], gold: Sequence[Span]) -> SpanMeasures:
    """Measure the retrieved spans against the gold spans, in any order.

    Without gold characters recall is 1; without retrieved characters precision is 0.

    >>> measure_spans([(0, 10), (5, 15)], [(8, 18)])
    SpanMeasures(recall=0.7, precision=0.35, iou=0.30434782608695654)
    """
    n_shared, n_read, n_gold = (
        count_shared(spans, gold),
        sum(map(_span_length, spans)),
        sum(map(_span_length, merge_spans(gold))),
    )
    return SpanMeasures(
        recall=n_shared / n_gold if n_gold else 1.0,
        precision=n_shared / n_read if n_read else 0.0,
        iou=n_shared / max(1, n_read + n_gold - n_shared),
    )


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Return the disjoint spans of the same characters, in order; adjacent spans are merged.

    >>> merge_spans([(4, 6), (0, 2), (1, 4), (8, 8)])
    [(0, 6)]
    """
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif start < end:
            merged.append((start, end))
    return merged


def count_shared(first: Iterable[Span], second: Iterable[Span]) -> int:
    """Return the number of distinct characters that are in both sets of spans.

    >>> count_shared([(0, 5), (3, 8)], [(4, 10)])
    4
    """
    spans_a, spans_b = merge_spans(first), merge_spans(second)
    n_shared, i, j = 0, 0, 0
    while i < len(spans_a) and j < len(spans_b):
        n_shared += max(0, min(spans_a[i][1], spans_b[j][1]) - max(spans_a[i][0], spans_b[j][0]))
        if spans_a[i][1] < spans_b[j][1]:
            i += 1
        else:
            j += 1
    return n_shared


def _span_length(span: Span) -> int:
    return span[1] - span[0]
