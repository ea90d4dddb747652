"""The parent of a build: the snapshot of its ref (else of `latest`), from which it inherits unchanged parts.

Boundaries of parts, passages of articles, vectors of passages and trained files of indexes (`snapshots.heritage`) are
inherited. Passages are the same as without a parent, vectors the same up to rounding, and memo keys do not contain the
parent; only indexes may differ, at equal quality. Tasks get the parent as a few blob names of the parts that cover
their pages.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Self

from rag_model.corpus.parts import Fences
from rag_model.corpus.records import Part
from rag_model.encoders import embed
from rag_model.errors import RefusedError
from rag_model.snapshots.recipe import Recipe
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest
from rag_model.store.versions.page_ranges import PageRanges
from rag_model.store.versions.paths import articles_path, passages_path, spans_path
from rag_model.store.versions.signatures import UnsignedError

LATEST = "latest"  # the default ref of a build


@dataclass(frozen=True, slots=True)
class Earlier:
    """A part of the parent: its passages, and a file with the same rows."""

    passages: BlobRef
    beside: BlobRef  # the article log, or the vectors
    spans: BlobRef | None = None  # salient spans, beside an article log


@dataclass(frozen=True, slots=True)
class Parent:
    """The snapshot that a build may inherit from; without a manifest it inherits nothing."""

    manifest: Manifest | None = None
    _ranges: PageRanges = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the parts by their pages."""
        object.__setattr__(self, "_ranges", PageRanges(self.manifest.content.parts if self.manifest else ()))

    @classmethod
    def of(cls, store: Store, ref: str) -> Self:
        """Return the current snapshot of `ref` as the parent; for a new ref that of `latest`.

        Raises:
            StoreError: the ref's log or the snapshot is damaged.
            RefusedError: a trust file is given, and no key of it signed the snapshot.
        """
        named = next((name for name in (ref, LATEST) if store.refs.current(name)), None)
        if named is None:
            return cls()
        try:
            return cls(store.snapshots.get(store.snapshots.trusted(named)))
        except UnsignedError as unsigned:
            raise RefusedError(
                f"ref {named} in {store.url}, from which a build inherits, or its snapshot is signed by no key of the "
                f"trust file: look with `log --ref {named}` and `show {named}`; `tag {named}@NUMBER {named}` moves it "
                f"back to a signed one, and if this one is yours, `tag {named} {named}` without a trust file signs it"
            ) from unsigned

    def fences(self, recipe: Recipe) -> Fences | None:
        """Return the ranges of the parts; None if they overlap, or the recipe sets another part size."""
        content = self._content
        if content is None or not content.parts or content.recipe.get("part_bytes") != recipe.part_bytes:
            return None
        starts = (0, *(part.first_page for part in content.parts[1:]))
        end = content.parts[-1].last_page + 1
        if not all(before < after for before, after in pairwise([*starts, end])):
            return None
        return Fences(content.corpus.get("kind", ""), content.corpus.get("dbname", ""), starts, end)

    def cut(self, part: Part) -> tuple[Earlier, ...]:
        """Return the passages and article logs of the pages of a part."""
        return tuple(self._beside(part, articles_path))

    def encoded(self, part: Part, space: str) -> tuple[Earlier, ...]:
        """Return the passages and vectors of the pages of a part, if space and code version are the same."""
        content = self._content
        if self.manifest is None or content is None:
            return ()
        same = [name for name in content.representations if (content.space_of(name) or {}).get("digest") == space]
        code = self.manifest.provenance.get("code")
        if not same or not isinstance(code, dict) or code.get("embed") != embed.VERSION:
            return ()
        return tuple(known for name in same for known in self._beside(part, partial(content.rows_path, name)))

    @property
    def _content(self) -> Content | None:
        return None if self.manifest is None else self.manifest.content

    def _beside(self, part: Part, path: Callable[[str], str]) -> Iterator[Earlier]:
        if self._content is None:
            return
        files = self._content.files
        for _, entry in self._ranges.within(part.first_page, part.last_page):
            passages, beside = files.get(passages_path(entry.name)), files.get(path(entry.name))
            if passages is not None and beside is not None:
                yield Earlier(passages, beside, files.get(spans_path(entry.name)))


def local_files(store: Store, earlier: Sequence[Earlier]) -> list[tuple[Path, Path]]:
    """Return local paths of inherited files; those no longer in the store are left out, and so made again.

    Raises:
        StoreError: a file is damaged; damaged files are not reused.
    """
    there = [known for known in earlier if store.blobs.exists(known.passages) and store.blobs.exists(known.beside)]
    return [(store.blobs.local(known.passages), store.blobs.local(known.beside)) for known in there]


def local_cuts(store: Store, earlier: Sequence[Earlier]) -> list[tuple[Path, ...]]:
    """Return local paths of inherited passages and article logs, each with the spans if there are any.

    Raises:
        StoreError: as `local_files`.
    """
    there = [known for known in earlier if known.spans is None or store.blobs.exists(known.spans)]
    return [
        (*paths, *([] if known.spans is None else [store.blobs.local(known.spans)]))
        for known in there
        for paths in local_files(store, [known])
    ]
