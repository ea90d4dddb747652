"""Learned sparse retrieval: the question becomes weighted terms, and one index of the passages' terms is searched."""

from collections.abc import Mapping

from rag_model.index.kind import SparseIndex
from rag_model.retrieve.dense import check_asks
from rag_model.retrieve.found import Found, SnapshotRetriever
from rag_model.retrieve.indexes import sizes_of
from rag_model.retrieve.questions import QuestionEncoder, Questions
from rag_model.store.versions.snapshot import Snapshot


class SparseRetriever(SnapshotRetriever):
    """A `Retriever` over one index of weighted terms."""

    def __init__(
        self,
        snapshot: Snapshot,
        index: str,
        encoder: QuestionEncoder,
        opened: SparseIndex,
        parameters: Mapping[str, int] | None = None,
    ) -> None:
        """Search `opened`, which `open_index_of` has opened for the name `index`, with search parameters.

        Raises:
            RefusedError: the encoder's space is not the representation's.
        """
        super().__init__(snapshot, index)
        check_asks(encoder, snapshot, snapshot.manifest.content.over(index))
        self.index = index  # its name; an expression may call it by its parameters too
        self.parameters: Mapping[str, int] = parameters or {}
        self._encoder, self._opened = encoder, opened

    @property
    def files(self) -> Mapping[str, int]:
        """The index's file."""
        return sizes_of(self.snapshot, self.index)

    def find(self, asked: Questions, k: int) -> Found:
        """Search the index by the questions' weighted terms."""
        scores, rows = self._opened.search(asked.vectors(self._encoder), k, **self.parameters)
        return Found(self.name, rows, scores)
