"""The objectives by name: the built-in ones, and those that installed packages register as entry points.

Only what is asked for is imported. A package cannot replace a built-in objective: its own must have another name.
"""

import logging
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from rag_model.errors import BookwheelError, InputError, UsageError
from rag_model.training.objectives.objective import Objective

GROUP = "bookwheel.objectives"
_HERE = "rag_model.training.objectives"
_BUILT_IN = {
    "dpr": f"{_HERE}.dpr:DPR",
    "rag-sequence": f"{_HERE}.rag:SEQUENCE",
    "rag-token": f"{_HERE}.rag:TOKEN",
}
_log = logging.getLogger(__name__)


def names() -> tuple[str, ...]:
    """Return the names of all objectives: the built-in ones, then others by alphabet; imports nothing."""
    return (*_BUILT_IN, *sorted({point.name for point in entry_points(group=GROUP)} - set(_BUILT_IN)))


def objective(name: str) -> Objective[Any]:
    """Return the objective of a name.

    Raises:
        InputError: the package that registers it cannot be imported, or what it registers is not that objective.
        UsageError: there is no such objective, or two packages register it.
    """
    if name in _BUILT_IN:
        return _loaded(EntryPoint(name, _BUILT_IN[name], GROUP))
    found = {point.value: point for point in entry_points(group=GROUP, name=name)}
    if not found:
        raise UsageError(f"there is no objective {name!r}: choose one of {', '.join(names())}")
    if len(found) > 1:
        raise UsageError(f"objective {name!r} is registered by {' and by '.join(sorted(found))}: uninstall one of them")
    return _loaded(*found.values())


def objectives() -> list[Objective[Any]]:
    """Return all objectives in the order of `names`; one that cannot be loaded is logged and left out."""
    found: list[Objective[Any]] = []
    for name in names():
        try:
            found.append(objective(name))
        except BookwheelError as broken:
            _log.warning("%s", broken)
    return found


def _loaded(point: EntryPoint) -> Objective[Any]:
    where = f"objective {point.name!r} ({point.value})"
    try:
        found = point.load()
    except Exception as broken:  # a package may raise anything when it is imported
        raise InputError(f"{where} cannot be imported ({broken}): repair or uninstall its package") from broken
    if not isinstance(found, Objective):
        raise InputError(f"{where} is {type(found).__name__}: register an instance of a subclass of Objective")
    if found.name != point.name:
        raise InputError(f"{where} calls itself {found.name!r}: register it by that name")
    return found
