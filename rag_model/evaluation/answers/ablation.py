"""Ablations: answer the same questions from other passages, to find the cause of wrong answers.

* *open book*: the k retrieved passages; measures the whole system.
* *closed book*: no passage; measures the knowledge in the model's weights. The open-book value
  minus the closed-book value is the gain from passages.
* *gold passage*: one passage that contains the answer. 1 minus the gold-passage value is the loss
  due to the generator; the gold-passage value minus the open-book value is due to the retriever.
* *shuffled passages*: the passages of another question. A model that answers equally well with them
  does not use its passages (`collapse`).
* *open book, k = N*: the first N passages, for several N (Lewis et al. 2020, figure 3).
* *BM25* and *frozen retriever*: the k passages of another retriever (table 6 of the same paper).
* *whole corpus*: every passage in one prompt, if all of them fit, which needs no retrieval.
* *another reader*: the open-book passages, from which another `Reader` answers.

`describe_retrieval_benefit` describes in one sentence whether retrieval is worth its cost.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from rag_model.errors import UsageError
from rag_model.evaluation.answers.readings import Reading
from rag_model.evaluation.answers.scores import ScoredAnswer, compare_answers, estimate_measures, score_answer
from rag_model.evaluation.bootstrap import DEFAULT_RESAMPLING, Estimate, Resampling
from rag_model.evaluation.measures.measure import AnswerKind
from rag_model.evaluation.questions import Question
from rag_model.evaluation.retrieval.judging import RetrievalResult
from rag_model.retrieve.hits import Hit

HitsT = TypeVar("HitsT", bound=Sequence[Hit])
OPEN_BOOK, CLOSED_BOOK, GOLD_PASSAGE = "open book", "closed book", "gold passage"
SHUFFLED_PASSAGES = "shuffled passages"
BM25, FROZEN_RETRIEVER, WHOLE_CORPUS = "BM25", "frozen retriever", "whole corpus"


@dataclass(frozen=True, slots=True)
class AblationSettings:
    """Settings of the ablations; each ablation answers all questions once more."""

    # numbers of passages per question to compare; the RAG paper's figure 3 ends at 50
    sweep: tuple[int, ...] = (1, 2, 5, 10, 20)
    # number of hits in which a gold passage is looked for; DPR looks for positives in 100, too
    gold_depth: int = 100
    seed: int = 0  # random seed of the shuffled passages

    def __post_init__(self) -> None:
        if min([*self.sweep, self.gold_depth]) < 1:
            raise UsageError(f"the depths in {self} are invalid: give depths of at least 1")

    def search_depth(self, k: int) -> int:
        """Return how many passages to retrieve per question for these ablations and an open book of
        `k` passages.
        """
        return max(k, self.gold_depth, *self.sweep)


@dataclass(frozen=True, slots=True)
class EvalCondition:
    """A condition of an evaluation: questions, and the passages from which to answer each one."""

    name: str
    k: int  # passages per question; 0 means closed book
    questions: tuple[Question, ...]
    hits: tuple[tuple[Hit, ...], ...]  # up to k hits per question; BM25 may return fewer
    # name of the condition's retriever; empty means the model's own retriever
    other_retriever: str = ""
    reader: str = ""  # name of the reader; empty means the first reader


@dataclass(frozen=True, slots=True)
class AblationResult:
    """The metrics of one condition."""

    name: str
    k: int
    scored_answers: tuple[ScoredAnswer, ...]
    metrics: dict[str, Estimate]
    # difference from the open book by measure, over the questions of both; empty for the open book
    differences: dict[str, Estimate]

    def to_json(self) -> dict[str, Any]:
        """Return the metrics as JSON values, without values per question."""
        metrics = {name: asdict(estimate) for name, estimate in self.metrics.items()}
        differences = {name: asdict(estimate) for name, estimate in self.differences.items()}
        summary = {"condition": self.name, "k": self.k, "n": len(self.scored_answers), "metrics": metrics}
        stage_ms = {name: 1000 * seconds for name, seconds in self.stages.items()}
        return {**summary, "against_open": differences, "costs": self.costs, "stages": stage_ms}

    @property
    def costs(self) -> dict[str, float]:
        """Mean `seconds`, prompt tokens (`read`) and new tokens (`written`) per question."""
        readings = [scored_answer.reading for scored_answer in self.scored_answers]
        token_usages = [reading.usage for reading in readings if reading.usage is not None]
        cost_values: dict[str, list[float]] = {
            "seconds": [reading.seconds for reading in readings if reading.seconds is not None],
            "read": [token_usage.prompt_tokens for token_usage in token_usages],
            "written": [usage.new_tokens for usage in token_usages],
        }
        return {name: sum(column) / len(column) for name, column in cost_values.items() if column}

    @property
    def stages(self) -> dict[str, float]:
        """The mean seconds per question by stage; empty if an answer's stages were not timed."""
        stage_seconds = [scored_answer.reading.stages for scored_answer in self.scored_answers]
        stages = dict.fromkeys(name for seconds in stage_seconds for name in seconds) if all(stage_seconds) else {}
        return {name: sum(seconds.get(name, 0.0) for seconds in stage_seconds) / len(stage_seconds) for name in stages}


def build_open_book(results: Sequence[RetrievalResult], k: int) -> EvalCondition:
    """Return the questions with their first `k` retrieved passages, or fewer if fewer were
    retrieved.
    """
    return _build_condition(OPEN_BOOK, [(result.question, result.hits[:k]) for result in results])


def build_closed_book(results: Sequence[RetrievalResult]) -> EvalCondition:
    """Return the questions without passages."""
    return _build_condition(CLOSED_BOOK, [(result.question, ()) for result in results])


def iter_conditions(results: Sequence[RetrievalResult], k: int, settings: AblationSettings) -> Iterator[EvalCondition]:
    """Yield the closed book, the gold and the shuffled passages, and the open book with other k.

    A condition that applies to no question is omitted.

    Args:
        results: the retrieved passages, up to `AblationSettings.search_depth(k)` per question.
        k: number of passages per question in the open book, and of the shuffled passages.
        settings: the other values of k, the depth of the gold passages, and the random seed.
    """
    yield build_closed_book(results)
    gold_hits = [(result.question, _find_gold_hit(result, settings.gold_depth)) for result in results]
    if gold_pairs := [(question, (gold,)) for question, gold in gold_hits if gold is not None]:
        yield _build_condition(GOLD_PASSAGE, gold_pairs)
    open_book = build_open_book(results, k)
    if len(results) > 1:
        shuffled_hits = tuple(shuffle_hits(open_book.hits, settings.seed))
        yield EvalCondition(SHUFFLED_PASSAGES, open_book.k, open_book.questions, shuffled_hits)
    for depth in settings.sweep:
        book_at_depth = build_open_book(results, depth)
        if book_at_depth.k == depth != open_book.k:
            yield EvalCondition(f"{OPEN_BOOK}, k = {depth}", depth, book_at_depth.questions, book_at_depth.hits)


def build_retriever_condition(
    name: str, questions: Sequence[Question], hits: Sequence[Sequence[Hit]], k: int
) -> EvalCondition:
    """Return the questions with the first `k` passages of another retriever."""
    pairs = [(question, tuple(question_hits[:k])) for question, question_hits in zip(questions, hits, strict=True)]
    return replace(_build_condition(name, pairs), other_retriever=name)


def build_corpus_condition(questions: Sequence[Question], corpus: Sequence[Hit], reader: str = "") -> EvalCondition:
    """Return each question with all passages of the corpus; `reader` names another reader."""
    condition = _build_condition(WHOLE_CORPUS, [(question, tuple(corpus)) for question in questions])
    return replace(condition, name=f"{reader}, {WHOLE_CORPUS}", reader=reader) if reader else condition


def _build_condition(name: str, pairs: Sequence[tuple[Question, tuple[Hit, ...]]]) -> EvalCondition:
    questions, hits = tuple(question for question, _ in pairs), tuple(hits for _, hits in pairs)
    return EvalCondition(name, max(map(len, hits), default=0), questions, hits)


def _find_gold_hit(result: RetrievalResult, depth: int) -> Hit | None:
    """Return the first hit on an evidence page of the question. If the question has no evidence,
    return the first hit that contains an answer.
    """
    evidence_page_ids = frozenset[str]().union(*result.question.evidence)
    for hit, has_answer in zip(result.hits[:depth], result.has_answer, strict=False):
        if hit.passage.page_id in evidence_page_ids if evidence_page_ids else has_answer:
            return hit
    return None


def shuffle_hits(hits: Sequence[HitsT], seed: int) -> list[HitsT]:
    """Return the hits in another order, so that each question gets the hits of another question.

    The order is a random cycle, because adjacent questions of a file often share passages.
    """
    permutation = random.Random(seed).sample(range(len(hits)), len(hits))
    next_positions = dict(zip(permutation, [*permutation[1:], permutation[0]], strict=True))
    return [hits[next_positions[position]] for position in range(len(hits))]


def measure_condition(
    condition: EvalCondition,
    answer_questions: Callable[[EvalCondition], Sequence[Reading]],
    kind: AnswerKind = "spans",
    open_book_result: AblationResult | None = None,
    resampling: Resampling = DEFAULT_RESAMPLING,
) -> AblationResult:
    """Answer a condition's questions and measure the answers.

    Args:
        condition: the questions and passages.
        answer_questions: function that returns the answers to all questions of a condition, in
            order.
        kind: the kind of the answers.
        open_book_result: the result to compare with; None for the open book itself.
        resampling: settings of the confidence intervals.
    """
    readings = answer_questions(condition)
    scored_answers = tuple(
        score_answer(question, reading, kind) for question, reading in zip(condition.questions, readings, strict=True)
    )
    differences = (
        compare_answers(scored_answers, open_book_result.scored_answers, resampling) if open_book_result else {}
    )
    return AblationResult(
        condition.name,
        condition.k,
        scored_answers,
        estimate_measures(scored_answers, kind, resampling),
        differences,
    )


def describe_retrieval_benefit(
    all_results: Sequence[AblationResult], measure: str, search_milliseconds: Mapping[str, float]
) -> str:
    """Return a sentence about whether retrieval is worth its cost.

    The sentence is empty if the questions were not answered without passages (closed book).

    Args:
        all_results: the results of all conditions, beginning with the open book.
        measure: the measure that decides whether an answer is correct.
        search_milliseconds: milliseconds per question by stage of retrieval; empty if unknown.
    """
    result_by_name = {result.name: result for result in all_results}
    if CLOSED_BOOK not in result_by_name or measure not in result_by_name[CLOSED_BOOK].differences:
        return ""
    gain_over_closed_book = _negate_difference(result_by_name[CLOSED_BOOK].differences[measure])
    phrases = [_describe_range(gain_over_closed_book, "closed book")]
    if BM25 in result_by_name and measure in result_by_name[BM25].differences:
        phrases.append(_describe_range(_negate_difference(result_by_name[BM25].differences[measure]), f"with {BM25}"))
    extra_costs = list(
        _iter_extra_costs(
            result_by_name[OPEN_BOOK].costs, result_by_name[CLOSED_BOOK].costs, sum(search_milliseconds.values())
        )
    )
    cost = f", for {_join_phrases(extra_costs)} more per question" if extra_costs else ""
    return f"{_describe_gain(gain_over_closed_book)}: {measure} is {' and '.join(phrases)}{cost}"


def _negate_difference(difference: Estimate) -> Estimate:
    """Return the difference with the opposite sign, with swapped bounds of its interval."""
    value, low, high = (0.0 - number for number in (difference.value, difference.high, difference.low))
    return Estimate(value, low, high, difference.n)


def _describe_gain(gain: Estimate) -> str:
    if gain.low > 0:
        return "retrieval is worth its cost here"
    if gain.high < 0:
        return "retrieval is not worth its cost here"
    return f"{gain.n:,} questions do not show that retrieval is worth its cost here"


def _describe_range(gain: Estimate, condition_name: str) -> str:
    direction = "lower" if gain.value < 0 else "higher"
    return f"{abs(gain.value):.3f} {direction} than {condition_name} [{gain.low:+z.3f}, {gain.high:+z.3f}]"


def _iter_extra_costs(
    open_costs: Mapping[str, float], closed_costs: Mapping[str, float], search_milliseconds: float
) -> Iterator[str]:
    if search_milliseconds:
        yield f"{search_milliseconds:.3g} ms of search"
    if "seconds" in open_costs and "seconds" in closed_costs:
        yield f"{1000 * max(0.0, open_costs['seconds'] - closed_costs['seconds']):.3g} ms of reading"
    if "read" in open_costs and "read" in closed_costs:
        yield f"{max(0.0, open_costs['read'] - closed_costs['read']):,.0f} tokens"


def _join_phrases(phrases: Sequence[str]) -> str:
    *leading_phrases, last_phrase = phrases
    return f"{', '.join(leading_phrases)} and {last_phrase}" if leading_phrases else last_phrase
