"""Options for readers, and for the prompt that the reader `concat` builds from passages."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from rag_model.encoders.files import ENDPOINT_PREFIX
from rag_model.errors import UsageError
from rag_model.reading.confidence import Threshold
from rag_model.reading.reader import Order, ReaderName

if TYPE_CHECKING:
    from rag_model.reading.routing import Route
    from rag_model.reading.settings import PromptSettings, ReaderSettings

_LOG = logging.getLogger(__name__)

ReaderOption = Annotated[
    ReaderName | None,
    Parameter(
        help="`marginal` reads each passage separately and weighs answers by p(z|x), as in the RAG paper; `concat` "
        "reads all passages in one prompt; `extractive` takes a span of a passage and needs a "
        "folder of a question-answering model or of DPR's reader; `auto` answers from the "
        "model's weights or from "
        "passages, as --route decides, and reads passages like `marginal` if the model is a RAG model, otherwise like "
        "`concat`. By default marginal, and concat for a model behind an endpoint."
    ),
]
MaxTokens = Annotated[
    int | None,
    Parameter(
        help="Maximum tokens of an answer, including reasoning. The default is 50; behind an endpoint it is 4,096, or "
        "a quarter of BOOKWHEEL_LLM_CONTEXT if that is less."
    ),
]
RouteSource = Annotated[
    str | None,
    Parameter(
        help="With --reader auto: the file of `evaluate --choose-route`, or evaluation:ID of that evaluation in the "
        "store. By default, the answer with the higher mean log-likelihood per token is given."
    ),
]
AbstainBelow = Annotated[
    str | None,
    Parameter(
        allow_leading_hyphen=True,
        help="Give no answer if its score is below this threshold: a number, log p(y|x) in nats, "
        "or the file of `evaluate --abstain`.",
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Options of a prompt that contains all passages of a question.

    Attributes:
        order: With --reader concat: order of the passages: `rank` is best first, `document` as in
            their pages, `ends` best at both ends. By default by rank.
        budget: With --reader concat: maximum tokens of all passages with their titles and numbers;
            by default as many as the model can read.
        prompt: With --reader concat: a file with the prompt: an instruction, a line `---`, and a
            message with {context} and {question}.
        cite: With --reader concat: ask for citations: the number of a passage, [1].
    """

    order: Order | None = None
    budget: int | None = None
    prompt: Path | None = None
    cite: bool = False

    def list_given_options(self) -> list[str]:
        """Return the names of the given options."""
        return [f"--{field.name}" for field in fields(PromptOptions) if getattr(self, field.name) not in (None, False)]

    def build_settings(self, readers: Sequence[ReaderName | None], model: str) -> "PromptSettings":
        """Return the settings of the prompt.

        Raises:
            InputError: the prompt file cannot be read.
            UsageError: prompt options are given but no reader puts all passages into one prompt, or
                a setting is invalid.
        """
        # This import loads torch, which reads the environment that `serve` sets first.
        from rag_model.reading.settings import PromptSettings, read_prompt  # noqa: PLC0415

        given_options = self.list_given_options()
        if given_options and not {"concat", "auto"} & {*readers} and not model.startswith(ENDPOINT_PREFIX):
            raise UsageError(
                f"{given_options[0]} only applies to a reader with one prompt for "
                f"all passages: give --reader concat too"
            )
        prompt_fields: dict[str, Any] = {"order": self.order or "rank", "budget": self.budget, "cite": self.cite}
        return PromptSettings(**prompt_fields if self.prompt is None else read_prompt(self.prompt, **prompt_fields))


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class ReadingOptions(PromptOptions):
    """Options for how a model reads passages, and when it withholds an answer."""

    reader: ReaderOption = None
    max_tokens: MaxTokens = None
    abstain_below: AbstainBelow = None
    route: RouteSource = None

    def build_reader_settings(self, model: str, store: str | None, beams: int = 1) -> "ReaderSettings":
        """Return the settings of the reader; `--route` may name an evaluation in `store`.

        Raises:
            InputError: the prompt file, or the file of the threshold or route, cannot be read.
            StoreError: the store has no evaluation that --route names.
            UsageError: prompt options are given but the reader does not put all passages into one
                prompt, or a setting is invalid.
        """
        # These imports load torch too.
        from rag_model.generate.decoding import DecodingSettings  # noqa: PLC0415
        from rag_model.reading.settings import ReaderSettings  # noqa: PLC0415

        threshold = None if self.abstain_below is None else Threshold.parse(self.abstain_below)
        decoding_settings = DecodingSettings(beams, self.max_tokens)
        prompt_settings = self.build_settings([self.reader], model)
        answer_route = load_route(self.route, [self.reader], store)
        return ReaderSettings(self.reader, decoding_settings, prompt_settings, threshold=threshold, route=answer_route)


def load_route(
    source: str | None, readers: Sequence[ReaderName | None], store: str | None, *, is_chosen_later: bool = False
) -> "Route | None":
    """Load the route from the file or evaluation that `--route` names; without it, return None.

    If a reader is `auto` and no route is given, log a warning that the default route is used,
    unless `is_chosen_later`, which says that the following evaluation chooses a route.

    Raises:
        InputError: the file or the evaluation has no route.
        StoreError: the store has no such evaluation.
        UsageError: no reader is `auto`, or there is no store.
    """
    from rag_model.reading.routing import CHOOSE_ROUTE, EVALUATION_PREFIX, Route  # noqa: PLC0415 - torch

    if source is None:
        if "auto" in readers and not is_chosen_later:
            _LOG.warning(
                "no route is given, so the likelier of the answers from the weights and from passages is chosen; %s",
                CHOOSE_ROUTE,
            )
        return None
    if "auto" not in readers:
        raise UsageError(f"--route {source} is a route of the reader auto: give --reader auto too")
    if not source.startswith(EVALUATION_PREFIX):
        return Route.read(Path(source))
    if store is None:
        raise UsageError(f"--route {source} names an evaluation in a store: give --store too")
    from flows.evaluation_records import OUTCOME  # noqa: PLC0415
    from rag_model.store.store import Store  # noqa: PLC0415
    from rag_model.untrusted_text import parse_json  # noqa: PLC0415

    opened_store = Store.open(store)
    evaluation_id = opened_store.evaluations.resolve_trusted(source.removeprefix(EVALUATION_PREFIX))
    outcome_blob = opened_store.evaluations.get(evaluation_id).content.files.get(OUTCOME)
    outcome = {} if outcome_blob is None else parse_json(opened_store.blobs.read(outcome_blob), finite=False)
    return Route.from_json(outcome["routing"]["route"] if outcome.get("routing") else None, source)
