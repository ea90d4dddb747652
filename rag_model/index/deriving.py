"""What a kind of index can add to its protocol: the next file is made of the last one, by builds and pullers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from rag_model.index.files.engine import Rows
from rag_model.index.kind import Entry
from rag_model.index.plan import Facts

if TYPE_CHECKING:
    import pyarrow as pa


@runtime_checkable
class DerivingKind(Protocol):
    """A kind over text whose index file can be made of an earlier snapshot's file and the passages, byte for byte.

    A build does so in place of scattering and merging, and a puller in place of fetching.
    """

    name: ClassVar[str]

    def derive(
        self,
        earlier: Entry,
        entry: Entry,
        before: Path,
        kept: Rows,
        texts: Callable[[Rows], Iterator["pa.RecordBatch"]],
        out: Path,
    ) -> Facts | None:
        """Write the file: the bytes of a whole build.

        Args:
            earlier: the entry of the earlier index.
            entry: that of the index.
            before: the file of the earlier index.
            kept: (n,) the earlier row of each passage; -1: it was not there.
            texts: yields title and text of the passages of these rows, ascending.
            out: what is written.

        Returns:
            The facts of a merge; None if it was not written: then it is built as a whole, or fetched.

        Raises:
            BookwheelError: it cannot be made here.
        """
        ...

    def to_derive(self, n: int) -> int:
        """Return the bytes of memory that it takes for n passages."""
        ...
