"""The record of an answer: its text, its passages, and its cost in tokens and seconds."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rag_model.corpus.records import Passage
from rag_model.reading.citations import Statement, remove_citations, split_statements
from rag_model.retrieve.hits import Hit

CLOSED_BOOK = Hit(1, 0.0, -1, Passage("", "", 0, "", "", "", 0, 0, Passage.hash_of("", "")), "", "", inner_product=0.0)
"""The empty passage; an answer read from it comes from the weights of the model."""


@dataclass(frozen=True, slots=True)
class SupportingPassage:
    """One passage and its share of an answer, which is known if passages are marginalised."""

    hit: Hit
    weight: float | None = None  # p(z|x)
    posterior: float | None = None  # p(z|x,y); for RAG-Token the mean over the tokens


@dataclass(frozen=True, slots=True)
class TokenSupport:
    """One token of a RAG-Token answer, and the share of each passage."""

    # The texts of all tokens form the answer. The text is empty for special tokens, and for all but
    # the
    # last of several tokens that encode one character.
    text: str
    posterior: tuple[float, ...]  # p(z_i|x,y) of each passage, in the order of the support


@dataclass(frozen=True, slots=True)
class ContextEntry:
    """One numbered entry of a context, cited as [number]: a passage, or several joined passages."""

    number: int  # from 1, in the order of the prompt
    title: str
    section: str  # of its first passage; empty: none
    url: str  # of the article's revision; empty: the source has none
    revision: int  # of the article; 0: the source has no revisions
    # Positions of its hits in `Answer.support`, ascending; hits with equal texts share an entry.
    places: tuple[int, ...]
    text: str  # as in the prompt
    cut: bool = False  # the end did not fit into the budget, and the text ends with an ellipsis
    revised: str | None = None  # time of the revision, ISO 8601 in UTC; None: unknown


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """The tokens of an answer and their cost."""

    # By the model's own tokenizer; the sum over all contexts if passages are marginalised.
    prompt_tokens: int
    new_tokens: int  # of the answer
    cost: float | None = None  # in the currency of the given prices; None: no prices are known
    estimated: bool = False  # the endpoint reported no tokens, so that they were counted here


@dataclass(frozen=True, slots=True)
class AnswerProblem:
    """The reason why a model gave no answer, or a doubtful one."""

    # `reasoning`: the model reasoned and did not answer; `refused`: by the model; `filtered`: by
    # the endpoint; `tool_call`: instead of an answer; `empty`; `prompt_truncated`: by the endpoint.
    kind: str
    message: str  # one sentence, without a full stop


@dataclass(frozen=True, slots=True)
class Confidence:
    """The confidence of an answer by one signal (`confidence`)."""

    signal: str
    score: float  # larger is more confident
    least: float  # the answer is withheld if the score is below this threshold


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question, with its passages."""

    question: str
    text: str  # may be empty
    # Log p(y|x), nats, with the end token; fast decoding gives a lower bound.
    log_likelihood: float | None
    support: tuple[SupportingPassage, ...]  # in the order of the passages
    tokens: tuple[TokenSupport, ...] = ()  # RAG-Token only
    ended: bool = True  # False: cut at the maximum number of tokens
    usage: TokenUsage | None = None  # None: not counted
    context: tuple[ContextEntry, ...] = ()  # of the prompt; hits without an entry did not fit
    # Log p(text|question), nats, with the end token; None: not computed.
    closed_book: float | None = None
    confidence: Confidence | None = None  # None: no threshold
    abstained: bool = False  # the score is below the threshold: the text is empty
    problem: AnswerProblem | None = None  # the reason why the text is empty or doubtful
    # By stage; shares of the batch.
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def statements(self) -> tuple[Statement, ...]:
        """The sentences of the text, each with the numbers of the context entries that it cites."""
        return split_statements(self.text, len(self.context))

    @property
    def citations(self) -> tuple[ContextEntry, ...]:
        """The cited entries of the context, in the order of their first citation."""
        numbers = dict.fromkeys(number for statement in self.statements for number in statement.cited)
        return tuple(self.context[number - 1] for number in numbers)

    @property
    def plain(self) -> str:
        """The text without its citations."""
        return remove_citations(self.text, len(self.context))


def answer_json(answer: Answer) -> dict[str, Any]:
    """Return an answer in the JSON format of the command line, with its passages."""
    passages = [
        {**support.hit.to_json(), "weight": support.weight, "posterior": support.posterior}
        for support in answer.support
    ]
    likelihood = answer.log_likelihood
    is_finite = likelihood is not None and math.isfinite(likelihood)
    value: dict[str, Any] = {
        "question": answer.question,
        "answer": answer.text,
        "ended": answer.ended,
        "log_likelihood": likelihood if is_finite else None,
        "passages": passages,
        "tokens": [{"text": token.text, "posterior": list(token.posterior)} for token in answer.tokens],
    }
    if answer.closed_book is not None:
        value["closed_book_log_likelihood"] = answer.closed_book if math.isfinite(answer.closed_book) else None
    if answer.confidence is not None:
        score = answer.confidence.score
        confidence = {**asdict(answer.confidence), "score": score if math.isfinite(score) else None}
        value |= {"abstained": answer.abstained, "confidence": confidence}
    if answer.problem is not None:
        value["problem"] = asdict(answer.problem)
    if answer.usage is not None:
        value["usage"] = asdict(answer.usage)
    if all(support.posterior is None for support in answer.support):
        value["context"] = [asdict(excerpt, dict_factory=_lists_for_tuples) for excerpt in answer.context]
        value["statements"] = [asdict(statement, dict_factory=_lists_for_tuples) for statement in answer.statements]
        value["citations"] = [excerpt.number for excerpt in answer.citations]
    return value


def _lists_for_tuples(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a record's fields with lists instead of tuples, as in JSON."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in pairs}
