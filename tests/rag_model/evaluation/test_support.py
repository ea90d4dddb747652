"""A passage supports a statement by its gold answers, and otherwise by its words and numbers."""

import pytest

from rag_model.evaluation.matching import supports_statement

PAGE = "Animal Farm is a beast fable by George Orwell, first published in England on 17 August 1945."


@pytest.mark.parametrize(
    ("statement", "golds", "expected"),
    [
        ("It was George Orwell.", ["George Orwell"], True),
        ("It was George Orwell, who lived in Paris.", ["George Orwell"], True),  # the gold answer decides
        ("It was Aldous Huxley.", ["George Orwell"], False),
        ("A fable, published in August 1945 by Orwell.", [], True),
        ("A fable, published in August 1946 by Orwell.", [], False),  # every number must be there
        ("Orwell, a teacher of French, published it.", [], False),  # two of four key tokens
        ("Orwell published a fable in Burma.", [], True),  # three of four
        ("It is of the.", [], False),  # states nothing
        ("first published in England", [], True),
    ],
)
def test_gold_answers_words_and_numbers_decide(statement: str, golds: list[str], expected: bool) -> None:
    assert supports_statement([PAGE], statement, "What is it?", golds) is expected


def test_texts_support_together() -> None:
    texts = ["by George Orwell", "published in 1945"]
    assert supports_statement(texts, "Orwell published it in 1945.")
    assert not any(supports_statement([text], "Orwell published it in 1945.") for text in texts)
    assert not supports_statement([], "Orwell published it in 1945.")
