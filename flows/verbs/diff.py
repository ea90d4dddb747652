"""`bookwheel diff`: what changed from one snapshot to another, or from one evaluation to another."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from cyclopts import Parameter

from flows.command.evaluations import compared
from flows.command.reply import Common, Reply, StoreUrl
from rag_model.errors import UsageError
from rag_model.evaluation.records.differences import beside
from rag_model.store.comparing.diff import CHANGES, Diff
from rag_model.store.comparing.diff import diff as diff_snapshots
from rag_model.store.store import EVALUATION, Store
from rag_model.store.versions.snapshot import Snapshot


def diff(
    before: str,
    after: str,
    /,
    *,
    store: StoreUrl,
    limit: Annotated[int, Parameter(help="Number of articles to list for each kind of change.")] = 10,
    common: Common | None = None,
) -> Reply:
    """Compare two snapshots: articles and passages added, changed and removed, settings, and the bytes of a pull.

    `evaluation:ID` twice compares two evaluations: figures side by side, and the difference of each measure question by
    question, with its 95 % interval.

    Passages are joined by id and hash. The bytes are those that a holder of the first would fetch to pull the second.

    Parameters
    ----------
    before
        A ref, ref@number, an id, or a unique prefix of one; with `evaluation:` before it, that of an evaluation.
    after
        The one to compare with, named in the same way.
    """
    opened = Store.open(store)
    kinds = {name.startswith(EVALUATION) for name in (before, after)}
    if kinds == {True}:
        return _evaluations(opened, before, after)
    if True in kinds:
        raise UsageError(f"an evaluation is compared with another one, not with a snapshot: {before}, {after}")
    found = diff_snapshots(Snapshot.from_store(opened, before), Snapshot.from_store(opened, after), limit)
    return Reply(found.to_json(), "\n".join(_lines(found)))


def _evaluations(store: Store, before: str, after: str) -> Reply:
    shelf = store.evaluations
    old, new = (shelf.get(shelf.trusted(name.removeprefix(EVALUATION))) for name in (before, after))
    return compared(beside(store, old, new))


def _lines(found: Diff) -> Iterator[str]:
    yield f"from      {found.before}"
    yield f"to        {found.after}"
    yield f"articles  {_counts(found.articles)}"
    yield f"passages  {_counts(found.passages)}"
    for change in CHANGES:
        named = found.examples[change]
        more = found.articles[change] - len(named)
        if named:
            titles = ", ".join(article.title for article in named)
            yield f"{change:<9} {titles}" + (f" and {more:,} more" if more else "")
    for name, (before, after) in found.settings.items():
        yield f"setting   {name}: {_value(before)} -> {_value(after)}"
    for kind, pull in found.pull.items():
        yield f"pull      {kind}: {pull.fetched_bytes:,} of {pull.fetched_bytes + pull.reused_bytes:,} bytes"


def _counts(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{counts[change]:,} {change}" for change in CHANGES)


def _value(value: Any) -> str:
    return "none" if value is None else str(value)
