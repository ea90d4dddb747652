"""What a kind of index can add to its protocol: the puller makes the file, in place of fetching it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from rag_model.index.files.engine import Rows
from rag_model.index.kind import Entry

if TYPE_CHECKING:
    import pyarrow as pa


@runtime_checkable
class DerivingKind(Protocol):
    """A kind over text whose index file a puller can make itself, of an earlier snapshot's file and the passages."""

    name: ClassVar[str]

    def derive(
        self,
        earlier: Entry,
        entry: Entry,
        before: Path,
        kept: Rows,
        texts: Callable[[Rows], Iterator["pa.RecordBatch"]],
        out: Path,
    ) -> bool:
        """Write the file; its digest is compared with the published one's.

        Args:
            earlier: the entry of the earlier index.
            entry: that of the index.
            before: the file of the earlier index.
            kept: (n,) the earlier row of each passage; -1: it was not there.
            texts: yields title and text of the passages of these rows, ascending.
            out: what is written.

        Returns:
            Whether it was written; if not, the file is fetched.

        Raises:
            BookwheelError: it cannot be made here; the file is fetched.
        """
        ...
