"""The parent's index of words, of which a build makes its own: its file, and where its passages are now.

Equal parts need no look. For a part that changed, the delta that pullers will fetch tells which rows are new, and holds
their texts (`store.pulling.deltas`); where there is none, passages are joined by their hashes, and new ones are read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rag_model.corpus.passage_delta import kept_rows
from rag_model.corpus.passages import PassageFile, hashes_of
from rag_model.errors import BookwheelError, InputError
from rag_model.index.deriving import DerivingKind
from rag_model.index.plan import Facts, IndexPlan
from rag_model.index.registry import kind_named
from rag_model.partition import Partition, Rows
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.pulling.deltas import Step, offered
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content
from rag_model.store.versions.page_ranges import PageRanges
from rag_model.store.versions.paths import passages_path

_COLUMNS = ["title", "text"]
_HELD = 32 << 20  # bytes of new texts that are held from the first look at deltas on; more are read again
_EXPANDS = 8  # times its size a delta decodes to; one that does so by more may be read twice


@dataclass(frozen=True, slots=True)
class KeptPart:
    """A part of a build, and the parent's parts that hold its pages."""

    passages: BlobRef
    rows: int
    before: tuple[tuple[BlobRef, int, int], ...]  # passages, the first row in the parent, and number of rows

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read back what `EarlierIndex.to_json` wrote."""
        before = tuple((BlobRef.from_json(ref), first, rows) for ref, first, rows in value["before"])
        return cls(BlobRef.from_json(value["passages"]), value["rows"], before)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        before = [[ref.to_json(), first, rows] for ref, first, rows in self.before]
        return {"passages": self.passages.to_json(), "rows": self.rows, "before": before}


@dataclass(frozen=True, slots=True)
class EarlierIndex:
    """An index of the parent, of the same kind and settings."""

    file: BlobRef
    entry: Mapping[str, Any]  # of the parent's manifest
    parts: tuple[KeptPart, ...]  # of the build, in row order

    @classmethod
    def of(cls, store: Store, before: Content | None, now: Content, name: str, plan: IndexPlan) -> Self | None:
        """Return the parent's index of a name; None: there is none, or it is another one.

        Args:
            store: of both.
            before: the parent's content.
            now: the build's, without indexes.
            name: of the index.
            plan: of the index now.
        """
        kind = kind_named(plan.kind)
        if before is None or not isinstance(kind, DerivingKind):
            return None
        entry, file = before.indexes.get(name, {}), before.files.get(before.index_file(name))
        same = all(entry.get(key) == value for key, value in plan.entry().items() if key not in ("n", "search"))
        if not same or file is None or not store.blobs.exists(file):
            return None
        starts, ranges = Partition(part.rows for part in before.parts).starts, PageRanges(before.parts)
        parts = []
        for part in now.parts:
            known = [(number, one) for number, one in ranges.within(part.first_page, part.last_page)]
            refs = tuple((before.files[passages_path(one.name)], int(starts[at]), one.rows) for at, one in known)
            parts.append(KeptPart(now.files[passages_path(part.name)], part.rows, refs))
        return cls(file, entry, tuple(parts))

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        parts = [part.to_json() for part in self.parts]
        return {"file": self.file.to_json(), "entry": dict(self.entry), "parts": parts}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read back what `to_json` wrote."""
        return cls(BlobRef.from_json(value["file"]), value["entry"], tuple(map(KeptPart.from_json, value["parts"])))

    def derive(self, store: Store, plan: IndexPlan, out: Path) -> Facts | None:
        """Write the index of the build; None: it is to be built as a whole.

        Raises:
            InputError: the parent's file is damaged.
            StoreError: a file is missing or damaged.
            ResourceError: `out` cannot be written.
        """
        kind = kind_named(plan.kind)
        if not isinstance(kind, DerivingKind):
            return None
        found, room = list[Kept](), _HELD
        for part in self.parts:
            found.append(Kept.of(store, part, room))
            room -= _size(found[-1].held)
        kept = np.concatenate([np.empty(0, np.int64), *(part.rows for part in found)])

        def texts(rows: Rows) -> Iterator[pa.RecordBatch]:
            for place, _, local in Partition(len(part.rows) for part in found).split(rows):
                yield from found[place].texts(local)

        return kind.derive(self.entry, plan.entry(), store.blobs.local(self.file), kept, texts, out)


@dataclass(frozen=True, slots=True)
class Kept:
    """Which passages of a part the parent has."""

    rows: Rows  # (n,): the parent's row of each, or -1
    passages: Callable[[], Path]  # of the part
    delta: Callable[[], Path] | None = None  # a passage file of those that are new
    held: Sequence[pa.RecordBatch] = ()  # title and text of these, if they are short

    @classmethod
    def of(cls, store: Store, part: KeptPart, room: int) -> Self:
        """Compare a part with the parent's; up to `room` bytes of new texts are held.

        Raises:
            InputError: a file is damaged.
            StoreError: as above, or it is missing.
        """

        def passages() -> Path:
            return store.blobs.local(part.passages)

        if len(part.before) == 1:
            (before, first, rows), *_ = part.before
            if before == part.passages:
                return cls(np.arange(first, first + rows), passages)
            with suppress(BookwheelError):  # without a delta that can be used it takes longer
                if delta := offered(store, Step(part.passages, before, passages=True)):
                    path, small = partial(store.blobs.local, delta), _EXPANDS * delta.size <= room
                    with PassageFile(pa.BufferReader(store.blobs.read(delta)) if small else path()) as file:
                        kept = _from(first, kept_rows(file, rows, part.rows))
                        held = list(file.iter_batches(_COLUMNS)) if small else []
                    return cls(kept, passages, path, held if _size(held) <= room else ())
        hashes, kept = hashes_of(passages()), np.full(part.rows, -1, np.int64)
        if len(hashes) != part.rows:
            raise InputError(f"a part's passages are {len(hashes)}, not {part.rows}: build it again")
        for before, first, rows in part.before:
            if store.blobs.exists(before):
                there = pc.index_in(hashes, value_set=hashes_of(store.blobs.local(before))).fill_null(-1).to_numpy()
                kept = np.where((there < 0) | (there >= rows), kept, there + first)
        return cls(kept, passages)

    def texts(self, rows: Rows) -> Iterator[pa.RecordBatch]:
        """Yield title and text of the passages of these rows of the part, ascending."""
        if self.delta and np.array_equal(rows, np.flatnonzero(self.rows < 0)):
            if self.held:
                yield from self.held
                return
            with PassageFile(self.delta()) as file:
                yield from file.iter_batches(_COLUMNS)
        else:
            with PassageFile(self.passages()) as file:
                yield from file.iter_chosen(rows.tolist(), _COLUMNS)


def _size(batches: Sequence[pa.RecordBatch]) -> int:
    return sum(batch.nbytes for batch in batches)


def _from(first: int, kept: Rows) -> Rows:
    return np.where(kept < 0, kept, kept + first)
