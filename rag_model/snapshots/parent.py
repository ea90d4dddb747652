"""The parent of a build: the snapshot that its ref (else `latest`) names, from which it inherits what has not changed.

Boundaries of parts, passages of articles and vectors of passages are inherited, and what indexes were trained to
(`snapshots.heritage`). Passages are what they would be without a parent, vectors to rounding, and no record's key
knows of it; only indexes may be others, as good ones. It travels in the tasks of the parts whose pages it held, as a
few names of blobs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Self

from rag_model.corpus.parts import Fences
from rag_model.corpus.records import Part
from rag_model.encoders import embed
from rag_model.snapshots.recipe import Recipe
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest
from rag_model.store.versions.paths import articles_path, embeddings_path, passages_path

LATEST = "latest"  # where a build goes unless told otherwise


@dataclass(frozen=True, slots=True)
class Earlier:
    """A part of the parent: its passages, and what lies beside them."""

    passages: BlobRef
    beside: BlobRef  # the article log, or the vectors


@dataclass(frozen=True, slots=True)
class Parent:
    """What a build may inherit; without a manifest nothing."""

    manifest: Manifest | None = None

    @classmethod
    def of(cls, store: Store, ref: str) -> Self:
        """Return the snapshot that `ref` names as the parent; of a ref that is new, the one that `latest` names.

        Raises:
            StoreError: the ref's log or the snapshot is damaged.
        """
        now = store.refs.current(ref) or store.refs.current(LATEST)
        return cls(store.snapshots.get(now.snapshot) if now else None)

    def fences(self, recipe: Recipe) -> Fences | None:
        """Return the ranges of the parts; None where they overlap, or the recipe asks for parts of another size."""
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
        """Return the passages and vectors of the pages of a part, if they are of this space and of today's code."""
        content = self._content
        if self.manifest is None or content is None:
            return ()
        same = [name for name in content.representations if (content.space_of(name) or {}).get("digest") == space]
        code = self.manifest.provenance.get("code")
        if not same or not isinstance(code, dict) or code.get("embed") != embed.VERSION:
            return ()
        return tuple(self._beside(part, partial(embeddings_path, representation=same[0])))

    @property
    def _content(self) -> Content | None:
        return None if self.manifest is None else self.manifest.content

    def _beside(self, part: Part, path: Callable[[str], str]) -> Iterator[Earlier]:
        if self._content is None:
            return
        files = self._content.files
        for entry in self._content.parts:
            passages, beside = files.get(passages_path(entry.name)), files.get(path(entry.name))
            overlaps = entry.first_page <= part.last_page and part.first_page <= entry.last_page
            if overlaps and passages is not None and beside is not None:
                yield Earlier(passages, beside)


def local_files(store: Store, earlier: Sequence[Earlier]) -> list[tuple[Path, Path]]:
    """Return local paths of what is inherited; what is no longer in the store is left out, and so made anew.

    Raises:
        StoreError: a file of it is damaged: what is wrong is not taken over.
    """
    there = [known for known in earlier if store.blobs.exists(known.passages) and store.blobs.exists(known.beside)]
    return [(store.blobs.local(known.passages), store.blobs.local(known.beside)) for known in there]
