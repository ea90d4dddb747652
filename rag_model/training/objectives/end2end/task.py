"""End-to-end RAG: passage encoder, question encoder and generator learn together (Siriwardhana et al. 2023).

-log p(y|x) is that of RAG, but p(z|x) has the gradient of both encoders: the passages that an older index finds are
encoded again, by the passage encoder as it is now. A second loss is -log p(s|z) of statements s, each generated from
the passages that it retrieves, without those that hold it word for word.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Vectors
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.generate.rag import Rag
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.candidates import reranked, without_source
from rag_model.training.data.examples import Example
from rag_model.training.data.memory import Recalled
from rag_model.training.data.statements import Statement, digest_statements
from rag_model.training.loop.task import Measures
from rag_model.training.moving.moving_index import Learner, MovingIndex
from rag_model.training.objectives.end2end.settings import End2EndTraining
from rag_model.training.objectives.rag_task import Pair, RagBatch, RagTask, array_of

_SPARE = 2  # more candidates of a statement, for those that hold it


@dataclass(frozen=True, slots=True)
class Stated(Pair):
    """A statement of a batch; its answer is the statement itself."""

    @classmethod
    def of(cls, statement: Statement) -> "Stated":
        """Return the statement as a pair."""
        return cls(Example(f"statement {statement.id}", statement.text, (statement.text,)), statement.text)


class End2EndTask(RagTask):
    """Train a `Rag` with a passage encoder on questions, answers and statements, beside a moving index."""

    def __init__(
        self,
        rag: Rag,
        passage: TrainableEncoder,
        snapshot: Snapshot,
        examples: Mapping[str, Sequence[Example]],
        statements: Sequence[Statement],
        settings: End2EndTraining,
        index: Callable[[Learner], MovingIndex],
        began: Mapping[str, str] | None = None,
    ) -> None:
        """Set the data; `index` makes the moving index, given what it needs of this task.

        Raises:
            BookwheelError: as `RagTask`, and as `MovingIndex`.
        """
        super().__init__(rag, snapshot, examples["train"], examples["dev"], settings.rag, began)
        self._passage, self._settings = passage, settings
        self._statements = list(statements)
        self._turn = (-1, list[int]())  # a round through the statements, and its order
        self._moving = index(Learner(self.save_encoders, self.turn_to))

    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe, and the digests of data and models."""
        tables = asdict(self._settings)
        own = {name: tables[name] for name in ("end2end", "reconstruction", "moving")}
        return {**super().recipe(), **own, "kind": "rag-end2end", "statements": digest_statements(self._statements)}

    @property
    def asked(self) -> str:
        """The id of the snapshot that is currently searched."""
        return self._moving.asked

    def move(self, step: int) -> Measures:
        """Move to a rebuilt snapshot if there is one; see `MovingIndex`."""
        return self._moving.move(step)

    def ask(self, snapshot: str) -> None:
        """Search the snapshot of a checkpoint again."""
        self._moving.ask(snapshot)

    def save_encoders(self, folder: Path) -> None:
        """Write the pair of encoders as they are, as the model whose vectors a rebuilt snapshot has."""
        space = self._passage.save_passages(folder / "passage")
        self._question.save(folder / "question", asks=space)

    def batches(self, epoch: int) -> Sequence[RagBatch]:
        """Return an epoch's batches: questions as RAG's, then statements, which begin again when all were given."""
        batches, size = super().batches(epoch), self._settings.reconstruction.batch_size
        if not self._statements:
            return batches
        first = epoch * len(batches) * size
        return [
            (*batch, *(Stated.of(self._statement(first + place * size + at)) for at in range(size)))
            for place, batch in enumerate(batches)
        ]

    def loss(self, batch: RagBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the mean loss of the questions and the weighted one of the statements, and both as measures."""
        stated = [pair for pair in batch if isinstance(pair, Stated)]
        answered, measures = super().loss(tuple(pair for pair in batch if not isinstance(pair, Stated)))
        if not self._statements:
            return answered, measures
        written = self._reconstruction(stated)
        told = {**measures, "answer_loss": answered.detach(), "reconstruction_loss": written.detach()}
        return answered + self._settings.reconstruction.weight * written, told

    def _statement(self, number: int) -> Statement:
        """Return the statement of a number, from 0; each round through all of them has its own order."""
        turn, place = divmod(number, len(self._statements))
        return self._statements[self._order(turn)[place]]

    def _order(self, turn: int) -> list[int]:
        if self._turn[0] != turn:
            numbers = range(len(self._statements))
            dice = random.Random(f"{self._settings.rag.seed} statements {turn}")
            self._turn = turn, dice.sample(numbers, len(numbers))
        return self._turn[1]

    def _reconstruction(self, batch: Sequence[Pair]) -> Tensor:
        """Return the mean -log p(s|z) of statements; 0 if no passage is left for any of them."""
        marker, texts = self._settings.reconstruction.marker, [pair.answer for pair in batch]
        asked = self.module.ask([f"{marker} {text}" for text in texts])  # (s, d)
        wide = self._memory.recall(texts, array_of(asked), self._settings.candidates + _SPARE)
        alive, recalled = without_source(wide, texts)
        if not alive:
            return asked.sum() * 0
        asked = asked[alive]
        recalled = reranked(recalled, array_of(asked), self._encode, self._recipe.k)
        marked = [Pair(Example(batch[place].example.id, marker), texts[place]) for place in alive]
        return self.module.loss(self._scores(asked, recalled), *self._read(marked, recalled)).mean()

    def _recall(self, batch: RagBatch, asked: Tensor) -> Recalled:
        recalled = self._memory.recall(
            [pair.example.question for pair in batch], array_of(asked), self._settings.candidates
        )
        if self._settings.candidates == self._recipe.k:  # the same passages in any order
            return recalled
        return reranked(recalled, array_of(asked), self._encode, self._recipe.k)

    def _ask(self, questions: Sequence[str]) -> Recalled:
        asked = self._question.encode_questions(questions)
        recalled = self._memory.recall(questions, asked, self._settings.candidates)
        return reranked(recalled, asked, self._encode, self._recipe.k)

    def _encode(self, passages: Sequence[Passage]) -> Vectors:
        return self._passage.encode([(one.title, one.text) for one in passages], "passage")
