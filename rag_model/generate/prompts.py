"""Render a question and a passage as a generator's input with a template, tokenize and truncate it.

A template renders a text and records the span of each part that may be truncated. If the text is
too long for the model, the passage is truncated first, then its title, then the question;
separators and instructions are never truncated. Truncating the whole text at its end instead could
remove the question.

Passages and questions are untrusted: the name of a special token in them is tokenized as ordinary
text. Otherwise a passage with `<|im_end|>` would end the user message, and a passage with `</s>`
would end the input.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise
from string import Formatter
from typing import Any, Protocol

import torch
from torch import Tensor

from rag_model.corpus.records import Passage
from rag_model.errors import InputError, UsageError
from rag_model.tokenizer import explain_tokenizer_errors

Span = tuple[int, int]  # character offsets (start, end) in a text
# fields of a template, in the order in which they are truncated
_TRUNCATION_ORDER = ("text", "title", "question")
DEFAULT_INSTRUCTION = (
    "Answer the question in a few words, from the passage.\n\n"
    "Title: {title}\nPassage: {text}\n\nQuestion: {question}\nAnswer:"
)


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """The tokens of a text; the lists have one entry per token."""

    ids: list[int]  # token ids
    offsets: Sequence[Span]  # character span of each token in the text
    added_mask: Sequence[int]  # 1 for a special token that the tokenizer added, else 0


@explain_tokenizer_errors()
def tokenize_untrusted(
    tokenizer: Any, texts: Sequence[str], untrusted_spans: Sequence[Sequence[Span]], *, add_special_tokens: bool
) -> list[TokenizedText]:
    """Tokenize each text; with `add_special_tokens` the tokenizer adds special tokens around it.

    If a span of `untrusted_spans` contains the name of a special token, the text is split after the
    first character of the name, and both sides are tokenized separately. Texts without such names
    are tokenized as a whole.
    """
    # verbose=False suppresses warnings about long texts, which the caller truncates
    encodings = tokenizer(
        list(texts), add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False
    )
    special_names = tuple(
        sorted(
            str(added_token)
            for added_token in tokenizer.added_tokens_decoder.values()
            if added_token.special and len(str(added_token)) > 1
        )
    )
    tokenized_texts: list[TokenizedText] = []
    for text, text_spans, ids, encoding in zip(
        texts, untrusted_spans, encodings["input_ids"], encodings.encodings, strict=True
    ):
        tokenized_text = TokenizedText(ids, encoding.offsets, encoding.special_tokens_mask)
        cuts = sorted(
            {
                offset
                for offset in _iter_cut_offsets(text, special_names)
                if any(span_start < offset <= span_end for span_start, span_end in text_spans)
            }
        )
        tokenized_texts.append(_tokenize_segments(tokenizer, text, cuts, tokenized_text) if cuts else tokenized_text)
    return tokenized_texts


def _iter_cut_offsets(text: str, special_names: tuple[str, ...]) -> Iterator[int]:
    """Yield the offset after the first character of each occurrence of a special token's name.

    A cut there keeps the tokenizer from reading the name as a special token. Occurrences may
    overlap.
    """
    if any(name in text for name in special_names):
        for match in _compile_name_pattern(special_names).finditer(text):
            yield match.start() + 1


@lru_cache(maxsize=16)
def _compile_name_pattern(special_names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(f"(?={'|'.join(map(re.escape, special_names))})")


def _tokenize_segments(tokenizer: Any, text: str, cuts: Sequence[int], tokenized_text: TokenizedText) -> TokenizedText:
    """Tokenize the segments between `cuts`, and add the special tokens of the whole text around
    them.
    """
    prefix, suffix = _split_added_tokens(tokenized_text)
    segment_spans = list(pairwise([0, *cuts, len(text)]))
    encodings = tokenizer([text[start:end] for start, end in segment_spans], add_special_tokens=False, verbose=False)
    ids, offsets = list(prefix), [(0, 0)] * len(prefix)
    for (segment_start, _), encoding in zip(segment_spans, encodings.encodings, strict=True):
        ids += encoding.ids
        offsets += [(segment_start + start, segment_start + end) for start, end in encoding.offsets]
    added_mask = [1] * len(prefix) + [0] * (len(ids) - len(prefix)) + [1] * len(suffix)
    return TokenizedText([*ids, *suffix], [*offsets, *[(0, 0)] * len(suffix)], added_mask)


def _split_added_tokens(tokenized_text: TokenizedText) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer added before and after a text."""
    text_positions = [i for i, added in enumerate(tokenized_text.added_mask) if not added]
    if not text_positions:
        return tokenized_text.ids, []
    return tokenized_text.ids[: text_positions[0]], tokenized_text.ids[text_positions[-1] + 1 :]


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The text of a context, and the spans that may be truncated, in the order of truncation."""

    text: str
    truncatable: tuple[Span, ...]


class PromptTemplate(Protocol):
    """Renders a question and a passage as one text."""

    @property
    def max_length(self) -> int:
        """Maximum tokens of a context, including special tokens."""
        ...

    @property
    def max_answer(self) -> int:
        """Maximum tokens of an answer, including the end token."""
        ...

    def render(self, question: str, passage: Passage) -> RenderedPrompt:
        """Render a question with a passage."""
        ...


@dataclass(frozen=True, slots=True)
class PaperTemplate:
    """`title / passage // question`: the input format of the generators of Lewis et al. 2020.

    The defaults are those of transformers' `RagConfig`. As in transformers, quotes around titles
    are removed, and two spaces are replaced by one.
    """

    prefix: str = ""  # text before the title, such as the task name `answer: ` for T5
    title_sep: str = " / "
    doc_sep: str = " // "
    max_length: int = 300  # maximum tokens of a context, including special tokens
    # Maximum tokens of an answer, including the end token; longer answers are truncated.
    max_answer: int = 128

    def __post_init__(self) -> None:
        _check_template(self)

    def render(self, question: str, passage: Passage) -> RenderedPrompt:
        """Render the passage, then the question."""
        title = passage.title.removeprefix('"').removesuffix('"')
        parts = [("", self.prefix), ("title", title), ("", self.title_sep), ("text", passage.text)]
        return _collapse_double_spaces(_concatenate_parts([*parts, ("", self.doc_sep), ("question", question)]))


@dataclass(frozen=True, slots=True)
class InstructionTemplate:
    """An instruction with fields for passage and question, for decoder-only models.

    `before` and `after` are the text of the tokenizer's chat template around the user message.
    """

    # Text with the fields {title}, {text} and {question}; literal braces are doubled.
    template: str = DEFAULT_INSTRUCTION
    before: str = ""
    after: str = ""
    answer_prefix: str = " "  # text before an answer; empty for chat templates
    # Whether the tokenizer adds special tokens; a chat template already contains them.
    special: bool = True
    max_length: int = 512  # maximum tokens of a context, including special tokens
    # Maximum tokens of an answer, including the end token; longer answers are truncated.
    max_answer: int = 128

    def __post_init__(self) -> None:
        _check_template(self)
        try:
            template_fields = [field for _, field, _, _ in Formatter().parse(self.template) if field is not None]
        except ValueError as error:
            raise UsageError(
                f"prompt template {self.template!r} is invalid ({error}): write a literal brace twice"
            ) from error
        if "question" not in template_fields or set(template_fields) - set(_TRUNCATION_ORDER):
            raise UsageError(
                f"prompt template {self.template!r} must contain {{question}}, and may contain "
                f"{{title}} and {{text}}: correct it"
            )

    def render(self, question: str, passage: Passage) -> RenderedPrompt:
        """Replace the fields of the template by the passage, its title and the question."""
        fields_by_name = {"question": question, "text": passage.text, "title": passage.title}
        parts = [("", self.before)]
        for literal, field, _, _ in Formatter().parse(self.template):
            parts += [("", literal), *([(field, fields_by_name[field])] if field else [])]
        return _concatenate_parts([*parts, ("", self.after)])


def _check_template(template: "PaperTemplate | InstructionTemplate") -> None:
    for field in fields(template):
        setting = getattr(template, field.name)
        if type(setting) is not type(field.default) or (type(setting) is int and setting < 1):
            raise UsageError(
                f"{field.name} {setting!r} of a prompt template is invalid: give a value like {field.default!r}"
            )


def _concatenate_parts(parts: Sequence[tuple[str, str]]) -> RenderedPrompt:
    spans_by_field: dict[str, list[Span]] = {name: [] for name in _TRUNCATION_ORDER}
    offset = 0
    for name, text in parts:
        if name:
            spans_by_field[name].append((offset, offset + len(text)))
        offset += len(text)
    return RenderedPrompt(
        "".join(text for _, text in parts), tuple(span for name in _TRUNCATION_ORDER for span in spans_by_field[name])
    )


def _collapse_double_spaces(prompt: RenderedPrompt) -> RenderedPrompt:
    """Replace each pair of spaces by one space, as `str.replace` does, and shift the spans."""
    removed_offsets = [match.end() - 1 for match in re.finditer("  ", prompt.text)]
    truncatable_spans = tuple(
        (start - bisect_left(removed_offsets, start), end - bisect_left(removed_offsets, end))
        for start, end in prompt.truncatable
    )
    return RenderedPrompt(prompt.text.replace("  ", " "), truncatable_spans)


def render_prompts(
    template: PromptTemplate, questions: Sequence[str], passages: Sequence[Sequence[Passage]]
) -> tuple[list[RenderedPrompt], int]:
    """Render each question with each of its passages; return (prompts, passages per question).

    The prompts of one question are adjacent.

    Raises:
        UsageError: the number of passages differs between questions, or a question has none.
    """
    passage_counts = {len(question_passages) for question_passages in passages}
    if len(questions) != len(passages) or len(passage_counts) != 1 or 0 in passage_counts:
        raise UsageError(
            f"{len(questions)} questions with {sorted(passage_counts)} passages cannot be read "
            "together: give each question the same number of passages, with empty passages if "
            "necessary"
        )
    pairs = zip(questions, passages, strict=True)
    return [
        template.render(question, passage) for question, question_passages in pairs for passage in question_passages
    ], passage_counts.pop()


def tokenize_prompts(
    tokenizer: Any, prompts: Sequence[RenderedPrompt], max_tokens: int, *, add_special_tokens: bool = True
) -> list[list[int]]:
    """Tokenize prompts with a fast tokenizer of transformers, and truncate each to `max_tokens`.

    The name of a special token in a passage, title or question, such as `<|im_start|>`, is
    tokenized as ordinary text.

    Raises:
        UsageError: a prompt exceeds the maximum length even without passage, title and question.
    """
    tokenized_prompts = tokenize_untrusted(
        tokenizer,
        [prompt.text for prompt in prompts],
        [prompt.truncatable for prompt in prompts],
        add_special_tokens=add_special_tokens,
    )
    return [
        tokenized_prompt.ids
        if len(tokenized_prompt.ids) <= max_tokens
        else [tokenized_prompt.ids[i] for i in _select_kept_tokens(tokenized_prompt, prompt.truncatable, max_tokens)]
        for tokenized_prompt, prompt in zip(tokenized_prompts, prompts, strict=True)
    ]


def _select_kept_tokens(encoding: TokenizedText, truncatable: Sequence[Span], max_tokens: int) -> list[int]:
    """Return the positions of the tokens to keep.

    Each span in turn loses tokens from its end; all tokens of a character are removed together.
    """
    positions = list(range(len(encoding.ids)))
    for span in truncatable:
        n_excess_tokens = len(positions) - max_tokens
        if n_excess_tokens <= 0:
            break
        positions_inside = list(_iter_positions_inside(encoding, span))
        tail_positions = positions_inside[-n_excess_tokens:]
        first_offset = (
            encoding.offsets[tail_positions[0]][0]
            if tail_positions and len(tail_positions) < len(positions_inside)
            else -1
        )
        removed_positions = {
            *tail_positions,
            *(position for position in positions_inside if encoding.offsets[position][0] == first_offset),
        }
        positions = [position for position in positions if position not in removed_positions]
    if len(positions) > max_tokens:
        raise UsageError(
            f"max_length {max_tokens} is too small for the template alone: use {len(positions) + 1} or more"
        )
    return positions


def _iter_positions_inside(encoding: TokenizedText, span: Span) -> Iterator[int]:
    for position, (token_start, token_end) in enumerate(encoding.offsets):
        if not encoding.added_mask[position] and span[0] <= max(token_start, token_end - 1) < span[1]:
            yield position


def pad_rows(token_rows: Sequence[Sequence[int]], pad_token: int, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Pad rows on the right or the left; return ((n, s) int64 tokens, (n, s) bool mask)."""
    row_lengths = torch.tensor([len(row) for row in token_rows])
    n_columns = max(len(row) for row in token_rows)
    padding_rows = [[pad_token] * (n_columns - len(row)) for row in token_rows]
    tokens = torch.tensor(
        [
            [*(padding_row if left else ()), *row, *(() if left else padding_row)]
            for row, padding_row in zip(token_rows, padding_rows, strict=True)
        ]
    )
    columns = torch.arange(n_columns)
    # (s,) and (n, 1) -> (n, s)
    mask = columns >= n_columns - row_lengths[:, None] if left else columns < row_lengths[:, None]
    return tokens.long(), mask


def truncate_with_end_token(tokens: Sequence[int], max_tokens: int, end_token: int) -> list[int]:
    """Truncate an answer to `max_tokens` tokens, of which the last is `end_token`."""
    answer_tokens = list(tokens[:-1] if tokens and tokens[-1] == end_token else tokens)
    return [*answer_tokens[: max_tokens - 1], end_token]


def template_to_json(template: PromptTemplate) -> dict[str, Any]:
    """Return a template as JSON values, to save them with a generator."""
    name = next(name for name, kind in _TEMPLATE_CLASSES.items() if type(template) is kind)
    return {"form": name, **{field.name: getattr(template, field.name) for field in fields(_TEMPLATE_CLASSES[name])}}


def template_from_json(value: Mapping[str, Any]) -> PromptTemplate:
    """Parse the result of `template_to_json`.

    Raises:
        InputError: the value is not a template, or a field is unknown or invalid.
    """
    settings = dict(value)
    template_class = _TEMPLATE_CLASSES.get(settings.pop("form", ""))
    if template_class is None or set(settings) - {field.name for field in fields(template_class)}:
        raise InputError(f"{value} is not a generator's prompt template: save the generator again")
    try:
        return template_class(**settings)
    except UsageError as error:
        raise InputError(f"{value} is not a generator's prompt template ({error}): save the generator again") from error


_TEMPLATE_CLASSES: dict[str, type[PaperTemplate] | type[InstructionTemplate]] = {
    "paper": PaperTemplate,
    "prompt": InstructionTemplate,
}
