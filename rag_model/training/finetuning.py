"""Run one fine-tuning from end to end: compute its key, train, and publish the model in the store.

Like a stage of an index build, a fine-tuning has a memo key. The same snapshot, examples, models
and settings are trained only once, and the memo records the result. The work folder is named by the
key, so that the next run resumes a run that was killed. `estimate_work` estimates memory and time
before the training.
"""

import json
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from rag_model.atomic_write import atomic_write
from rag_model.encoders.architecture import read_architecture
from rag_model.encoders.files import HubName, resolve_folder
from rag_model.errors import StoreError, UsageError
from rag_model.evaluation.reports.reproduction import format_markdown_table
from rag_model.evaluation.reports.run_files import store_report
from rag_model.evaluation.reports.training import read_training_curves, render_training_report
from rag_model.evaluation.subject import resolve_retriever_models
from rag_model.extras import get_versions
from rag_model.process import format_bytes
from rag_model.resources import CORE_FLOPS, WorkEstimate, estimate_weight_bytes
from rag_model.retrieve.attribution import describe_licence
from rag_model.store.objects.memo import Memo
from rag_model.store.recorded_tasks import OnProgress
from rag_model.store.store import Store
from rag_model.store.versions.model_manifest import detect_model_parts
from rag_model.store.versions.models import ModelMetadata, StoredModel, put_model
from rag_model.store.versions.trainings import TRAINING_STAGE
from rag_model.training.data.examples import digest_examples
from rag_model.training.loop.checkpoint import METRICS
from rag_model.training.loop.loop import ReportCallback, TrainingResult, resolve_precision, train
from rag_model.training.loop.processes import find_processes
from rag_model.training.moving_index import Rebuilder
from rag_model.training.objectives.objective import (
    TRAINED_COPIES,
    Job,
    ModelDescription,
    Objective,
    find_loop_settings,
)

STAGE, CURVES_PAGE = TRAINING_STAGE, "training.html"
# version of this code; increase it when the same inputs would give a different model
VERSION = 3
_RECORDED_PACKAGES = ("bookwheel", "torch", "transformers", "tokenizers", "accelerate", "numpy", "faiss-cpu")


@dataclass(frozen=True, slots=True)
class StageSummary:
    """The result of one stage of a training."""

    name: str
    result: TrainingResult
    trained_on: str = ""  # one sentence about the training data


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The contents of a model card."""

    description: ModelDescription
    inputs: Mapping[str, Any]  # `Finetuning.inputs`
    corpus: Mapping[str, Any]  # source of the passages, as in the snapshot's manifest
    training_result: TrainingResult  # combined result of all stages
    stages: Sequence[StageSummary] = ()  # results of the stages; empty if there is only one stage
    # source of each initial model by part: NAME@COMMIT of the hub, or a folder
    sources: Mapping[str, str] = field(default_factory=dict)


def render_card(card: ModelCard) -> str:
    """Return the card as Markdown with a YAML header; equal cards give equal texts."""
    kind, language = card.inputs["kind"], str(card.corpus.get("language") or "")
    header = {
        "library_name": "bookwheel",
        "pipeline_tag": card.description.hub_task,
        "tags": ["bookwheel", "retrieval-augmented-generation", kind],
        **({"language": language} if language else {}),
    }
    card_lines = [
        "---",
        # A JSON value is a YAML value.
        *(f"{name}: {json.dumps(setting, ensure_ascii=False)}" for name, setting in header.items()),
        "---",
        f"# {kind}, trained by bookwheel",
        "",
        card.description.summary,
        "",
        f"    {card.description.usage}",
        "",
        "## Where it comes from",
        "",
        format_markdown_table(["what", "which"], _list_origin_rows(card)),
        "",
        f"## How it does after {card.training_result.steps:,} steps",
        "",
        "On the dev set, before training and with the best weights.",
        "",
        _format_measures(card.training_result),
        "",
        *(line for stage in card.stages for line in _render_stage(stage)),
        "## Recipe",
        "",
        "```json",
        json.dumps(card.inputs["recipe"], indent=2, ensure_ascii=False),
        "```",
    ]
    return "\n".join(card_lines) + "\n"


def _list_origin_rows(card: ModelCard) -> list[Sequence[str]]:
    licence = describe_licence(str(card.corpus.get("licence") or ""))
    corpus = card.corpus.get("base") or card.corpus.get("dbname") or card.corpus.get("kind") or "unknown"
    return [
        *(
            (f"began as ({model_part})", f"{source}, {digest}" if HubName.parse(source) else digest)
            for model_part, digest in card.inputs["models"].items()
            for source in [card.sources.get(model_part, "")]
        ),
        ("snapshot", card.inputs["snapshot"]),
        ("its text", ", ".join(part for part in (corpus, licence) if part)),
        *(
            (f"asked from step {searched_snapshot.step:,}", searched_snapshot.snapshot)
            for searched_snapshot in card.training_result.searched_snapshots
            if searched_snapshot.step
        ),
        *((f"examples ({name})", digest) for name, digest in card.inputs["examples"].items()),
    ]


def _render_stage(stage: StageSummary) -> list[str]:
    steps_text = f"{stage.result.steps:,} steps; the best weights are those of step {stage.result.best_step:,}."
    description = f"{stage.trained_on} {steps_text}".lstrip()
    return [f"### Stage {stage.name}", "", description, "", _format_measures(stage.result), ""]


def _format_measures(result: TrainingResult) -> str:
    initial, best = result.initial_measures, result.best_measures
    names = dict.fromkeys([*initial, *best])
    measure_rows = [(name, _format_measure(initial.get(name)), _format_measure(best.get(name))) for name in names]
    return format_markdown_table(["measure", "before", "after"], measure_rows)


def _format_measure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class FinetuningResult:
    """The result of a fine-tuning."""

    model: str  # full id
    steps: int
    best_step: int  # step of the published weights; 0 means no step improved the goal
    before: dict[str, float]  # measures of the initial weights on the dev set
    after: dict[str, float]  # measures of the published weights


class Finetuning:
    """One training with an objective; equal inputs have equal keys."""

    def __init__(self, objective: Objective[Any], job: Job[Any]) -> None:
        """Store the objective and the job, which together determine the model."""
        self.objective, self.job = objective, job
        self.store, self.snapshot = job.store, job.snapshot
        self._prepared: Job[Any] | None = None
        self._stage_summaries: Sequence[StageSummary] = ()

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """All inputs that determine the model, as JSON values.

        The first access reads the files of the initial models.

        Raises:
            StoreError: the store does not have a model that a retriever expression names.
            UsageError: a retriever expression is invalid.
        """
        settings, n_processes = self.job.settings, find_processes().count
        retrievers = self.objective.list_retrievers(settings)
        # A name such as model:NAME may name another model later.
        retriever_models = resolve_retriever_models(self.store, self.snapshot, retrievers)
        return {
            "kind": self.objective.name,
            "snapshot": self.snapshot.id,
            "models": dict(self.job.origins.digests()),
            **({"retriever_models": retriever_models} if retriever_models else {}),
            "recipe": {
                **asdict(settings),
                **{
                    name: resolve_precision(loop_settings).list_loss_settings()
                    for name, loop_settings in find_loop_settings(settings).items()
                },
            },
            "examples": {name: digest_examples(examples) for name, examples in self.job.examples.items()},
            **self.objective.inputs(self.job),
            "version": VERSION,
            # `batch_size` counts per process, so the number of processes changes the model.
            **({"processes": n_processes} if n_processes > 1 else {}),
            **({"code": self.objective.version} if self.objective.version else {}),
        }

    def prepare(self, work: Path | None = None, on_progress: OnProgress = lambda _, __: None) -> Job[Any]:
        """Return the job with examples prepared for training, for example with mined negatives.

        Later calls return the same job. `work` is the training's folder, which caches slow results.
        `on_progress` is called with the finished and the total amount of work. If several processes
        train, only the first process prepares the examples.
        """
        if self._prepared is None:
            digests = {**self.inputs["models"], **self.inputs.get("retriever_models", {})}
            job = replace(self.job, digests=digests, work=work, on_progress=on_progress)
            examples = find_processes().share(lambda: self.objective.prepare(job))
            self._prepared = replace(job, examples=examples)
        return self._prepared

    @property
    def key(self) -> str:
        """The memo key of the inputs, 64 hex digits."""
        return Memo.compute_key(self.inputs)

    def find_result(self) -> FinetuningResult | None:
        """Return the result of a previous run with equal inputs.

        Return None if there was no such run, or if its model is no longer in the store.
        """
        memo_record = self.store.memo.find(STAGE, self.key)
        if memo_record is None:
            return None
        try:
            self.store.models.get(memo_record.stats["model"])
        except StoreError:
            return None
        return FinetuningResult(**memo_record.stats)

    def run(
        self,
        work: Path,
        report: ReportCallback | None = None,
        rebuild: Rebuilder | None = None,
        on_checkpoint: Callable[[str, int, int], None] | None = None,
    ) -> TrainingResult:
        """Train in the folder `work`, or resume the training there, one stage after another.

        `on_checkpoint` is called with the stage, the step and the number of steps after every
        checkpoint that is to be uploaded to the store.

        `rebuild` runs the rebuilds of a moving index. `report` is called as `train` calls it, and
        also with kind `stage NAME` and the value `evaluate_every` before each named stage, and with
        kind `score` while the data of a stage are scored.

        `training.html` in `work` shows the curves, and when the training switched to a new index.

        Raises:
            BookwheelError: an error of the objective, its tasks or the loop; checkpoints are kept.
        """
        processes = find_processes()
        stage_results, summaries = list[TrainingResult](), list[StageSummary]()

        def report_scoring(n_done: int, total: int) -> None:
            if report is not None:
                report("score", n_done, total, {})

        for stage in self.objective.stages(replace(self.prepare(work), rebuild=rebuild)):
            if stage.name and report is not None:
                report(f"stage {stage.name}", 0, 0, {"evaluate_every": stage.loop.evaluate_every})
            # The seed determines weights that the model's files do not have, such as a pooler's.
            torch.manual_seed(stage.loop.seed)
            best_folder = stage_results[-1].best_folder if stage_results else None
            task = processes.run_after_first(partial(stage.task, best_folder, report_scoring))
            try:
                on_stage_checkpoint = (
                    partial(on_checkpoint, stage.name) if on_checkpoint is not None and stage.loop.stored else None
                )
                result = train(task, stage.loop, work / stage.name, report, on_stage_checkpoint)
            finally:
                if processes.is_first:
                    self._write_curves_page(work, [*(summary.name for summary in summaries), stage.name])
            self.objective.check(task, result.best_measures)
            stage_results.append(result)
            summaries.append(StageSummary(stage.name, result, getattr(task, "trained_on", "")))
        self._stage_summaries = summaries
        return _combine_stages(stage_results)

    def _write_curves_page(self, work: Path, stages: Sequence[str]) -> None:
        """Write the page with the curves so far, even if the training ended with an error."""
        curves_by_stage = {stage: read_training_curves(work / stage / METRICS) for stage in stages}
        page_html = render_training_report(f"{self.objective.name}: the training", curves_by_stage)
        with (
            suppress(OSError),
            atomic_write(work / CURVES_PAGE) as temp_path,
        ):  # A failure to write the page must not end the training.
            temp_path.write_text(page_html, encoding="utf-8")

    def publish(
        self, training_result: TrainingResult, work: Path, name: str, seconds: Mapping[str, float]
    ) -> tuple[FinetuningResult, StoredModel]:
        """Put the best weights with the model card and the curves into the store as a new model.

        The ref `name` moves to the model, and the memo records the result. `seconds` has the
        duration of each part of the run, for the model's provenance.

        Raises:
            StoreError: the store cannot be written.
            UsageError: the task did not save all parts that its objective declares.
        """
        best_folder = training_result.best_folder
        self._check_parts(best_folder)
        stages = self._stage_summaries if len(self._stage_summaries) > 1 else ()
        corpus, sources = self.snapshot.manifest.content.corpus, self.job.origins.list_sources()
        card = ModelCard(self.objective.result, self.inputs, corpus, training_result, stages, sources)
        (best_folder / "README.md").write_text(render_card(card), encoding="utf-8")
        for stage in self._stage_summaries:
            shutil.copyfile(work / stage.name / METRICS, best_folder / f"{stage.name}{'-' * bool(stage.name)}{METRICS}")
        before, after = dict(training_result.initial_measures), dict(training_result.best_measures)
        space = self.objective.space(self.job, best_folder)
        trained_model = ModelMetadata(
            self.objective.name,
            space.to_json() if space else None,
            {name: input_value for name, input_value in self.inputs.items() if name != "kind"},
            {"before": before, "after": after},
            self._build_provenance(seconds, training_result),
        )
        stored_model = put_model(self.store, best_folder, trained_model, name)
        result = FinetuningResult(stored_model.model, training_result.steps, training_result.best_step, before, after)
        files = self.store.models.get(stored_model.model).content.files
        self.store.memo.write_record(STAGE, self.key, files, asdict(result), self.inputs)
        return result, stored_model

    def _check_parts(self, folder: Path) -> None:
        parts = detect_model_parts(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        if missing_parts := self.objective.result.parts - parts:
            raise UsageError(
                f"the task of objective {self.objective.name!r} saved no "
                f"{', '.join(sorted(missing_parts))} in {folder}: write them in its `save`, or "
                "remove them from `result.parts`"
            )

    def _build_provenance(self, seconds: Mapping[str, float], training_result: TrainingResult) -> dict[str, Any]:
        searched_snapshots = [asdict(searched) for searched in training_result.searched_snapshots]
        return {
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "names": dict(self.job.origins.list_sources()),
            **({"asked": searched_snapshots} if searched_snapshots else {}),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
            "seconds": dict(seconds),
            "versions": get_versions(*_RECORDED_PACKAGES),
        }


def estimate_work(finetuning: Finetuning, rebuild: WorkEstimate | None = None) -> WorkEstimate:
    """Estimate the memory, time and disk of a fine-tuning, without loading a model or mining.

    `rebuild` is the estimate of one rebuild of the index, which runs at the same time as the
    training; None leaves rebuilds out.

    Raises:
        InputError: a model's folder is incomplete.
        UsageError: the snapshot does not have an index that the settings name.
    """
    objective, job = finetuning.objective, finetuning.job
    models = {model_part: read_architecture(resolve_folder(name)) for model_part, name in job.origins.names.items()}
    costs, weight_bytes = objective.costs(job, models), estimate_weight_bytes(*models.values())
    memory_by_stage: dict[str, int] = {}
    n_steps, n_operations, disk = 0, costs.rebuilds * costs.rebuild_operations, 0
    for stage_costs in (*costs.previous_stages, costs):
        loop = stage_costs.loop or job.settings.loop
        stage_steps = loop.count_steps(stage_costs.batches, 1)
        n_evaluations = 2 + stage_steps // loop.evaluate_every
        n_steps += stage_steps
        n_operations += (
            stage_costs.preparation_operations
            + stage_steps * loop.accumulation * stage_costs.step_operations
            + n_evaluations * stage_costs.evaluation_operations
        )
        disk += (loop.keep + 1) * (TRAINED_COPIES - 1) * weight_bytes
        memory_by_stage |= stage_costs.stage_bytes
    item_name, n_items = (
        ("examples", len(job.examples["train"])) if objective.takes_examples else ("texts", job.snapshot.n)
    )
    work_sizes = {"steps": f"{n_steps:,}", item_name: f"{n_items:,}"}
    if costs.rebuilds:
        work_sizes["rebuilds of the index"] = (
            f"{costs.rebuilds:,}, each {costs.rebuild_operations / CORE_FLOPS:,.0f} s of a core"
        )
    if costs.preparation_operations:
        work_sizes["scores of the generator"] = f"{costs.preparation_operations / CORE_FLOPS:,.0f} s of a core"
    if rebuild is not None:
        peak_bytes, disk = max(rebuild.compute_stage_memory(1).values()), disk + rebuild.disk
        memory_by_stage["rebuild"] = max(costs.stage_bytes.values()) + peak_bytes
        work_sizes["a rebuild takes"] = f"{format_bytes(peak_bytes)} of memory, {format_bytes(rebuild.disk)} of disk"
    return WorkEstimate(work_sizes, memory_by_stage, n_operations, disk=disk)


def _combine_stages(stages: Sequence[TrainingResult]) -> TrainingResult:
    """Combine the initial measures of the first stage with the best weights of the last stage."""
    last_stage = stages[-1]
    n_previous_steps = sum(stage.steps for stage in stages[:-1])
    best_step = (
        n_previous_steps + last_stage.best_step if last_stage.best_step else sum(stage.best_step for stage in stages)
    )
    return replace(
        last_stage,
        steps=n_previous_steps + last_stage.steps,
        best_step=best_step,
        initial_measures=stages[0].initial_measures,
    )


def store_training_page(store: Store, model: str) -> str | None:
    """Write the page with the curves of a model's training into the store, and return its URL.

    The curves are read from the files of the model, so an earlier run may have trained it. Return
    None if the store cannot be read or written.

    Args:
        store: the store with the model.
        model: full id of the model.
    """
    with suppress(StoreError):
        content = store.models.get(model).content
        curves_by_stage = {
            path.removesuffix(METRICS).removesuffix("-"): read_training_curves(store.blobs.get_local_path(metrics_ref))
            for path, metrics_ref in sorted(content.files.items())
            if path.endswith(METRICS)
        }
        return store_report(store, model, render_training_report(f"{content.kind}: the training", curves_by_stage))
    return None
