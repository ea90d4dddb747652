"""Settings of readers, and of prompts that contain all passages of a question."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any, get_args

from rag_model.encoders.files import ENDPOINT_PREFIX
from rag_model.errors import InputError, UsageError
from rag_model.generate.decoding import DecodingSettings
from rag_model.generate.rag_folder import is_rag_folder
from rag_model.reading.confidence import Signal, Threshold
from rag_model.reading.reader import Order, ReaderName
from rag_model.reading.routing import Route

INSTRUCTION = "Answer the question in a few words, from the numbered passages."
TEMPLATE = "{context}\n\nQuestion: {question}\nAnswer:"
CLOSED_BOOK_TEMPLATE = "Question: {question}\nAnswer:"
_CLOSED_BOOK_INSTRUCTION = "Answer the question in a few words."
_CITE_INSTRUCTION = "After each statement write the number of the passage that says it, in brackets, such as [1]."
_DATED_CONTEXT = "dated_context"
_SEPARATOR = "---"  # line between instruction and template in a prompt file


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """Settings of prompts that contain all passages of a question."""

    instruction: str = INSTRUCTION  # system message; may be empty
    # The user message, with {question} and {context}. {dated_context} instead of {context} adds the
    # day of the revision to the titles. Literal braces are doubled.
    template: str = TEMPLATE
    # Order of the passages. `rank`: best first; `document`: grouped by page, in the order of its
    # text; `ends`: the best at both ends (1 3 5 4 2).
    order: Order = "rank"
    # Maximum tokens of the passages with titles and numbers; None: as many as the model can read.
    budget: int | None = None
    cite: bool = False  # whether to ask for a citation after each statement

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
        """Whether the day of a page's revision follows its title."""
        with suppress(ValueError):  # `check_template` reports an invalid template
            return any(name == _DATED_CONTEXT for _, name, _, _ in Formatter().parse(self.template))
        return False

    def build_system_message(self, *, closed_book: bool) -> str:
        """Return the system message of a prompt with or, if `closed_book`, without passages."""
        if closed_book:
            return _CLOSED_BOOK_INSTRUCTION if self.instruction else ""
        return f"{self.instruction} {_CITE_INSTRUCTION}".strip() if self.cite else self.instruction

    def build_user_message(self, context: str, question: str) -> str:
        """Return the user message; with an empty context it contains only the question."""
        template_values = {"context": context, _DATED_CONTEXT: context, "question": question}
        return fill_template(self.template if context else CLOSED_BOOK_TEMPLATE, **template_values)


def read_prompt(path: Path, **settings: Any) -> dict[str, Any]:
    """Return keyword arguments of `PromptSettings`: `settings`, with the instruction and the
    template of a prompt file.

    The file contains the instruction, a line `---`, and the user message. Without such a line, the
    whole file is the user message and there is no instruction. A byte order mark and trailing
    blanks are removed.

    Raises:
        InputError: the file is missing or not UTF-8.
    """
    try:
        lines = [line.rstrip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the prompt file {path} cannot be read ({error}): give a UTF-8 text file") from error
    separator_line = lines.index(_SEPARATOR) if _SEPARATOR in lines else -1
    instruction, user_message = (
        "\n".join(prompt_section).strip()
        for prompt_section in (lines[: max(separator_line, 0)], lines[separator_line + 1 :])
    )
    return {**settings, "instruction": instruction, "template": user_message}


def check_template(template: str, *placeholders: str) -> None:
    """Check that a template has exactly the given placeholders.

    Raises:
        UsageError: a placeholder is missing or unknown, or a brace is not closed.
    """
    expected = " and ".join(f"{{{placeholder}}}" for placeholder in placeholders)
    try:
        template_parts = list(Formatter().parse(template))
    except ValueError as error:
        raise UsageError(f"the prompt template is invalid ({error}): write a literal brace twice") from error
    template_fields = [(name, spec, conversion) for _, name, spec, conversion in template_parts if name is not None]
    for name, spec, conversion in template_fields:
        if name not in placeholders or spec or conversion:
            field_text = "{" + name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "") + "}"
            raise UsageError(
                f"the prompt template has the placeholder {field_text}: use only {expected}, "
                "and write a literal brace twice"
            )
    missing_placeholders = [
        placeholder for placeholder in placeholders if placeholder not in {name for name, _, _ in template_fields}
    ]
    if missing_placeholders:
        raise UsageError(f"the prompt template has no {{{missing_placeholders[0]}}}: it needs {expected}")


def fill_template(template: str, **values: str) -> str:
    """Return a template with its placeholders replaced; braces in the values are literal."""
    template_parts = Formatter().parse(template)
    return "".join(literal + (values[name] if name is not None else "") for literal, name, _, _ in template_parts)


@dataclass(frozen=True, slots=True)
class ReaderSettings:
    """Settings of a reader; the defaults are those of the RAG paper for open-domain questions."""

    # name of the reader; None: `concat` for an endpoint, else `marginal`
    reader: ReaderName | None = None
    decoding: DecodingSettings = field(default_factory=DecodingSettings)
    # settings of the reader `concat`
    concat: PromptSettings = field(default_factory=PromptSettings)
    # For each label, the word that the model generates for it; empty: the model writes its
    # answers freely.
    labels: Mapping[str, str] = field(default_factory=dict)
    # threshold below which answers are withheld; None: return every answer
    threshold: Threshold | None = None
    # signal to measure if there is no threshold; otherwise the threshold's signal is measured
    signal: Signal | None = None
    route: Route | None = None  # route of the reader `auto`; None: the default route

    @property
    def required_signal(self) -> Signal | None:
        """The signal whose score every answer must have; None: no signal is required."""
        return self.signal if self.threshold is None else self.threshold.signal

    def reader_for(self, model: str) -> ReaderName:
        """Return the name of the reader for a model; for `auto`, the name of the reader with which
        it answers from passages.

        Raises:
            UsageError: the settings need likelihoods or spans, which a model behind an endpoint
                does not compute; labels are given for a reader other than `marginal`; or `auto` is
                given a threshold or prompt settings that it cannot use.
        """
        is_endpoint = model.startswith(ENDPOINT_PREFIX)
        if self.labels and (is_endpoint or self.reader not in (None, "marginal")):
            raise UsageError("labels need the likelihood over all passages: give --reader marginal")
        if is_endpoint and self.reader == "extractive":
            raise UsageError(f"{model} generates text, not spans: omit --reader extractive")
        if is_endpoint and self.reader == "marginal":
            raise UsageError(
                f"{model} does not give the likelihood of a text, so its answers cannot be "
                "marginalized: omit --reader marginal"
            )
        if is_endpoint and self.required_signal == "passages":
            raise UsageError(
                f"{model} does not give the likelihood of a text, which a threshold for `passages` "
                "needs: choose one for `retrieval` or `likelihood`"
            )
        if self.reader == "auto":
            return self._select_passage_reader(model)
        return self.reader or ("concat" if is_endpoint else "marginal")

    def _select_passage_reader(self, model: str) -> ReaderName:
        """Return the reader with which `auto` reads passages: `marginal` for a RAG model, else
        `concat`.
        """
        if self.required_signal in ("retrieval", "passages"):
            raise UsageError(
                f"a threshold for `{self.required_signal}` needs passages, and an answer from the "
                "weights has none: choose a threshold for `likelihood`, or omit --reader auto"
            )
        folder = Path(model)
        if model.startswith(ENDPOINT_PREFIX) or (folder.is_dir() and not is_rag_folder(folder)):
            return "concat"
        if self.concat != PromptSettings():
            raise UsageError(
                f"model {model} reads each passage separately, without a prompt of all passages: "
                "omit --order, --budget, --prompt and --cite, or give --reader concat"
            )
        return "marginal"
