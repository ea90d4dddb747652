"""Prompt templates, and how prompts that are too long are truncated."""

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


def render_tokens(tokenizer: Any, template: PromptTemplate, question: str, title: str, text: str, limit: int) -> str:
    (row,) = tokenize_prompts(tokenizer, [template.render(question, passage(title, text))], limit)
    assert len(row) <= limit
    return str(tokenizer.decode(row))


@given(title=TEXT, text=TEXT, question=TEXT, prefix=st.sampled_from(["", "answer:  "]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_paper_template_equals_transformers(title: str, text: str, question: str, prefix: str) -> None:
    """Compare with the strings that `RagRetriever.postprocess_docs` tokenizes."""
    rendered: list[str] = []

    class RecordingRetriever:
        config = RagConfig.from_dict({"question_encoder": {"model_type": "dpr"}, "generator": {"model_type": "bart"}})

        def generator_tokenizer(self, strings: list[str], **_: Any) -> dict[str, list[int]]:
            rendered.extend(strings)
            return {"input_ids": [], "attention_mask": []}

    docs = [{"title": [title], "text": [text]}]
    RagRetriever.postprocess_docs(RecordingRetriever(), docs, [question], prefix, 1)  # type: ignore[arg-type]
    assert [PaperTemplate(prefix).render(question, passage(title, text)).text] == rendered


def test_short_prompt_is_not_truncated(tokenizer: Any) -> None:
    prompt = render_tokens(tokenizer, PaperTemplate(), "who?", "Ti", "some text", 300)
    assert prompt == "<s>Ti / some text // who?</s>"


@pytest.mark.parametrize(
    ("limit", "expected"),
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
def test_passage_is_truncated_first_then_title_then_question(tokenizer: Any, limit: int, expected: str) -> None:
    assert render_tokens(tokenizer, PaperTemplate(), "0123456789", "title", "abcdefghij", limit) == expected


def test_double_spaces_are_merged_before_truncation(tokenizer: Any) -> None:
    template = PaperTemplate("a  b  c  ", title_sep="/")
    prompt = render_tokens(tokenizer, template, "01  23", "", "xyz  vw", 300)
    assert prompt == "<s>a b c /xyz vw // 01 23</s>"
    assert render_tokens(tokenizer, template, "01  23", "", "xyz  vw", 20) == "<s>a b c /xy // 01 23</s>"
    assert render_tokens(tokenizer, template, "01  23", "", "xyz  vw", 15) == "<s>a b c / // 01</s>"


def test_truncated_prompt_keeps_its_instructions(tokenizer: Any) -> None:
    assert render_tokens(tokenizer, PROMPT, "0123", "title", "abcdef", 21) == "<s>Q 0123 P title: a A</s>"
    assert render_tokens(tokenizer, PROMPT, "0123", "title", "abcdef", 13) == "<s>Q 01 P :  A</s>"


def test_template_longer_than_the_limit_is_refused(tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="max_length 8 is too small for the template alone: use 10 or more"):
        render_tokens(tokenizer, PaperTemplate(), "xyz", "a", "b", 8)


@pytest.mark.parametrize("template", [PaperTemplate(), PROMPT], ids=["paper", "prompt"])
@given(title=TEXT, text=TEXT, question=TEXT, limit=st.integers(12, 60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100)
def test_truncation_never_splits_a_character(
    tokenizer: Any, template: PromptTemplate, title: str, text: str, question: str, limit: int
) -> None:
    prompt = render_tokens(tokenizer, template, question, title, text, limit)
    assert "\N{REPLACEMENT CHARACTER}" not in prompt or "\N{REPLACEMENT CHARACTER}" in title + text + question


def test_tokens_of_a_character_are_removed_together(tokenizer: Any) -> None:
    for limit in range(9, 24):
        assert "\N{REPLACEMENT CHARACTER}" not in render_tokens(tokenizer, PaperTemplate(), "é", "", "日本語🎉", limit)


def test_rows_are_padded_on_either_side() -> None:
    tokens, mask = pad_rows([[1, 2, 3], [4]], 9)
    assert tokens.tolist() == [[1, 2, 3], [4, 9, 9]]
    assert mask.tolist() == [[True] * 3, [True, False, False]]
    tokens, mask = pad_rows([[1, 2, 3], [4]], 9, left=True)
    assert tokens.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert mask.tolist() == [[True] * 3, [False, False, True]]
    assert tokens.dtype == torch.int64


def test_truncated_answer_has_an_end_token() -> None:
    assert truncate_with_end_token([5, 6, 7, 2], 9, 2) == [5, 6, 7, 2]
    assert truncate_with_end_token([5, 6, 7], 9, 2) == [5, 6, 7, 2]
    assert truncate_with_end_token([5, 6, 7, 2], 3, 2) == [5, 6, 2]
    assert truncate_with_end_token([], 3, 2) == [2]


@pytest.mark.parametrize("template", ["no field", "{question} {who}", "{question", "{question} {}"])
def test_template_without_a_valid_question_field_is_refused(template: str) -> None:
    with pytest.raises(UsageError, match="prompt template"):
        InstructionTemplate(template)


def test_braces_in_texts_are_kept() -> None:
    assert InstructionTemplate("{{x}} {question}").render("{text}", passage("", "")).text == "{x} {text}"


@pytest.mark.parametrize("template", [PaperTemplate("answer: ", max_length=64), PROMPT])
def test_template_is_restored_from_json(template: PromptTemplate) -> None:
    assert template_from_json(template_to_json(template)) == template


@pytest.mark.parametrize(
    "value", [{}, {"form": "poem"}, {"form": "paper", "colour": 1}, {"form": "paper", "max_length": "long"}]
)
def test_invalid_json_of_a_template_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="is not a generator's prompt template"):
        template_from_json(value)


@pytest.mark.parametrize("changes", [{"max_length": 0}, {"max_answer": -1}, {"max_length": 2.5}, {"max_answer": None}])
def test_invalid_field_of_a_template_is_refused(changes: dict[str, Any]) -> None:
    for template in (PaperTemplate, InstructionTemplate):
        with pytest.raises(UsageError, match="of a prompt template is invalid"):
            template(**changes)


@pytest.mark.parametrize("counts", [[2, 3], [1, 0], [0, 0], [1]])
def test_questions_of_a_batch_must_have_equal_passage_counts(counts: list[int]) -> None:
    with pytest.raises(UsageError, match="cannot be read together"):
        render_prompts(PaperTemplate(), ["a", "b"], [[passage("", "")] * count for count in counts])


def test_prompts_are_ordered_by_question() -> None:
    passages = [[passage("1", "")] * 2, [passage("2", ""), passage("3", "")]]
    prompts, k = render_prompts(PaperTemplate(), ["a", "b"], passages)
    assert k == 2
    assert [prompt.text for prompt in prompts] == ["1 / // a", "1 / // a", "2 / // b", "3 / // b"]
