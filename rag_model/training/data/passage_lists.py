"""Examples with the passages that a retriever found for them, once: rows of the snapshot, best first."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rag_model.corpus.records import Passage
from rag_model.digest import digest_json
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.store.objects.memo import Produced
from rag_model.store.store import Store
from rag_model.training.data.answer_scores import Reading
from rag_model.training.data.corpus_text import overlap
from rag_model.training.data.memory import Memory

STAGE = "lists"
VERSION = 1  # increased when the same inputs would give other lists
_AT_ONCE = 256  # questions
_BESIDE = 3  # passages that are asked for beyond k for a text: itself, and windows that overlap it on both sides
_NONE = -1  # where a list has ended


@dataclass(frozen=True, slots=True)
class Asked:
    """An input x and its output y, before retrieval."""

    id: str
    text: str  # x
    answer: str  # y
    source: Passage | None = None  # of a plain text: where it stands; it is not retrieved for itself


@dataclass(frozen=True, slots=True)
class Listed:
    """An input, its output, and the rows of its passages."""

    asked: Asked
    rows: tuple[int, ...]  # of the snapshot, best first


@dataclass(frozen=True, slots=True)
class Lister:
    """Finds passages with an encoder as it is; recorded in the memo of a store."""

    memory: Memory
    encoder: TrainableEncoder
    retriever: str | None  # the expression of `memory`
    store: Store | None = None  # None: nothing is recorded
    identity: str = ""  # digest of the encoder's files

    def lists(self, asked: Sequence[Asked], k: int) -> list[Listed]:
        """Return the examples, in order, with up to `k` passages each, those with a passage only.

        A plain text has neither its own passage nor one that overlaps it.
        """
        rows = self._found(asked, k) if self.store is None else self._recorded(self.store, asked, k)
        kept = [tuple(row for row in own if row != _NONE) for own in rows.tolist()]
        return [Listed(one, own) for one, own in zip(asked, kept, strict=True) if own]

    def readings(self, listed: Sequence[Listed]) -> list[Reading]:
        """Return the examples with the texts of their passages."""
        rows = sorted({row for one in listed for row in one.rows})
        texts = {row: (one.title, one.text) for row, one in zip(rows, self.memory.snapshot.passages(rows), strict=True)}
        return [
            Reading(
                one.asked.id,
                one.asked.text,
                one.asked.answer,
                tuple(texts[row] for row in one.rows),
                one.asked.source is not None,
            )
            for one in listed
        ]

    def _recorded(self, store: Store, asked: Sequence[Asked], k: int) -> npt.NDArray[np.int64]:
        inputs = {
            "snapshot": self.memory.snapshot.id,
            "encoder": self.identity,
            "retriever": self.retriever,
            "texts": digest_json([[one.text, one.source.id if one.source else ""] for one in asked]),
            "k": k,
            "code": VERSION,
        }

        def produce(workdir: Path) -> Produced:
            np.save(out := workdir / "lists.npy", self._found(asked, k), allow_pickle=False)
            return Produced({"lists": out}, {"examples": len(asked)})

        record, _ = store.memo.once(STAGE, inputs, produce)
        rows: npt.NDArray[np.int64] = np.load(store.blobs.local(record.outputs["lists"]), allow_pickle=False)
        return rows

    def _found(self, asked: Sequence[Asked], k: int) -> npt.NDArray[np.int64]:
        rows = np.full((len(asked), k), _NONE, np.int64)
        deep = k + (_BESIDE if any(one.source for one in asked) else 0)
        for start in range(0, len(asked), _AT_ONCE):
            some = asked[start : start + _AT_ONCE]
            texts = [one.text for one in some]
            hits = self.memory.recall(texts, self.encoder.encode_questions(texts), deep).hits
            for place, (one, found) in enumerate(zip(some, hits, strict=True), start=start):
                own = [hit.row for hit in found if one.source is None or not overlap(one.source, hit.passage)][:k]
                rows[place, : len(own)] = own
        return rows
