"""Types of fine-tuning settings, for the command line and for the forms of deployments."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import WithJsonSchema

from flows.forms import build_form
from rag_model.toml import read_toml
from rag_model.training.objectives.objective import list_objective_names, list_objectives
from rag_model.training.settings import Tables

RecipeTables = Annotated[dict[str, dict[str, Any]] | None, WithJsonSchema(build_form(list_objectives()))]
if TYPE_CHECKING:
    KindName = str
else:
    KindName = Literal[list_objective_names()]  # help and forms offer the registered names only


def read_tables(path: Path | None) -> Tables:
    """Read the tables of a TOML file; return {} if there is no path.

    Raises:
        InputError: the file is missing or is not TOML.
    """
    return {} if path is None else read_toml(path)
