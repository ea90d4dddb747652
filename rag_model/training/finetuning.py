"""One fine-tuning from end to end: its exact inputs, the task, and the model that it puts into the store.

Its inputs have a key, like a stage of a build: the same snapshot, examples, models and settings are trained once, and
the memo records the result. Work is in a folder named by the key, so that a run that died is resumed.
"""

import json
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from rag_model.errors import StoreError, UsageError
from rag_model.evaluation.reports.training import read_curves, render
from rag_model.extras import versions
from rag_model.landing import landing
from rag_model.store.objects.memo import Memo
from rag_model.store.store import MODEL
from rag_model.store.versions.model_parts import parts_of
from rag_model.store.versions.models import Made, PutModel, put_model
from rag_model.store.versions.moves import tag
from rag_model.store.versions.trainings import TRAINED
from rag_model.training.card import Card, StageTold, write_card
from rag_model.training.data.examples import digest_examples
from rag_model.training.data.teaching import Tell
from rag_model.training.loop.journal import METRICS
from rag_model.training.loop.loop import Report, Trained, train
from rag_model.training.loop.task import Task, TellingTask
from rag_model.training.moving.rebuild import Rebuild
from rag_model.training.objectives.objective import Job, Objective, Stage, loops_of

STAGE, PAGE = TRAINED, "training.html"
VERSION = 2  # increased when the same inputs would give another model
_DECIDING = ("bookwheel", "torch", "transformers", "tokenizers", "accelerate", "numpy", "faiss-cpu")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a fine-tuning."""

    model: str  # full id
    steps: int
    best_step: int  # the step of these weights; 0: no step improved the goal
    before: Mapping[str, float]  # on the dev set
    after: Mapping[str, float]


class Finetuning:
    """One job of an objective, identified by its exact inputs."""

    def __init__(self, objective: Objective[Any], job: Job[Any]) -> None:
        """Take the objective, and everything that determines the model."""
        self.objective, self.job = objective, job
        self.store, self.snapshot = job.store, job.snapshot
        self._prepared: Job[Any] | None = None
        self._told: Sequence[StageTold] = ()

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """Everything that determines the model, as JSON values; reads the models' files once."""
        settings = self.job.settings
        return {
            "kind": self.objective.name,
            "snapshot": self.snapshot.id,
            "models": dict(self.job.origins.digests()),
            "recipe": {**asdict(settings), **{name: loop.deciding() for name, loop in loops_of(settings).items()}},
            "examples": {name: digest_examples(some) for name, some in self.job.examples.items()},
            **self.objective.inputs(self.job),
            "version": VERSION,
            **({"code": self.objective.version} if self.objective.version else {}),
        }

    def prepare(self, work: Path | None = None, tell: Tell = lambda _, __: None) -> Job[Any]:
        """Return the job with its examples prepared for training, for example with mined negatives; done once.

        `work` is the training's folder, which keeps what took long; `tell` is called with what is done, and of how
        much.
        """
        if self._prepared is None:
            job = replace(self.job, digests=self.inputs["models"], work=work, tell=tell)
            self._prepared = replace(job, examples=self.objective.prepare(job))
        return self._prepared

    @property
    def key(self) -> str:
        """The key of the inputs, 64 hex digits."""
        return Memo.key(self.inputs)

    def known(self) -> Outcome | None:
        """Return the result of an earlier run with the same inputs, if its model is still in the store."""
        record = self.store.memo.get(STAGE, self.key)
        if record is None:
            return None
        try:
            self.store.models.get(record.facts["model"])
        except StoreError:
            return None
        return Outcome(**record.facts)

    def run(
        self,
        work: Path,
        report: Report | None = None,
        rebuild: Rebuild | None = None,
        keep: Callable[[str, int, int], None] | None = None,
    ) -> Trained:
        """Train in the folder `work`, or resume the training there: stage after stage, if there are several.

        `keep` is called after every checkpoint that is for the store, with the stage, the step and the number of steps.

        `rebuild` makes the rebuilds of a moving index. `report` is also called with kind `stage NAME` before each of
        several stages, whose `evaluate_every` is its value, and with kind `score` while a stage's data are scored.

        `training.html` in `work` shows the curves, and how the index moved.

        Raises:
            BookwheelError: as the objective, its tasks and the loop; the checkpoints stay.
        """
        found, told = list[Trained](), list[StageTold]()
        for stage in self.objective.stages(replace(self.prepare(work), rebuild=rebuild)):
            if stage.name and report is not None:
                report(f"stage {stage.name}", 0, 0, {"evaluate_every": stage.loop.evaluate_every})
            torch.manual_seed(stage.loop.seed)  # for weights that a folder lacks, such as a pooler's
            task = stage.task(found[-1].best if found else None, _scoring(report))
            try:
                kept = partial(keep, stage.name) if keep is not None and stage.loop.stored else None
                trained = train(task, stage.loop, work / stage.name, report, kept)
            finally:
                self._draw(work, [*(one.name for one in told), stage.name])
            self.objective.check(task, trained.after)
            found.append(trained)
            told.append(_told(stage, task, trained))
        self._told = told
        return _joined(found)

    def _draw(self, work: Path, stages: Sequence[str]) -> None:
        """Write the page of the curves so far: of a training that was refused, too."""
        curves = {one: read_curves(work / one / METRICS) for one in stages}
        page = render(f"{self.objective.name}: the training", curves)
        with suppress(OSError), landing(work / PAGE) as temporary:  # an illustration ends no training
            temporary.write_text(page, encoding="utf-8")

    def publish(
        self, trained: Trained, work: Path, name: str, seconds: Mapping[str, float]
    ) -> tuple[Outcome, PutModel]:
        """Put the best weights into the store, with card and curves, name them, and record the inputs in the memo.

        Raises:
            StoreError: the store cannot be written.
            UsageError: the task did not save all parts of its objective.
        """
        folder = trained.best
        self._check_parts(folder)
        (folder / "README.md").write_text(write_card(self._card(trained)), encoding="utf-8")
        for stage in self._told:
            shutil.copyfile(work / stage.name / METRICS, folder / f"{stage.name}{'-' * bool(stage.name)}{METRICS}")
        metrics = {"before": dict(trained.before), "after": dict(trained.after)}
        space = self.objective.space(self.job, folder)
        provenance = self._provenance(seconds, trained)
        made = Made(self.objective.name, space.to_json() if space else None, self._lineage(), metrics, provenance)
        put = put_model(self.store, folder, made, name)
        found = Outcome(put.model, trained.steps, trained.best_step, trained.before, trained.after)
        files = self.store.models.get(put.model).content.files
        facts = {"model": found.model, "steps": found.steps, "best_step": found.best_step, **metrics}
        self.store.memo.record(STAGE, self.key, files, facts, self.inputs)
        return found, put

    def name(self, outcome: Outcome, name: str) -> PutModel:
        """Name a model that is already in the store."""
        return PutModel(outcome.model, tag(self.store, f"{MODEL}{outcome.model}", name))

    def _check_parts(self, folder: Path) -> None:
        saved = parts_of(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        if missing := self.objective.result.parts - saved:
            raise UsageError(
                f"the task of objective {self.objective.name!r} saved no {', '.join(sorted(missing))} in {folder}: "
                "write them in its `save`, or remove them from `result.parts`"
            )

    def _lineage(self) -> dict[str, Any]:
        return {name: value for name, value in self.inputs.items() if name != "kind"}

    def _provenance(self, seconds: Mapping[str, float], trained: Trained) -> dict[str, Any]:
        return {
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "names": dict(self.job.origins.names),
            **({"asked": [asdict(one) for one in trained.asked]} if trained.asked else {}),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
            "seconds": dict(seconds),
            "versions": versions(*_DECIDING),
        }

    def _card(self, trained: Trained) -> Card:
        corpus = self.snapshot.manifest.content.corpus
        source = corpus.get("base") or corpus.get("dbname") or corpus.get("kind") or "unknown"
        return Card(
            kind=self.objective.name,
            result=self.objective.result,
            began=self.inputs["models"],
            snapshot=self.snapshot.id,
            text=", ".join(part for part in (source, corpus.get("licence")) if part),
            data=self.inputs["examples"],
            recipe=json.loads(json.dumps(self.inputs["recipe"])),
            before=trained.before,
            after=trained.after,
            steps=trained.steps,
            language=str(corpus.get("language") or ""),
            asked=trained.asked,
            stages=self._told if len(self._told) > 1 else (),
        )


def _told(stage: Stage, task: Task[Any], trained: Trained) -> StageTold:
    said = task.trained_on if isinstance(task, TellingTask) else ""
    return StageTold(stage.name, trained.steps, trained.best_step, trained.before, trained.after, said)


def _joined(stages: Sequence[Trained]) -> Trained:
    """Return stages as one training: from before the first to the best weights of the last."""
    last = stages[-1]
    earlier = sum(one.steps for one in stages[:-1])
    best = earlier + last.best_step if last.best_step else sum(one.best_step for one in stages)
    return replace(last, steps=earlier + last.steps, best_step=best, before=stages[0].before)


def _scoring(report: Report | None) -> Tell:
    return lambda done, total: None if report is None else report("score", done, total, {})
