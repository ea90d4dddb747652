"""The forms of a context, and what is cut of one that is too long."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, RagConfig, RagRetriever

from rag_model.corpus.records import Passage
from rag_model.errors import InputError, UsageError
from rag_model.generate.prompts import (
    InstructionTemplate,
    PaperTemplate,
    PromptTemplate,
    pad_rows,
    render_prompts,
    template_from_json,
    template_to_json,
    tokenize_prompts,
    truncate_with_end_token,
)
from tests.fixtures.tiny_generators import save_bart

PROMPT = InstructionTemplate("Q {question} P {title}: {text} A")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(save_bart(tmp_path_factory.mktemp("bart")))


def passage(title: str, text: str) -> Passage:
    return Passage("1", "1", 1, title, "", text, 0, 1, "")


def words(tokenizer: Any, form: PromptTemplate, question: str, title: str, text: str, longest: int) -> str:
    (row,) = tokenize_prompts(tokenizer, [form.render(question, passage(title, text))], longest)
    assert len(row) <= longest
    return str(tokenizer.decode(row))


@given(title=TEXT, text=TEXT, question=TEXT, prefix=st.sampled_from(["", "answer:  "]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_the_paper_s_form_is_transformers_own(title: str, text: str, question: str, prefix: str) -> None:
    """`RagRetriever.postprocess_docs`, asked for the strings that it tokenises."""
    seen: list[str] = []

    class Listening:
        config = RagConfig.from_dict({"question_encoder": {"model_type": "dpr"}, "generator": {"model_type": "bart"}})

        def generator_tokenizer(self, strings: list[str], **_: Any) -> dict[str, list[int]]:
            seen.extend(strings)
            return {"input_ids": [], "attention_mask": []}

    docs = [{"title": [title], "text": [text]}]
    RagRetriever.postprocess_docs(Listening(), docs, [question], prefix, 1)  # type: ignore[arg-type]
    assert [PaperTemplate(prefix).render(question, passage(title, text)).text] == seen


def test_what_fits_is_left_as_it_is(tokenizer: Any) -> None:
    whole = words(tokenizer, PaperTemplate(), "who?", "Ti", "some text", 300)
    assert whole == "<s>Ti / some text // who?</s>"


@pytest.mark.parametrize(
    ("longest", "left"),
    [
        (34, "<s>title / abcdefghij // 0123456789</s>"),
        (33, "<s>title / abcdefghi // 0123456789</s>"),
        (25, "<s>title / a // 0123456789</s>"),
        (24, "<s>title /  // 0123456789</s>"),
        (23, "<s>titl /  // 0123456789</s>"),
        (19, "<s> /  // 0123456789</s>"),
        (18, "<s> /  // 012345678</s>"),
        (9, "<s> /  // </s>"),
    ],
)
def test_the_passage_is_cut_first_then_the_title_then_the_question(tokenizer: Any, longest: int, left: str) -> None:
    assert words(tokenizer, PaperTemplate(), "0123456789", "title", "abcdefghij", longest) == left


def test_places_are_counted_after_two_blanks_are_made_one(tokenizer: Any) -> None:
    form = PaperTemplate("a  b  c  ", title_sep="/")
    whole = words(tokenizer, form, "01  23", "", "xyz  vw", 300)
    assert whole == "<s>a b c /xyz vw // 01 23</s>"
    assert words(tokenizer, form, "01  23", "", "xyz  vw", 20) == "<s>a b c /xy // 01 23</s>"
    assert words(tokenizer, form, "01  23", "", "xyz  vw", 15) == "<s>a b c / // 01</s>"


def test_a_prompt_keeps_its_instructions(tokenizer: Any) -> None:
    assert words(tokenizer, PROMPT, "0123", "title", "abcdef", 21) == "<s>Q 0123 P title: a A</s>"
    assert words(tokenizer, PROMPT, "0123", "title", "abcdef", 13) == "<s>Q 01 P :  A</s>"


def test_a_form_that_alone_is_too_long_is_refused(tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="max_length 8 is too small for the template alone: use 10 or more"):
        words(tokenizer, PaperTemplate(), "xyz", "a", "b", 8)


@pytest.mark.parametrize("form", [PaperTemplate(), PROMPT], ids=["paper", "prompt"])
@given(title=TEXT, text=TEXT, question=TEXT, longest=st.integers(12, 60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100)
def test_any_text_is_cut_between_its_characters(
    tokenizer: Any, form: PromptTemplate, title: str, text: str, question: str, longest: int
) -> None:
    """No character is cut in two: what is left of every text reads as its beginning."""
    found = words(tokenizer, form, question, title, text, longest)
    assert "\N{REPLACEMENT CHARACTER}" not in found or "\N{REPLACEMENT CHARACTER}" in title + text + question


def test_all_tokens_of_a_character_go_together(tokenizer: Any) -> None:
    for longest in range(9, 24):
        assert "\N{REPLACEMENT CHARACTER}" not in words(tokenizer, PaperTemplate(), "é", "", "日本語🎉", longest)


def test_rows_are_filled_up_on_either_side() -> None:
    tokens, mask = pad_rows([[1, 2, 3], [4]], 9)
    assert tokens.tolist() == [[1, 2, 3], [4, 9, 9]]
    assert mask.tolist() == [[True] * 3, [True, False, False]]
    tokens, mask = pad_rows([[1, 2, 3], [4]], 9, left=True)
    assert tokens.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert mask.tolist() == [[True] * 3, [False, False, True]]
    assert tokens.dtype == torch.int64


def test_an_answer_ends_however_it_is_cut() -> None:
    assert truncate_with_end_token([5, 6, 7, 2], 9, 2) == [5, 6, 7, 2]
    assert truncate_with_end_token([5, 6, 7], 9, 2) == [5, 6, 7, 2]
    assert truncate_with_end_token([5, 6, 7, 2], 3, 2) == [5, 6, 2]
    assert truncate_with_end_token([], 3, 2) == [2]


@pytest.mark.parametrize("template", ["no place", "{question} {who}", "{question", "{question} {}"])
def test_a_template_says_where_the_question_goes(template: str) -> None:
    with pytest.raises(UsageError, match="prompt template"):
        InstructionTemplate(template)


def test_braces_in_texts_are_texts() -> None:
    assert InstructionTemplate("{{x}} {question}").render("{text}", passage("", "")).text == "{x} {text}"


@pytest.mark.parametrize("form", [PaperTemplate("answer: ", max_length=64), PROMPT])
def test_a_form_is_read_back(form: PromptTemplate) -> None:
    assert template_from_json(template_to_json(form)) == form


@pytest.mark.parametrize(
    "value", [{}, {"form": "poem"}, {"form": "paper", "colour": 1}, {"form": "paper", "max_length": "long"}]
)
def test_what_is_no_form_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="is not a generator's prompt template"):
        template_from_json(value)


@pytest.mark.parametrize("changes", [{"max_length": 0}, {"max_answer": -1}, {"max_length": 2.5}, {"max_answer": None}])
def test_fields_of_a_form_have_types_and_bounds(changes: dict[str, Any]) -> None:
    for form in (PaperTemplate, InstructionTemplate):
        with pytest.raises(UsageError, match="of a prompt template is invalid"):
            form(**changes)


@pytest.mark.parametrize("counts", [[2, 3], [1, 0], [0, 0], [1]])
def test_questions_read_together_have_as_many_passages(counts: list[int]) -> None:
    with pytest.raises(UsageError, match="cannot be read together"):
        render_prompts(PaperTemplate(), ["a", "b"], [[passage("", "")] * count for count in counts])


def test_contexts_are_written_question_by_question() -> None:
    written, k = render_prompts(
        PaperTemplate(), ["a", "b"], [[passage("1", "")] * 2, [passage("2", ""), passage("3", "")]]
    )
    assert k == 2
    assert [one.text for one in written] == ["1 / // a", "1 / // a", "2 / // b", "3 / // b"]
