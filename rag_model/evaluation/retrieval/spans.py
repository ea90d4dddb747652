"""Measures over spans of characters, in which text that is read twice counts once as a match.

Passages may overlap, and then two of them hold the same answer. Whether it was found is a matter of characters: those
of the passages that were read, and those that hold the answer (Smith & Troynikov 2024, "Evaluating Chunking
Strategies for Retrieval", Chroma).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Span = tuple[int, int]  # characters of one text: first, and one after the last


@dataclass(frozen=True, slots=True)
class SpanMeasures:
    """What was found of the characters that answer a question, each in [0, 1]."""

    recall: float  # of the wanted characters, the share that was read
    precision: float  # of all characters read, repeated ones included, the share that was wanted, each counted once
    iou: float  # found / (read + wanted - found), with the repeated ones in `read`


def span_measures(read: Sequence[Span], wanted: Sequence[Span]) -> SpanMeasures:
    """Return the measures of spans that were read against the spans that were wanted, in any order.

    Without a wanted character, recall is 1; with nothing read, precision is 0.

    >>> span_measures([(0, 10), (5, 15)], [(8, 18)])
    SpanMeasures(recall=0.7, precision=0.35, iou=0.30434782608695654)
    """
    found, all_read, all_wanted = shared(read, wanted), sum(map(_length, read)), sum(map(_length, union(wanted)))
    return SpanMeasures(
        recall=found / all_wanted if all_wanted else 1.0,
        precision=found / all_read if all_read else 0.0,
        iou=found / max(1, all_read + all_wanted - found),
    )


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the disjoint spans, in order, that hold the same characters; spans that touch are joined.

    >>> union([(4, 6), (0, 2), (1, 4), (8, 8)])
    [(0, 6)]
    """
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        elif start < end:
            joined.append((start, end))
    return joined


def shared(one: Iterable[Span], other: Iterable[Span]) -> int:
    """Return how many characters are in both; a character counts once, however many spans hold it.

    >>> shared([(0, 5), (3, 8)], [(4, 10)])
    4
    """
    left, right = union(one), union(other)
    found, i, j = 0, 0, 0
    while i < len(left) and j < len(right):
        found += max(0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(span: Span) -> int:
    return span[1] - span[0]
