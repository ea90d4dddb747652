"""The objectives by name: the built-in ones, and those that installed packages register as entry points."""

import logging
from typing import Any

from rag_model.errors import BookwheelError, InputError, UsageError
from rag_model.plugins import Registry
from rag_model.training.objectives.objective import Objective

_HERE = "rag_model.training.objectives"
OBJECTIVES: Registry[Objective[Any]] = Registry(
    "objective",
    "bookwheel.objectives",
    {
        "dpr": f"{_HERE}.dpr:DPR",
        "colbert": f"{_HERE}.colbert:COLBERT",
        "cross-encoder": f"{_HERE}.cross_encoder:CROSS_ENCODER",
        "margin-mse": f"{_HERE}.margin_mse:MARGIN_MSE",
        "sidr": f"{_HERE}.sidr.objective:SIDR",
        "openrag": f"{_HERE}.openrag.objective:OPENRAG",
        "rag-sequence": f"{_HERE}.rag:SEQUENCE",
        "rag-token": f"{_HERE}.rag:TOKEN",
        "rag-end2end": f"{_HERE}.end2end.objective:END2END",
        "ra-dit": f"{_HERE}.ra_dit.objective:RA_DIT",
        "ict": f"{_HERE}.ict:ICT",
        "realm": f"{_HERE}.realm.objective:REALM",
    },
)
_log = logging.getLogger(__name__)


def names() -> tuple[str, ...]:
    """Return the names of all objectives: the built-in ones, then others in alphabetical order; imports nothing."""
    return tuple(OBJECTIVES.names())


def objective(name: str) -> Objective[Any]:
    """Return the objective of a name.

    Raises:
        InputError: the package that registers it cannot be imported, it registers something else, or two
            packages register it.
        UsageError: there is no such objective.
    """
    found: Any = OBJECTIVES.find(name)
    if found is None:
        raise UsageError(f"there is no objective {name!r}: choose one of {', '.join(names())}")
    if not isinstance(found, Objective):
        raise InputError(
            f"objective {name!r} is {type(found).__name__}: register an instance of a subclass of Objective"
        )
    if found.name != name:
        raise InputError(f"objective {name!r} has the name {found.name!r}: register it by that name")
    return found


def objectives() -> list[Objective[Any]]:
    """Return all objectives in the order of `names`; one that cannot be loaded is logged and left out."""
    found: list[Objective[Any]] = []
    for name in names():
        try:
            found.append(objective(name))
        except BookwheelError as broken:
            _log.warning("%s", broken)
    return found
