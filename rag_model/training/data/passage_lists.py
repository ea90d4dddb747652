"""Retrieve passages for training examples once, and record their snapshot rows in the memo."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_model.corpus.records import Passage
from rag_model.digest import digest_json
from rag_model.encoders.model import list_dtype_memo_inputs
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.evaluation.subject import resolve_retriever_models
from rag_model.store.objects.memo import StageResult
from rag_model.store.recorded_tasks import TaskRunner
from rag_model.store.store import Store
from rag_model.training.data.answer_scores import AnswerScores, ScoringExample
from rag_model.training.data.batches import split_batches
from rag_model.training.data.memory import PassageMemory, read_passages
from rag_model.training.data.texts import passages_overlap

STAGE = "lists"
VERSION = 1  # version of the lists; increase it when the same inputs would give different lists
_SEARCH_BATCH = 256  # number of examples per search
_READ_BATCH = 4_096  # number of examples whose passages are in memory at the same time
# A plain text gets three more candidates, because its source passage and two passages that overlap
# it are removed.
_EXTRA_CANDIDATES = 3
NO_SCORES = AnswerScores((), 0)  # scores of a list that no generator has scored
_NO_ROW = -1  # padding after the last row of a list


@dataclass(frozen=True, slots=True)
class PassageList:
    """An input x with an output y, the rows of x's passages, and a generator's scores of y."""

    id: str
    text: str  # x: a question, or the beginning of a text
    answer: str  # y: the answer, or the continuation of the text
    source: Passage | None = None  # source passage of a plain text; excluded from its own results
    # rows of the passages in the snapshot, best first; empty before retrieval
    rows: tuple[int, ...] = ()
    # a generator's scores of y with each of the passages, in the order of `rows`
    scores: AnswerScores = NO_SCORES


@dataclass(frozen=True, slots=True)
class PassageLister:
    """Retrieves passages for examples with a frozen encoder; the store's memo records the rows."""

    memory: PassageMemory
    encoder: TrainableEncoder
    retriever: str | None  # the retriever expression of `memory`
    store: Store | None = None  # store whose memo records the rows; None records nothing
    identity: str = ""  # digest of the encoder's files
    runner: TaskRunner | None = None  # reads passages on workers; if None, this process reads them

    def retrieve_lists(self, examples: Sequence[PassageList], k: int) -> list[PassageList]:
        """Return the examples, in order, with up to `k` passages each.

        The list of a plain text excludes its source passage and passages that overlap it. Examples
        without a passage are dropped.
        """
        rows = self._retrieve_rows(examples, k) if self.store is None else self._memoize_rows(self.store, examples, k)
        row_lists = [tuple(row for row in example_rows if row != _NO_ROW) for example_rows in rows.tolist()]
        examples_and_rows = zip(examples, row_lists, strict=True)
        return [replace(example, rows=example_rows) for example, example_rows in examples_and_rows if example_rows]

    def to_scoring_examples(self, passage_lists: Sequence[PassageList]) -> list[ScoringExample]:
        """Return the examples with the texts of their passages, to be scored by a generator."""
        needed_rows = sorted({row for passage_list in passage_lists for row in passage_list.rows})
        passages = read_passages(self.memory.snapshot, needed_rows, self.runner)
        text_by_row = {row: (passage.title, passage.text) for row, passage in passages.items()}
        return [
            ScoringExample(example.id, example.text, example.answer, passages, example.source is not None)
            for example in passage_lists
            for passages in [tuple(text_by_row[row] for row in example.rows)]
        ]

    def _memoize_rows(self, store: Store, examples: Sequence[PassageList], k: int) -> npt.NDArray[np.int64]:
        memo_inputs: dict[str, Any] = {
            "snapshot": self.memory.snapshot.id,
            "encoder": self.identity,
            "retriever": self.retriever,
            "texts": digest_json([[example.text, example.source.id if example.source else ""] for example in examples]),
            "k": k,
            "code": VERSION,
            **list_dtype_memo_inputs(),  # library versions on which scores of a cross-encoder depend
        }
        # The models are inputs too, because a name such as model:NAME may name another model later.
        if models := resolve_retriever_models(store, self.memory.snapshot, [self.retriever]):
            memo_inputs["models"] = models

        def produce(workdir: Path) -> StageResult:
            np.save(rows_path := workdir / "lists.npy", self._retrieve_rows(examples, k), allow_pickle=False)
            return StageResult({"lists": rows_path}, {"examples": len(examples)})

        record, _ = store.memo.get_or_create(STAGE, memo_inputs, produce)
        rows: npt.NDArray[np.int64] = np.load(store.blobs.get_local_path(record.outputs["lists"]), allow_pickle=False)
        return rows

    def _retrieve_rows(self, examples: Sequence[PassageList], k: int) -> npt.NDArray[np.int64]:
        rows = np.full((len(examples), k), _NO_ROW, np.int64)
        depth = k + (_EXTRA_CANDIDATES if any(example.source for example in examples) else 0)
        for start in range(0, len(examples), _READ_BATCH):
            group = examples[start : start + _READ_BATCH]
            batches = split_batches(group, _SEARCH_BATCH)
            candidates = [example_rows for batch in batches for example_rows in self._find_rows(batch, depth)]
            pairs = zip(group, candidates, strict=True)
            needed_rows = {row for example, example_rows in pairs if example.source for row in example_rows}
            passages = read_passages(self.memory.snapshot, sorted(needed_rows), self.runner)
            for i, (example, example_rows) in enumerate(zip(group, candidates, strict=True), start=start):
                list_rows = [
                    row
                    for row in example_rows
                    if example.source is None or not passages_overlap(example.source, passages[row])
                ][:k]
                rows[i, : len(list_rows)] = list_rows
        return rows

    def _find_rows(self, examples: Sequence[PassageList], k: int) -> list[list[int]]:
        texts = [example.text for example in examples]
        hit_rows: list[list[int]] = self.memory.find_rows(texts, self.encoder.encode_questions(texts), k).tolist()
        return hit_rows
