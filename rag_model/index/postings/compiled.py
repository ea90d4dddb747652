"""The loops over postings are compiled by numba when they are first called.

The machine code is kept beside the sources, or in the user's cache, so that later processes do not compile again. Each
file's code is kept until that file changes: after a change of a function that another file calls, run
`make clean-compiled`.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rag_model.extras import require


def compiled(function: Callable[..., Any]) -> Any:
    """Return a function compiled for this processor; it releases Python's lock, and divides as numpy does.

    Where no folder can be written, as in a container with a read-only disk, each process compiles again.
    """
    compiler = require("numba", extra="text").njit
    with suppress(RuntimeError):
        return compiler(function, cache=True, nogil=True, error_model="numpy")
    return compiler(function, nogil=True, error_model="numpy")


def inlined(function: Callable[..., Any]) -> Any:
    """Return a function of which compiled ones take in the code: to call it with twenty arrays takes 150 ns."""
    return require("numba", extra="text").njit(function, nogil=True, error_model="numpy", forceinline=True)
