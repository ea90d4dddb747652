"""What a posting adds to a score: factor · part, where the factor is the question's, and the part the posting's.

part = weight / (saturation · weight + fixed + slope · length)

BM25 and impacts are two settings of it, so one search serves both. A part rises with the weight and falls with the
length of the passage, whatever the setting is: bounds by the largest weight and the shortest length of a block hold for
all of them.
"""

from typing import NamedTuple

MOST_IMPACT = 255  # of a posting in one byte


class Weighting(NamedTuple):
    """The numbers of a setting; compiled code takes it as it is."""

    limit: float  # no part is larger
    saturation: float
    fixed: float
    slope: float


IMPACT = Weighting(float(MOST_IMPACT), 0.0, 1.0, 0.0)  # the weight itself


def bm25(k1: float, b: float, mean_length: float) -> Weighting:
    """Return BM25's tf / (tf + k1 (1 - b + b · length / mean_length))."""
    return Weighting(1.0, 1.0, k1 * (1 - b), k1 * b / mean_length)
