"""Retrieval by text: one index over the passages themselves, searched by the words of the question."""

from collections.abc import Mapping

from rag_model.index.kind import TextIndex
from rag_model.retrieve.found import Found, SnapshotRetriever
from rag_model.retrieve.indexes import open_index_of, sizes_of
from rag_model.retrieve.questions import Questions
from rag_model.store.versions.snapshot import Snapshot


class TextRetriever(SnapshotRetriever):
    """A `Retriever` over one index of text; it needs no encoder."""

    def __init__(
        self,
        snapshot: Snapshot,
        index: str,
        opened: TextIndex | None = None,
        parameters: Mapping[str, float] | None = None,
    ) -> None:
        """Open `index`, or search what `open_index_of` has opened for that name already, with search parameters.

        Raises:
            StoreError: a file is missing or damaged, or the index's kind is not installed.
            UsageError: the snapshot has no such index.
        """
        super().__init__(snapshot, index)
        self.index = index  # its name; an expression may call it by its parameters too
        self._opened: TextIndex = open_index_of(snapshot, index) if opened is None else opened
        self.parameters: Mapping[str, float] = parameters or {}

    @property
    def files(self) -> Mapping[str, int]:
        """The index, and the rows that it ranks by."""
        return sizes_of(self.snapshot, self.index)

    def find(self, asked: Questions, k: int) -> Found:
        """Search the index by the questions' texts."""
        scores, rows = self._opened.search(asked.texts, k, **self.parameters)
        return Found(self.name, rows, scores)
