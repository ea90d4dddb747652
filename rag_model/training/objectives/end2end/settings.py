"""Settings of end-to-end RAG. "Paper" is Siriwardhana et al. 2023 (TACL 11, 1-17), "code" its authors' repository."""

from dataclasses import dataclass, field

from rag_model.errors import UsageError
from rag_model.generate.rag import Variant
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.moving.moving_settings import MovingSettings
from rag_model.training.objectives.rag_task import RagRecipe

LOOP = LoopSettings(
    epochs=10,  # paper: 10
    accumulation=8,  # paper: batches of 4, 8 times
    learning_rate=3e-5,  # paper: 3e-5
    warmup_share=0.02,  # paper: 500 steps; of SQuAD's 27,400 (87,599 examples, 10 epochs, batches of 32)
    weight_decay=0.001,  # code: as the authors of RAG
    max_gradient_norm=0.1,  # code: as the authors of RAG
)
LEADS, NONE = "leads", "none"


@dataclass(frozen=True, slots=True)
class End2EndRecipe:
    """What end-to-end RAG has beside RAG."""

    marginal: Variant = "token"  # RAG-Token or RAG-Sequence; code: rag_token
    candidates: int = 0  # passages of the index that the current encoder scores again, k are read; 0: k, as the paper

    def __post_init__(self) -> None:
        if self.candidates < 0 or self.marginal not in ("sequence", "token"):
            raise UsageError(
                f"candidates {self.candidates} and marginal {self.marginal!r} of end-to-end RAG: need 0 or more, and "
                "sequence or token"
            )


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """The auxiliary task: a statement must be generated from the passages that it retrieves; paper, section 3.2."""

    statements: str = LEADS  # the corpus's own leads; none; or a JSON-lines file with a `statement` a line
    most: int = 20_000  # leads
    batch_size: int = 1  # statements per batch and process
    weight: float = 1.0  # of its loss; paper: the two are added
    marker: str = "<p>"  # before a statement that retrieves, and in place of the question when it is written again

    def __post_init__(self) -> None:
        if not self.statements or self.most < 1 or self.batch_size < 1 or self.weight <= 0 or not self.marker.strip():
            raise UsageError(
                f"{self} is out of bounds: need leads, none or a file, most and batch_size of 1 or more, a weight "
                "above 0 and a marker"
            )


def _rag() -> RagRecipe:
    return RagRecipe(batch_size=4)  # paper: 4


@dataclass(frozen=True, slots=True)
class End2EndTraining:
    """Settings of an end-to-end RAG training."""

    loop: LoopSettings = LOOP  # paper, section 4.2, and code; the paper warms up for 500 steps
    rag: RagRecipe = field(default_factory=_rag)
    end2end: End2EndRecipe = field(default_factory=End2EndRecipe)
    reconstruction: Reconstruction = field(default_factory=Reconstruction)
    moving: MovingSettings = field(default_factory=MovingSettings)

    def __post_init__(self) -> None:
        if self.rag.retrieve != "batch":
            raise UsageError('end-to-end RAG retrieves with the encoders as they are: leave retrieve = "batch"')
        if self.rag.frozen == "question":
            raise UsageError('without a retriever that learns use `finetune rag-token`, with frozen = "question"')
        if self.rag.weighed_by == "scores":
            raise UsageError('end-to-end RAG learns from inner products: leave weighed_by = "products"')
        if 0 < self.end2end.candidates < self.rag.k:
            raise UsageError(
                f"{self.end2end.candidates} candidates are fewer than the {self.rag.k} passages that are read: raise "
                "candidates or lower k"
            )

    @property
    def candidates(self) -> int:
        """How many passages the index is asked for."""
        return self.end2end.candidates or self.rag.k
