"""Compose a retriever from an expression: a builder makes each call, and `Materials` open each name.

A new kind of retriever is a file with a `build(call, composer)`, and a line in `CALLS`. Another package adds its own by
an entry point of the group `bookwheel.retrievers`. A builder is called twice: first on legs that open nothing, so that
the whole expression is checked before anything is loaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from rag_model.errors import UsageError
from rag_model.plugins import Registry
from rag_model.retrieve.found import SnapshotRetriever
from rag_model.retrieve.leg import Deep, Leg
from rag_model.retrieve.maxsim import Graph, Neighbours, Tokens
from rag_model.retrieve.nodes import Call, Node, Word
from rag_model.retrieve.rerank import PairScorer

Build = Callable[[Call, "Composer"], SnapshotRetriever]
CALLS: Registry[Build] = Registry(
    "retriever",
    "bookwheel.retrievers",
    {
        "maxsim": "rag_model.retrieve.maxsim:build",
        "rerank": "rag_model.retrieve.rerank:build",
        "rrf": "rag_model.retrieve.fusion:build",
    },
)
MOST_LEGS = 16  # indexes that one expression searches


class Materials(Protocol):
    """What retrievers of one snapshot are composed of."""

    def names(self) -> tuple[str, ...]:
        """Return the indexes that may be named."""
        ...

    def unknown(self, name: str) -> str:
        """Return the sentence that refuses another name."""
        ...

    def kind(self, name: str) -> str:
        """Return the kind of an index."""
        ...

    def leg(self, name: str, parameters: Mapping[str, Any]) -> SnapshotRetriever:
        """Open an index to search it with these parameters, instead of the snapshot's.

        Raises:
            UsageError: a parameter is unknown or out of range.
        """
        ...

    def tokens(self, name: str) -> Tokens:
        """Open an index over token vectors, to score passages that others find."""
        ...

    def graph(self, name: str) -> Neighbours:
        """Open the bottom layer of a graph."""
        ...

    def scorer(self, model: Word) -> PairScorer:
        """Open a model that scores pairs."""
        ...

    def build(self, call: Call) -> Build | None:
        """Return what builds a call; None: there is no such call."""
        ...


class Composer:
    """Composes one expression; a `build` function gets its legs and models from here."""

    def __init__(self, materials: Materials, most_depth: int | None = None) -> None:
        """Compose from `materials`; no leg may be asked for more than `most_depth` passages."""
        self._materials, self.most_depth = materials, most_depth
        self._searched: list[str] = []  # indexes, in the expression's order

    def retriever(self, tree: Word | Call) -> SnapshotRetriever:
        """Return the retriever of a whole expression.

        Raises:
            UsageError: it names what is not known, or a builder refuses it.
        """
        leg = self.leg(tree)
        return leg.retriever if leg.depth is None else Deep(leg)

    def leg(self, node: Node) -> Leg:
        """Return a leg: an index or a call, either with a depth.

        Raises:
            UsageError: it is neither, or unknown here.
        """
        if isinstance(node, Call):
            return Leg(self._called(node), self._checked(node, node.depth))
        if not isinstance(node, Word):
            raise node.wrong(f"{node} is not a retriever: name an index, or a call")
        name, depth = node.with_depth()
        return Leg(self._index(node, name, {}), self._checked(node, depth))

    def tokens(self, node: Node) -> tuple[str, Tokens]:
        """Return the name of an index over token vectors, and the index with the encoder of its questions.

        Raises:
            UsageError: it is another kind of index, or unknown here.
        """
        name = self._of_kind(node, "tokens", "an index over token vectors")
        return name, self._materials.tokens(name)

    def graph(self, node: Node | None) -> Graph | None:
        """Return a graph and its bottom layer: of the index that is named, else of the first that is searched already.

        Without such a one it is the first of all; None if there is none.

        Raises:
            UsageError: it is another kind of index, or unknown here.
        """
        if node is not None:
            name = self._of_kind(node, "hnsw", "a graph")
            return Graph(name, self._materials.graph(name))
        names = (*self._searched, *self._materials.names())
        first = next((name for name in names if self._materials.kind(name) == "hnsw"), None)
        return None if first is None else Graph(first, self._materials.graph(first))

    def scorer(self, node: Node) -> tuple[str, PairScorer]:
        """Return a model's name as the expression has it, and the scorer of pairs that uses it.

        Raises:
            UsageError: it is no name, or models may not be named here.
            InputError: it is no cross-encoder.
        """
        if not isinstance(node, Word):
            raise node.wrong(f"{node} is not a model: give a folder, or model:NAME of the store")
        return str(node), self._materials.scorer(node)

    def _of_kind(self, node: Node, kind: str, what: str) -> str:
        if not isinstance(node, Word):
            raise node.wrong(f"{node} is not {what}: give the name of one")
        self._count(node, node.text)
        if self._materials.kind(node.text) != kind:
            known = [name for name in self._materials.names() if self._materials.kind(name) == kind]
            rest = f"choose one of {', '.join(known)}" if known else "the snapshot has none, add one to its recipe"
            raise node.wrong(f"{node} is not {what}: {rest}")
        return node.text

    def _count(self, node: Node, name: str) -> None:
        if name not in self._materials.names():
            raise node.wrong(self._materials.unknown(name))
        self._searched.append(name)
        if len(self._searched) > MOST_LEGS:
            raise node.wrong(f"more than {MOST_LEGS} indexes are searched: take some out")

    def _called(self, call: Call) -> SnapshotRetriever:
        build = self._materials.build(call)
        if build is None and call.name in self._materials.names():
            return self._with_parameters(call)
        if build is None:
            known, indexes = ", ".join(CALLS.names()), ", ".join(self._materials.names())
            raise call.wrong(f"there is no call {call.name!r}: choose one of {known}, or name an index: {indexes}")
        return build(call, self)

    def _with_parameters(self, call: Call) -> SnapshotRetriever:
        """Return an index that is searched with other parameters: `bm25(k1=1.2, b=.75)`."""
        if call.arguments:
            raise call.wrong(f"{call.name} is an index: it takes search parameters alone, as in {call.name}(NAME=1)")
        parameters = {name: call.number(name) for name in call.options}
        for name, value in parameters.items():
            if self.most_depth is not None and value > self.most_depth:
                raise call.wrong(f"{name} is {value:,}: ask for at most {self.most_depth:,} here")
        try:
            found = self._index(call, call.name, parameters)
        except UsageError as wrong:
            raise call.wrong(str(wrong)) from wrong
        found.name = str(replace(call, depth=None))
        return found

    def _index(self, node: Node, name: str, parameters: Mapping[str, Any]) -> SnapshotRetriever:
        self._count(node, name)
        return self._materials.leg(name, parameters)

    def _checked(self, node: Node, depth: int | None) -> int | None:
        if depth is not None and self.most_depth is not None and depth > self.most_depth:
            raise node.wrong(f"{node} asks for {depth:,} passages: ask for at most {self.most_depth:,} here")
        return depth


def builder_of(call: Call) -> Build | None:
    """Return what builds a call, of this package or of another one; None: there is no such call.

    Raises:
        InputError: another package brings such a call, and it cannot be imported.
    """
    return CALLS.find(call.name)
