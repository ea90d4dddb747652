"""Which inputs go through the model together: of like length, as many as a budget of tokens allows.

Sorting makes padding rare. A budget of tokens rather than of inputs keeps memory and speed even, from short
questions to long passages.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

# With AMX, bf16 attention costs 1.0 us a token and layer where the length is a multiple of 16, else 1.5;
# tensor cores want multiples of 8. Measured: 7 % more tokens, and a quarter less time.
LENGTH_MULTIPLE = 16

# From so many tokens on, a batch's size decides no bit of its vectors. oneDNN multiplies small matrices by other
# kernels: in bf16 with AMX the numbers differed by up to 1e-3 below 384 tokens a thread, in other padded lengths too,
# and from there on by nothing, nor with one thread or two, nor with or without a mask.
STEADY_TOKENS = 1024


def padded(length: int) -> int:
    """Return the next multiple of `LENGTH_MULTIPLE` that holds `length` tokens."""
    return -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


def by_length(lengths: Sequence[int], budget: int, least: int = 0) -> Iterator[npt.NDArray[np.int64]]:
    """Yield batches of positions, longest inputs first, each position in one batch.

    A batch, padded to its longest input, takes at most `budget` tokens or holds one input. Longest first, so
    that what does not fit into memory fails at once; equal lengths keep their order.

    With a `least` number of tokens a batch holds inputs of one padded length, and some of them more than once where
    there are too few (`STEADY_TOKENS`).
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    widths = np.array([padded(int(lengths[place])) for place in order], np.int64)
    start = 0
    while start < len(order):
        width = int(widths[start])
        end = start + max(1, budget // width)
        rows = order[start:end][widths[start:end] == width] if least else order[start:end]
        start += len(rows)
        yield np.resize(rows, max(len(rows), -(-least // width)))
