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
    return _compiled(function, {})


def bare(function: Callable[..., Any]) -> Any:
    """Return a function compiled likewise, which makes no array: so it need not count who holds those it is given.

    The counts are atomic, five nanoseconds for each array of each call: for a list of few postings, most of the work.
    """
    return _compiled(function, {"_nrt": False})


def inlined(function: Callable[..., Any]) -> Any:
    """Return a function compiled likewise, which becomes a part of those that call it.

    A call passes each array as seven numbers: for a list of few postings, most of the work.
    """
    return _compiled(function, {"_nrt": False, "forceinline": True})


def _compiled(function: Callable[..., Any], settings: dict[str, Any]) -> Any:
    compiler = require("numba", extra="text").njit
    with suppress(RuntimeError):
        return compiler(function, cache=True, nogil=True, error_model="numpy", **settings)
    return compiler(function, nogil=True, error_model="numpy", **settings)
