"""The protocol of objectives, and the registry of objectives by name.

An objective defines one kind of training: its name, initial models, settings, task, result and
costs. The built-in objectives are in this folder, such as `dpr.py` and `rag.py`. Another package
registers an objective as an entry point:

```toml
[project.entry-points."bookwheel.objectives"]
mine = "my_package.mine:MINE"  # an instance of a subclass of `Objective` whose name is `mine`
```
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

from rag_model.encoders.architecture import Architecture
from rag_model.encoders.space import Space, read_declared_space
from rag_model.errors import BookwheelError, UsageError
from rag_model.plugins import Registry
from rag_model.retrieve.expression import RetrieverChoice
from rag_model.store.recorded_tasks import OnProgress, TaskRunner
from rag_model.store.store import Store
from rag_model.store.versions.model_manifest import CROSS_ENCODER, GENERATOR, PASSAGE, QUESTION
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import Example
from rag_model.training.data.negatives import NegativesRecipe
from rag_model.training.data.temporary_index import Indexer
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.loop.task import Measures, Task
from rag_model.training.moving_index import Rebuilder
from rag_model.training.origins import InitialModels, NamedModels, choose_models

# temperature for vectors of length 1; sentence-transformers multiplies their scores by 20
UNIT_TEMPERATURE = 0.05
# numbers in memory per trained weight: the weight, its gradient, and the two moments of Adam
TRAINED_COPIES = 4
# The cost of a training step is that of three forward passes: one forward pass, and a backward pass
# with the cost of two (Kaplan et al. 2020, section 2.1).
TRAINING_PASSES = 3

Option = Literal["encoder", "generator", "teacher"]
Examples = Mapping[str, Sequence[Example]]  # `train` and `dev`
_PACKAGE = "rag_model.training.objectives"
_log = logging.getLogger(__name__)


class TrainingSettings(Protocol):
    """Settings of a training: a frozen dataclass with defaults, one dataclass per TOML table."""

    @property
    def loop(self) -> LoopSettings:
        """Settings of the training loop."""
        ...


S = TypeVar("S", bound=TrainingSettings)


def find_loop_settings(settings: TrainingSettings) -> dict[str, LoopSettings]:
    """Return the loop settings of all stages by the name of their table, such as `loop`."""
    return {name: table for name, table in _get_tables(settings).items() if isinstance(table, LoopSettings)}


def _get_tables(settings: TrainingSettings) -> dict[str, Any]:
    return {settings_field.name: getattr(settings, settings_field.name) for settings_field in fields(settings)}  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Job(Generic[S]):
    """Everything that determines the model of one training."""

    store: Store
    snapshot: Snapshot  # the snapshot of the training, identified by its id
    origins: InitialModels  # the initial models
    settings: S
    examples: Examples
    # digests of the files of the initial models, by part, and the identities of the models that
    # retriever expressions name, by name; empty for `costs`
    digests: Mapping[str, str] = field(default_factory=dict)
    work: Path | None = None  # the training's folder, where `prepare` may cache slow results
    # function that is called with the finished and the total amount of work
    on_progress: Callable[[int, int], None] = lambda _, __: None
    rebuild: Rebuilder | None = None  # runs rebuilds of the index; if None, it cannot be rebuilt
    runner: TaskRunner | None = None  # runs tasks on workers; if None, this process runs them
    # builds temporary indexes on workers; if None, this process builds them
    indexer: Indexer | None = None


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Description for the card of a trained model, and the parts of the model in the store."""

    summary: str  # one or two sentences for the model card, which name the paper
    usage: str  # a command that uses the model; NAME, STORE and so on are in capitals
    # task of the Hugging Face hub, such as text-generation; if empty, the parts determine it
    pipeline_tag: str = ""
    # folders that `Task.save` writes; see `store.versions.model_manifest`
    parts: frozenset[str] = frozenset()
    # whether the passage encoder is trained, so that all passages are encoded again at the end
    rebuilds: bool = False

    @property
    def hub_task(self) -> str:
        """The task of the Hugging Face hub."""
        tag_by_part = {GENERATOR: "question-answering", CROSS_ENCODER: "text-ranking"}
        part_tags = [tag for part, tag in tag_by_part.items() if part in self.parts]
        return self.pipeline_tag or (part_tags or ["sentence-similarity"])[0]


@dataclass(frozen=True, slots=True)
class TrainingCosts:
    """Costs of a training, estimated from the sizes of data and models."""

    # bytes of memory of each stage, in addition to those of a process without models and data
    stage_bytes: Mapping[str, int]
    batches: int  # batches per epoch, in one process; 1 or more
    step_operations: float  # floating-point operations of a batch, forward and backward
    evaluation_operations: float  # floating-point operations of one evaluation
    rebuild_operations: float = 0.0  # floating-point operations to encode all passages once
    rebuilds: int = 0  # number of rebuilds, including the one at the end
    # floating-point operations before the first step, such as a generator's scoring
    preparation_operations: float = 0.0
    # loop settings of this stage; None means the table `loop` of the settings
    loop: LoopSettings | None = None
    previous_stages: "tuple[TrainingCosts, ...]" = ()  # costs of the stages before this one


@dataclass(frozen=True, slots=True)
class TrainingStage:
    """One stage of a training. The stages run one after another, each in its own folder."""

    name: str  # subfolder of the training's folder; empty means the folder itself
    loop: LoopSettings
    # Function that builds the task. The arguments are the folder with the best weights of the
    # previous stage, and `on_progress`.
    task: Callable[[Path | None, OnProgress], Task[Any]]


@runtime_checkable
class Objective(Protocol[S]):
    """Defines one kind of training. Subclass it; methods with a body are the defaults."""

    # name for `finetune`, and kind of the trained models: up to 40 lower-case letters, digits and
    # dashes
    name: str
    summary: str  # summary of a few words for the help text
    options: frozenset[Option]  # command-line options that the objective accepts
    settings: type[S]
    result: ModelDescription
    # table of `settings` whose `temperature` depends on the length of vectors; empty means no table
    tempered: str = ""
    # whether the model learns from examples; if false, it learns from the snapshot's own text, and
    # `Job.examples` is empty
    takes_examples: bool = True
    # increase the version when the same inputs would give a different model, to invalidate the memo
    version: int = 0

    def defaults(self, *, unit_vectors: bool) -> Mapping[str, Mapping[str, Any]]:
        """Return the settings that differ from the defaults of the settings record, by table.

        `unit_vectors` says whether vectors of the initial encoder have length 1, so that their
        scores differ little and the softmax needs a lower temperature.
        """
        return {self.tempered: {"temperature": UNIT_TEMPERATURE}} if unit_vectors and self.tempered else {}

    def origins(self, store: Store, snapshot: Snapshot, named_models: NamedModels) -> InitialModels:
        """Return the initial models; `named_models` names only models that `options` accepts.

        By default, `choose_models` chooses them for the parts of `result` and for `options`.

        Raises:
            StoreError: the store has no such model, or the snapshot contains no encoder.
            UsageError: a named model cannot be trained, or a required name is missing.
        """
        return choose_models(store, snapshot, named_models, self.result.parts, self.options)

    def inputs(self, job: Job[S]) -> Mapping[str, Any]:
        """Return further inputs that determine the model, as JSON values.

        One such input is the digest of a file that the settings name.
        """
        return {}

    def list_retrievers(self, settings: S) -> list[str | None]:
        """Return the retriever expressions of the settings; None means the snapshot's default.

        The models that they name are inputs of the training. By default, the expressions are those
        of tables that are a `RetrieverChoice`, or a `NegativesRecipe` that searches the snapshot.
        """
        tables = _get_tables(settings).values()
        return [
            *(table.expression for table in tables if isinstance(table, RetrieverChoice)),
            *(table.retriever for table in tables if isinstance(table, NegativesRecipe) and table.search == "snapshot"),
        ]

    def prepare(self, job: Job[S]) -> Examples:
        """Return the examples for the task, for example with mined negatives; this may be slow.

        This method is called once, before `task`. The result must depend only on the job, because
        the memo key of the model contains the examples of the job, but not the result.
        """
        return job.examples

    def task(self, job: Job[S]) -> Task[Any]:
        """Build the task from the examples that `prepare` returned, after torch's seed was set.

        Raises:
            BookwheelError: a model cannot be loaded, or the examples or the snapshot do not fit the
                settings.
        """
        ...

    def stages(self, job: Job[S]) -> Sequence[TrainingStage]:
        """Return the stages to run after `prepare`, in order; the default is one stage with `task`.

        The last stage saves the model. The same measure should have the same name in all stages,
        because their measures are shown side by side.
        """
        return [TrainingStage("", job.settings.loop, lambda _, __: self.task(job))]

    def check(self, task: Task[Any], measures: Measures) -> None:
        """Check, by its measures on the dev set, that the trained model may be published.

        Raises:
            RefusedError: the model must not be published. The checkpoints are kept.
        """
        return

    def space(self, job: Job[S], folder: Path) -> Space | None:
        """Return the vector space that the model's questions search; None if it encodes none.

        It is the space of the model's own passage encoder or, if it has none, of the snapshot.
        """
        if PASSAGE in self.result.parts:
            return read_declared_space(folder / QUESTION)
        snapshot_space = QUESTION in self.result.parts and job.snapshot.space
        return Space.from_json(snapshot_space) if snapshot_space else None

    def costs(self, job: Job[S], models: Mapping[str, Architecture]) -> TrainingCosts:
        """Estimate the costs; `models` are the architectures of the initial models, by part."""
        ...


OBJECTIVES: Registry[Objective[Any]] = Registry(
    "objective",
    "bookwheel.objectives",
    {
        "dpr": f"{_PACKAGE}.dpr:DPR",
        "colbert": f"{_PACKAGE}.colbert:COLBERT",
        "cross-encoder": f"{_PACKAGE}.cross_encoder:CROSS_ENCODER",
        "margin-mse": f"{_PACKAGE}.margin_mse:MARGIN_MSE",
        "sidr": f"{_PACKAGE}.sidr:SIDR",
        "openrag": f"{_PACKAGE}.openrag:OPENRAG",
        "rag-sequence": f"{_PACKAGE}.rag:SEQUENCE",
        "rag-token": f"{_PACKAGE}.rag:TOKEN",
        "rag-end2end": f"{_PACKAGE}.end2end:END2END",
        "ra-dit": f"{_PACKAGE}.ra_dit:RA_DIT",
        "ict": f"{_PACKAGE}.ict:ICT",
        "realm": f"{_PACKAGE}.realm:REALM",
    },
    Objective,
)


def list_objective_names() -> tuple[str, ...]:
    """Return the names of all objectives, without importing the objectives.

    The built-in objectives come first, then those of other packages in alphabetical order.
    """
    return tuple(OBJECTIVES.list_names())


def get_objective(name: str) -> Objective[Any]:
    """Return the objective with a name.

    Raises:
        InputError: the package that registers the objective cannot be imported, the entry point is
            not an objective, or two packages register it.
        UsageError: there is no such objective.
    """
    objective = OBJECTIVES.find(name)
    if objective is None:
        raise UsageError(f"there is no objective {name!r}: choose one of {', '.join(list_objective_names())}")
    if objective.name != name:
        raise OBJECTIVES.wrong_plugin_error(name, f"has the name {objective.name!r}", "register it by that name")
    return objective


def list_objectives() -> list[Objective[Any]]:
    """Return all objectives in the order of their names; log and skip what cannot be loaded."""
    objectives: list[Objective[Any]] = []
    for name in list_objective_names():
        try:
            objectives.append(get_objective(name))
        except BookwheelError as error:
            _log.warning("%s", error)
    return objectives
