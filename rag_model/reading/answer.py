"""The record of an answer: its text, the passages that it was read from, and what it cost."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rag_model.corpus.records import Passage
from rag_model.reading.citations import Statement, statements, without_citations
from rag_model.retrieve.retriever import Hit, hit_json

CLOSED_BOOK = Hit(1, 0.0, -1, Passage("", "", 0, "", "", "", 0, 0, Passage.hash_of("", "")), "", "", inner_product=0.0)
"""The empty passage: an answer from it alone comes from the weights of the model."""


@dataclass(frozen=True, slots=True)
class Support:
    """One passage, and its share of an answer; the shares are known where passages are marginalised."""

    hit: Hit
    weight: float | None = None  # p(z|x)
    posterior: float | None = None  # p(z|x,y); of RAG-Token the mean over the tokens


@dataclass(frozen=True, slots=True)
class TokenSupport:
    """One token of a RAG-Token answer, and each passage's share of it."""

    text: str  # all of them joined are the answer; empty for special tokens and for all but the last of a character's
    posterior: tuple[float, ...]  # p(z_i|x,y) of each passage, in the order of the support


@dataclass(frozen=True, slots=True)
class Excerpt:
    """One numbered entry of a context, which an answer cites as [number]: a passage, or several joined."""

    number: int  # from 1, in the order of the prompt
    title: str
    section: str  # of its first passage; empty if there is none
    url: str  # of the article's revision; empty where the source has none
    revision: int  # of the article; 0 where the source has no revisions
    places: tuple[int, ...]  # in `Answer.support`, ascending: the hits whose text it holds; equal texts are one entry
    text: str  # as the writer read it
    cut: bool = False  # its end did not fit into the budget; the text then ends with an ellipsis
    revised: str | None = None  # when the revision was saved, ISO 8601 in UTC; None: unknown


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer cost."""

    prompt_tokens: int  # read, by the model's own tokenizer; where passages are marginalised, of all their contexts
    new_tokens: int  # of the answer
    cost: float | None = None  # in the currency of the prices given; None: no prices are known
    estimated: bool = False  # True: the endpoint told no tokens, so they were counted here


@dataclass(frozen=True, slots=True)
class Confidence:
    """How sure an answer is, by one signal (`confidence`)."""

    signal: str
    score: float  # larger is surer
    least: float  # below it the answer is withheld


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question, and the passages that it comes from."""

    question: str
    text: str  # may be empty
    log_likelihood: float | None  # log p(y|x) in nats, the end token included; a lower bound by fast decoding
    support: tuple[Support, ...]  # in the order of the passages
    tokens: tuple[TokenSupport, ...] = ()  # RAG-Token only
    ended: bool = True  # False: cut at the most tokens of an answer
    usage: Usage | None = None  # None: not counted
    context: tuple[Excerpt, ...] = ()  # what was in the prompt; a hit in none of them did not fit
    closed_book: float | None = None  # log p(text|question alone) in nats, the end token included; None: not computed
    confidence: Confidence | None = None  # None: there is no threshold
    abstained: bool = False  # the reader was not sure enough: the text is empty
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)  # by stage, shares of its batch's

    @property
    def statements(self) -> tuple[Statement, ...]:
        """The sentences of the text, each with the numbers of the context that it cites."""
        return statements(self.text, len(self.context))

    @property
    def citations(self) -> tuple[Excerpt, ...]:
        """The entries of the context that the text cites, in the order of their first citation."""
        numbers = dict.fromkeys(number for one in self.statements for number in one.cited)
        return tuple(self.context[number - 1] for number in numbers)

    @property
    def plain(self) -> str:
        """The text without its citations."""
        return without_citations(self.text, len(self.context))


def answer_json(answer: Answer) -> dict[str, Any]:
    """Return an answer as the command line's contract has it, with all that it was read from."""
    passages = [{**hit_json(one.hit), "weight": one.weight, "posterior": one.posterior} for one in answer.support]
    likelihood = answer.log_likelihood
    known = likelihood is not None and math.isfinite(likelihood)
    value: dict[str, Any] = {
        "question": answer.question,
        "answer": answer.text,
        "ended": answer.ended,
        "log_likelihood": likelihood if known else None,
        "passages": passages,
        "tokens": [{"text": one.text, "posterior": list(one.posterior)} for one in answer.tokens],
    }
    if answer.closed_book is not None:
        value["closed_book_log_likelihood"] = answer.closed_book if math.isfinite(answer.closed_book) else None
    if answer.confidence is not None:
        score = answer.confidence.score
        sure = {**asdict(answer.confidence), "score": score if math.isfinite(score) else None}
        value |= {"abstained": answer.abstained, "confidence": sure}
    if answer.usage is not None:
        value["usage"] = asdict(answer.usage)
    if all(one.posterior is None for one in answer.support):
        value["context"] = [asdict(one, dict_factory=_listed) for one in answer.context]
        value["statements"] = [asdict(one, dict_factory=_listed) for one in answer.statements]
        value["citations"] = [one.number for one in answer.citations]
    return value


def _listed(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a record's fields with lists for tuples, as JSON has them."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in pairs}
