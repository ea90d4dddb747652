"""How a question and a passage become a generator's input, and which tokens are cut if there are too many.

Both forms write one text and record the span of each part. If it is too long for the model, the passage is cut
at its end first, then its title, then the question; separators and instructions stay. So a long passage never displaces
the question, as it would if the whole text were cut at its end.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from string import Formatter
from typing import Any, Protocol

import torch
from torch import Tensor

from rag_model.corpus.records import Passage
from rag_model.errors import InputError, UsageError
from rag_model.generate.spelling import Span, Spelled, spelled

_CUT_ORDER = ("text", "title", "question")
PROMPT = (
    "Answer the question in a few words, from the passage.\n\n"
    "Title: {title}\nPassage: {text}\n\nQuestion: {question}\nAnswer:"
)


@dataclass(frozen=True, slots=True)
class Written:
    """A context as one text, and the parts of it that may be cut, in the order of cutting."""

    text: str
    cuts: tuple[Span, ...]


class Form(Protocol):
    """How a context is written."""

    @property
    def max_length(self) -> int:
        """Return the maximum tokens of a context, special tokens included."""
        ...

    @property
    def max_answer(self) -> int:
        """Return the maximum tokens of an answer, the end token included."""
        ...

    def write(self, question: str, passage: Passage) -> Written:
        """Write a question with a passage."""
        ...


@dataclass(frozen=True, slots=True)
class PaperForm:
    """`title / passage // question`: the input format of the generators of Lewis et al. 2020.

    Defaults are those of transformers' `RagConfig`; like it, this form removes quotes around titles and replaces two
    spaces by one.
    """

    prefix: str = ""  # inserted unchanged before the title: a task name for T5, `answer: `
    title_sep: str = " / "
    doc_sep: str = " // "
    max_length: int = 300  # tokens of a context, special ones included
    max_answer: int = 128  # tokens of an answer, its end included; what is longer is cut

    def __post_init__(self) -> None:
        _check(self)

    def write(self, question: str, passage: Passage) -> Written:
        """Write the passage, then the question."""
        title = passage.title.removeprefix('"').removesuffix('"')
        parts = [("", self.prefix), ("title", title), ("", self.title_sep), ("text", passage.text)]
        return _squeezed(_joined([*parts, ("", self.doc_sep), ("question", question)]))


@dataclass(frozen=True, slots=True)
class PromptForm:
    """An instruction with places for a passage and a question, for decoder-only models.

    `before` and `after` surround it: the text of a tokenizer's chat template before and after the user's message.
    """

    template: str = PROMPT  # with {title}, {text} and {question}; literal braces are doubled
    before: str = ""
    after: str = ""
    answer_prefix: str = " "  # inserted unchanged before an answer; empty for chat templates
    special: bool = True  # the tokenizer adds special tokens; a chat template already contains them
    max_length: int = 512  # tokens of a context, special ones included
    max_answer: int = 128  # tokens of an answer, its end included; what is longer is cut

    def __post_init__(self) -> None:
        _check(self)
        try:
            places = [field for _, field, _, _ in Formatter().parse(self.template) if field is not None]
        except ValueError as broken:
            raise UsageError(
                f"prompt template {self.template!r} is invalid ({broken}): write a literal brace twice"
            ) from broken
        if "question" not in places or set(places) - set(_CUT_ORDER):
            raise UsageError(
                f"prompt template {self.template!r} needs {{question}}, and may use only {{title}} and {{text}} too"
            )

    def write(self, question: str, passage: Passage) -> Written:
        """Fill the template in."""
        values = {"question": question, "text": passage.text, "title": passage.title}
        parts = [("", self.before)]
        for literal, field, _, _ in Formatter().parse(self.template):
            parts += [("", literal), *([(field, values[field])] if field else [])]
        return _joined([*parts, ("", self.after)])


def _check(form: "PaperForm | PromptForm") -> None:
    for field in fields(form):
        value = getattr(form, field.name)
        if type(value) is not type(field.default) or (type(value) is int and value < 1):
            raise UsageError(f"{field.name} {value!r} of a form is invalid: give a value like {field.default!r}")


def _joined(parts: Sequence[tuple[str, str]]) -> Written:
    spans: dict[str, list[Span]] = {name: [] for name in _CUT_ORDER}
    length = 0
    for name, text in parts:
        if name:
            spans[name].append((length, length + len(text)))
        length += len(text)
    return Written("".join(text for _, text in parts), tuple(span for name in _CUT_ORDER for span in spans[name]))


def _squeezed(written: Written) -> Written:
    """Replace two spaces by one, as `str.replace` does, and shift the spans."""
    dropped = [found.end() - 1 for found in re.finditer("  ", written.text)]
    cuts = tuple((at - bisect_left(dropped, at), to - bisect_left(dropped, to)) for at, to in written.cuts)
    return Written(written.text.replace("  ", " "), cuts)


def write_all(form: Form, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> tuple[list[Written], int]:
    """Write each question with each of its passages, question by question; return also the passages per question.

    Raises:
        UsageError: the number of passages differs between questions, or some have none.
    """
    counts = {len(beside) for beside in passages}
    if len(questions) != len(passages) or len(counts) != 1 or 0 in counts:
        raise UsageError(
            f"{len(questions)} questions with {sorted(counts)} passages cannot be read together: give equally many, "
            "an empty one where there is no passage"
        )
    pairs = zip(questions, passages, strict=True)
    return [form.write(question, passage) for question, beside in pairs for passage in beside], counts.pop()


def encode(tokenizer: Any, written: Sequence[Written], longest: int, *, special: bool = True) -> list[list[int]]:
    """Return each text's tokens, at most `longest` of them; `tokenizer` is a fast one of transformers.

    What passage, title and question say is text: a special token's name in them, such as `<|im_start|>`, is spelled in
    ordinary tokens.

    Raises:
        UsageError: a text is too long even after passage, title and question are cut.
    """
    rows = spelled(tokenizer, [one.text for one in written], [one.cuts for one in written], special=special)
    return [
        row.ids if len(row.ids) <= longest else [row.ids[i] for i in _kept(row, one.cuts, longest)]
        for row, one in zip(rows, written, strict=True)
    ]


def _kept(encoding: Spelled, cuts: Sequence[Span], longest: int) -> list[int]:
    """Return the tokens that stay: each span loses its last tokens; the tokens of one character go together."""
    kept = list(range(len(encoding.ids)))
    for span in cuts:
        excess = len(kept) - longest
        if excess <= 0:
            break
        inside = list(_inside(encoding, span))
        going = inside[-excess:]
        first = encoding.offsets[going[0]][0] if going and len(going) < len(inside) else -1
        gone = {*going, *(place for place in inside if encoding.offsets[place][0] == first)}
        kept = [place for place in kept if place not in gone]
    if len(kept) > longest:
        raise UsageError(f"max_length {longest} is too small for the form alone: use {len(kept) + 1} or more")
    return kept


def _inside(encoding: Spelled, span: Span) -> Iterator[int]:
    for place, (first, end) in enumerate(encoding.offsets):
        if not encoding.added[place] and span[0] <= max(first, end - 1) < span[1]:
            yield place


def padded(rows: Sequence[Sequence[int]], pad: int, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Return (n, s) int64 tokens and their (n, s) bool mask; shorter rows are padded at the end or start."""
    lengths = torch.tensor([len(row) for row in rows])
    longest = max(len(row) for row in rows)
    fill = [[pad] * (longest - len(row)) for row in rows]
    tokens = torch.tensor(
        [[*(rest if left else ()), *row, *(() if left else rest)] for row, rest in zip(rows, fill, strict=True)]
    )
    places = torch.arange(longest)
    mask = places >= longest - lengths[:, None] if left else places < lengths[:, None]  # (s,) and (n, 1) -> (n, s)
    return tokens.long(), mask


def with_end(tokens: Sequence[int], most: int, end: int) -> list[int]:
    """Return at most `most` tokens of an answer; the last one is `end`."""
    said = list(tokens[:-1] if tokens and tokens[-1] == end else tokens)
    return [*said[: most - 1], end]


def form_to_json(form: Form) -> dict[str, Any]:
    """Return a form as JSON values, for the record beside a saved generator."""
    name = next(name for name, kind in _FORMS.items() if type(form) is kind)
    return {"form": name, **{field.name: getattr(form, field.name) for field in fields(_FORMS[name])}}


def form_of_json(value: Mapping[str, Any]) -> Form:
    """Read back what `form_to_json` wrote.

    Raises:
        InputError: it is not a form, a field is unknown, or a value is invalid.
    """
    given = dict(value)
    kind = _FORMS.get(given.pop("form", ""))
    if kind is None or set(given) - {field.name for field in fields(kind)}:
        raise InputError(f"{value} is not a form of a generator's input: save the generator again")
    try:
        return kind(**given)
    except UsageError as wrong:
        raise InputError(f"{value} is not a form of a generator's input ({wrong}): save the generator again") from wrong


_FORMS: dict[str, type[PaperForm] | type[PromptForm]] = {"paper": PaperForm, "prompt": PromptForm}
