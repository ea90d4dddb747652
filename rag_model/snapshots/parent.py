"""The parent of a build: the snapshot of its ref, or of `latest`, whose unchanged results are
reused.

A build reuses the boundaries of parts, passages of articles, vectors of passages and trained files
of indexes (`snapshots.reused_training`). Passages are the same as without a parent, and vectors are
the same up to rounding; only indexes may differ, at equal quality. So the memo keys of passages and
vectors do not contain the parent. A task names only the blobs of those parts of the parent that
have the task's pages.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Self

from rag_model.corpus import chunk
from rag_model.corpus.parts import PartBoundaries
from rag_model.corpus.records import Part
from rag_model.encoders import embed
from rag_model.errors import RefusedError
from rag_model.snapshots.encoding import COMMITS
from rag_model.snapshots.recipe import Recipe
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.pulling.overlap import PageRanges
from rag_model.store.store import Store
from rag_model.store.versions.manifest import (
    Content,
    Manifest,
    articles_path,
    passages_path,
    spans_path,
    trained_path,
)
from rag_model.store.versions.signatures import UnsignedError

LATEST = "latest"  # the default ref of a build


@dataclass(frozen=True, slots=True)
class ParentPart:
    """The passages of a part of the parent, with the article log or the vectors of this part."""

    passages: BlobRef
    log_or_vectors: BlobRef
    spans: BlobRef | None = None  # with the article log: its salient spans, if the parent kept them


@dataclass(frozen=True, slots=True)
class Parent:
    """The snapshot whose results a build may reuse; `manifest` is None if there is no such
    snapshot.
    """

    manifest: Manifest | None = None
    _ranges: PageRanges = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the parts by their pages."""
        object.__setattr__(self, "_ranges", PageRanges(self.manifest.content.parts if self.manifest else ()))

    @classmethod
    def from_ref(cls, store: Store, ref: str) -> Self:
        """Return the snapshot of `ref` as the parent; for a new ref, the snapshot of `latest`.

        Raises:
            StoreError: the ref's log or the snapshot is damaged.
            RefusedError: a trust file is given, and no key in it signed the snapshot.
        """
        ref_name = next((name for name in (ref, LATEST) if store.refs.find_current(name)), None)
        if ref_name is None:
            return cls()
        try:
            return cls(store.snapshots.get(store.snapshots.resolve_trusted(ref_name)))
        except UnsignedError as error:
            raise RefusedError(
                f"no key of the trust file signed ref {ref_name} in {store.url}, the parent of "
                f"this build, or its snapshot: inspect them with `log --ref {ref_name}` and `show "
                f"{ref_name}`; `tag {ref_name}@NUMBER {ref_name}` moves the ref back to a signed "
                f"snapshot, and if this one is yours, `tag {ref_name} {ref_name}` without a trust "
                "file signs it"
            ) from error

    def get_part_boundaries(self, recipe: Recipe) -> PartBoundaries | None:
        """Return the page ranges of the parent's parts; None if they overlap, or if `recipe` sets
        another part size.
        """
        content = self._content
        if content is None or not content.parts or content.recipe.get("part_bytes") != recipe.part_bytes:
            return None
        first_pages = (0, *(part.first_page for part in content.parts[1:]))
        end_page = content.parts[-1].last_page + 1
        if not all(start < next_start for start, next_start in pairwise([*first_pages, end_page])):
            return None
        return PartBoundaries(content.corpus.get("kind", ""), content.corpus.get("dbname", ""), first_pages, end_page)

    def find_chunked_parts(self, part: Part) -> tuple[ParentPart, ...]:
        """Return the parent's passages, article logs and salient spans for the pages of `part`.

        Return none if another version of the chunking code built the parent.
        """
        if not self._has_code_version("chunk", chunk.VERSION):
            return ()
        return tuple(self._iter_parts(part, articles_path, with_spans=True))

    def find_encoded_parts(self, part: Part, space: str) -> tuple[ParentPart, ...]:
        """Return the parent's passages and vectors for the pages of `part`, if the parent has the
        encoder space and the code version of this build.
        """
        content = self._content
        if content is None:
            return ()
        matching_names = [
            name for name in content.representations if (content.space_of(name) or {}).get("digest") == space
        ]
        if not matching_names or not self._has_code_version("embed", embed.VERSION):
            return ()
        return tuple(
            parent_part
            for name in matching_names
            for parent_part in self._iter_parts(part, partial(content.rows_path, name))
        )

    def _has_code_version(self, stage: str, version: int) -> bool:
        code_versions = self.manifest.provenance.get("code") if self.manifest else None
        return isinstance(code_versions, dict) and code_versions.get(stage) == version

    def describe_missing_files(self, store: Store) -> list[str]:
        """Return sentences about passages and trained files of the parent that no longer exist.

        Such files are deleted when a snapshot expires, or when one of its pages is taken down.
        """
        if self.manifest is None:
            return []
        content, short_id = self.manifest.content, self.manifest.id[:12]
        passage_paths = [passages_path(part.name) for part in content.parts]
        trained_paths = [path for name in content.indexes if (path := trained_path(name)) in content.files]
        paths = [*passage_paths, *trained_paths]
        exist_flags = store.files.map_concurrently(store.blobs.exists, [content.files[path] for path in paths])
        missing_paths = {path for path, exists in zip(paths, exist_flags, strict=True) if not exists}
        messages = []
        if n_missing := len(missing_paths.intersection(passage_paths)):
            messages.append(
                f"{n_missing} of {len(passage_paths)} parts of the parent {short_id} are gone: they are built again"
            )
        if n_missing := len(missing_paths.intersection(trained_paths)):
            messages.append(
                f"{n_missing} of {len(trained_paths)} trained files of the parent {short_id} are "
                "gone: their indexes are trained again"
            )
        return messages

    @property
    def pins(self) -> Mapping[str, str]:
        """The commit, as `NAME@COMMIT`, of each hub name that the parent was built with."""
        commits = self.manifest.provenance.get(COMMITS) if self.manifest else None
        if not isinstance(commits, dict):
            return {}
        return {name: hub_name for name, hub_name in commits.items() if isinstance(hub_name, str)}

    @property
    def _content(self) -> Content | None:
        return None if self.manifest is None else self.manifest.content

    def _iter_parts(
        self, part: Part, get_path: Callable[[str], str], *, with_spans: bool = False
    ) -> Iterator[ParentPart]:
        if self._content is None:
            return
        files = self._content.files
        for _, parent_part in self._ranges.find_overlapping(part.first_page, part.last_page):
            name = parent_part.name
            passages, log_or_vectors = files.get(passages_path(name)), files.get(get_path(name))
            if passages is not None and log_or_vectors is not None:
                yield ParentPart(passages, log_or_vectors, files.get(spans_path(name)) if with_spans else None)


def fetch_parent_files(store: Store, parent_parts: Sequence[ParentPart]) -> list[tuple[Path, ...]]:
    """Return the local paths of the files of each part, in the order of the fields of `ParentPart`.

    A part is left out if one of its files is no longer in the store.

    Raises:
        StoreError: a file is damaged; damaged files are not reused.
    """
    refs_by_part = [
        [ref for ref in (part.passages, part.log_or_vectors, part.spans) if ref is not None] for part in parent_parts
    ]
    return [tuple(map(store.blobs.get_local_path, refs)) for refs in refs_by_part if all(map(store.blobs.exists, refs))]
