"""Citations in answers: every way in which models write them, and brackets that are none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.reading.answer import Statement, remove_citations, split_statements


@pytest.mark.parametrize(
    ("text", "cited"),
    [
        ("Orwell [1]", [1]),
        ("Orwell[2].", [2]),
        ("Orwell [1, 2].", [1, 2]),
        ("Orwell [1;3].", [1, 3]),
        ("Orwell [1][2] [2].", [1, 2]),
        ("Orwell [1-3].", [1, 2, 3]),
        ("Orwell [ 2 \N{EN DASH} 3 ].", [2, 3]),
        ("[1] Orwell", [1]),
        ("Orwell\n[3]", [3]),
        ('"George Orwell [1]"', [1]),  # the whole answer stands in quotation marks
        ("Orwell (1) {2} [a] [] [one]", []),
        ("in [2024] and [100]", []),
        ("a[i] = [0]", []),
        ('He wrote "as shown in [2]" there.', []),
        ("Er schrieb „siehe [2]“ dort.", []),
        ('5" [1] and 6" [2]', [1, 2]),  # inches are no quotation marks
    ],
)
def test_numbers_in_brackets_are_citations(text: str, cited: list[int]) -> None:
    found = [number for one in split_statements(text, 5) for number in one.cited]
    assert found == cited
    if not cited:
        assert remove_citations(text, 5) == text


def test_a_citation_belongs_to_the_statement_before_it() -> None:
    text = "It is by Orwell [1]. It was published in Aug. 1945. [2][4] The U.S. edition [3] came later.\n- A list [1-2]"
    assert split_statements(text, 4) == (
        Statement("It is by Orwell.", (1,)),
        Statement("It was published in Aug. 1945.", (2, 4)),
        Statement("The U.S. edition came later.", (3,)),
        Statement("- A list", (1, 2)),
    )


def test_scripts_without_spaces_have_statements_too() -> None:
    text = "ジョージ・オーウェルの小説である[1]。一九四五年に出版された作品である。[2]"
    assert [(one.text[-1], one.cited) for one in split_statements(text, 2)] == [("。", (1,)), ("。", (2,))]


def test_numbers_that_the_context_does_not_have_are_told_apart() -> None:
    assert split_statements("Orwell [2, 7].", 3) == (Statement("Orwell.", (2,), (7,)),)
    assert split_statements("Orwell [7].", 3) == (Statement("Orwell.", (), (7,)),)
    assert split_statements("Orwell [1-2024].", 3) == (Statement("Orwell [1-2024].", ()),)


def test_without_a_context_nothing_is_a_citation() -> None:
    assert split_statements("Orwell [1].", 0) == (Statement("Orwell [1].", ()),)
    assert split_statements("", 3) == ()
    assert split_statements("[1]", 3) == ()  # cites, and states nothing


@given(st.text(alphabet='ab.A[]12,-"“”\n 。', max_size=60), st.integers(0, 5))
def test_no_text_is_lost_and_no_number_invented(text: str, most: int) -> None:
    found = split_statements(text, most)
    assert "".join("".join(one.text for one in found).split()) == "".join(remove_citations(text, most).split())
    assert all(1 <= number <= most for one in found for number in one.cited)
    assert remove_citations(remove_citations("Orwell [1]", 5), 5) == "Orwell"
