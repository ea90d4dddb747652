"""Batch inputs of similar length up to a token budget, and halve batches that do not fit a GPU.

Sorting by length makes padding rare. A budget of tokens instead of inputs keeps memory and speed
even, from short questions to long passages.
"""

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rag_model.errors import ResourceError

# With AMX, bf16 attention costs 1.0 us per token and layer if the length is a multiple of 16, else
# 1.5; tensor cores need multiples of 8. Measured: 7 % more tokens, and a quarter less time.
LENGTH_MULTIPLE = 16

# In batches of at least this many tokens, a vector does not depend on the batch size. oneDNN uses
# other kernels for small matrices: in bf16 with AMX the values differed by up to 1e-3 below 384
# tokens per thread, also between padded lengths. Above that they did not differ, with one thread or
# two, with or without an attention mask.
BATCH_INVARIANT_TOKENS = 1024
Rows = npt.NDArray[np.int64]
_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


def pad_length(length: int, multiple: int = LENGTH_MULTIPLE) -> int:
    """Return the smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


def batch_by_length(lengths: Sequence[int], max_tokens: int, min_tokens: int = 0) -> Iterator[npt.NDArray[np.int64]]:
    """Yield batches of row numbers, longest inputs first; every row is in one batch.

    A batch, padded to its longest input, has at most `max_tokens` tokens, or one input. The longest
    inputs come first, so that a batch that does not fit into memory fails at once. Inputs of equal
    length keep their order.

    With `min_tokens`, all inputs of a batch have one padded length, and the batch has at least that
    many tokens; rows are repeated if there are too few (see `BATCH_INVARIANT_TOKENS`).
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    # (n,): padded lengths, descending.
    widths = np.array([pad_length(int(lengths[row])) for row in order], np.int64)
    start = 0
    while start < len(order):
        width = int(widths[start])
        end = start + max(1, max_tokens // width)
        rows = order[start:end][widths[start:end] == width] if min_tokens else order[start:end]
        start += len(rows)
        yield np.resize(rows, max(len(rows), -(-min_tokens // width)))  # (b,) -> (>= b,), repeated


def batch_without_padding(lengths: Sequence[int], max_tokens: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield batches of row numbers for packed inputs, longest inputs first; every row is in one
    batch.

    A batch has at most `max_tokens` tokens without padding, or one input. Inputs of equal length
    are neighbours.
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    ends = np.cumsum(np.asarray(lengths, np.int64)[order])  # (n,): tokens up to each input
    start, tokens_done = 0, 0
    while start < len(order):
        end = max(start + 1, int(np.searchsorted(ends, tokens_done + max_tokens, side="right")))
        yield order[start:end]
        start, tokens_done = end, int(ends[end - 1])


def run_batches(batches: Iterable[Rows], work: Callable[[Rows], _Result]) -> Iterator[tuple[Rows, _Result]]:
    """Yield each batch of row numbers, in order, with the result of `work`.

    If a batch does not fit into the GPU's memory, it and all later batches are halved. Because the
    longest inputs come first (`batch_by_length`), a few attempts find a size that fits.

    Raises:
        ResourceError: a batch of one input does not fit.
    """
    pending = deque(batches)
    while pending:
        rows = pending.popleft()
        try:
            result = work(rows)
        except _out_of_memory_errors() as error:
            if len(rows) == 1:
                raise ResourceError(
                    "the GPU's memory does not hold the model and one text: end other programs on "
                    "this GPU, lower the encoder's max_length, or set CUDA_VISIBLE_DEVICES to "
                    "another GPU"
                ) from error
        else:
            yield rows, result
            continue
        # Outside the handler, because its exception keeps the tensors of the failed attempt alive.
        sys.modules["torch"].cuda.empty_cache()
        _log.warning("a batch of %d texts does not fit into the GPU's memory: batches are halved", len(rows))
        pending = deque(half for batch in (rows, *pending) for half in np.array_split(batch, 2) if len(half))


def _out_of_memory_errors() -> tuple[type[Exception], ...]:
    """Return torch's out-of-memory error; nothing if torch is not loaded, as with an ONNX graph."""
    torch = sys.modules.get("torch")
    return () if torch is None else (torch.OutOfMemoryError,)
