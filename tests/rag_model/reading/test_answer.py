"""Citations in answers in the notations of models, and brackets that are not citations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.reading.answer import Statement, remove_citations, split_statements


@pytest.mark.parametrize(
    ("text", "expected"),
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
        ('"George Orwell [1]"', [1]),  # quotation marks around the whole answer
        ("Orwell (1) {2} [a] [] [one]", []),
        ("in [2024] and [100]", []),
        ("a[i] = [0]", []),
        ('He wrote "as shown in [2]" there.', []),
        ("Er schrieb „siehe [2]“ dort.", []),
        ('5" [1] and 6" [2]', [1, 2]),  # inch marks
    ],
)
def test_numbers_in_brackets_are_citations(text: str, expected: list[int]) -> None:
    numbers = [number for statement in split_statements(text, 5) for number in statement.cited]
    assert numbers == expected
    if not expected:
        assert remove_citations(text, 5) == text


def test_citation_belongs_to_the_statement_before_it() -> None:
    text = "It is by Orwell [1]. It was published in Aug. 1945. [2][4] The U.S. edition [3] came later.\n- A list [1-2]"
    assert split_statements(text, 4) == (
        Statement("It is by Orwell.", (1,)),
        Statement("It was published in Aug. 1945.", (2, 4)),
        Statement("The U.S. edition came later.", (3,)),
        Statement("- A list", (1, 2)),
    )


@pytest.mark.parametrize(
    "text",
    [
        "It is by Orwell [1]. It was published in 1945 [2].",
        "It is by Orwell. [1] It was published in 1945. [2]",
        "[1] It is by Orwell. [2] It was published in 1945. [1]",
        '"It is by Orwell. [1] It was published in 1945. [2]"',
    ],
)
def test_leading_blank_lines_do_not_move_citations(text: str) -> None:
    statements = split_statements(text, 2)
    assert [len(statement.cited) for statement in statements] == [2 if text.startswith("[") else 1, 1]
    for n_blank_lines in range(6):
        assert split_statements("\n" * n_blank_lines + text, 2) == statements
        assert split_statements(text.replace("[1] It is", "[1] " + "\n" * n_blank_lines + "It is"), 2) == statements


def test_scripts_without_spaces_are_split_into_statements() -> None:
    text = "ジョージ・オーウェルの小説である[1]。一九四五年に出版された作品である。[2]"
    statements = split_statements(text, 2)
    assert [(each.text[-1], each.cited) for each in statements] == [("。", (1,)), ("。", (2,))]


def test_numbers_outside_the_context_are_unknown() -> None:
    assert split_statements("Orwell [2, 7].", 3) == (Statement("Orwell.", (2,), (7,)),)
    assert split_statements("Orwell [7].", 3) == (Statement("Orwell.", (), (7,)),)
    assert split_statements("Orwell [1-2024].", 3) == (Statement("Orwell [1-2024].", ()),)


def test_nothing_is_a_citation_without_a_context() -> None:
    assert split_statements("Orwell [1].", 0) == (Statement("Orwell [1].", ()),)
    assert split_statements("", 3) == ()
    assert split_statements("[1]", 3) == ()  # has no statement


@given(st.text(alphabet='ab.A[]12,-"“”\n 。', max_size=60), st.integers(0, 5))
def test_statements_keep_all_text_and_have_valid_numbers(text: str, count: int) -> None:
    statements = split_statements(text, count)
    text_of_statements = "".join(statement.text for statement in statements)
    assert "".join(text_of_statements.split()) == "".join(remove_citations(text, count).split())
    assert all(1 <= number <= count for statement in statements for number in statement.cited)
    assert remove_citations(remove_citations("Orwell [1]", 5), 5) == "Orwell"
