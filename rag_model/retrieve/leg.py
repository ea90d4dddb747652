"""A retriever as a leg of another, and the depth that it is asked for."""

from dataclasses import dataclass

from rag_model.retrieve.found import Found, SnapshotRetriever
from rag_model.retrieve.questions import Questions


@dataclass(frozen=True, slots=True)
class Leg:
    """A retriever, and how many passages a question it is asked for: `hnsw:100`."""

    retriever: SnapshotRetriever
    depth: int | None = None  # None: as many as the retriever around it asks for

    @property
    def name(self) -> str:
        """How an expression calls it, without the depth."""
        return self.retriever.name

    @property
    def most(self) -> int:
        """How many passages it gives a question at most."""
        return self.retriever.most if self.depth is None else min(self.depth, self.retriever.most)

    def find(self, asked: Questions, wanted: int) -> Found:
        """Find its own depth of passages, else `wanted`; never more than it can give."""
        depth = min(self.depth or wanted, self.retriever.most)
        if asked.watch is None:
            return self.retriever.find(asked, depth)
        return asked.watch.find(self.retriever, asked, depth)


class Deep(SnapshotRetriever):
    """A retriever that is asked for more passages than it gives: an approximate index then finds better ones."""

    is_stage = False

    def __init__(self, leg: Leg) -> None:
        """Ask a leg to its own depth."""
        super().__init__(leg.retriever.snapshot, leg.name)
        self.exact_products = leg.retriever.exact_products
        self._leg = leg

    @property
    def most(self) -> int:
        """As many as the leg gives."""
        return self._leg.most

    def find(self, asked: Questions, k: int) -> Found:
        """Find to the leg's depth; give the first `k`."""
        return self._leg.find(asked, k).cut(k)
