"""The settings of a prompt, and its template."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, Literal, get_args

from rag_model.errors import InputError, UsageError

Order = Literal["rank", "document", "ends"]

INSTRUCTION = "Answer the question in a few words, from the numbered passages."
TEMPLATE = "{context}\n\nQuestion: {question}\nAnswer:"
CLOSED_BOOK_TEMPLATE = "Question: {question}\nAnswer:"
_CLOSED_INSTRUCTION = "Answer the question in a few words."
_CITE_INSTRUCTION = "After each statement write the number of the passage that says it, in brackets, such as [1]."
_DATED_CONTEXT = "dated_context"
_SEPARATOR = "---"  # line of a prompt file between instruction and template


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """The settings of a prompt with all passages."""

    instruction: str = INSTRUCTION  # the system message; may be empty
    # The user message, with {question} and {context}. {dated_context} instead of {context} adds the
    # day
    # of the revision to the titles. Literal braces are doubled.
    template: str = TEMPLATE
    # `rank`: best first; `document`: as in the pages; `ends`: the best at both ends (1, 3, 5, 4,
    # 2).
    order: Order = "rank"
    # Tokens of the passages with titles and numbers; None: the capacity of the model.
    budget: int | None = None
    cite: bool = False  # ask for a citation after each statement

    def __post_init__(self) -> None:
        """Check the template, the order and the budget.

        Raises:
            UsageError: a placeholder of the template is missing or unknown, or the order or the
                budget is invalid.
        """
        check_template(self.template, _DATED_CONTEXT if self.is_dated else "context", "question")
        if self.order not in get_args(Order):
            raise UsageError(
                f"the order {self.order!r} of passages is unknown: use one of {', '.join(get_args(Order))}"
            )
        if self.budget is not None and self.budget < 1:
            raise UsageError(f"the budget is {self.budget} tokens: give at least 1")

    @property
    def is_dated(self) -> bool:
        """Whether titles have the day of their revision."""
        with suppress(ValueError):  # an invalid template, which `check_template` reports
            return any(name == _DATED_CONTEXT for _, name, _, _ in Formatter().parse(self.template))
        return False

    def system(self, *, closed: bool) -> str:
        """Return the system message of a prompt with passages or, if `closed`, without passages."""
        if closed:
            return _CLOSED_INSTRUCTION if self.instruction else ""
        return f"{self.instruction} {_CITE_INSTRUCTION}".strip() if self.cite else self.instruction

    def user(self, context: str, question: str) -> str:
        """Return the user message; with an empty context it is the question alone."""
        values = {"context": context, _DATED_CONTEXT: context, "question": question}
        return fill_template(self.template if context else CLOSED_BOOK_TEMPLATE, **values)


def read_prompt(path: Path, **settings: Any) -> dict[str, Any]:
    """Return fields of `PromptSettings`, with the instruction and the template from a file.

    The file has the instruction, a line `---`, and the user message. Without such a line, the whole
    file is the user message and there is no instruction. A byte order mark and blanks at the ends
    of lines are removed.

    Raises:
        InputError: the file is missing or not UTF-8.
    """
    try:
        lines = [line.rstrip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the prompt file {path} cannot be read ({error}): give a UTF-8 text file") from error
    separator = lines.index(_SEPARATOR) if _SEPARATOR in lines else -1
    instruction, user_message = (
        "\n".join(section).strip() for section in (lines[: max(separator, 0)], lines[separator + 1 :])
    )
    return {**settings, "instruction": instruction, "template": user_message}


def check_template(template: str, *placeholders: str) -> None:
    """Check that a template has exactly the given placeholders.

    Raises:
        UsageError: a placeholder is missing or unknown, or a brace is not closed.
    """
    expected = " and ".join(f"{{{placeholder}}}" for placeholder in placeholders)
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise UsageError(f"the prompt template is invalid ({error}): write a literal brace twice") from error
    fields = [(name, spec, conversion) for _, name, spec, conversion in parts if name is not None]
    for name, spec, conversion in fields:
        if name not in placeholders or spec or conversion:
            field_text = "{" + name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "") + "}"
            raise UsageError(
                f"the prompt template has the placeholder {field_text}: use only {expected}, "
                "and write a literal brace twice"
            )
    absent = [placeholder for placeholder in placeholders if placeholder not in {name for name, _, _ in fields}]
    if absent:
        raise UsageError(f"the prompt template has no {{{absent[0]}}}: it needs {expected}")


def fill_template(template: str, **values: str) -> str:
    """Return a template with its placeholders replaced; braces in the values are literal."""
    parts = Formatter().parse(template)
    return "".join(literal + (values[name] if name is not None else "") for literal, name, _, _ in parts)
