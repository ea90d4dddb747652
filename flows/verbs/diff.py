"""`bookwheel diff`: compare two snapshots, or two evaluations."""

from collections.abc import Iterator, Mapping
from typing import Any

from flows.command.evaluations import build_comparison_reply
from flows.command.reply import Common, Reply, StoreUrl, format_value
from flows.verbs.show import format_index
from rag_model.errors import UsageError
from rag_model.evaluation.records import compare_evaluations
from rag_model.store.diff import CHANGES, SnapshotDiff, diff_snapshots
from rag_model.store.store import EVALUATION_PREFIX, Store
from rag_model.store.versions.snapshot import Snapshot


def diff(
    before: str,
    after: str,
    /,
    *,
    store: StoreUrl,
    limit: int = 10,
    common: Common | None = None,
) -> Reply:
    """Compare two snapshots: changed articles, passages and settings, and the bytes of a pull.

    `evaluation:ID` twice compares two evaluations: metrics side by side, and the difference of each
    measure, paired by question, with its 95 % interval.

    Passages are joined by id and hash. The bytes are those that a pull of the second fetches into a
    folder with the first.

    Args:
        before: A ref, ref@number, an id, or a unique prefix of one; with `evaluation:` before
            it, that of an evaluation.
        after: The snapshot or evaluation to compare with, named in the same way.
        limit: Number of articles to list for each kind of change.
    """
    opened_store = Store.open(store)
    kinds = {name.startswith(EVALUATION_PREFIX) for name in (before, after)}
    if kinds == {True}:
        return _compare_evaluations(opened_store, before, after)
    if True in kinds:
        raise UsageError(f"an evaluation is compared with another one, not with a snapshot: {before}, {after}")
    snapshot_diff = diff_snapshots(
        Snapshot.from_store(opened_store, before), Snapshot.from_store(opened_store, after), limit
    )
    return Reply(snapshot_diff.to_json(), "\n".join(_format_diff(snapshot_diff)))


def _compare_evaluations(store: Store, before: str, after: str) -> Reply:
    catalog = store.evaluations
    old_evaluation, new_evaluation = (
        catalog.get(catalog.resolve_trusted(name.removeprefix(EVALUATION_PREFIX))) for name in (before, after)
    )
    return build_comparison_reply(compare_evaluations(store, old_evaluation, new_evaluation))


def _format_diff(snapshot_diff: SnapshotDiff) -> Iterator[str]:
    yield f"from      {snapshot_diff.before}"
    yield f"to        {snapshot_diff.after}"
    yield f"articles  {_format_counts(snapshot_diff.articles)}"
    yield f"passages  {_format_counts(snapshot_diff.passages)}"
    for change in CHANGES:
        examples = snapshot_diff.examples[change]
        further_count = snapshot_diff.articles[change] - len(examples)
        if examples:
            titles = ", ".join(article.title or article.page_id for article in examples)
            yield f"{change:<9} {titles}" + (f" and {further_count:,} more" if further_count else "")
    for name, (old_value, new_value) in snapshot_diff.settings.items():
        yield from format_difference(name, old_value, new_value)
    for kind, pull in snapshot_diff.pull.items():
        yield f"pull      {kind}: {pull.fetched_bytes:,} of {pull.fetched_bytes + pull.reused_bytes:,} bytes"


def _format_counts(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{counts[change]:,} {change}" for change in CHANGES)


_SIZE_UNITS = {"n": "passages", "d": "dimensions", "row_bytes": "bytes a row"}  # by key of an index


def format_difference(name: str, old_value: Any, new_value: Any) -> Iterator[str]:
    """Yield the line of a changed setting, or of a changed property of the corpus or an index.

    Yield nothing for fields of an index that only a later build reads.
    """
    section, _, key = name.partition(".")
    if section != "indexes":
        label, text = ("corpus", key) if section == "corpus" else ("setting", name)
        yield f"{label:<9} {text}: {format_value(old_value)} -> {format_value(new_value)}"
        return
    index, _, key = key.partition(".")
    if not key:
        change, entry = ("removed", old_value) if new_value is None else ("added", new_value)
        yield f"index     {index}: {change}, {format_index(entry)}"
    elif key in _SIZE_UNITS and isinstance(old_value, int) and isinstance(new_value, int):
        yield f"index     {index}: {old_value:,} -> {new_value:,} {_SIZE_UNITS[key]}"
    elif key.partition(".")[0] != "trained":
        yield f"index     {index}: {key} {format_value(old_value)} -> {format_value(new_value)}"
