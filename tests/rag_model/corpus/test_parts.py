"""Where parts begin: by weight at first, and then where they began before."""

from hypothesis import given
from hypothesis import strategies as st

from rag_model.corpus.parts import PageRun, PartBoundaries, assemble_parts, choose_starts
from rag_model.corpus.records import Slice

weights = st.lists(st.integers(1, 50), min_size=1, max_size=40)
targets = st.integers(1, 200)


def pieces_of(sizes: list[int], first: int = 1) -> list[PageRun]:
    """One piece of ten pages for each weight."""
    slices = [Slice("u", i, 1, "bz2", first + 10 * i, first + 10 * i + 9) for i in range(len(sizes))]
    return [PageRun(at, weight, ordered=True) for at, weight in zip(slices, sizes, strict=True)]


def fences_of(starts: list[int], pieces: list[PageRun]) -> PartBoundaries:
    return PartBoundaries("wiki", "w", tuple(starts), pieces[-1].slice.last_page + 1)


@given(weights, targets)
def test_the_same_dump_is_cut_as_before(sizes: list[int], target: int) -> None:
    pieces = pieces_of(sizes)
    starts = choose_starts(pieces, target)
    assert choose_starts(pieces, target, fences_of(starts, pieces)) == starts


@given(weights, weights, targets)
def test_a_dump_that_grew_keeps_its_parts_and_fills_the_last_first(
    sizes: list[int], more: list[int], target: int
) -> None:
    old = pieces_of(sizes)
    grown = old + pieces_of(more, first=old[-1].slice.last_page + 1)
    starts = choose_starts(old, target)
    later = choose_starts(grown, target, fences_of(starts, old))
    assert later[: len(starts)] == starts
    assert all(start > old[-1].slice.last_page for start in later[len(starts) :])
    full = assemble_parts("wiki", grown, later, grown[-1].slice.last_page)[len(starts) - 1 : -1]
    held = [sum(piece.weight for piece in grown if _inside(piece, part)) for part in full]
    assert all(weight >= target for weight in held), "a new part begins once the one before it is full"


def _inside(piece: PageRun, part: object) -> bool:
    return part.first_page <= piece.slice.first_page <= part.last_page  # type: ignore[attr-defined]


def test_a_dump_that_ends_earlier_has_fewer_parts() -> None:
    pieces = pieces_of([10] * 6)
    starts = choose_starts(pieces, 20)
    assert len(starts) == 3
    short = pieces[:2]
    cut = assemble_parts("wiki", short, choose_starts(short, 20, fences_of(starts, pieces)), short[-1].slice.last_page)
    assert [(part.first_page, part.last_page) for part in cut] == [(0, 20)]
