"""Answers made once: every batch of questions is kept in the store under its exact inputs.

Answering is what costs in an evaluation. A run that died goes on where it was, and one that asks the same questions of
the same snapshot and model for other measures, or for ablations besides, answers nothing twice.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rag_model.errors import StoreError
from rag_model.evaluation.ablation import Condition
from rag_model.evaluation.questions import Question
from rag_model.evaluation.readings import Reading, Reads, read
from rag_model.retrieve.retriever import Hit
from rag_model.store.objects.memo import Produced, Record
from rag_model.store.store import Store

STAGE = "answer"
VERSION = 1  # of what decides an answer in this code; a new number answers anew
_BATCH = 32  # questions a record: what a kill loses at most, and enough to fill a generator's batch
_FILE = "readings.jsonl"

Tell = Callable[[int, int], None]  # questions done, of so many


@dataclass(frozen=True, slots=True)
class Answering:
    """Has questions answered, or finds that they were."""

    store: Store
    reader: Callable[[], Reads]  # called when there is something to answer; remembers what it opened
    inputs: Mapping[str, Any]  # what decides the answers beside questions and passages: snapshot, model, decoding

    def __call__(self, condition: Condition, tell: Tell = lambda done, total: None) -> list[Reading]:
        """Return the answer to every question of a condition, in order."""
        found: list[list[Reading]] = []
        n = len(condition.questions)
        for start in range(0, n, _BATCH):
            some = slice(start, start + _BATCH)
            found.append(self._batch(condition.questions[some], condition.hits[some]))
            tell(min(start + _BATCH, n), n)
        return list(chain.from_iterable(found))

    def _batch(self, questions: Sequence[Question], hits: Sequence[Sequence[Hit]]) -> list[Reading]:
        def produce(folder: Path) -> Produced:
            readings = read(self.reader(), questions, hits)
            lines = (json.dumps(one.to_json(), ensure_ascii=False, allow_nan=False) for one in readings)
            path = folder / _FILE
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            return Produced({_FILE: path}, {"answers": len(readings)})

        record, _ = self.store.memo.once(STAGE, self._key(questions, hits), produce)
        return self._load(record)

    def _key(self, questions: Sequence[Question], hits: Sequence[Sequence[Hit]]) -> dict[str, Any]:
        """Return what a batch's answers depend on; the scores follow from model, snapshot and question."""
        asked = [
            [question.id, question.text, [hit.passage.hash for hit in found]]
            for question, found in zip(questions, hits, strict=True)
        ]
        return {**self.inputs, "version": VERSION, "asked": asked}

    def _load(self, record: Record) -> list[Reading]:
        path = self.store.blobs.local(record.outputs[_FILE])
        try:
            with path.open(encoding="utf-8") as lines:
                return [Reading.from_json(json.loads(line)) for line in lines]
        except (ValueError, KeyError, TypeError) as broken:
            raise StoreError(
                f"the answers kept in {self.store.url} as memo/{STAGE}/{record.key[:12]}… cannot be read ({broken}): "
                "delete that record and run again"
            ) from broken
