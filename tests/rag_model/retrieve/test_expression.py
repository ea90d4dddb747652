"""Expressions are parsed, or refused with an error that names the position."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.errors import UsageError
from rag_model.retrieve.expression import MAX_CHARACTERS, MAX_NESTING, Call, Word, choose_expression, parse


@pytest.mark.parametrize(
    ("text", "formatted"),
    [
        ("hnsw", "hnsw"),
        (" hnsw:100 ", "hnsw:100"),
        ("rrf( hnsw,ivfpq )", "rrf(hnsw, ivfpq)"),
        ("rrf(hnsw:100, ivfpq:100, k=60)", "rrf(hnsw:100, ivfpq:100, k=60)"),
        ("rrf(a, b, weights=[2,.5])", "rrf(a, b, weights=[2, .5])"),
        ("rrf(a,b):50", "rrf(a, b):50"),
        ("rerank(rrf(hnsw:100,bm25:100),model:ce,50)", "rerank(rrf(hnsw:100, bm25:100), model:ce, 50)"),
        ("rerank(hnsw, '/a folder/m (1)', 5)", "rerank(hnsw, '/a folder/m (1)', 5)"),
        ('rerank(hnsw, "it\'s", 5)', 'rerank(hnsw, "it\'s", 5)'),
        ("rerank(hnsw, ../models/ce-v1.2)", "rerank(hnsw, ../models/ce-v1.2)"),
        ("anything()", "anything()"),
    ],
)
def test_expression_is_parsed_and_formatted(text: str, formatted: str) -> None:
    assert str(parse(text)) == formatted
    assert parse(formatted) == parse(text)


def test_depths_belong_to_legs() -> None:
    leg, call = parse("hnsw:100"), parse("rrf(a, b):7")
    assert isinstance(leg, Word)
    assert leg.split_depth() == ("hnsw", 100)
    assert isinstance(call, Call)
    assert call.depth == 7
    assert [argument.split_depth() for argument in call.arguments if isinstance(argument, Word)] == [
        ("a", None),
        ("b", None),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: name an index"),
        (" \t\n", "is empty: name an index"),
        ("rrf(hnsw, ivfpq", r"character 4: the bracket '\(' is not closed: add '\)'"),
        ("rrf(hnsw, ivfpq, weights=[1, 2", r"character 26: the bracket '\[' is not closed: add '\]'"),
        ("rrf(hnsw, [1", r"the bracket '\[' is not closed"),
        ("rrf hnsw", "character 5: the retriever should end here"),
        ("rrf(hnsw))", r"character 10: the retriever should end here"),
        ("rrf(hnsw ivfpq)", "character 10: a comma or a closing bracket is missing"),
        ("rrf(,hnsw)", "character 5: ',' is where a name is expected"),
        ("rrf(hnsw,)", r"character 10: '\)' is where a name is expected"),
        ("(hnsw)", r"character 1: '\(' is where a name is expected"),
        ("[hnsw]", "a list is not a retriever"),
        ("rrf(hnsw, k=)", r"character 13: '\)' is where a name is expected"),
        ("rrf(a, b, k=1, k=2)", "character 16: the option 'k' is given twice"),
        ("rrf(a, k=1, b)", "character 13: an argument follows an option"),
        ("rrf(a, b):many", "character 10: ':many' is not a depth"),
        ("rrf(a, b):0", "is 0 passages"),
        ("rerank(hnsw, 'ce", "character 13: a quote is not closed"),
        ("rrf(", r"character 4: the bracket '\(' is not closed"),
        ("h" * 10_000, r"'h+…' has 10,000 characters: use at most 1,000"),
        ("rrf(" * 1_000 + ")" * 1_000, "has 5,000 characters"),
        ("f(" * 100 + "a" + ")" * 100, f"calls are nested more than {MAX_NESTING} levels deep"),
        ("[" * 900, r"'\[' is where a name is expected"),
    ],
)
def test_error_of_an_invalid_expression_names_the_position(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        parse(text)
    assert len(str(error.value)) < 250
    assert "\n" not in str(error.value)


def test_a_depth_below_one_is_refused() -> None:
    word = parse("hnsw:-5")
    assert isinstance(word, Word)
    with pytest.raises(UsageError, match="the depth of 'hnsw' is -5 passages: give at least 1"):
        word.split_depth()


def test_calls_may_be_nested_up_to_the_limit() -> None:
    assert str(parse("f(" * MAX_NESTING + "a" + ")" * MAX_NESTING)).startswith("f(f(")


@given(text=st.text(alphabet="rf()[],=:'\" 1a-\n\x00é\udc80", max_size=MAX_CHARACTERS + 5))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        tree = parse(text)
    except UsageError as error:
        message = str(error)
    else:
        message = ""
        assert parse(str(tree)) == tree
    assert "\n" not in message


def test_index_is_the_short_form_of_retriever() -> None:
    assert choose_expression(None, None) is None
    assert (
        choose_expression("hnsw", None)
        == choose_expression(None, " hnsw ")
        == choose_expression("hnsw", "hnsw ")
        == "hnsw"
    )
    with pytest.raises(UsageError, match=r"index 'hnsw' and the retriever 'rrf\(a, b\)' are both given"):
        choose_expression("hnsw", "rrf(a,b)")
