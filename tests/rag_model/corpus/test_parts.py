"""Parts are chosen by weight in a first build, and later keep their boundaries."""

from hypothesis import given
from hypothesis import strategies as st

from rag_model.corpus.parts import PageRun, PartBoundaries, assemble_parts, choose_starts
from rag_model.corpus.records import Slice

weights = st.lists(st.integers(1, 50), min_size=1, max_size=40)
targets = st.integers(1, 200)


def build_pieces(sizes: list[int], first: int = 1) -> list[PageRun]:
    """Build a piece of ten pages for each weight."""
    slices = [Slice("u", i, 1, "bz2", first + 10 * i, first + 10 * i + 9) for i in range(len(sizes))]
    return [PageRun(slice_, weight, ordered=True) for slice_, weight in zip(slices, sizes, strict=True)]


def build_boundaries(starts: list[int], pieces: list[PageRun]) -> PartBoundaries:
    return PartBoundaries("wiki", "w", tuple(starts), pieces[-1].slice.last_page + 1)


@given(weights, targets)
def test_same_dump_has_the_same_parts(sizes: list[int], target: int) -> None:
    pieces = build_pieces(sizes)
    starts = choose_starts(pieces, target)
    assert choose_starts(pieces, target, build_boundaries(starts, pieces)) == starts


@given(weights, weights, targets)
def test_larger_dump_keeps_its_parts_and_fills_the_last_one(
    sizes: list[int], added_sizes: list[int], target: int
) -> None:
    old = build_pieces(sizes)
    all_pieces = old + build_pieces(added_sizes, first=old[-1].slice.last_page + 1)
    starts = choose_starts(old, target)
    new_starts = choose_starts(all_pieces, target, build_boundaries(starts, old))
    assert new_starts[: len(starts)] == starts
    assert all(start > old[-1].slice.last_page for start in new_starts[len(starts) :])
    full_parts = assemble_parts("wiki", all_pieces, new_starts, all_pieces[-1].slice.last_page)[len(starts) - 1 : -1]
    weights_of_parts = [sum(piece.weight for piece in all_pieces if _is_inside(piece, part)) for part in full_parts]
    assert all(weight >= target for weight in weights_of_parts), "a part must be full before the next one begins"


def _is_inside(piece: PageRun, part: object) -> bool:
    return part.first_page <= piece.slice.first_page <= part.last_page  # type: ignore[attr-defined]


def test_shorter_dump_has_fewer_parts() -> None:
    pieces = build_pieces([10] * 6)
    starts = choose_starts(pieces, 20)
    assert len(starts) == 3
    new_starts = choose_starts(pieces[:2], 20, build_boundaries(starts, pieces))
    parts = assemble_parts("wiki", pieces[:2], new_starts, pieces[1].slice.last_page)
    assert [(part.first_page, part.last_page) for part in parts] == [(0, 20)]
