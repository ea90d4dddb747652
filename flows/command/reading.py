"""The options that say how passages are read: the reader, and how passages become one prompt."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from rag_model.errors import UsageError
from rag_model.reading.prompts import Concat, Order, read_prompt
from rag_model.reading.reader import ReaderName
from rag_model.reading.writers.writer import ENDPOINT

ReadBy = Annotated[
    ReaderName | None,
    Parameter(
        help="`marginal`: each passage apart, answers weighed by p(z|x), as in the RAG paper; `concat`: all in one "
        "prompt; `extractive`: a span of a passage, by a folder of a question-answering head or DPR's reader. By "
        "default marginal, and concat for a model behind an endpoint."
    ),
]
CONCAT = "--reader concat: "
OrderName = Annotated[
    Order | None,
    Parameter(
        help=f"{CONCAT}best first by `rank`, as they stand in their pages by `document`, or best at both `ends`. By "
        "default by rank."
    ),
]
BudgetTokens = Annotated[
    int | None,
    Parameter(help=f"{CONCAT}tokens of all passages, with titles and numbers; by default as many as the model reads."),
]
PromptFile = Annotated[
    Path | None,
    Parameter(
        name="--prompt",
        help=f"{CONCAT}a file with the prompt: an instruction, a line `---`, and a message with {{context}} and "
        "{question}.",
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
Cite = Annotated[bool, Parameter(negative="", help=f"{CONCAT}ask for citations: the number of a passage, [1].")]


def concat_of(
    readers: Sequence[ReaderName | None],
    model: str,
    order: Order | None,
    budget: int | None,
    prompt: Path | None,
    cite: bool,
) -> Concat:
    """Return how passages become one prompt.

    Raises:
        InputError: the prompt file cannot be read.
        UsageError: no reader reads one prompt, or a setting cannot be used.
    """
    given = {"--order": order, "--budget": budget, "--prompt": prompt, "--cite": cite or None}
    named = [name for name, value in given.items() if value is not None]
    if named and "concat" not in readers and not model.startswith(ENDPOINT):
        raise UsageError(f"{named[0]} says how passages become one prompt: give --reader concat too")
    settings: dict[str, Any] = {"order": order or "rank", "budget": budget, "cite": cite}
    return Concat(**settings) if prompt is None else Concat(**read_prompt(prompt, **settings))
