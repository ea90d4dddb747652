"""What an objective is: one training, whole, in one file.

It says what it is called, what it may begin as, its settings, its task, what its result is for, and what it costs.
`dpr.py` and `rag.py` beside this file are the built-in ones. Another package registers its own as an entry point:

```toml
[project.entry-points."bookwheel.objectives"]
mine = "my_package.mine:MINE"          # an instance of a subclass of `Objective` whose name is `mine`
```
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

from rag_model.encoders.architecture import Architecture
from rag_model.encoders.space import Space, asked_space
from rag_model.store.store import Store
from rag_model.store.versions.model_parts import PASSAGE, QUESTION
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import Example
from rag_model.training.loop.settings import LoopSettings
from rag_model.training.loop.task import Measures, Task
from rag_model.training.origins import Origins

UNIT_TEMPERATURE = 0.05  # of scores where vectors have unit length: sentence-transformers' scale of 20
LEARNED = 4  # numbers a weight that learns: itself, its gradient, and Adam's two moments
BACKWARD = 3  # times a forward pass: forward, and twice as much back (Kaplan et al. 2020, section 2.1)

Option = Literal["encoder", "generator"]
Examples = Mapping[str, Sequence[Example]]  # `train` and `dev`


class Settings(Protocol):
    """How a training is done: a frozen dataclass of one dataclass a TOML table, all of them with defaults."""

    @property
    def loop(self) -> LoopSettings:
        """How it is optimised."""
        ...


S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True)
class Job(Generic[S]):
    """One training before it runs: all that its model follows from."""

    store: Store
    snapshot: Snapshot  # pinned by its id
    origins: Origins  # what it begins as
    settings: S
    examples: Examples
    digests: Mapping[str, str] = field(default_factory=dict)  # of the files of `origins`, by part; {} for `costs`


@dataclass(frozen=True, slots=True)
class Result:
    """What a training's model is, and how it lies in the store."""

    says: str  # one or two sentences of the card, with the paper
    uses: str  # the command that uses it; NAME, STORE and the like in capitals
    role: str  # a `pipeline_tag` of the Hugging Face hub: sentence-similarity, question-answering, text-ranking, …
    parts: frozenset[str]  # folders that `Task.save` writes, by `store.versions.model_parts`: question, passage, …


@dataclass(frozen=True, slots=True)
class Costs:
    """What a training takes, told by sizes alone."""

    stages: Mapping[str, int]  # bytes of memory of each stage, beside the process's own
    batches: int  # of an epoch, in one process; 1 or more
    step: float  # operations of floating point of a batch, forward and backward
    look: float  # the same of one evaluation


@runtime_checkable
class Objective(Protocol[S]):
    """One training. Subclass it: what has a body below is the default."""

    name: str  # what `finetune` calls it, and the kind of its models: lower case, digits and dashes, at most 40
    summary: str  # a few words for the help text
    options: frozenset[Option]  # of the command line, that it takes
    settings: type[S]
    result: Result
    version: int = 0  # raised when the same inputs would give another model, so that no earlier one is looked up

    def defaults(self, *, unit_vectors: bool) -> Mapping[str, Mapping[str, Any]]:
        """Return the settings that differ from the record's own defaults, by table.

        `unit_vectors`: what it begins as makes vectors of length 1, so that scores differ by little.
        """
        return {}

    def origins(self, store: Store, snapshot: Snapshot, encoder: str | None, generator: str | None) -> Origins:
        """Return what the training begins as; an option that is not among `options` is None.

        Raises:
            StoreError: the store has no such model, or the snapshot carries none.
            UsageError: what is named cannot be trained, or something is not named that must be.
        """
        ...

    def prepare(self, job: Job[S]) -> Examples:
        """Return the examples as the task gets them, such as with negatives; called once, before `task`; may be slow.

        The result must follow from the job alone: the memo key of the model holds the job's own examples.
        """
        return job.examples

    def task(self, job: Job[S]) -> Task[Any]:
        """Make what the loop trains, of examples as `prepare` returned them; torch's seed is set.

        Raises:
            BookwheelError: a model cannot be loaded, or the examples or the snapshot do not fit the settings.
        """
        ...

    def check(self, task: Task[Any], trained: Measures) -> None:
        """Do nothing if the trained model may be published; `trained` are its measures on the dev set.

        Raises:
            RefusedError: it may not; the checkpoints stay.
        """
        return

    def space(self, job: Job[S], folder: Path) -> Space | None:
        """Return the space that the saved model's questions ask into; None of a model that encodes no questions.

        It is that of the model's own passage encoder, where it has one, else the snapshot's.
        """
        if PASSAGE in self.result.parts:
            return asked_space(folder / QUESTION)
        asks = QUESTION in self.result.parts and job.snapshot.space
        return Space.from_json(asks) if asks else None

    def costs(self, job: Job[S], models: Mapping[str, Architecture]) -> Costs:
        """Return what the training takes; `models` are the shapes of what it begins as, by part."""
        ...
