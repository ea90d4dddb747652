"""Batches that do not fit into a GPU's memory: they are halved, and the work goes on."""

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rag_model.errors import ResourceError

Rows = npt.NDArray[np.int64]
_LOG = logging.getLogger(__name__)
_Made = TypeVar("_Made")


def halved(batches: Iterable[Rows], work: Callable[[Rows], _Made]) -> Iterator[tuple[Rows, _Made]]:
    """Yield each batch of positions, in order, with what `work` makes of it.

    Where the GPU's memory does not hold one, that batch and all after it are halved: with the longest inputs first
    (`by_length`) a few tries find what fits.

    Raises:
        ResourceError: a batch of one input does not fit.
    """
    waiting = deque(batches)
    while waiting:
        rows = waiting.popleft()
        try:
            made = work(rows)
        except _exhausted() as full:
            if len(rows) == 1:
                raise ResourceError(
                    "a GPU's memory does not hold one text beside the model: end what else runs there, lower the "
                    "encoder's max_length, or set CUDA_VISIBLE_DEVICES to another GPU"
                ) from full
        else:
            yield rows, made
            continue
        sys.modules["torch"].cuda.empty_cache()  # outside of the handler, whose error holds the failed try's tensors
        _LOG.warning("a batch of %d texts does not fit into the GPU's memory: batches are halved", len(rows))
        waiting = deque(half for own in (rows, *waiting) for half in np.array_split(own, 2) if len(half))


def _exhausted() -> tuple[type[Exception], ...]:
    """Return torch's error of a full GPU; nothing where torch is not used, as beside an ONNX graph."""
    torch = sys.modules.get("torch")
    return () if torch is None else (torch.OutOfMemoryError,)
