"""How many processors this process may use."""

import os
from contextlib import suppress

from rag_model.errors import UsageError

CORES = "BOOKWHEEL_CORES"  # the processors that a launch gave this run


def cores() -> int:
    """Return the number of processors that this process may run on, at most `BOOKWHEEL_CORES` if that is set.

    Raises:
        UsageError: the variable is no number of processors.
    """
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return at_most(found, CORES, "number of processors")


def at_most(found: int, variable: str, what: str) -> int:
    """Return the number that was found here, or the environment variable's if that is smaller; an empty one is not set.

    Raises:
        UsageError: the variable is no whole number of at least 1; the sentence says `what` it should be.
    """
    given = os.environ.get(variable)
    if not given:
        return found
    with suppress(ValueError):
        if (most := int(given)) > 0:
            return min(most, found)
    raise UsageError(f"{variable} is {given!r}: set it to a {what}, at least 1, or unset it")
