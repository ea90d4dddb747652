"""Options for readers, and for the prompt that the reader `concat` builds from passages."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from rag_model.encoders.files import ENDPOINT_PREFIX
from rag_model.errors import UsageError
from rag_model.reading.prompts import Order, PromptSettings, read_prompt
from rag_model.reading.reader import ReaderName

ReaderOption = Annotated[
    ReaderName | None,
    Parameter(
        help="`marginal` reads each passage separately and weighs answers by p(z|x), as in the RAG paper; `concat` "
        "reads all passages in one prompt; `extractive` takes a span of a passage, with a folder "
        "of a question-answering head or DPR's reader. By default marginal, and concat for a model "
        "behind an endpoint."
    ),
]
_CONCAT_HELP = "--reader concat: "
MaxTokens = Annotated[
    int | None,
    Parameter(
        help="Maximum tokens of an answer, including reasoning. The default is 50; behind an endpoint it is 4,096, or "
        "a quarter of BOOKWHEEL_LLM_CONTEXT if that is less."
    ),
]
AbstainBelow = Annotated[
    str | None,
    Parameter(
        allow_leading_hyphen=True,
        help="Give no answer where its score is below this: a number, of log p(y|x) in nats, or the file of `evaluate "
        "--abstain`.",
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Options of the prompt that holds all passages."""

    order: Annotated[
        Order | None,
        Parameter(
            help=f"{_CONCAT_HELP}order of the passages: `rank` is best first, `document` as in their pages, `ends` "
            "best at both ends. By default by rank."
        ),
    ] = None
    budget: Annotated[
        int | None,
        Parameter(
            help=f"{_CONCAT_HELP}tokens of all passages, with titles and numbers; by default as many as the model "
            "reads."
        ),
    ] = None
    prompt: Annotated[
        Path | None,
        Parameter(
            help=f"{_CONCAT_HELP}a file with the prompt: an instruction, a line `---`, and a message with {{context}} "
            "and {question}."
        ),
    ] = None
    cite: Annotated[bool, Parameter(help=f"{_CONCAT_HELP}ask for citations: the number of a passage, [1].")] = False

    def list_given(self) -> list[str]:
        """Return the names of the given options."""
        return [f"--{name}" for name, value in asdict(self).items() if value not in (None, False)]

    def build_settings(self, readers: Sequence[ReaderName | None], model: str) -> PromptSettings:
        """Return the settings of the prompt.

        Raises:
            InputError: the prompt file cannot be read.
            UsageError: no reader takes a prompt with all passages, or a setting is invalid.
        """
        given_options = self.list_given()
        if given_options and "concat" not in readers and not model.startswith(ENDPOINT_PREFIX):
            raise UsageError(f"{given_options[0]} says how passages become one prompt: give --reader concat too")
        settings: dict[str, Any] = {"order": self.order or "rank", "budget": self.budget, "cite": self.cite}
        return PromptSettings(**settings if self.prompt is None else read_prompt(self.prompt, **settings))
