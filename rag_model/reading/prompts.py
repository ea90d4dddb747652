"""How passages become one prompt: the settings, and the template that is filled in."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, Literal, get_args

from rag_model.errors import InputError, UsageError

Order = Literal["rank", "document", "ends"]

INSTRUCTION = "Answer the question in a few words, from the numbered passages."
TEMPLATE = "{context}\n\nQuestion: {question}\nAnswer:"
CLOSED = "Question: {question}\nAnswer:"
_CLOSED_INSTRUCTION = "Answer the question in a few words."
_CITE = "After each statement write the number of the passage that says it, in brackets, such as [1]."
_DATED = "dated_context"
_BETWEEN = "---"  # the line of a prompt file between the instruction and the template


@dataclass(frozen=True, slots=True)
class Concat:
    """How passages become one prompt."""

    instruction: str = INSTRUCTION  # the system message; may be empty
    # The user's message, with {question} and {context}, or in place of that {dated_context}, whose titles have the day
    # of their revision; literal braces are doubled.
    template: str = TEMPLATE
    order: Order = "rank"  # best first; `document`: as in their pages; `ends`: best at both ends (1, 3, 5, 4, 2)
    budget: int | None = None  # tokens of the passages with titles and numbers; None: as many as the model reads
    cite: bool = False  # ask for the number of the passage after each statement

    def __post_init__(self) -> None:
        """Refuse what cannot be filled in.

        Raises:
            UsageError: a place of the template is missing or unknown, or the order or the budget is none.
        """
        check_template(self.template, _DATED if self.dated else "context", "question")
        if self.order not in get_args(Order):
            raise UsageError(
                f"the order {self.order!r} of passages is unknown: use one of {', '.join(get_args(Order))}"
            )
        if self.budget is not None and self.budget < 1:
            raise UsageError(f"the budget is {self.budget} tokens: give at least 1")

    @property
    def dated(self) -> bool:
        """Whether the passages are shown with the days of their revisions."""
        with suppress(ValueError):  # it is no template, which `check_template` says
            return any(name == _DATED for _, name, _, _ in Formatter().parse(self.template))
        return False

    def system(self, *, closed: bool) -> str:
        """Return the system message of a prompt with passages, or without any (`closed`)."""
        if closed:
            return _CLOSED_INSTRUCTION if self.instruction else ""
        return f"{self.instruction} {_CITE}".strip() if self.cite else self.instruction

    def user(self, context: str, question: str) -> str:
        """Return the user's message; without passages it asks the question alone."""
        values = {"context": context, _DATED: context, "question": question}
        return filled(self.template if context else CLOSED, **values)


def read_prompt(path: Path, **settings: Any) -> dict[str, Any]:
    """Return `settings` of a `Concat` with the template in a file: instruction, a line `---`, the user's message.

    Without such a line, the whole file is the user's message, and there is no instruction. A byte order mark and blanks
    at the ends of lines are left out.

    Raises:
        InputError: there is no such file, or it is not UTF-8.
    """
    try:
        lines = [line.rstrip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as broken:
        raise InputError(f"the prompt file {path} cannot be read ({broken}): give a UTF-8 text file") from broken
    cut = lines.index(_BETWEEN) if _BETWEEN in lines else -1
    above, below = ("\n".join(some).strip() for some in (lines[: max(cut, 0)], lines[cut + 1 :]))
    return {**settings, "instruction": above, "template": below}


def check_template(template: str, *places: str) -> None:
    """Refuse a template that lacks one of `places`, or has another.

    Raises:
        UsageError: it does, or a brace is not closed; the sentence says which.
    """
    known = " and ".join(f"{{{place}}}" for place in places)
    try:
        parts = list(Formatter().parse(template))
    except ValueError as broken:
        raise UsageError(f"the prompt template is invalid ({broken}): write a literal brace twice") from broken
    found = [(name, spec, conversion) for _, name, spec, conversion in parts if name is not None]
    for name, spec, conversion in found:
        if name not in places or spec or conversion:
            shown = "{" + name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "") + "}"
            raise UsageError(
                f"the prompt template has the place {shown}: it may have {known} alone; write a literal brace twice"
            )
    if missing := [place for place in places if place not in {name for name, _, _ in found}]:
        raise UsageError(f"the prompt template has no {{{missing[0]}}}: it needs {known}")


def filled(template: str, **values: str) -> str:
    """Return a template with its places filled in; braces in the values mean nothing."""
    parts = Formatter().parse(template)
    return "".join(literal + (values[name] if name is not None else "") for literal, name, _, _ in parts)
