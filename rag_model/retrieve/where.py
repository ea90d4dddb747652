"""Filter hits by the kind of their passage, `where(A, kind=table)`, by the metadata of its page,
`where(A, language=de)`, or by the beginning of its title, `where(A, title=Animal)`. Without A, as
in `where(kind=table)`, the hits of the default retriever are filtered.

The inner retriever is searched to increasing depths until `k` of its hits match. So any retriever
can be filtered, and searches without a filter cost nothing extra. The first query that filters by a
column reads this column of all passages. `where(A, kind=[table, infobox])` allows several values.
If several options are given, a passage must match all of them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_model.corpus.records import PASSAGE_KINDS, STRUCTURES
from rag_model.errors import UsageError
from rag_model.retrieve.expression import WHERE_COLUMNS, Call, Node, Word, WordList, parse
from rag_model.retrieve.factory import RetrieverFactory
from rag_model.retrieve.retriever import ChildRetriever, Queries, RankedRows, SnapshotRetriever

_DEPTH_GROWTH = 4  # factor by which the depth grows if fewer than `k` hits match
_MAX_REQUEST_DEPTH = 10_000  # maximum depth of the child retriever in a request to a service


class FilteredRetriever(SnapshotRetriever):
    """A retriever that keeps those hits of another one whose passages match given column values."""

    def __init__(
        self,
        name: str,
        child: ChildRetriever,
        conditions: Mapping[str, tuple[str, ...]],
        max_depth: int | None,
    ) -> None:
        """Create a filter of the hits of `child`.

        Args:
            name: spelling of this retriever in an expression.
            child: child retriever; it is searched to its own depth, or else to the necessary depth.
            conditions: allowed values of the returned passages, by column.
            max_depth: maximum depth of the child retriever; None: unlimited.
        """
        super().__init__(child.retriever.snapshot, name)
        self.exact_products = child.retriever.exact_products
        self._child, self._conditions, self._max_depth = child, conditions, max_depth

    @property
    def most(self) -> int:
        """The maximum depth of the child retriever, because all of its hits may match."""
        return self._child.most

    def find(self, queries: Queries, k: int) -> RankedRows:
        """Search the child retriever until each query has `k` matching hits or no hits are left.

        Raises:
            UsageError: the snapshot has no passage of the given kinds.
        """
        conditions = self._conditions.items()
        mask_by_column = {column: self.snapshot.match_rows(column, field_values) for column, field_values in conditions}
        if self.snapshot.n and not mask_by_column.get("kind", np.True_).any():
            raise self._create_kind_error()
        is_allowed = np.logical_and.reduce(list(mask_by_column.values()))
        n_allowed = max(int(is_allowed.sum()), 1)
        max_depth = min(self.most, max(k, self._max_depth or self.most))
        # This depth is enough if the matching passages are spread evenly over the child's hits.
        depth = min(max_depth, k * -(-len(is_allowed) // n_allowed))
        while True:
            ranking = self._child.find(queries, depth)
            is_match = (ranking.rows >= 0) & is_allowed[ranking.rows]
            is_exhausted = ranking.rows.shape[1] < depth or bool((ranking.rows[:, -1] < 0).all())
            has_enough = int(is_match.sum(axis=1).min()) >= min(k, n_allowed)
            if depth >= max_depth or is_exhausted or has_enough:
                return self._select(ranking, is_match, k)
            depth = min(max_depth, depth * _DEPTH_GROWTH)

    def _create_kind_error(self) -> UsageError:
        """Return the error for a search for kinds of passages that the snapshot does not have."""
        kinds = self._conditions["kind"]
        present_kinds = (kind for kind in PASSAGE_KINDS if self.snapshot.match_rows("kind", (kind,)).any())
        message = (
            f"snapshot {self.snapshot.id:.12} has no passages of kind {' or '.join(kinds)}, only "
            f"{', '.join(present_kinds)}"
        )
        requested_structures = self.snapshot.manifest.content.recipe.get("chunk", {}).get("structures", ())
        structures = [STRUCTURES[kind] for kind in kinds if kind in STRUCTURES]
        if missing_names := sorted({*structures} - {*requested_structures}):
            structure_names = ",".join([*requested_structures, *missing_names])
            message += f": build it with --structures {structure_names}, or leave out the condition"
        return UsageError(message)

    def _select(self, ranking: RankedRows, is_match: npt.NDArray[Any], k: int) -> RankedRows:
        """Return the first `k` rows of each query for which `is_match` is true, in their order."""
        matches_first = np.argsort(~is_match, axis=1, kind="stable")
        hit_rows = np.take_along_axis(np.where(is_match, ranking.rows, -1), matches_first, axis=1)
        scores = np.take_along_axis(ranking.scores, matches_first, axis=1)
        products = None if ranking.products is None else np.take_along_axis(ranking.products, matches_first, axis=1)
        legs = ranking.legs or (ranking,)
        return RankedRows(self.name, hit_rows, scores, products, legs, ranking.passages).truncate(k)


def build_where(call: Call, factory: RetrieverFactory) -> SnapshotRetriever:
    """Build the retriever of `where(A, kind=KIND)`.

    Raises:
        UsageError: there is no condition, a kind is unknown, the snapshot has no such metadata, or
            there is more than one child retriever.
    """
    call.check_options(*WHERE_COLUMNS)
    if len(call.arguments) > 1:
        raise call.arguments[1].error("where filters one retriever: name an index or a call, then kind=table")
    if not call.options:
        raise call.error(f"where has no condition: add kind= and one of {', '.join(PASSAGE_KINDS)}, or language=")
    conditions = {WHERE_COLUMNS[name]: _parse_values(node) for name, node in call.options.items()}
    if unknown_kinds := [kind for kind in conditions.get("kind", ()) if kind not in PASSAGE_KINDS]:
        raise call.options["kind"].error(
            f"there is no kind {unknown_kinds[0]!r} of passages: choose from {', '.join(PASSAGE_KINDS)}"
        )
    child = factory.leg(call.arguments[0] if call.arguments else parse(factory.default_expression))
    recipe = child.retriever.snapshot.manifest.content.recipe.get("chunk", {})
    if missing_names := sorted({*conditions} - {"kind", "title", *recipe.get("metadata", ())}):
        raise call.error(
            f"the passages of this snapshot have no {missing_names[0]}: "
            f'add metadata = ["{missing_names[0]}"] to [chunk] of the recipe and rebuild the snapshot'
        )
    max_depth = None if factory.max_depth is None else _MAX_REQUEST_DEPTH
    return FilteredRetriever(str(replace(call, depth=None)), child, conditions, max_depth)


def _parse_values(node: Node) -> tuple[str, ...]:
    """Return the words of an option's value, in their order."""
    words = node.items if isinstance(node, WordList) else (node,)
    return tuple(word.text if isinstance(word, Word) else str(word) for word in words)
