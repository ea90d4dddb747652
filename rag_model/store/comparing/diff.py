"""What changed from one snapshot to another: articles, passages, settings, and the bytes that a puller would fetch."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rag_model.store.comparing.changes import ArticleChange, Change, article_changes
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.ranges import read_ahead
from rag_model.store.pulling.deltas import offered
from rag_model.store.pulling.deltas import steps as steps_of
from rag_model.store.pulling.kinds import FOR_BUILDS, kind_of
from rag_model.store.pulling.overlap import Overlap, Patch
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content
from rag_model.store.versions.paths import EMBEDDINGS
from rag_model.store.versions.snapshot import Snapshot

_AHEAD = 8  # files that are compared at once, at most
CHANGES: tuple[Change, ...] = ("added", "changed", "removed")


@dataclass(frozen=True, slots=True)
class PullBytes:
    """The bytes of one kind of files that a holder of the earlier snapshot would pull; equal files count once."""

    fetched_bytes: int
    reused_bytes: int


@dataclass(frozen=True, slots=True)
class Diff:
    """The differences between an earlier (or any other) snapshot and a later one, in both directions."""

    before: str  # full id
    after: str
    articles: Mapping[Change, int]
    passages: Mapping[Change, int]
    examples: Mapping[Change, tuple[ArticleChange, ...]]  # the first few articles
    settings: Mapping[str, tuple[Any, Any]]  # recipe.chunk.words -> before, after; None: not there
    pull: Mapping[str, PullBytes]  # by kind of file: passages, embeddings, encoder, index/hnsw

    def to_json(self) -> dict[str, Any]:
        """Return the diff as JSON values."""
        settings = {name: {"before": old, "after": new} for name, (old, new) in self.settings.items()}
        return {**asdict(self), "settings": settings}


def diff(before: Snapshot, after: Snapshot, limit: int = 10) -> Diff:
    """Compare two snapshots of any stores, with up to `limit` examples of articles for each kind of change.

    Memory is bounded by a part (`store.comparing.changes`) and 8 bytes a passage; passages' texts, vectors and indexes
    are not read.

    Raises:
        StoreError: a passage file is missing or damaged.
    """
    articles, passages = Counter(dict.fromkeys(CHANGES, 0)), Counter(dict.fromkeys(CHANGES, 0))
    examples: dict[Change, list[ArticleChange]] = {change: [] for change in CHANGES}
    for article in article_changes(before, after):
        articles[article.change] += 1
        passages.update(article.passages)
        if len(examples[article.change]) < limit:
            examples[article.change].append(article)
    old, new = before.manifest.content, after.manifest.content
    return Diff(
        before=before.id,
        after=after.id,
        articles=dict(articles),
        passages=dict(passages),
        examples={change: tuple(found) for change, found in examples.items()},
        settings=dict(differences(_settings(old), _settings(new))),
        pull=_pull(before, after),
    )


def _settings(content: Content) -> dict[str, Any]:
    value = content.to_json()
    kept = {name: value[name] for name in ("corpus", "recipe", "indexes")}
    spaces = {name: dict(entry.get("space") or {}) for name, entry in content.representations.items()}
    return {**kept, "space": spaces.pop(EMBEDDINGS, None), "spaces": spaces, "retriever": content.default_retriever}


def differences(before: Any, after: Any, at: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the dotted path and both values of every setting that differs; a section of one side only is not split."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in sorted({*before, *after}):
            yield from differences(before.get(name), after.get(name), f"{at}.{name}" if at else name)
    elif before != after:
        yield at, (before, after)


def _pull(before: Snapshot, after: Snapshot) -> dict[str, PullBytes]:
    files, there = after.manifest.content.files, set(before.manifest.content.files.values())
    paths = {ref: path for path, ref in sorted(files.items(), reverse=True)}  # first name wins
    overlap, store = Overlap.of(before, after), Store.open(after.where) if isinstance(after.where, str) else None
    steps = {step.after: step for step in steps_of(before.manifest.content, after.manifest.content)}
    fetched, reused = Counter[str](), Counter[str]()

    def lacked(ref: BlobRef) -> int:
        patch = overlap.patch(paths[ref]) if overlap and ref not in there else None
        lacking, step = 0 if ref in there else _lacking(ref.size, patch), steps.get(ref)
        if store and step and (patch or not step.head) and (delta := offered(store, step)):
            lacking -= (step.head or ref.size) - delta.size
        return lacking

    ahead = min(_AHEAD, max(before.at_once, after.at_once))
    for (ref, path), lacking in zip(paths.items(), read_ahead(lacked, [*paths], ahead), strict=True):
        fetched[kind_of(path)] += lacking
        reused[kind_of(path)] += ref.size - lacking
    return {kind: PullBytes(fetched[kind], reused[kind]) for kind in sorted(fetched.keys() - FOR_BUILDS)}


def _lacking(size: int, patch: Patch | None) -> int:
    return size if patch is None else patch.fetched_bytes
