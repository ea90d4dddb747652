"""Parts are chosen by weight in a first build, and later keep their boundaries."""

from hypothesis import given
from hypothesis import strategies as st

from rag_model.corpus.parts import PageRun, PartBoundaries, assemble_parts, choose_starts
from rag_model.corpus.records import Part, Slice

weights = st.lists(st.integers(1, 50), min_size=1, max_size=40)
targets = st.integers(1, 200)


def build_page_runs(sizes: list[int], first: int = 1) -> list[PageRun]:
    """Build a page run of ten pages for each weight."""
    slices = [Slice("u", i, 1, "bz2", first + 10 * i, first + 10 * i + 9) for i in range(len(sizes))]
    return [PageRun(slice_, weight, ordered=True) for slice_, weight in zip(slices, sizes, strict=True)]


def build_boundaries(starts: list[int], page_runs: list[PageRun]) -> PartBoundaries:
    return PartBoundaries("wiki", "w", tuple(starts), page_runs[-1].slice.last_page + 1)


@given(weights, targets)
def test_same_dump_has_the_same_parts(sizes: list[int], target: int) -> None:
    page_runs = build_page_runs(sizes)
    starts = choose_starts(page_runs, target)
    assert choose_starts(page_runs, target, build_boundaries(starts, page_runs)) == starts


@given(weights, weights, targets)
def test_larger_dump_keeps_its_parts_and_fills_the_last_one(
    sizes: list[int], added_sizes: list[int], target: int
) -> None:
    old_runs = build_page_runs(sizes)
    all_runs = old_runs + build_page_runs(added_sizes, first=old_runs[-1].slice.last_page + 1)
    starts = choose_starts(old_runs, target)
    new_starts = choose_starts(all_runs, target, build_boundaries(starts, old_runs))
    assert new_starts[: len(starts)] == starts
    assert all(start > old_runs[-1].slice.last_page for start in new_starts[len(starts) :])
    full_parts = assemble_parts("wiki", all_runs, new_starts, all_runs[-1].slice.last_page)[len(starts) - 1 : -1]
    weights_of_parts = [sum(run.weight for run in all_runs if _is_inside(run, part)) for part in full_parts]
    assert all(weight >= target for weight in weights_of_parts), "a part must be full before the next one begins"


def _is_inside(page_run: PageRun, part: Part) -> bool:
    return part.first_page <= page_run.slice.first_page <= part.last_page


def test_shorter_dump_has_fewer_parts() -> None:
    page_runs = build_page_runs([10] * 6)
    starts = choose_starts(page_runs, 20)
    assert len(starts) == 3
    new_starts = choose_starts(page_runs[:2], 20, build_boundaries(starts, page_runs))
    parts = assemble_parts("wiki", page_runs[:2], new_starts, page_runs[1].slice.last_page)
    assert [(part.first_page, part.last_page) for part in parts] == [(0, 20)]
