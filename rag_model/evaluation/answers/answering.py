"""Answer every batch of questions once: the answers are kept in the store under their exact inputs. Answering is the
main cost of an evaluation. A run that died resumes, and a run with the same questions, snapshot and model but other
measures or more ablations reuses the answers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rag_model.errors import StoreError
from rag_model.evaluation.answers.ablation import Condition
from rag_model.evaluation.answers.readings import Reading, Reads, read
from rag_model.evaluation.questions.files import Question
from rag_model.json_text import parse_json
from rag_model.retrieve.retriever import Hit
from rag_model.store.objects.memo import Produced, Record
from rag_model.store.store import Store

STAGE = "answer"
VERSION = 3  # of the code that determines an answer; a new number discards earlier answers
_BATCH = 32  # questions per record: at most lost by a kill, and enough to fill a generator's batch
_FILE = "readings.jsonl"

Tell = Callable[[int, int], None]  # questions done, number of questions


@dataclass(frozen=True, slots=True)
class Answering:
    """Answers questions, or reuses earlier answers."""

    store: Store
    reader: Callable[[], Reads]  # called when there is something to answer; caches what it opened
    inputs: Mapping[str, Any]  # what determines the answers besides questions and passages: snapshot, model, decoding

    def __call__(self, condition: Condition, tell: Tell = lambda done, total: None) -> list[Reading]:
        """Return the answer to every question of a condition, in order."""
        found: list[list[Reading]] = []
        n = len(condition.questions)
        for start in range(0, n, _BATCH):
            some = slice(start, start + _BATCH)
            found.append(self._batch(condition.questions[some], condition.hits[some], condition.rival))
            tell(min(start + _BATCH, n), n)
        return list(chain.from_iterable(found))

    def _batch(self, questions: Sequence[Question], hits: Sequence[Sequence[Hit]], rival: str) -> list[Reading]:
        def produce(folder: Path) -> Produced:
            readings = read(self.reader(), questions, hits)
            lines = (json.dumps(one.to_json(), ensure_ascii=False, allow_nan=False) for one in readings)
            path = folder / _FILE
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            return Produced({_FILE: path}, {"answers": len(readings)})

        record, _ = self.store.memo.once(STAGE, self._key(questions, hits, rival), produce)
        return self._load(record)

    def _key(self, questions: Sequence[Question], hits: Sequence[Sequence[Hit]], rival: str) -> dict[str, Any]:
        """Return the inputs of a batch's answers; scores are functions of retriever, model, snapshot and question."""
        asked = [
            [question.id, question.text, [hit.passage.hash for hit in found]]
            for question, found in zip(questions, hits, strict=True)
        ]
        return {**self.inputs, "version": VERSION, "asked": asked, **({"rival": rival} if rival else {})}

    def _load(self, record: Record) -> list[Reading]:
        path = self.store.blobs.local(record.outputs[_FILE])
        try:
            with path.open(encoding="utf-8") as lines:
                return [Reading.from_json(parse_json(line, finite=False)) for line in lines]
        except (ValueError, KeyError, TypeError) as broken:
            raise StoreError(
                f"the answers kept in {self.store.url} as memo/{STAGE}/{record.key[:12]}… cannot be read ({broken}): "
                "delete that record and run again"
            ) from broken
