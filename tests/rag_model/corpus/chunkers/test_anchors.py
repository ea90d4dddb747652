"""Sections are named by their headings, equal ones by numbers, in time that is linear in their number."""

from hypothesis import given
from hypothesis import strategies as st

from rag_model.corpus.chunkers.anchors import MAX_ANCHOR, anchor

HEADINGS = st.lists(st.sampled_from(["", "a", "a 2", "a 2 2", "a_2_3", "_2", "b", "x" * 70]), max_size=30)


class Lookups(dict[str, int]):
    """Names taken, which count how often one was looked for."""

    made = 0

    def __contains__(self, name: object) -> bool:
        self.made += 1
        return super().__contains__(name)


def first_free(heading: str, taken: set[str]) -> str:
    """Return the name by its definition: of the heading and the first free number from 2 on."""
    name = "_".join(heading.split())[:MAX_ANCHOR]
    return next(one for one in [name, *(f"{name}_{n}" for n in range(2, len(taken) + 3))] if one not in taken)


@given(HEADINGS)
def test_a_name_has_the_first_free_number(headings: list[str]) -> None:
    taken: dict[str, int] = {}
    named: set[str] = set()
    for heading in headings:
        expected = first_free(heading, named)
        assert anchor(heading, taken) == expected
        named.add(expected)
    assert {*taken} == named


def test_equal_headings_are_looked_up_a_constant_number_of_times() -> None:
    for headings in (["a"] * 4000, [f"a {n}" for n in range(2, 2000)] + ["a"] * 2000):
        taken = Lookups()
        names = [anchor(heading, taken) for heading in headings]
        assert len({*names}) == len(headings)
        assert taken.made <= 3 * len(headings)
