"""The settings of a whole fine-tuning: how it is optimised, and what is particular to what is learned."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rag_model.training.data.negatives import NegativesRecipe
from rag_model.training.loop.settings import LoopSettings
from rag_model.training.objectives.dpr import DprRecipe
from rag_model.training.objectives.rag import LOOP, RagRecipe

Kind = Literal["dpr", "rag-sequence", "rag-token"]


@dataclass(frozen=True, slots=True)
class DprTraining:
    """How a pair of encoders is trained."""

    loop: LoopSettings = field(default_factory=LoopSettings)
    dpr: DprRecipe = field(default_factory=DprRecipe)
    negatives: NegativesRecipe = field(default_factory=NegativesRecipe)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values, table by table."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RagTraining:
    """How a question encoder and a generator are trained."""

    loop: LoopSettings = LOOP
    rag: RagRecipe = field(default_factory=RagRecipe)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values, table by table."""
        return asdict(self)


Training = DprTraining | RagTraining
