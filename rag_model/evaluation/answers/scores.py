"""The measures of a set of answers, with their confidence intervals.

The kind of the answers selects the measures: spans (Natural Questions, TriviaQA, WebQuestions),
patterns (CuratedTREC), labels (FEVER), texts (MS MARCO), or clues, which are questions written for
a given entity (Jeopardy). Spans and patterns add grounding measures (`grounding`), texts and clues
add BLEU and n-gram diversity. Questions with evidence add KILT's measures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rag_model.errors import UsageError
from rag_model.evaluation.answers.grounding import (
    CITATION_MEASURES,
    GROUNDING_MEASURES,
    measure_citations,
    measure_grounding,
)
from rag_model.evaluation.answers.readings import Reading
from rag_model.evaluation.bootstrap import (
    DEFAULT_RESAMPLING,
    Estimate,
    Resampling,
    estimate_difference,
    estimate_mean,
)
from rag_model.evaluation.matching import compile_pattern
from rag_model.evaluation.measures.answers import FEVER_3WAY, label_match
from rag_model.evaluation.measures.measure import AnswerKind, answer_functions, corpus_functions
from rag_model.evaluation.measures.retrieval import r_precision, recall_at
from rag_model.evaluation.questions import Question

_EXTRACTIVE_KINDS = ("spans", "patterns")  # a passage may hold these answers word for word
_KILT_DEPTH = 5  # KILT's own depth


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """One question, its reading, and the measures of the answer."""

    question: Question
    reading: Reading
    measures: Mapping[str, float]  # by name; only those that apply to the question


def score_answer(question: Question, reading: Reading, kind: AnswerKind = "spans") -> ScoredAnswer:
    """Measure one answer against the gold answers, and its passages against the question's
    evidence.

    Raises:
        InputError: a pattern is malformed or takes too long.
        MissingExtraError: a package that a measure of this kind needs is not installed.
    """
    values = {name: compute(reading.answer, question.answers) for name, compute in answer_functions(kind).items()}
    measures = {name: value for name, value in values.items() if value is not None}
    passage_measures = {**_kilt_measures(question, reading, measures), **measure_citations(question, reading)}
    if kind in _EXTRACTIVE_KINDS:
        passage_measures |= measure_grounding(
            question, reading, measures[deciding_measure(kind)], patterns=kind == "patterns"
        )
    return ScoredAnswer(question, reading, {**measures, **passage_measures})


def _kilt_measures(question: Question, reading: Reading, measures: Mapping[str, float]) -> dict[str, float]:
    if not question.evidence:
        return {}
    precision = r_precision(reading.pages, question.evidence)
    earned = {f"KILT-{name}": value if precision == 1 else 0.0 for name, value in measures.items()}
    recall = recall_at(reading.pages, question.evidence, _KILT_DEPTH)
    return {"R-precision": precision, f"recall@{_KILT_DEPTH}": recall, **earned}


def deciding_measure(kind: AnswerKind) -> str:
    """Return the measure that decides whether an answer of a kind is correct."""
    return next(iter(answer_functions(kind)))


def list_measures(kind: AnswerKind, *, evidence: bool) -> list[str]:
    """Return the names of all measures that answers of a kind can have.

    Args:
        kind: the kind of the answers.
        evidence: whether a question names evidence.
    """
    answer_names = list(answer_functions(kind))
    kilt_names = (
        ["R-precision", f"recall@{_KILT_DEPTH}", *(f"KILT-{name}" for name in answer_names)] if evidence else []
    )
    grounding_names = GROUNDING_MEASURES if kind in _EXTRACTIVE_KINDS else ()
    return [*answer_names, *kilt_names, *CITATION_MEASURES, *grounding_names, *corpus_functions(kind)]


def check_gold_answers(questions: Sequence[Question], kind: AnswerKind) -> None:
    """Check that the questions have gold answers of a kind, before a model answers for hours.

    Raises:
        UsageError: no question has an answer, or the kind is labels and no answer is a FEVER label.
        InputError: a pattern is malformed.
        MissingExtraError: a package that a measure of this kind needs is not installed.
    """
    golds = [gold for question in questions for gold in question.answers]
    if not golds:
        raise UsageError("no question has an answer to compare with: give a file with answers")
    if kind == "patterns":
        for gold in golds:
            compile_pattern(gold)
    if kind == "labels" and all(label_match(gold, [gold], FEVER_3WAY) is None for gold in golds):
        raise UsageError(f"no question has one of the labels {', '.join(FEVER_3WAY)}: measure its answers as spans")
    for measure_answer in answer_functions(kind).values():
        measure_answer("a", ["a"])
    for measure_corpus in corpus_functions(kind).values():
        measure_corpus(["a"], [["a"]], Resampling(draws=1))


def estimate_measures(
    scored: Sequence[ScoredAnswer], kind: AnswerKind = "spans", resampling: Resampling = DEFAULT_RESAMPLING
) -> dict[str, Estimate]:
    """Return each measure of the set, in [0, 1], with its interval.

    A measure covers the questions that it applies to (`Estimate.n`): FEVER's two-way accuracy
    covers the questions with one of two labels, KILT's measures those with evidence. Texts and
    clues add BLEU-1, BLEU-4, distinct-3 (the ratio of distinct to all trigrams of the answers) and
    gold-distinct-3 (that ratio for the first gold answer of each question).

    Raises:
        UsageError: there is no answer.
    """
    if not scored:
        raise UsageError("there is no answer to measure: give at least one question")
    columns: dict[str, list[float]] = {}
    for answer in scored:
        for name, value in answer.measures.items():
            columns.setdefault(name, []).append(value)
    means = {name: estimate_mean(values, resampling) for name, values in columns.items()}
    predictions, golds = [answer.reading.answer for answer in scored], [answer.question.answers for answer in scored]
    estimates = {name: compute(predictions, golds, resampling) for name, compute in corpus_functions(kind).items()}
    return {**means, **{name: estimate for name, estimate in estimates.items() if estimate is not None}}


def compare_answers(
    after: Sequence[ScoredAnswer], before: Sequence[ScoredAnswer], resampling: Resampling = DEFAULT_RESAMPLING
) -> dict[str, Estimate]:
    """Return the mean difference of each measure, `after` minus `before`, over the shared
    questions.

    Questions are joined by id. Set measures such as BLEU are left out, because they have no value
    per question.
    """
    before_measures = {answer.question.id: answer.measures for answer in before}
    measure_pairs = [
        (answer.measures, before_measures[answer.question.id])
        for answer in after
        if answer.question.id in before_measures
    ]
    names = dict.fromkeys(
        name for after_measures, before_values in measure_pairs for name in after_measures if name in before_values
    )
    differences = {}
    for name in names:
        values = [
            (after_values, before_values)
            for after_values, before_values in measure_pairs
            if name in after_values and name in before_values
        ]
        after_column, before_column = [after_value[name] for after_value, _ in values], [old[name] for _, old in values]
        differences[name] = estimate_difference(after_column, before_column, resampling)
    return differences
