"""Batches for the model: inputs of similar length, as many as a budget of tokens allows.

Sorting makes padding rare. A budget of tokens instead of inputs keeps memory and speed even, from short questions to
long passages.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

# With AMX, bf16 attention costs 1.0 us per token and layer if the length is a multiple of 16, else 1.5; tensor cores
# need multiples of 8. Measured: 7 % more tokens, and a quarter less time.
LENGTH_MULTIPLE = 16

# From this number of tokens on, the size of a batch does not change its vectors. oneDNN uses other kernels for small
# matrices: in bf16 with AMX the numbers differed by up to 1e-3 below 384 tokens per thread, also between padded
# lengths. From there on they did not differ, with one thread or two, with or without a mask.
STEADY_TOKENS = 1024


def padded(length: int, multiple: int = LENGTH_MULTIPLE) -> int:
    """Return the smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


def by_length(lengths: Sequence[int], budget: int, least: int = 0) -> Iterator[npt.NDArray[np.int64]]:
    """Yield batches of positions, longest inputs first, each position in one batch.

    A batch, padded to its longest input, has at most `budget` tokens or one input. Longest first, so that a batch that
    does not fit into memory fails at once; equal lengths keep their order.

    With `least`, a batch has inputs of one padded length and at least that many tokens: inputs are repeated if there
    are too few (`STEADY_TOKENS`).
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    widths = np.array([padded(int(lengths[place])) for place in order], np.int64)  # (n,): padded lengths, descending
    start = 0
    while start < len(order):
        width = int(widths[start])
        end = start + max(1, budget // width)
        rows = order[start:end][widths[start:end] == width] if least else order[start:end]
        start += len(rows)
        yield np.resize(rows, max(len(rows), -(-least // width)))  # (b,) -> (>= b,), repeated


def by_tokens(lengths: Sequence[int], budget: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield batches of positions, longest inputs first, each position in one batch; equal lengths stand together.

    A batch has at most `budget` tokens, none of them padding, or one input.
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    ends = np.cumsum(np.asarray(lengths, np.int64)[order])  # (n,): tokens up to each input
    start, done = 0, 0
    while start < len(order):
        end = max(start + 1, int(np.searchsorted(ends, done + budget, side="right")))
        yield order[start:end]
        start, done = end, int(ends[end - 1])
