"""What the kinds of postings share: parts that are sorted by term, and merged as a stream."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rag_model.errors import InputError
from rag_model.index.files.pieces import Opener, stamp_of
from rag_model.index.kind import UntrainedKind
from rag_model.index.plan import Facts, IndexPlan

if TYPE_CHECKING:
    from rag_model.index.postings.part import PartReader

HELD = 13  # bytes a passage in memory while parts of 3,500 are merged: windows of their terms and postings


class PostingsKind(UntrainedKind, ABC):
    """Postings by part, merged as a stream: the same bytes however the passages are divided into parts.

    A kind says what the terms of a passage and their weights are (`scatter`), and what they count (`open`).
    """

    suffix: ClassVar[str] = "postings"

    @abstractmethod
    def scatter(self, plan: IndexPlan, trained: Path, rows: Path, number: int, out: Path) -> Facts:
        """Write a part's postings, sorted by term, as the piece that `stamp` names."""

    def scale(self, plan: IndexPlan, rows: Sequence[Path]) -> int:
        """Return how many units a weight of 1 is; 0: weights are frequencies."""
        return 0

    def merge(
        self,
        plan: IndexPlan,
        trained: Path,
        rows: Sequence[Path],
        scattered: Sequence[Opener],
        shards: Sequence[Opener],
        out: Path,
    ) -> Facts:
        """Merge the parts' postings, term by term."""
        from rag_model.index.postings.merge import merge  # noqa: PLC0415

        with readers(plan, trained, enumerate(scattered)) as parts:
            held = sum(part.n for part in parts)
            if held != plan.n:
                raise InputError(f"the pieces hold {held} rows, but the index is of {plan.n}: build them again")
            return merge(parts, out, self.scale(plan, rows))


def stamp(plan: IndexPlan, trained: Path, number: int) -> str:
    """Return the stamp of a part's piece."""
    return stamp_of(plan, trained, "scattered", number)


@contextmanager
def readers(plan: IndexPlan, trained: Path, pieces: Iterable[tuple[int, Opener]]) -> Iterator[list["PartReader"]]:
    """Open the pieces of parts of these numbers.

    Raises:
        InputError: one is missing, damaged or of another build.
    """
    from rag_model.index.postings.part import PartReader  # noqa: PLC0415

    with ExitStack() as stack:
        parts = []
        for number, piece in pieces:
            name = f"the scattered piece of part {number}"
            parts.append(PartReader(piece, stamp(plan, trained, number), name))
            stack.callback(parts[-1].close)
        yield parts
