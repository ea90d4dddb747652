"""Filter hits by the kind of their passage: `where(A, kind=table)`, or `where(kind=table)` for the
default retriever.

The inner retriever is searched to a larger depth until `k` of its hits are of the kinds, so any
retriever can be filtered, and other retrievers are not slower. The first filtered query reads the
kinds of all passages, a byte each. `where(A, kind=[table, infobox])` allows several kinds.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_model.corpus.records import PASSAGE_KINDS, STRUCTURES
from rag_model.errors import UsageError
from rag_model.retrieve.expression import Call, Node, WordList, parse
from rag_model.retrieve.factory import RetrieverFactory
from rag_model.retrieve.retriever import Leg, Queries, RankedRows, SnapshotRetriever

_GROWTH = 4  # factor for the depth if too few hits are of the kinds
_MAX_REQUEST_DEPTH = 10_000  # maximum depth of a search for a request


class FilteredRetriever(SnapshotRetriever):
    """Return those hits of another retriever whose passages are of given kinds."""

    def __init__(self, name: str, leg: Leg, kinds: tuple[str, ...], max_depth: int | None) -> None:
        """Filter the hits of `leg`.

        Args:
            name: spelling of this retriever in an expression.
            leg: searched to its own depth, or else to the necessary depth.
            kinds: kinds of the returned passages.
            max_depth: maximum depth of the leg; None: unlimited.
        """
        super().__init__(leg.retriever.snapshot, name)
        self.exact_products = leg.retriever.exact_products
        self._leg, self._kinds, self._max_depth = leg, kinds, max_depth

    @property
    def most(self) -> int:
        """Maximum number of hits: that of the leg, because all of its hits may be of the kinds."""
        return self._leg.most

    def find(self, queries: Queries, k: int) -> RankedRows:
        """Search the leg until each query has `k` passages of the kinds, or the leg is exhausted.

        Raises:
            UsageError: the snapshot has no passage of these kinds.
        """
        is_allowed = np.isin(self.snapshot.kinds(), [PASSAGE_KINDS.index(kind) for kind in self._kinds])
        n_allowed = int(is_allowed.sum())
        if not n_allowed and len(is_allowed):
            raise self._create_kind_error()
        most = min(self.most, max(k, self._max_depth or self.most))
        depth = min(most, k * -(-len(is_allowed) // n_allowed))
        while True:
            ranked = self._leg.find(queries, depth)
            keep = (ranked.rows >= 0) & is_allowed[ranked.rows]
            is_exhausted = ranked.rows.shape[1] < depth or bool((ranked.rows[:, -1] < 0).all())
            if depth >= most or is_exhausted or int(keep.sum(axis=1).min()) >= min(k, n_allowed):
                return self._select(ranked, keep, k)
            depth = min(most, depth * _GROWTH)

    def _create_kind_error(self) -> UsageError:
        """Return the error of a search for kinds that no passage of the snapshot has."""
        present = ", ".join(PASSAGE_KINDS[number] for number in np.unique(self.snapshot.kinds()))
        message = f"snapshot {self.snapshot.id:.12} has no passages of kind {' or '.join(self._kinds)}, only {present}"
        requested = self.snapshot.manifest.content.recipe.get("chunk", {}).get("structures", ())
        structures = [STRUCTURES[kind] for kind in self._kinds if kind in STRUCTURES]
        if missing := sorted({*structures} - {*requested}):
            message += f": build it with --structures {','.join([*requested, *missing])}, or leave out the condition"
        return UsageError(message)

    def _select(self, ranked: RankedRows, keep: npt.NDArray[Any], k: int) -> RankedRows:
        """Return the first `k` kept rows of each query, in their order."""
        order = np.argsort(~keep, axis=1, kind="stable")
        rows = np.take_along_axis(np.where(keep, ranked.rows, -1), order, axis=1)
        scores = np.take_along_axis(ranked.scores, order, axis=1)
        products = None if ranked.products is None else np.take_along_axis(ranked.products, order, axis=1)
        legs = ranked.legs or (ranked,)
        return RankedRows(self.name, rows, scores, products, legs, ranked.passages).truncate(k)


def build(call: Call, factory: RetrieverFactory) -> SnapshotRetriever:
    """Build the retriever of `where(A, kind=KIND)`.

    Raises:
        UsageError: there is no kind or an unknown one, or more than one retriever.
    """
    call.check_options("kind")
    if len(call.arguments) > 1:
        raise call.arguments[1].error("where filters one retriever: name an index or a call, then kind=table")
    if "kind" not in call.options:
        raise call.error(f"where has no condition: add kind= and one of {', '.join(PASSAGE_KINDS)}")
    kinds = _parse_kinds(call.options["kind"])
    leg = factory.leg(call.arguments[0] if call.arguments else parse(factory.default_expression))
    return FilteredRetriever(
        str(replace(call, depth=None)), leg, kinds, None if factory.max_depth is None else _MAX_REQUEST_DEPTH
    )


def _parse_kinds(node: Node) -> tuple[str, ...]:
    kinds = tuple(str(item) for item in node.items) if isinstance(node, WordList) else (str(node),)
    if unknown := [kind for kind in kinds if kind not in PASSAGE_KINDS]:
        raise node.error(f"there is no kind {unknown[0]!r} of passages: choose from {', '.join(PASSAGE_KINDS)}")
    return kinds
