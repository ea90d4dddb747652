"""Train a model on a snapshot with any registered objective, and put it into the store.

Purpose: the job that trains models on an index, and `bookwheel finetune`.
Caching: the store's memo, keyed by the exact inputs; a finished training is not repeated. An
interrupted run continues from its last checkpoint, which is in a folder named after the inputs and,
for other machines, in the store.
Requires: the extras `model` and `train`; a store that this machine can write to.
"""

import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from beam_jobs import corpus
from beam_jobs.job_settings import JobSettings
from flows import artifacts
from flows.add_index import reencode
from flows.command.console import ProgressReporter, format_seconds
from flows.machine.workplace import lock_folder
from flows.parameters import Url
from flows.rebuild import delete_rebuild_refs, open_rebuild_launcher
from flows.stage import StageClock, deployment_flow, log, run_flow, stage
from flows.training import KindParameter, RecipeTablesParameter
from rag_model.errors import UsageError
from rag_model.snapshots.existing import REENCODED
from rag_model.store.objects.cache import get_cache_folder
from rag_model.store.store import MODEL_PREFIX, Store
from rag_model.store.versions.models import StoredModel
from rag_model.store.versions.moves import tag
from rag_model.store.versions.refs import check_ref_name
from rag_model.store.versions.snapshot import Snapshot, SnapshotLease
from rag_model.training.checkpoint_uploads import CheckpointUploader, TrainingIdentity, restore_checkpoint
from rag_model.training.data.examples import draw_examples, read_examples
from rag_model.training.finetuning import Finetuning, FinetuningResult, store_training_page
from rag_model.training.loop.loop import TrainingResult
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.loop.processes import TrainingProcesses, join_processes
from rag_model.training.moving_index import MovingSettings
from rag_model.training.objectives.objective import Examples, Job, Objective, get_objective
from rag_model.training.origins import NamedModels
from rag_model.training.settings import Tables, parse_settings


class TrainingWatch:
    """Shows the steps, evaluations and index rebuilds of a training, which calls it as a
    `ReportCallback`.
    """

    def __init__(
        self, reporter: ProgressReporter, n_dev: int, evaluate_every: int, moving: MovingSettings | None = None
    ) -> None:
        """Prepare to show a training.

        Args:
            reporter: shows the progress.
            n_dev: number of dev examples; 0 for a training that creates its own examples.
            evaluate_every: steps between two evaluations.
            moving: the settings of the index that the training rebuilds; None: it rebuilds none.
        """
        self._reporter, self._n_dev, self._evaluate_every, self._moving = reporter, n_dev, evaluate_every, moving
        self._n_started_rebuilds, self._n_used_rebuilds = 0, 0
        self._index_age = -1.0  # age of the searched index in steps; -1: unknown
        self._evaluation_start = time.monotonic()
        self._has_reported_scores = False

    def __call__(self, kind: str, step: int, n_steps: int, values: Mapping[str, float]) -> None:
        """Show a report; `kind` is the reported event, such as `train`, `dev` or `stage NAME`."""
        event, _, stage = kind.partition(" ")
        if event == "stage":
            self._evaluate_every = int(values["evaluate_every"])
            self._reporter.say(f"stage {stage} begins")
            return
        if kind == "score" and not self._has_reported_scores:
            self._has_reported_scores = True
            self._reporter.say(f"a generator scores the passages of the examples, in {n_steps:,} blocks …")
        elif kind == "evaluate":
            self._evaluation_start = time.monotonic()
            weights = f"the weights of step {step:,}" if step else "the initial weights"
            self._reporter.say(f"evaluates {weights}{f' on {self._n_dev:,} dev examples' if self._n_dev else ''} …")
        elif kind == "dev":
            self._reporter.say(
                f"evaluated in {format_seconds(time.monotonic() - self._evaluation_start)}"
                f"{self._format_remaining(step, n_steps)}"
            )
            if step == n_steps and self._n_started_rebuilds and not self._n_used_rebuilds:
                self._reporter.say("searched the first index at every step, because no rebuild finished in time")
        elif kind == "move":
            self._report_rebuild_start(step - 1)
            return
        elif kind == "train" and "snapshot_age" in values:
            self._report_index_change(step - 1, values)
        self._reporter(step, n_steps)

    def _report_rebuild_start(self, n_steps: int) -> None:
        if self._moving is not None and self._moving.is_due(n_steps):
            self._n_started_rebuilds += 1
            wait = ", and waits for it" if self._moving.mode == "synchronous" else ""
            self._reporter.say(f"rebuilds the index with the encoders of step {n_steps:,}{wait} …")

    def _report_index_change(self, n_steps: int, step_values: Mapping[str, float]) -> None:
        age, previous_age = step_values["snapshot_age"], self._index_age
        self._index_age = age
        if age <= previous_age:
            self._n_used_rebuilds += 1
            seconds = format_seconds(step_values["rebuild_seconds"])
            self._reporter.say(f"searches the index of step {n_steps - int(age):,} now; its rebuild took {seconds}")

    def _format_remaining(self, step: int, n_steps: int) -> str:
        n_remaining = -(-n_steps // self._evaluate_every) - -(-step // self._evaluate_every)
        if not n_remaining:
            return ""
        remaining_time = format_seconds(n_remaining * (time.monotonic() - self._evaluation_start))
        hint = " (fewer `dev_examples` make them shorter)" if self._n_dev else ""
        return f"; {n_remaining} more{hint}: about {remaining_time}"


@dataclass(frozen=True, slots=True)
class FinetuneOutcome:
    """The outcome of a fine-tuning."""

    model: str  # full id
    kind: str  # the objective's name
    name: str  # the ref that names the model
    number: int  # number of the new entry in the ref's log
    snapshot: str  # full id of the snapshot on which it was trained
    steps: int
    best_step: int  # step of the published weights; 0: the initial weights were best
    metrics: dict[str, dict[str, float]]  # on the dev set, `before` and `after` the training
    trained: bool  # False: the same training was finished by an earlier run
    seconds: dict[str, float] = field(default_factory=dict)  # by stage
    # full id of the snapshot that was encoded with the model, whose ref has the model's name; None:
    # the model searches `snapshot`
    index: str | None = None
    report: str | None = None  # URL of the page with the curves; None: the store cannot be written


@deployment_flow("finetune")
def finetune(
    kind: KindParameter,
    store: Url,
    train: Url | None = None,
    dev: Url | None = None,
    ref: str = "latest",
    encoder: Url | None = None,
    generator: Url | None = None,
    teacher: Url | None = None,
    recipe: RecipeTablesParameter = None,
    name: str | None = None,
    max_steps: int | None = None,
    work: str | None = None,
    beam_options: Sequence[str] = (),
) -> FinetuneOutcome | None:
    """Train a model of `kind` on the snapshot that `ref` names, and move the model's ref to it.

    Several processes that `torchrun` or `accelerate launch` started share the training. The first
    process prepares the training, writes files and publishes the model; the others only train, and
    return None.

    Args:
        kind: The name of an objective: `dpr`, `rag-sequence`, `rag-token`, or one that an installed
            package registers.
        store: URL or folder of the store.
        train: Examples to learn from: DPR's JSON, question CSV or JSONL, triples, KILT, or a BEIR
            folder; none if the objective learns from the snapshot's text alone.
        dev: Validation examples for checkpoint selection, in a format of `train`.
        ref: A ref, ref@number, an id or a unique prefix of a snapshot; it is resolved to an id at
            the start and not changed afterwards.
        encoder: Initial weights of the encoder or encoders: a folder, a hub name, or `model:NAME`;
            by default the snapshot's.
        generator: Initial weights of the generator: a folder, a hub name, or `model:NAME`.
        teacher: The cross-encoder to learn from: a folder, a hub name, or `model:NAME`.
        recipe: Tables of settings, as in a TOML file (`rag_model.training.settings`); by default
            those of the papers.
        name: The model ref to move; by default `kind`.
        max_steps: The number of steps, in place of the recipe's.
        work: Keep checkpoints and curves in this folder; by default in the cache, where they are
            deleted at the end. Until the model is published the newest checkpoint is also in the
            store, unless the recipe's `stored` is false, so that a run on another machine with the
            same arguments continues from it.
        beam_options: Options of Beam and of its runner. Beam jobs rebuild the index of a training,
            and compute the scores that `ra-dit` takes from its generator, and `margin-mse` and
            `colbert` from a teacher.

    Raises:
        GateRefusedError: the model is published, but the gate refused the index that was rebuilt
            for it.
        RefusedError: the question encoder's vector space is not the snapshot's, a loss is not
            finite, or retrieval has collapsed; the checkpoints are kept.
        BookwheelError: a stage failed; run it again to continue.
    """
    opened_store = Store.open(store)
    name, processes = check_ref_name(name or kind), join_processes()
    clock = StageClock("finetune", quiet=not processes.is_first)
    opened_store.models.refs.require_exclusive_creation()
    # keeps `gc` from deleting new and reused files
    with opened_store.intents.hold(f"finetune-{secrets.token_hex(8)}"):
        with clock("prepare"):
            models = NamedModels(encoder, generator, teacher)
            options = recipe or {}, max_steps, tuple(beam_options)
            training = prepare_training(opened_store, kind, train, dev, ref, models, *options)
        check_equal_inputs(training, processes)
        with closing(SnapshotLease(opened_store)) as lease:
            lease.hold(training.snapshot.id)  # keeps `expire` from deleting the snapshot
            check_index_ref(training, name)
            result = processes.share(training.find_result)
            if result is None:
                work_folder = Path(work) if work else None
                published_training = train_and_publish(training, work_folder, name, beam_options, clock, processes)
            else:
                processes.leave_group()
                published_training = tag_existing_model(training, result, name) if processes.is_first else None
            if published_training is None:
                return None
            result, stored_model = published_training
            index_snapshot = rebuild_index(training, result, name, beam_options, clock)
    outcome = FinetuneOutcome(
        model=result.model,
        kind=kind,
        name=name,
        number=stored_model.move.number,
        snapshot=training.snapshot.id,
        steps=result.steps,
        best_step=result.best_step,
        metrics={"before": result.before, "after": result.after},
        trained="train" in clock.seconds,
        seconds=clock.seconds,
        index=index_snapshot,
        report=store_training_page(opened_store, result.model),
    )
    show_training(outcome)
    return outcome


@stage
def prepare_training(
    store: Store,
    kind: str,
    train: str | None,
    dev: str | None,
    ref: str,
    models: NamedModels,
    tables: Tables,
    max_steps: int | None,
    beam_options: tuple[str, ...] = (),
) -> Finetuning:
    """Pin the snapshot, resolve the models, read the examples, and complete the settings."""
    objective, snapshot = get_objective(kind), Snapshot.from_store(store, ref)
    if models.teacher is not None and "teacher" not in objective.options:
        raise UsageError(f"{kind} learns from no teacher: leave --teacher out")
    # Take only the models that the objective uses, because the settings may name further models for
    # other subcommands.
    model_names = {option: getattr(models, option) for option in objective.options}
    origins = objective.origins(store, snapshot, NamedModels(**model_names)).pin()
    origins.check_trainable()
    settings = parse_settings(kind, tables, max_steps, unit_vectors=origins.has_unit_vectors())
    examples = _read_examples(objective, train, dev, settings.loop)
    job_settings = JobSettings.new(store.url, beam_options)
    runner = partial(corpus.run, job_settings=job_settings)
    indexer = partial(corpus.build_index, snapshot=snapshot, job_settings=job_settings)
    job = Job(store, snapshot, origins, settings, examples, runner=runner, indexer=indexer)
    return Finetuning(objective, job)


def _read_examples(objective: Objective[Any], train: str | None, dev: str | None, loop: LoopSettings) -> Examples:
    if objective.takes_examples and train is not None and dev is not None:
        dev_examples = draw_examples(read_examples(dev, split="dev"), loop.dev_examples, loop.seed)
        return {"train": read_examples(train), "dev": dev_examples}
    if objective.takes_examples:
        raise UsageError(f"{objective.name} learns from examples: give them with --train and --dev")
    if train is not None or dev is not None:
        raise UsageError(f"{objective.name} learns from the snapshot's own text: leave --train and --dev out")
    return {"train": (), "dev": ()}


def check_index_ref(training: Finetuning, name: str) -> None:
    """Check before the training that the index of the new model may be published under `name`.

    Raises:
        UsageError: the ref `name` points to a snapshot that `reencode` did not build.
    """
    current_move = training.store.refs.find_current(name) if training.objective.result.rebuilds else None
    if current_move is not None and REENCODED not in training.store.snapshots.get(current_move.snapshot).provenance:
        raise UsageError(
            f"the ref {name!r} is needed for the model's own index, but names a snapshot that "
            f"was built from a dump: give another --name"
        )


def check_equal_inputs(training: Finetuning, processes: TrainingProcesses) -> None:
    """Check that the processes of a training have the same inputs.

    Raises:
        UsageError: this process has other inputs than the first process.
    """
    if processes.share(lambda: training.key) != training.key:
        raise UsageError(
            f"process {processes.rank} has other inputs than the first process: give all "
            "processes the same arguments, settings and files, and name a moving --ref by an id"
        )


def tag_existing_model(
    training: Finetuning, result: FinetuningResult, name: str
) -> tuple[FinetuningResult, StoredModel]:
    """Move the model ref to the model of an earlier run with the same inputs."""
    stored_model = StoredModel(result.model, tag(training.store, f"{MODEL_PREFIX}{result.model}", name))
    # a killed run may have left its checkpoint in the store
    training.store.trainings.delete(training.key)
    return result, stored_model


def get_rebuild_ref(training: Finetuning) -> str:
    """Return the ref that names the rebuilt snapshots, and their encoders, during a training."""
    return f"refresh-{training.key[:12]}"


def rebuild_index(
    training: Finetuning, result: FinetuningResult, name: str, beam_options: Sequence[str], clock: StageClock
) -> str | None:
    """Encode the passages with the published model; return the id of the new snapshot.

    The ref of the new snapshot has the same name as the model.

    Return None if the passage encoder was not trained; the model then searches the snapshot that it
    was trained on.

    Raises:
        GateRefusedError: the snapshot is published, but the ref did not move.
    """
    if not training.objective.result.rebuilds:
        return None
    with clock("index"):
        store_url, model = training.store.url, f"{MODEL_PREFIX}{result.model}"
        return run_flow(reencode, training.snapshot.id, store_url, model, name, tuple(beam_options)).snapshot


def train_and_publish(
    training: Finetuning,
    work: Path | None,
    name: str,
    beam_options: Sequence[str],
    clock: StageClock,
    processes: TrainingProcesses,
) -> tuple[FinetuningResult, StoredModel] | None:
    """Train and publish the model, then delete the work folder if it is in the cache.

    Only the first process locks the folder and publishes; the others return None.
    """
    folder = work or get_cache_folder() / "training" / training.key
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder) if processes.is_first else nullcontext():
        with clock("mine") as on_progress:
            training_identity = get_training_identity(training, folder)
            processes.share(lambda: restore_checkpoint(training_identity, on_progress.say))
            complete_examples(training, folder, on_progress)
        with clock("train") as on_progress:
            trained_model = train_model(training, folder, beam_options, on_progress, processes)
        processes.leave_group()
        if not processes.is_first:
            return None
        with clock("publish"):
            published_training = publish_model(training, trained_model, folder, name, clock.seconds)
    delete_rebuild_refs(training.store, get_rebuild_ref(training))
    training.store.trainings.delete(training.key)
    if work is None:
        shutil.rmtree(folder, ignore_errors=True)
    return published_training


def get_training_identity(training: Finetuning, folder: Path) -> TrainingIdentity:
    """Return the identity of the training to which a work folder belongs."""
    return TrainingIdentity(training.store, training.key, training.objective.name, training.snapshot.id, folder)


@stage
def complete_examples(training: Finetuning, folder: Path, on_progress: ProgressReporter) -> None:
    """Add data that the objective needs to the examples: negatives, a teacher's scores."""
    if training.objective.takes_examples:
        example_counts = " and ".join(f"{len(examples):,} {name}" for name, examples in training.job.examples.items())
        on_progress.say(f"completes {example_counts} examples with what `{training.objective.name}` needs …")
    training.prepare(folder, on_progress)


@stage
def train_model(
    training: Finetuning,
    folder: Path,
    beam_options: Sequence[str],
    on_progress: ProgressReporter,
    processes: TrainingProcesses,
) -> TrainingResult:
    """Train, or continue an interrupted training."""
    settings = training.job.settings
    moving_settings = getattr(settings, "moving", None)
    # the GPUs for rebuilds of the index
    devices = moving_settings.devices if isinstance(moving_settings, MovingSettings) else ""
    watch = TrainingWatch(on_progress, len(training.job.examples["dev"]), settings.loop.evaluate_every, moving_settings)
    uploader = (
        CheckpointUploader(get_training_identity(training, folder), on_progress.say) if processes.is_first else None
    )
    with (
        open_rebuild_launcher(training.store, get_rebuild_ref(training), beam_options, devices) as launcher,
        uploader or nullcontext(),
    ):
        return training.run(folder, watch, launcher, uploader.enqueue if uploader else None)


publish_model = stage(Finetuning.publish, "publish_model")


def show_training(outcome: FinetuneOutcome) -> None:
    """Write an outcome's table as an artifact of the run."""
    initial_metrics, best_metrics = outcome.metrics["before"], outcome.metrics["after"]
    rows = [
        {"what": name, "before": f"{initial_value:.4g}", "after": f"{best_metrics[name]:.4g}"}
        for name, initial_value in initial_metrics.items()
    ]
    table_description = f"Model {outcome.model[:12]} ({outcome.name}@{outcome.number}) after {outcome.steps:,} steps"
    artifacts.create_table(rows, "finetune-measures", table_description, outcome.report, "The training")
    measures = "; ".join(f"{row['what']} {row['before']}, then {row['after']}" for row in rows)
    log(f"{table_description}, on snapshot {outcome.snapshot}: {measures}")
