"""The kinds of a snapshot's files: a pull selects files by kind, and reports of bytes are by kind."""

from collections.abc import Callable, Sequence

from rag_model.errors import UsageError
from rag_model.store.versions.manifest import Content
from rag_model.store.versions.paths import EMBEDDINGS, EXACT, SPARSE, TOKENS, rows_kind

# Logs of articles, trained files of indexes, spans for trainings, and what indexes hold in a form of their own: readers
# do not need them.
FOR_BUILDS = frozenset({"articles", "trained", "spans", TOKENS, SPARSE})


def kind_of(path: str) -> str:
    """Return the kind of a snapshot's file: `passages`, `embeddings`, `tokens`, `sparse`, `encoder`, or one index.

    >>> kind_of("passages/part-00042.parquet"), kind_of("index/hnsw.faiss")
    ('passages', 'index/hnsw')
    """
    top, _, rest = path.partition("/")
    if top == EMBEDDINGS:
        return rows_kind(path)
    return f"index/{rest.partition('/')[0].partition('.')[0]}" if top == "index" else top


def chosen(
    content: Content, *, indexes: Sequence[str] = (), embeddings: bool = True, passages_only: bool = False
) -> Callable[[str], bool]:
    """Return a `select` for `pull`: the files that readers need, without unselected indexes; or passages alone.

    `indexes` names the indexes to pull; without names all are pulled that can be searched. `exact` means the
    embeddings, which an index that ranks by them (`refine` in its entry) needs too.

    Raises:
        UsageError: the snapshot has no such index, or the choice contradicts itself.
    """
    if unknown := sorted({*indexes} - {*content.indexes, EXACT}):
        known = ", ".join([*content.indexes, EXACT])
        raise UsageError(f"the snapshot has no index {unknown[0]!r} to pull: choose from {known}")
    if indexes and passages_only:
        raise UsageError(f"passages alone include no index {indexes[0]}: select one or the other")
    if EXACT in indexes and EXACT not in content.indexes and not embeddings:
        raise UsageError("index exact is searched in the embeddings: pull them too")
    unwanted = [name for name in content.indexes if indexes and name not in indexes]
    if not embeddings:
        ranking = [name for name, entry in content.indexes.items() if entry.get("refine") == "vectors"]
        if named := sorted({*ranking} & {*indexes}):
            raise UsageError(f"index {named[0]} ranks what it finds by the embeddings: pull them too")
        unwanted += ranking
    left_out = {*FOR_BUILDS, *(f"index/{name}" for name in unwanted), *([] if embeddings else ["embeddings"])}
    return lambda path: kind_of(path) == "passages" if passages_only else kind_of(path) not in left_out
