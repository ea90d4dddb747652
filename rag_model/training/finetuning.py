"""One fine-tuning from end to end: its exact inputs, the task, and the model that it leaves in the store.

Its inputs have a key, as a stage of a build has: the same snapshot, examples, models and settings are trained once, and
the memo knows what came of it. Work lies in a folder named by the key, so that a run which died is gone on with.
"""

import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from rag_model.encoders.space import Space, asked_space
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import StoreError
from rag_model.generate.load import load_generator
from rag_model.generate.rag import Kind as Marginal
from rag_model.generate.rag import Rag
from rag_model.store.objects.memo import Memo
from rag_model.store.store import MODEL, Store
from rag_model.store.versions.models import Made, PutModel, put_model
from rag_model.store.versions.moves import tag
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.card import Card, write_card
from rag_model.training.data.examples import Example, digest_examples
from rag_model.training.data.negatives import ranked_passages, with_negatives
from rag_model.training.loop.journal import METRICS
from rag_model.training.loop.loop import Report, Trained, train
from rag_model.training.objectives.dpr import DprTask
from rag_model.training.objectives.rag import RagTask
from rag_model.training.origins import Origins
from rag_model.training.recipes import DprTraining, Kind, RagTraining, Training

STAGE = "finetune"
VERSION = 2  # raised when the same inputs would give another model
_DECIDING = ("bookwheel", "torch", "transformers", "tokenizers", "accelerate", "numpy", "faiss-cpu")
_MARGINALS: dict[Kind, Marginal] = {"rag-sequence": "sequence", "rag-token": "token"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a fine-tuning came to."""

    model: str  # full id
    steps: int
    best_step: int  # whose weights these are; 0: no step made it better
    before: Mapping[str, float]  # on the dev set
    after: Mapping[str, float]


class Finetuning:
    """What is trained, on what, and how."""

    def __init__(
        self,
        store: Store,
        kind: Kind,
        snapshot: Snapshot,
        origins: Origins,
        training: Training,
        examples: Mapping[str, Sequence[Example]],
    ) -> None:
        """Take all that decides the model; `examples` are those of `train` and of `dev`."""
        self.store, self.kind, self.snapshot, self.origins = store, kind, snapshot, origins
        self.training, self.examples = training, dict(examples)

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """All that the model follows from, as JSON values; reads the models' files once."""
        recipe = self.training.to_json()
        return {
            "kind": self.kind,
            "snapshot": self.snapshot.id,
            "models": dict(self.origins.digests()),
            "recipe": {**recipe, "loop": self.training.loop.deciding()},
            "examples": {name: digest_examples(some) for name, some in self.examples.items()},
            "version": VERSION,
        }

    @property
    def key(self) -> str:
        """The key of the inputs, 64 hex digits."""
        return Memo.key(self.inputs)

    def known(self) -> Outcome | None:
        """Return what came of the same inputs before, if its model is still in the store."""
        record = self.store.memo.get(STAGE, self.key)
        if record is None:
            return None
        try:
            self.store.models.get(record.facts["model"])
        except StoreError:
            return None
        return Outcome(**record.facts)

    def mine(self) -> None:
        """Find the negatives that the examples of a DPR training lack."""
        if isinstance(self.training, DprTraining):
            for name, some in self.examples.items():
                self.examples[name] = with_negatives(some, self.snapshot, self.training.negatives)

    def run(self, work: Path, report: Report | None = None) -> Trained:
        """Train in the folder `work`, or go on with what is there.

        Raises:
            BookwheelError: as the task and the loop say; the checkpoints stay.
        """
        torch.manual_seed(self.training.loop.seed)  # of weights that a folder lacks, such as a pooler's
        if isinstance(self.training, DprTraining):
            return train(self._dpr(self.training), self.training.loop, work, report)
        task = self._rag(self.training)
        trained = train(task, self.training.loop, work, report)
        task.check(trained.after)
        return trained

    def publish(
        self, trained: Trained, work: Path, name: str, seconds: Mapping[str, float]
    ) -> tuple[Outcome, PutModel]:
        """Put the best weights into the store, with card and curves, and name them; a record says what they came from.

        Raises:
            StoreError: the store cannot be written.
        """
        folder = trained.best
        (folder / "README.md").write_text(write_card(self._card(trained)), encoding="utf-8")
        shutil.copyfile(work / METRICS, folder / METRICS)
        metrics = {"before": dict(trained.before), "after": dict(trained.after)}
        made = Made(self.kind, self._space(folder).to_json(), self._lineage(), metrics, self._provenance(seconds))
        put = put_model(self.store, folder, made, name)
        found = Outcome(put.model, trained.steps, trained.best_step, trained.before, trained.after)
        files = self.store.models.get(put.model).content.files
        facts = {"model": found.model, "steps": found.steps, "best_step": found.best_step, **metrics}
        self.store.memo.record(STAGE, self.key, files, facts, self.inputs)
        return found, put

    def name(self, outcome: Outcome, name: str) -> PutModel:
        """Name a model that is in the store already."""
        return PutModel(outcome.model, tag(self.store, f"{MODEL}{outcome.model}", name))

    def _dpr(self, training: DprTraining) -> DprTask:
        corpus = ranked_passages(self.snapshot, training.negatives.ranked)
        examples = self.examples["train"], self.examples["dev"]
        return DprTask.load(self.origins.question, self.origins.passage, *examples, training.dpr, corpus)

    def _rag(self, training: RagTraining) -> RagTask:
        question = TrainableEncoder.load(self.origins.question, "question", device="cpu")
        generator = load_generator(self.origins.generator or "", device="cpu")
        rag = Rag(question, generator, training.rag.settings(_MARGINALS[self.kind]))
        examples = self.examples["train"], self.examples["dev"]
        return RagTask(rag, self.snapshot, *examples, training.rag, self.inputs["models"])

    def _space(self, folder: Path) -> Space:
        """Return the space that the model asks into: its own passages', or those of the snapshot."""
        own = asked_space(folder / "question") if self.kind == "dpr" else None
        return own or Space.from_json(self.snapshot.space or {})

    def _lineage(self) -> dict[str, Any]:
        return {name: value for name, value in self.inputs.items() if name != "kind"}

    def _provenance(self, seconds: Mapping[str, float]) -> dict[str, Any]:
        return {
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "names": self.origins.names,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
            "seconds": dict(seconds),
            "versions": {name: version(name) for name in _DECIDING},
        }

    def _card(self, trained: Trained) -> Card:
        corpus = self.snapshot.manifest.content.corpus
        source = corpus.get("base") or corpus.get("dbname") or corpus.get("kind") or "unknown"
        return Card(
            kind=self.kind,
            began=self.inputs["models"],
            snapshot=self.snapshot.id,
            text=", ".join(part for part in (source, corpus.get("licence")) if part),
            data=self.inputs["examples"],
            recipe=json.loads(json.dumps(self.inputs["recipe"])),
            before=trained.before,
            after=trained.after,
            steps=trained.steps,
            language=str(corpus.get("language") or ""),
        )
