"""The protocol of objectives: one training in one file.

It defines its name, initial models, settings, task, result, and costs.
`dpr.py`, `rag.py` and others in this folder are the built-in ones. Another package registers its own as an entry point:

```toml
[project.entry-points."bookwheel.objectives"]
mine = "my_package.mine:MINE"          # an instance of a subclass of `Objective` whose name is `mine`
```
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

from rag_model.encoders.architecture import Architecture
from rag_model.encoders.space import Space, asked_space
from rag_model.store.store import Store
from rag_model.store.versions.model_parts import PASSAGE, QUESTION
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.blocks import Scorer
from rag_model.training.data.examples import Example
from rag_model.training.data.teaching import Tell
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.loop.task import Measures, Task
from rag_model.training.moving.rebuild import Rebuild
from rag_model.training.origins import Named, Origins

UNIT_TEMPERATURE = 0.05  # of scores of unit vectors: sentence-transformers' scale of 20
LEARNED = 4  # numbers per trained weight: itself, its gradient, and Adam's two moments
BACKWARD = 3  # times a forward pass: forward, and twice that for backward (Kaplan et al. 2020, section 2.1)

Option = Literal["encoder", "generator", "teacher"]
Examples = Mapping[str, Sequence[Example]]  # `train` and `dev`


class Settings(Protocol):
    """Settings of a training: a frozen dataclass with one dataclass per TOML table, all with defaults."""

    @property
    def loop(self) -> LoopSettings:
        """Settings of the training loop."""
        ...


S = TypeVar("S", bound=Settings)


def loops_of(settings: Settings) -> dict[str, LoopSettings]:
    """Return the tables of loop settings by name: `loop`, and those of other stages."""
    tables = {one.name: getattr(settings, one.name) for one in fields(settings)}  # type: ignore[arg-type]
    return {name: table for name, table in tables.items() if isinstance(table, LoopSettings)}


@dataclass(frozen=True, slots=True)
class Job(Generic[S]):
    """One training before it runs: everything that determines its model."""

    store: Store
    snapshot: Snapshot  # pinned by its id
    origins: Origins  # the initial models
    settings: S
    examples: Examples
    digests: Mapping[str, str] = field(default_factory=dict)  # of the files of `origins`, by part; {} for `costs`
    work: Path | None = None  # the training's folder: `prepare` may keep there what a run that resumes need not repeat
    tell: Callable[[int, int], None] = lambda _, __: None  # how much of a slow preparation is done, and of how much
    rebuild: Rebuild | None = None  # makes the rebuilds of a moving index; None: nothing does here
    scorer: Scorer | None = None  # scores on workers, before the training; None: this process does it


@dataclass(frozen=True, slots=True)
class Result:
    """Description of a training's model, and its parts in the store."""

    says: str  # one or two sentences of the card, with the paper
    uses: str  # the command that uses it; NAME, STORE and the like in capitals
    role: str  # a `pipeline_tag` of the Hugging Face hub: sentence-similarity, question-answering, text-ranking, …
    parts: frozenset[str]  # folders that `Task.save` writes, by `store.versions.model_parts`: question, passage, …
    rebuilds: bool = False  # its passage encoder learned: the snapshot's passages are encoded again with it, at the end


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a training, estimated from sizes alone."""

    stages: Mapping[str, int]  # bytes of memory of each stage, without the process
    batches: int  # batches of an epoch, in one process; 1 or more
    step: float  # floating-point operations of a batch, forward and backward
    look: float  # the same of one evaluation
    rebuild: float = 0.0  # the same of encoding all passages once
    rebuilds: int = 0  # how often that is done, at the end included
    once: float = 0.0  # the same before the first step, such as a generator's scores
    loop: LoopSettings | None = None  # of these steps; None: the settings' own
    before: "tuple[Costs, ...]" = ()  # of the stages before this one


@dataclass(frozen=True, slots=True)
class Stage:
    """One of the trainings that an objective does one after another, each in a folder of its own."""

    name: str  # the folder below the training's own; empty: that one
    loop: LoopSettings
    task: Callable[[Path | None, Tell], Task[Any]]  # the best weights of the stage before, and whom to tell progress


@runtime_checkable
class Objective(Protocol[S]):
    """One training. Subclass it: methods with a body are defaults."""

    name: str  # name for `finetune`, and the kind of its models: lower case, digits and dashes, at most 40
    summary: str  # a few words for the help text
    options: frozenset[Option]  # the command-line options that it accepts
    settings: type[S]
    result: Result
    tempered: str = ""  # the table of `settings` whose `temperature` suits the length of the vectors; empty: none
    takes_examples: bool = True  # False: it learns from the snapshot's own text, and `Job.examples` are empty
    version: int = 0  # increased when the same inputs would give another model, so that earlier ones are not reused

    def defaults(self, *, unit_vectors: bool) -> Mapping[str, Mapping[str, Any]]:
        """Return the settings that differ from the record's own defaults, by table.

        `unit_vectors`: the initial encoder makes vectors of length 1, so that scores differ little.
        """
        return {self.tempered: {"temperature": UNIT_TEMPERATURE}} if unit_vectors and self.tempered else {}

    def origins(self, store: Store, snapshot: Snapshot, named: Named) -> Origins:
        """Return the models that the training begins with; what is not among `options` is not named.

        Raises:
            StoreError: the store has no such model, or the snapshot carries none.
            UsageError: a named model cannot be trained, or a required name is missing.
        """
        ...

    def inputs(self, job: Job[S]) -> Mapping[str, Any]:
        """Return, as JSON values, what else decides the model, such as digests of files that the settings name."""
        return {}

    def prepare(self, job: Job[S]) -> Examples:
        """Return the examples for the task, for example with negatives; called once, before `task`; may be slow.

        The result must depend on the job alone: the memo key of the model holds the job's own examples.
        """
        return job.examples

    def task(self, job: Job[S]) -> Task[Any]:
        """Make the task from the examples that `prepare` returned; torch's seed is set.

        Raises:
            BookwheelError: a model cannot be loaded, or the examples or the snapshot do not fit the settings.
        """
        ...

    def stages(self, job: Job[S]) -> Sequence[Stage]:
        """Return the trainings to do, in order, after `prepare`: one, that of `task`.

        The last one saves the model. Their measures have the same names, as far as they are shown side by side.
        """
        return [Stage("", job.settings.loop, lambda _, __: self.task(job))]

    def check(self, task: Task[Any], trained: Measures) -> None:
        """Check that the trained model may be published; `trained` are its measures on the dev set.

        Raises:
            RefusedError: it may not; the checkpoints stay.
        """
        return

    def space(self, job: Job[S], folder: Path) -> Space | None:
        """Return the space of the saved model's question vectors; None if the model encodes no questions.

        It is the space of the model's own passage encoder, if it has one, else the snapshot's.
        """
        if PASSAGE in self.result.parts:
            return asked_space(folder / QUESTION)
        asks = QUESTION in self.result.parts and job.snapshot.space
        return Space.from_json(asks) if asks else None

    def costs(self, job: Job[S], models: Mapping[str, Architecture]) -> Costs:
        """Return the costs; `models` are the sizes of the initial models, by part."""
        ...
