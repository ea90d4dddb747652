"""The settings of readers, and the settings and the template of a prompt with all passages."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any, Literal, get_args

from rag_model.encoders.files import ENDPOINT_PREFIX
from rag_model.errors import InputError, UsageError
from rag_model.generate.decoding import DecodingSettings
from rag_model.generate.rag_folder import is_rag_folder
from rag_model.reading.confidence import Signal, Threshold
from rag_model.reading.reader import ReaderName
from rag_model.reading.routing import Route

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
    # day of the revision to the titles. Literal braces are doubled.
    template: str = TEMPLATE
    # `rank`: best first; `document`: as in the pages; `ends`: the best at both ends (1 3 5 4 2).
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


@dataclass(frozen=True, slots=True)
class ReaderSettings:
    """Settings of a reader; the defaults are those of the RAG paper for open-domain questions."""

    reader: ReaderName | None = None  # None: `concat` for an endpoint, else `marginal`
    decoding: DecodingSettings = field(default_factory=DecodingSettings)
    concat: PromptSettings = field(default_factory=PromptSettings)  # for the reader `concat`
    # Label -> the word of one token that stands for it; empty: the model writes its answers.
    labels: Mapping[str, str] = field(default_factory=dict)
    threshold: Threshold | None = None  # withhold answers below it; None: give every answer
    signal: Signal | None = None  # to measure without a threshold; None: that of the threshold
    route: Route | None = None  # of the reader `auto`; None: the default route

    @property
    def required_signal(self) -> Signal | None:
        """The signal whose score every answer must have; None: no signal is required."""
        return self.signal if self.threshold is None else self.threshold.signal

    def reader_for(self, model: str) -> ReaderName:
        """Return the name of the reader for a model; for `auto`, the one that it reads passages with.

        Raises:
            UsageError: the settings need likelihoods or spans, which a model behind an endpoint
                does not give, labels are given for another reader than `marginal`, or settings of a
                threshold or a prompt do not apply to `auto`.
        """
        behind = model.startswith(ENDPOINT_PREFIX)
        if self.labels and (behind or self.reader not in (None, "marginal")):
            raise UsageError("labels are chosen by their likelihood over all passages: give --reader marginal")
        if behind and self.reader == "extractive":
            raise UsageError(f"{model} generates answers and finds no spans: leave --reader extractive out")
        if behind and self.reader == "marginal":
            raise UsageError(
                f"{model} does not give the likelihood of a text, so its answers cannot be "
                "marginalised: leave --reader marginal out"
            )
        if behind and self.required_signal == "passages":
            raise UsageError(
                f"{model} does not give the likelihood of a text, which a threshold for `passages` "
                "needs: choose one for `retrieval` or `likelihood`"
            )
        if self.reader == "auto":
            return self._select_passage_reader(model)
        return self.reader or ("concat" if behind else "marginal")

    def _select_passage_reader(self, model: str) -> ReaderName:
        """Return the reader of passages behind `auto`: `marginal` for a RAG model, else `concat`."""
        if self.required_signal in ("retrieval", "passages"):
            raise UsageError(
                f"a threshold for `{self.required_signal}` needs passages, and an answer from the weights has "
                "none: choose a threshold for `likelihood`, or leave --reader auto out"
            )
        folder = Path(model)
        if model.startswith(ENDPOINT_PREFIX) or (folder.is_dir() and not is_rag_folder(folder)):
            return "concat"
        if self.concat != PromptSettings():
            raise UsageError(
                f"model {model} reads each passage separately, without a prompt of all passages: leave --order, "
                "--budget, --prompt and --cite out, or give --reader concat"
            )
        return "marginal"
