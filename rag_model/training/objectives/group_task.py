"""What trainings on groups of examples share: DPR, ColBERT, cross-encoders and MarginMSE."""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from torch import nn

from rag_model.corpus.records import Passage
from rag_model.digest import digest_json
from rag_model.errors import UsageError
from rag_model.training.data.batches import DprBatch, groups
from rag_model.training.data.examples import Example, digest_examples
from rag_model.training.data.lists import ListBatch
from rag_model.training.loop.task import Goal
from rag_model.training.objectives.ranking import Ranking

_SMALLER = frozenset({"average_rank", "loss"})  # goals; of others the larger is better


@dataclass(frozen=True, slots=True)
class GroupRecipe:
    """Settings that all of them have; a recipe says its own defaults."""

    batch_size: int = 32  # questions per batch and process
    goal: str = "average_rank"  # selects the best weights, on the dev set
    seed: int = 12345  # of the order and of the negatives

    def __post_init__(self) -> None:
        """Refuse a word that is not among those of its field."""
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal and getattr(self, name) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise UsageError(f"{name} {getattr(self, name)!r} is unknown: use one of {known}")


B = TypeVar("B", DprBatch, ListBatch)
M = TypeVar("M", bound=nn.Module)
R = TypeVar("R", bound=GroupRecipe)


class GroupTask(ABC, Generic[B, M, R]):
    """A `Task` whose batches are groups of examples; a subclass adds what is missing."""

    kind: str  # the objective's name

    def __init__(
        self,
        module: M,
        train: Sequence[Example],
        dev: Sequence[Example],
        recipe: R,
        corpus: Sequence[Passage] = (),
        digests: Mapping[str, str] | None = None,
    ) -> None:
        """Set the data; dev questions rank the passages of `corpus` and of the dev examples.

        `digests` are those of the files of the initial models and the teacher.

        Raises:
            InputError: no example of `train` is complete; or one is not, and the recipe refuses that.
        """
        self.module, self._recipe = module, recipe
        self.train = self.complete(train)
        self.goal = Goal(recipe.goal, larger=recipe.goal not in _SMALLER)
        self._dev, self._corpus, self._digests = dev, tuple(corpus), dict(digests or {})

    @cached_property
    def _ranking(self) -> Ranking:
        """What the dev questions rank; a UsageError if there is no dev example or no passage at all."""
        return Ranking(self._dev, self._corpus)

    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe, and the digests of data and models."""
        read = digest_json([passage.hash for passage in self._corpus])
        return {
            "kind": self.kind,
            "settings": asdict(self._recipe),
            "train": digest_examples(self.train),
            "dev": digest_examples(self._dev),
            "models": self._digests,
            **({"corpus": read} if self._corpus else {}),
        }

    def batches(self, epoch: int) -> Sequence[B]:
        """Return an epoch's batches, shuffled by seed and epoch; an incomplete last batch is left out."""
        dice = random.Random(f"{self._recipe.seed} {epoch}")
        return [self.batch(group, dice) for group in groups(self.train, self._recipe.batch_size, dice)]

    def ids(self, batch: B) -> Sequence[str]:
        """Return the ids of the batch's examples."""
        return [example.id for example in batch.examples]

    @abstractmethod
    def complete(self, examples: Sequence[Example]) -> list[Example]:
        """Return the examples with the passages that a batch needs, or refuse, as the recipe says."""

    @abstractmethod
    def batch(self, examples: Sequence[Example], dice: random.Random) -> B:
        """Make a batch of examples; negatives are drawn with `dice`."""
