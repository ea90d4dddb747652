"""Which inputs go through the model together: sorted by length, cut by a budget of tokens.

Sorting makes padding rare (a batch holds inputs of nearly one length); a budget of tokens, not of inputs, keeps memory
and speed even from short questions to long passages.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt


def by_length(lengths: Sequence[int], budget: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield batches of positions, longest inputs first, each position once.

    A batch of n inputs padded to its longest takes at most `budget` tokens, or holds one input. Longest first: what
    does not fit into memory fails at once. Equal lengths keep their order.
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    start = 0
    while start < len(order):
        count = max(1, budget // max(1, int(lengths[order[start]])))
        yield order[start : start + count]
        start += count
