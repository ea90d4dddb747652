"""The salient spans of a snapshot's passages, by their rows."""

from collections.abc import Sequence

import numpy as np

from rag_model.corpus.salient import Salient
from rag_model.corpus.span_file import SpanFile
from rag_model.errors import InputError, StoreError, UsageError
from rag_model.partition import Partition
from rag_model.store.versions.paths import spans_path
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.texts import Rows


class SalientSpans:
    """Reads them from the files of the snapshot's parts, which are mapped."""

    def __init__(self, snapshot: Snapshot) -> None:
        """Open the files.

        Raises:
            StoreError: a file is missing or damaged.
            UsageError: the snapshot keeps no spans.
        """
        files = [spans_path(part.name) for part in snapshot.parts]
        if not {*files} <= {*snapshot.manifest.content.files}:
            raise UsageError(
                f"snapshot {snapshot.id[:12]} keeps no spans of links and dates: build it with spans = true in [chunk] "
                'of the recipe, or set masks = "random"'
            )
        try:
            self._files = [SpanFile(snapshot.path(file)) for file in files]
        except InputError as broken:
            raise StoreError(
                f"cannot read the spans of snapshot {snapshot.id[:12]} ({broken}): run `verify`"
            ) from broken
        self._partition = Partition(part.rows for part in snapshot.parts)

    @property
    def rows(self) -> Rows:
        """The rows of the passages that have a span, ascending."""
        found = [start + file.rows for start, file in zip(self._partition.starts, self._files, strict=False)]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def of(self, rows: Sequence[int]) -> list[list[Salient]]:
        """Return the spans of the passages of these rows, in their order."""
        wanted = np.unique(np.asarray(rows, np.int64))
        found: dict[int, list[Salient]] = {}
        for place, span, local in self._partition.split(wanted):
            own = [self._files[place].of(row) for row in local.tolist()]
            found |= dict(zip(wanted[span].tolist(), own, strict=True))
        return [found[row] for row in rows]
