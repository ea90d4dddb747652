"""The registry of index kinds: built-in kinds, and those of installed packages.

A package adds one by an entry point of the group `bookwheel.index_kinds`, whose name is the kind's `name`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rag_model.errors import StoreError, UsageError
from rag_model.index.factory import parse
from rag_model.plugins import Registry

if TYPE_CHECKING:  # kinds import recipes, which import this module
    from rag_model.index.kind import IndexKind

KINDS: "Registry[IndexKind]" = Registry(
    "index kind",
    "bookwheel.index_kinds",
    {
        "bm25": "rag_model.index.postings.kind:KIND",
        "exact": "rag_model.index.exact.kind:KIND",
        "hnsw": "rag_model.index.graphs.kind:KIND",
        "impact": "rag_model.index.postings.impact:KIND",
        "ivf": "rag_model.index.lists.kind:KIND",
        "tokens": "rag_model.index.tokens.kind:KIND",
    },
)


def kind_named(name: str) -> "IndexKind":
    """Return the kind of that name.

    Raises:
        StoreError: no installed package brings it.
    """
    kind = KINDS.find(name)
    if kind is None:
        raise StoreError(f"there is no index kind {name!r} here, only {', '.join(KINDS.names())}: install its package")
    return kind


def kind_for(factory: str) -> "IndexKind":
    """Return the kind that a factory string asks for.

    Raises:
        UsageError: no kind takes it; the message says what is wrong with it as a faiss factory string.
    """
    for kinds in (KINDS.built_in, KINDS.brought):
        for kind in kinds():
            if kind.takes(factory):
                return kind
    try:
        parse(factory)
    except UsageError as wrong:
        raise UsageError(
            f"{wrong}; over words BM25, over weighted terms Impact or Impact1, over token vectors MaxSim; one of "
            "another kind needs the package that brings the kind"
        ) from wrong
    raise AssertionError(f"no index kind takes {factory!r}")  # pragma: no cover - the parser takes what faiss does


def kind_of(entry: Mapping[str, Any]) -> "IndexKind":
    """Return the kind of an index by its entry in a manifest; in format 1 the factory determines it.

    Raises:
        StoreError: no installed package brings it.
        UsageError: the entry is of format 1 and its factory is unknown.
    """
    return kind_named(str(entry["kind"])) if "kind" in entry else kind_for(str(entry.get("factory")))
