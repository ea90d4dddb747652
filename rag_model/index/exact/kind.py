"""The kind `exact`: a header and the vectors; a search compares all of them."""

import re
from pathlib import Path
from typing import ClassVar

from rag_model.index.files.engine import Vectors
from rag_model.index.lists.kind import ListKind
from rag_model.index.quality.recall import FLOOR, Floor
from rag_model.index.recipe import VectorPlan


class ExactKind(ListKind):
    """`Flat`: built like inverted lists, as one list without codes."""

    name: ClassVar[str] = "exact"
    factories = re.compile(r"Flat\Z")

    def recalls(self, plan: VectorPlan, trained: Path, new: Vectors, old: Vectors) -> tuple[float, float] | None:
        """Return None: every vector is compared, so new ones are found like old ones."""
        return None

    def floor(self, factory: str) -> Floor:
        """Return the floor of an index that loses nothing."""
        return FLOOR


KIND = ExactKind()
