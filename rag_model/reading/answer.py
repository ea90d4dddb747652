"""The record of an answer: its text, its passages, and its cost in tokens and seconds.

An answer is split into statements with their citations of context entries: [1], [1, 2], [1; 2],
[1][2] and [1-3] are citations. Brackets are ordinary text if no number in them can be a citation,
such as [2024] with a context of five entries, or if they are inside a quotation. A number of one or
two digits without an entry in the context is an unknown citation: the model made it up.

A citation belongs to the statement that contains or precedes it, even after the full stop.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from rag_model.corpus.chunkers.article_words import ends_line, ends_sentence, ends_unspaced_sentence, split_token
from rag_model.corpus.records import Passage
from rag_model.retrieve.hits import Hit

_BRACKET = re.compile(r"\s*\[\s*(\d{1,4}(?:\s*[-\N{EN DASH},;]\s*\d{1,4})*)\s*\]")
_RANGE = re.compile(r"(\d+)\s*[-\N{EN DASH}]\s*(\d+)|(\d+)")
_QUOTATION = re.compile(r'(?<![^\s(\[])(?:"[^"\n]*"|“[^”\n]*”|«[^»\n]*»|„[^“”\n]*[“”])(?!\w)')
# largest number that can be an unknown citation; a larger one is text, such as a year
_MAX_UNKNOWN_NUMBER = 99


@dataclass(frozen=True, slots=True)
class Statement:
    """One sentence of an answer with its citations."""

    text: str  # text without citations
    cited: tuple[int, ...]  # distinct numbers of context entries, in the order of the text
    unknown: tuple[int, ...] = ()  # distinct numbers that are not in the context


@dataclass(frozen=True, slots=True)
class _CitationMark:
    """A citation that was removed from a text."""

    offset: int  # position of the citation in the text without citations
    numbers: tuple[int, ...]


def split_statements(text: str, n_entries: int) -> tuple[Statement, ...]:
    """Split an answer into sentences with their citations; the context has `n_entries` entries.

    >>> split_statements("It is by Orwell [1]. It was published in 1945. [2, 3]", 3)[1]
    Statement(text='It was published in 1945.', cited=(2, 3), unknown=())
    """
    plain_text, citation_marks = _extract_citations(text, n_entries)
    sentence_spans = list(_iter_sentence_spans(plain_text))
    citations_by_sentence: list[list[int]] = [[] for _ in sentence_spans]
    for citation in citation_marks if sentence_spans else ():
        sentence_index = bisect_right([start for start, _ in sentence_spans], max(0, citation.offset - 1)) - 1
        citations_by_sentence[max(0, sentence_index)] += citation.numbers
    return tuple(
        Statement(
            plain_text[start:end],
            tuple(dict.fromkeys(number for number in entry_numbers if number <= n_entries)),
            tuple(dict.fromkeys(number for number in entry_numbers if number > n_entries)),
        )
        for (start, end), entry_numbers in zip(sentence_spans, citations_by_sentence, strict=True)
    )


def remove_citations(text: str, n_entries: int) -> str:
    """Remove the citations from an answer; the context has `n_entries` entries.

    >>> remove_citations("George Orwell [1][2].", 5)
    'George Orwell.'
    """
    return _extract_citations(text, n_entries)[0]


def _extract_citations(text: str, n_entries: int) -> tuple[str, list[_CitationMark]]:
    plain_text, marks, plain_end = "", list[_CitationMark](), 0
    quotation_spans = [match.span() for match in _QUOTATION.finditer(text) if match[0] != text.strip()]
    for match in _BRACKET.finditer(text) if n_entries else ():
        entry_numbers = tuple(_parse_numbers(match[1], n_entries))
        if not entry_numbers or any(start < match.start(1) < end for start, end in quotation_spans):
            continue
        plain_text += text[plain_end : match.start()]
        marks.append(_CitationMark(len(plain_text), entry_numbers))
        plain_end = match.end()
    if not marks:
        return text, marks
    plain_text += text[plain_end:]
    n_leading = len(plain_text) - len(plain_text.lstrip())
    return plain_text.strip(), [replace(mark, offset=max(0, mark.offset - n_leading)) for mark in marks]


def _parse_numbers(bracket: str, n_entries: int) -> Iterator[int]:
    """Yield the numbers of a bracket that can be citations: entry numbers, and others up to 99."""
    for match in _RANGE.finditer(bracket):
        first_number, last_number = (int(match[1]), int(match[2])) if match[1] else (int(match[3]), int(match[3]))
        last_accepted = last_number if last_number <= max(n_entries, _MAX_UNKNOWN_NUMBER) else first_number - 1
        yield from (entry_number for entry_number in range(max(1, first_number), last_accepted + 1))


def _iter_sentence_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield the [start, end) offsets of each sentence."""
    token_spans = list(_iter_token_spans(text))
    first_token = 0
    for index, (token_start, token_end) in enumerate(token_spans):
        if index + 1 == len(token_spans) or _is_boundary(text, (token_start, token_end), token_spans[index + 1]):
            yield token_spans[first_token][0], token_end
            first_token = index + 1


def _iter_token_spans(text: str) -> Iterator[tuple[int, int]]:
    for token in re.finditer(r"\S+", text):
        token_start = token.start()
        for token_part in split_token(token[0]):
            n_characters = len(token_part.removeprefix(" "))
            yield token_start, token_start + n_characters
            token_start += n_characters


def _is_boundary(text: str, token_span: Sequence[int], next_span: Sequence[int]) -> bool:
    token, next_token = text[slice(*token_span)], text[slice(*next_span)]
    gap_text = text[token_span[1] : next_span[0]]
    if not gap_text:
        return ends_unspaced_sentence(token)
    return ends_line(token, next_token) if "\n" in gap_text else ends_sentence(token, next_token)


CLOSED_BOOK = Hit(1, 0.0, -1, Passage("", "", 0, "", "", "", 0, 0, Passage.hash_of("", "")), "", "", inner_product=0.0)
"""A hit with an empty passage; an answer from it comes from the weights of the model."""


Memory = Literal["weights", "passages"]


def name_memory(text: str, read_texts: Iterable[str]) -> Memory | None:
    """Return the source of an answer: `passages` if a text was read, else the model's `weights`.
    The result is None if the answer is empty.

    >>> name_memory("Orwell", []), name_memory("Orwell", ["by Orwell"]), name_memory("", [])
    ('weights', 'passages', None)
    """
    if not text:
        return None
    return "passages" if any(read_text.strip() for read_text in read_texts) else "weights"


@dataclass(frozen=True, slots=True)
class SupportingPassage:
    """One passage and its share of an answer, which is known if the reader marginalizes over
    passages.
    """

    hit: Hit
    weight: float | None = None  # p(z|x)
    posterior: float | None = None  # p(z|x,y); for RAG-Token the mean over the tokens


@dataclass(frozen=True, slots=True)
class TokenSupport:
    """One token of a RAG-Token answer, and the share of each passage."""

    # The texts of all tokens form the answer. The text is empty for special tokens, and for all but
    # the last of several tokens that encode one character.
    text: str
    posterior: tuple[float, ...]  # p(z_i|x,y) of each passage, in the order of the support


@dataclass(frozen=True, slots=True)
class ContextEntry:
    """One numbered entry of a context, cited as [number]: a passage, or several joined passages."""

    number: int  # from 1, in the order of the prompt
    title: str
    section: str  # heading of the first passage's section; empty in the introduction
    url: str  # URL of the article's revision; empty if the source has none
    revision: int  # revision id of the article; 0 if the source has no revisions
    # Ascending positions in `Answer.support` of the entry's hits; hits with equal texts share an
    # entry.
    places: tuple[int, ...]
    text: str  # text of the entry in the prompt
    # whether the text was truncated to fit into the budget, and ends with an ellipsis
    cut: bool = False
    revised: str | None = None  # time of the revision, ISO 8601 in UTC; None: unknown


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """The tokens of an answer and their cost."""

    # Number of prompt tokens, summed over all contexts if the reader marginalizes over passages.
    prompt_tokens: int
    new_tokens: int  # number of tokens of the answer
    cost: float | None = None  # in the currency of the configured prices; None: no prices
    # whether bookwheel counted the tokens, because the endpoint sent no counts
    estimated: bool = False


def sum_usage(usages: Iterable[TokenUsage | None]) -> TokenUsage | None:
    """Return the total of the usages that are not None, or None if all are. The cost is None if the
    cost of one usage is.
    """
    known_usages = [usage for usage in usages if usage is not None]
    if not known_usages:
        return None
    call_costs = [usage.cost for usage in known_usages]
    return TokenUsage(
        sum(usage.prompt_tokens for usage in known_usages),
        sum(usage.new_tokens for usage in known_usages),
        None if None in call_costs else math.fsum(cost for cost in call_costs if cost is not None),
        any(usage.estimated for usage in known_usages),
    )


@dataclass(frozen=True, slots=True)
class AnswerProblem:
    """The reason why a model gave no answer, or a doubtful one."""

    # `reasoning`: the model reasoned and did not answer; `refused`: the model refused; `filtered`:
    # the endpoint's filter stopped it; `tool_call`: the model called a tool instead; `empty`: the
    # model wrote nothing; `prompt_truncated`: the endpoint truncated the prompt.
    kind: str
    message: str  # explanation in one sentence, without a full stop


@dataclass(frozen=True, slots=True)
class Confidence:
    """The confidence of an answer, measured by one of the signals in `confidence`."""

    signal: str  # name of the signal
    score: float  # score of the answer; larger is more confident
    least: float  # threshold; the answer is withheld if the score is below it


@dataclass(frozen=True, slots=True)
class RouteScore:
    """The score by which the reader `auto` chose between weights and passages (see `routing`)."""

    signal: str  # name of the signal
    score: float | None  # score in nats per token; None: an answer is empty
    least: float | None  # the weights answer if the score is at least this threshold; None: never


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question, with its passages."""

    question: str
    text: str  # may be empty
    # Log p(y|x) in nats, including the end token; a lower bound with fast decoding.
    log_likelihood: float | None
    support: tuple[SupportingPassage, ...]  # one entry per passage, best passage first
    tokens: tuple[TokenSupport, ...] = ()  # RAG-Token only
    ended: bool = True  # False: truncated at the maximum number of tokens
    usage: TokenUsage | None = None  # None: not counted
    # entries of the prompt; hits that did not fit have no entry
    context: tuple[ContextEntry, ...] = ()
    # Log p(text|question) without passages in nats, including the end token; None: not computed.
    closed_book: float | None = None
    confidence: Confidence | None = None  # None: there is no threshold
    abstained: bool = False  # whether the score is below the threshold, so that the text is empty
    problem: AnswerProblem | None = None  # the reason why the text is empty or doubtful
    route: RouteScore | None = None  # None: the reader is not `auto`
    # By stage, the seconds of the batch divided by its number of answers.
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def memory(self) -> Memory | None:
        """Whether the text comes from the model's weights or from passages; None if it is empty."""
        read_texts = [context_entry.text for context_entry in self.context] or [
            support.hit.passage.text for support in self.support if support.hit.row >= 0
        ]
        return name_memory(self.text, read_texts)

    @property
    def statements(self) -> tuple[Statement, ...]:
        """The sentences of the text, each with the numbers of the context entries that it cites."""
        return split_statements(self.text, len(self.context))

    @property
    def citations(self) -> tuple[ContextEntry, ...]:
        """The cited entries of the context, in the order of their first citation."""
        entry_numbers = dict.fromkeys(entry_number for statement in self.statements for entry_number in statement.cited)
        return tuple(self.context[entry_number - 1] for entry_number in entry_numbers)

    @property
    def plain(self) -> str:
        """The text without its citations."""
        return remove_citations(self.text, len(self.context))


def answer_json(answer: Answer) -> dict[str, Any]:
    """Return an answer in the JSON format of the command line, with its passages."""
    passages = [
        {**passage.hit.to_json(), "weight": passage.weight, "posterior": passage.posterior}
        for passage in answer.support
    ]
    answer_fields: dict[str, Any] = {
        "question": answer.question,
        "answer": answer.text,
        "memory": answer.memory,
        "ended": answer.ended,
        "log_likelihood": replace_infinite(answer.log_likelihood),
        "passages": passages,
        "tokens": [{"text": token.text, "posterior": list(token.posterior)} for token in answer.tokens],
    }
    if answer.closed_book is not None:
        answer_fields["closed_book_log_likelihood"] = replace_infinite(answer.closed_book)
    if answer.confidence is not None:
        confidence = {**asdict(answer.confidence), "score": replace_infinite(answer.confidence.score)}
        answer_fields |= {"abstained": answer.abstained, "confidence": confidence}
    if answer.route is not None:
        answer_fields["route"] = {**asdict(answer.route), "score": replace_infinite(answer.route.score)}
    if answer.problem is not None:
        answer_fields["problem"] = asdict(answer.problem)
    if answer.usage is not None:
        answer_fields["usage"] = asdict(answer.usage)
    if all(support.posterior is None for support in answer.support):
        answer_fields["context"] = [asdict(entry, dict_factory=_convert_tuples_to_lists) for entry in answer.context]
        answer_fields["statements"] = [
            asdict(statement, dict_factory=_convert_tuples_to_lists) for statement in answer.statements
        ]
        answer_fields["citations"] = [context_entry.number for context_entry in answer.citations]
    return answer_fields


def replace_infinite(number: float | None) -> float | None:
    """Return the number, or None for an infinity, which JSON cannot represent."""
    return number if number is not None and math.isfinite(number) else None


def _convert_tuples_to_lists(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a record as JSON values: lists instead of tuples."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields}
