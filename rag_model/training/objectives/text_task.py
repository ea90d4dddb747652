"""What trainings on a snapshot's own text share: ICT and REALM."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.texts import Epoch, Rows, Split, TextBatch


class TextTask:
    """A `Task` whose batches are passages of a snapshot; a subclass adds what is missing."""

    kind: str  # the objective's name

    def __init__(self, snapshot: Snapshot, rows: Rows, recipe: Any, digests: Mapping[str, str] | None = None) -> None:
        """Choose the texts among `rows`; `recipe` is a record with `batch_size`, `seed` and `dev_texts`.

        `digests` are those of the files that the models begin as.
        """
        self._snapshot, self._recipe, self._digests = snapshot, recipe, dict(digests or {})
        self._split = Split.of(rows, recipe.dev_texts)

    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe, the snapshot of the texts, and the digests of the models."""
        return {
            "kind": self.kind,
            "settings": asdict(self._recipe),
            "snapshot": self._snapshot.id,
            "models": self._digests,
        }

    def batches(self, epoch: int) -> Sequence[TextBatch]:
        """Return an epoch's batches, shuffled by seed and epoch."""
        return Epoch(self._split.train, self._recipe.batch_size, self._recipe.seed, epoch)

    def ids(self, batch: TextBatch) -> Sequence[str]:
        """Return the ids of the passages that the batch's texts are."""
        return [passage.id for passage in self._snapshot.passages(batch.rows)]
