"""Options for readers, and for the prompt that the reader `concat` builds from passages."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from rag_model.encoders.files import ENDPOINT_PREFIX
from rag_model.errors import UsageError
from rag_model.reading.confidence import Threshold
from rag_model.reading.prompts import Order, PromptSettings, read_prompt
from rag_model.reading.reader import ReaderName

if TYPE_CHECKING:
    from rag_model.reading.settings import ReaderSettings

ReaderOption = Annotated[
    ReaderName | None,
    Parameter(
        help="`marginal` reads each passage separately and weighs answers by p(z|x), as in the RAG paper; `concat` "
        "reads all passages in one prompt; `extractive` takes a span of a passage, with a folder "
        "of a question-answering head or DPR's reader. By default marginal, and concat for a model "
        "behind an endpoint."
    ),
]
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
    """Options of the prompt that holds all passages.

    Attributes:
        order: With --reader concat: order of the passages: `rank` is best first, `document` as in
            their pages, `ends` best at both ends. By default by rank.
        budget: With --reader concat: tokens of all passages, with titles and numbers; by default
            as many as the model reads.
        prompt: With --reader concat: a file with the prompt: an instruction, a line `---`, and a
            message with {context} and {question}.
        cite: With --reader concat: ask for citations: the number of a passage, [1].
    """

    order: Order | None = None
    budget: int | None = None
    prompt: Path | None = None
    cite: bool = False

    def list_given(self) -> list[str]:
        """Return the names of the given options."""
        return [f"--{field.name}" for field in fields(PromptOptions) if getattr(self, field.name) not in (None, False)]

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


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class ReadingOptions(PromptOptions):
    """Options of how a model reads passages and when it gives no answer."""

    reader: ReaderOption = None
    max_tokens: MaxTokens = None
    abstain_below: AbstainBelow = None

    def build_reader_settings(self, model: str, beams: int = 1) -> "ReaderSettings":
        """Return the settings of the reader.

        Raises:
            InputError: the prompt file, or the file of the threshold, cannot be read.
            UsageError: the reader takes no prompt with all passages, or a setting is invalid.
        """
        # These imports load torch, before which `serve` sets its environment.
        from rag_model.generate.decoding import DecodingSettings  # noqa: PLC0415
        from rag_model.reading.settings import ReaderSettings  # noqa: PLC0415

        threshold = None if self.abstain_below is None else Threshold.parse(self.abstain_below)
        decoding = DecodingSettings(beams, self.max_tokens)
        return ReaderSettings(self.reader, decoding, self.build_settings([self.reader], model), threshold=threshold)
