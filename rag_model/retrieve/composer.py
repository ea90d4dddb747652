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
from rag_model.retrieve.nodes import Call, Node, Word
from rag_model.retrieve.rerank import PairScorer

Build = Callable[[Call, "Composer"], SnapshotRetriever]
CALLS: Registry[Build] = Registry(
    "retriever",
    "bookwheel.retrievers",
    {"rerank": "rag_model.retrieve.rerank:build", "rrf": "rag_model.retrieve.fusion:build"},
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

    def leg(self, name: str, parameters: Mapping[str, Any]) -> SnapshotRetriever:
        """Open an index to search it with these parameters, instead of the snapshot's.

        Raises:
            UsageError: a parameter is unknown or out of range.
        """
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
        self._materials, self._most_depth, self._legs = materials, most_depth, 0

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
        if name not in self._materials.names():
            raise node.wrong(self._materials.unknown(name))
        return Leg(self._index(node, name, {}), self._checked(node, depth))

    def scorer(self, node: Node) -> tuple[str, PairScorer]:
        """Return a model's name as the expression has it, and the scorer of pairs that uses it.

        Raises:
            UsageError: it is no name, or models may not be named here.
            InputError: it is no cross-encoder.
        """
        if not isinstance(node, Word):
            raise node.wrong(f"{node} is not a model: give a folder, or model:NAME of the store")
        return str(node), self._materials.scorer(node)

    def _called(self, call: Call) -> SnapshotRetriever:
        build = self._materials.build(call)
        if build is None and call.name in self._materials.names():
            return self._with_parameters(call)
        if build is None:
            known = ", ".join(CALLS.names())
            raise call.wrong(f"there is no call {call.name!r}: choose one of {known}, or name an index")
        return build(call, self)

    def _with_parameters(self, call: Call) -> SnapshotRetriever:
        """Return an index that is searched with other parameters: `bm25(k1=1.2, b=.75)`."""
        if call.arguments:
            raise call.wrong(f"{call.name} is an index: it takes search parameters alone, as in {call.name}(NAME=1)")
        parameters = {name: call.number(name) for name in call.options}
        for name, value in parameters.items():
            if self._most_depth is not None and value > self._most_depth:
                raise call.wrong(f"{name} is {value:,}: ask for at most {self._most_depth:,} here")
        try:
            found = self._index(call, call.name, parameters)
        except UsageError as wrong:
            raise call.wrong(str(wrong)) from wrong
        found.name = str(replace(call, depth=None))
        return found

    def _index(self, node: Node, name: str, parameters: Mapping[str, Any]) -> SnapshotRetriever:
        self._legs += 1
        if self._legs > MOST_LEGS:
            raise node.wrong(f"more than {MOST_LEGS} indexes are searched: take some out")
        return self._materials.leg(name, parameters)

    def _checked(self, node: Node, depth: int | None) -> int | None:
        if depth is not None and self._most_depth is not None and depth > self._most_depth:
            raise node.wrong(f"{node} asks for {depth:,} passages: ask for at most {self._most_depth:,} here")
        return depth


def builder_of(call: Call) -> Build | None:
    """Return what builds a call, of this package or of another one; None: there is no such call.

    Raises:
        InputError: another package brings such a call, and it cannot be imported.
    """
    return CALLS.find(call.name)
