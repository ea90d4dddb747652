"""The measures of a set of answers: every measure for the kind of answer, each with its interval.

The measures depend on the kind of answers: spans (Natural Questions, TriviaQA, WebQuestions), patterns (CuratedTREC),
labels (FEVER), texts (MS MARCO) or clues, which ask for the entity given (Jeopardy). Spans and patterns are also looked
for in the passages read (`grounds`), and the n-grams of texts and clues are counted (`diversity`). If questions name
evidence, KILT's scores are added.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import numpy as np

from rag_model.errors import UsageError
from rag_model.evaluation.answers.citing import CITING, citing
from rag_model.evaluation.answers.diversity import ORDER, distinct_ngrams
from rag_model.evaluation.answers.grounds import GROUNDS, grounds
from rag_model.evaluation.answers.measures import (
    FEVER_2WAY,
    FEVER_3WAY,
    bleu,
    bleu_counts,
    exact_match,
    label_match,
    rouge_l,
    token_f1,
)
from rag_model.evaluation.answers.qbleu import q_bleu
from rag_model.evaluation.answers.readings import Reading
from rag_model.evaluation.bootstrap import (
    RESAMPLING,
    Estimate,
    Resampling,
    difference_interval,
    interval_of_sums,
    mean_interval,
)
from rag_model.evaluation.questions.files import Question
from rag_model.evaluation.questions.kilt import r_precision, recall_at, strict_match
from rag_model.evaluation.questions.patterns import compile_pattern, pattern_match

AnswerKind = Literal["spans", "patterns", "labels", "texts", "clues"]
_Measure = Callable[[str, Sequence[str]], float | None]
_MEASURES: Mapping[AnswerKind, Mapping[str, _Measure]] = {  # the first one decides whether an answer is correct
    "spans": {"EM": exact_match, "F1": token_f1},
    "patterns": {"EM": pattern_match},
    "labels": {
        "Acc-3way": partial(label_match, labels=FEVER_3WAY),
        "Acc-2way": partial(label_match, labels=FEVER_2WAY),
        "AC": strict_match,
    },
    "texts": {"ROUGE-L": rouge_l, "F1": token_f1},
    "clues": {"Q-BLEU-1": q_bleu, "ROUGE-L": rouge_l},
}
KINDS: tuple[AnswerKind, ...] = get_args(AnswerKind)
_HELD = ("spans", "patterns")  # kinds whose answers a passage may hold word for word
_WRITTEN = ("texts", "clues")  # kinds of whole sentences
_BLEU_ORDERS = (1, 4)  # of texts; BLEU is a measure of the set, not of one answer
_RECALL_AT = 5  # KILT's own depth


@dataclass(frozen=True, slots=True)
class Scored:
    """One question, its answer, and the answer's measures."""

    question: Question
    reading: Reading
    measures: Mapping[str, float]  # by name; a measure that does not apply to the question is left out


def score(question: Question, reading: Reading, kind: AnswerKind = "spans") -> Scored:
    """Measure one answer against the gold answers, and its passages against the question's evidence.

    Raises:
        InputError: a pattern is malformed or takes too long.
        MissingExtraError: what measures this kind is not installed.
    """
    found = {name: measure(reading.answer, question.answers) for name, measure in _MEASURES[kind].items()}
    measures = {name: value for name, value in found.items() if value is not None}
    others = {**_provenance(question, reading, measures), **citing(question, reading)}
    if kind in _HELD:
        others |= grounds(question, reading, measures[right_by(kind)], patterns=kind == "patterns")
    return Scored(question, reading, {**measures, **others})


def _provenance(question: Question, reading: Reading, measures: Mapping[str, float]) -> dict[str, float]:
    if not question.evidence:
        return {}
    precision = r_precision(reading.pages, question.evidence)
    earned = {f"KILT-{name}": value if precision == 1 else 0.0 for name, value in measures.items()}
    recall = recall_at(reading.pages, question.evidence, _RECALL_AT)
    return {"R-precision": precision, f"recall@{_RECALL_AT}": recall, **earned}


def right_by(kind: AnswerKind) -> str:
    """Return the measure that decides whether an answer of that kind is correct."""
    return next(iter(_MEASURES[kind]))


def names_of(kind: AnswerKind, *, evidence: bool) -> list[str]:
    """Return the names of all measures that answers of a kind can have; `evidence`: some questions name theirs.

    Those of citations, of passages and of diversity are measured where they apply.
    """
    own = list(_MEASURES[kind])
    kilt = ["R-precision", f"recall@{_RECALL_AT}", *(f"KILT-{name}" for name in own)] if evidence else []
    held = GROUNDS if kind in _HELD else ()
    sets = [*(f"BLEU-{order}" for order in _BLEU_ORDERS), f"distinct-{ORDER}", f"gold-distinct-{ORDER}"]
    return [*own, *kilt, *CITING, *held, *(sets if kind in _WRITTEN else [])]


def check_golds(questions: Sequence[Question], kind: AnswerKind) -> None:
    """Check that the questions have answers of that kind, before a model answers for hours.

    Raises:
        UsageError: no question has an answer; or, for labels, no answer is one of FEVER's.
        InputError: for patterns, one is malformed.
        MissingExtraError: what measures this kind is not installed.
    """
    golds = [gold for question in questions for gold in question.answers]
    if not golds:
        raise UsageError("no question has an answer to compare with: give a file with answers")
    if kind == "patterns":
        for gold in golds:
            compile_pattern(gold)
    if kind == "labels" and all(label_match(gold, [gold], FEVER_3WAY) is None for gold in golds):
        raise UsageError(f"no question has one of the labels {', '.join(FEVER_3WAY)}: measure its answers as spans")
    if kind in _WRITTEN:
        rouge_l("a", ["a"])
        bleu_counts("a", ["a"])


def estimate(
    scored: Sequence[Scored], kind: AnswerKind = "spans", resampling: Resampling = RESAMPLING
) -> dict[str, Estimate]:
    """Return each measure of the set, in [0, 1], with its interval; of texts also BLEU-1, BLEU-4 and distinct-3.

    distinct-3 is the ratio of distinct to all trigrams of the answers, gold-distinct-3 that of each first gold answer.

    A measure covers the questions it applies to (`Estimate.n`): FEVER's two-way accuracy those with one of the two
    labels, KILT's scores those with evidence.

    Raises:
        UsageError: there is no answer.
    """
    if not scored:
        raise UsageError("there is no answer to measure: ask at least one question")
    columns: dict[str, list[float]] = {}
    for one in scored:
        for name, value in one.measures.items():
            columns.setdefault(name, []).append(value)
    means = {name: mean_interval(values, resampling) for name, values in columns.items()}
    return {**means, **_bleus(scored, resampling), **_diversity(scored, resampling)} if kind in _WRITTEN else means


def _bleus(scored: Sequence[Scored], resampling: Resampling) -> dict[str, Estimate]:
    pairs = [(one.reading.answer, one.question.answers) for one in scored]
    counts = {order: np.stack([bleu_counts(said, golds, order) for said, golds in pairs]) for order in _BLEU_ORDERS}
    return {f"BLEU-{order}": interval_of_sums(counts[order], bleu, resampling) for order in _BLEU_ORDERS}


def _diversity(scored: Sequence[Scored], resampling: Resampling) -> dict[str, Estimate]:
    said = distinct_ngrams([one.reading.answer for one in scored], ORDER, resampling)
    gold = distinct_ngrams([one.question.answers[0] for one in scored if one.question.answers], ORDER, resampling)
    figures = {f"distinct-{ORDER}": said, f"gold-distinct-{ORDER}": gold}
    return {name: one for name, one in figures.items() if one is not None}


def compare(
    after: Sequence[Scored], before: Sequence[Scored], resampling: Resampling = RESAMPLING
) -> dict[str, Estimate]:
    """Return the mean difference of each measure, `after` minus `before`, over the questions in both.

    Questions are joined by id. Corpus measures such as BLEU have no value per question and are left out.
    """
    earlier = {one.question.id: one.measures for one in before}
    shared = [(one.measures, earlier[one.question.id]) for one in after if one.question.id in earlier]
    names = dict.fromkeys(name for new, old in shared for name in new if name in old)
    differences = {}
    for name in names:
        both = [(new, old) for new, old in shared if name in new and name in old]
        now, then = [new[name] for new, _ in both], [old[name] for _, old in both]
        differences[name] = difference_interval(now, then, resampling)
    return differences
