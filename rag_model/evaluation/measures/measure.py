"""The open family of measures: three kinds of measure, and the registry of all of them.

A `RankingMeasure` judges the ranked results of a retriever at a cutoff and is named `NAME@k`, such
as `Success@20`. An `AnswerMeasure` compares one answer with its gold answers. A `CorpusMeasure` has
one value for a set of answers, such as BLEU. An installed package registers a measure through the
entry point group `bookwheel.measures`; the name of the entry point is the name of the measure.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias, get_args

from rag_model.errors import InputError
from rag_model.evaluation.bootstrap import Estimate, Resampling
from rag_model.plugins import Registry

JudgedBy = Literal["answers", "pages", "passages"]
JUDGED_BY: tuple[JudgedBy, ...] = get_args(JudgedBy)
AnswerKind = Literal["spans", "patterns", "labels", "texts", "clues"]
ANSWER_KINDS: tuple[AnswerKind, ...] = get_args(AnswerKind)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_NAME_AT_CUTOFF = re.compile(rf"({_NAME.pattern})@([1-9][0-9]{{0,5}})")

# The prediction and its gold answers -> a value in [0, 1]; None: the measure does not apply.
AnswerFunction: TypeAlias = Callable[[str, Sequence[str]], float | None]
# The predictions and the gold answers of each -> the metric; None: there is nothing to measure.
CorpusFunction: TypeAlias = Callable[[Sequence[str], Sequence[Sequence[str]], Resampling], Estimate | None]


@dataclass(frozen=True, slots=True)
class Ranking:
    """The ranked results of one question with its relevance judgements."""

    results: tuple[str, ...]  # distinct ids of pages or passages, best first
    # Id -> grade; 0 or absent: not relevant. If questions are judged by answers, only the retrieved
    # passages have a grade: 1 if the passage holds an answer, else 0.
    grades: Mapping[str, int]


def report_no_cutoff(depth: int, judged_by: JudgedBy) -> Sequence[int]:
    """Return no cutoffs, for a measure that is computed only where a recipe names it."""
    return ()


@dataclass(frozen=True, slots=True)
class RankingMeasure:
    """A measure of ranked results at a cutoff."""

    # Rankings and cutoff -> one value in [0, 1] per ranking, which depends on nothing else.
    compute: Callable[[Sequence[Ranking], int], Sequence[float]]
    # Depth of the search and judgement -> the cutoffs, at most the depth or fixed, that reports list.
    report_cutoffs: Callable[[int, JudgedBy], Sequence[int]] = report_no_cutoff
    # True: needs all relevant ids, which are unknown if judged by answers
    needs_qrels: bool = False
    listed_apart: tuple[JudgedBy, ...] = ()  # judgements for which reports list it under `ranks`
    # of the code; part of the identity of an evaluation with an installed measure
    version: str = "1"


@dataclass(frozen=True, slots=True)
class AnswerMeasure:
    """A measure of one answer, with a function for each kind of answers that it applies to."""

    functions: Mapping[AnswerKind, AnswerFunction]
    version: str = "1"  # as in `RankingMeasure`


@dataclass(frozen=True, slots=True)
class CorpusMeasure:
    """A measure of a set of answers, which is not the mean of values of single answers."""

    kinds: tuple[AnswerKind, ...]  # kinds of answers that it applies to
    compute: CorpusFunction
    version: str = "1"  # as in `RankingMeasure`


Measure: TypeAlias = RankingMeasure | AnswerMeasure | CorpusMeasure
_ANSWERS, _NGRAMS, _RETRIEVAL = (f"rag_model.evaluation.measures.{name}" for name in ("answers", "ngrams", "retrieval"))

# Reports follow this order. The first answer measure of a kind decides whether an answer is correct.
MEASURES: Registry[Measure] = Registry(
    "measure",
    "bookwheel.measures",
    {
        "Success": f"{_RETRIEVAL}:SUCCESS",
        "nDCG": f"{_RETRIEVAL}:NDCG",
        "R": f"{_RETRIEVAL}:RECALL",
        "RR": f"{_RETRIEVAL}:RECIPROCAL_RANK",
        "EM": f"{_ANSWERS}:EXACT_MATCH",
        "Acc-3way": f"{_ANSWERS}:ACCURACY_3WAY",
        "Acc-2way": f"{_ANSWERS}:ACCURACY_2WAY",
        "AC": f"{_ANSWERS}:STRICT_ACCURACY",
        "Q-BLEU-1": f"{_NGRAMS}:Q_BLEU_1",
        "ROUGE-L": f"{_ANSWERS}:ROUGE_L",
        "F1": f"{_ANSWERS}:TOKEN_F1",
        "BLEU-1": f"{_ANSWERS}:BLEU_1",
        "BLEU-4": f"{_ANSWERS}:BLEU_4",
        "distinct-3": f"{_NGRAMS}:DISTINCT_3",
        "gold-distinct-3": f"{_NGRAMS}:GOLD_DISTINCT_3",
    },
)


@cache
def load_measures() -> Mapping[str, Measure]:
    """Load every measure by its name: the built-in ones, then those of installed packages.

    Raises:
        InputError: an installed measure cannot be imported, is not a measure, or has an invalid
            name.
    """
    measures: dict[str, Measure] = {}
    for name in MEASURES.list_names():
        measure = MEASURES.find(name)
        if not _NAME.fullmatch(name):
            raise InputError(f"a package registers the measure {name!r}: use letters, digits, '-', '_' and '.'")
        if not isinstance(measure, Measure):
            raise InputError(
                f"the measure {name!r} of an installed package is {type(measure).__name__}: "
                "register a RankingMeasure, an AnswerMeasure or a CorpusMeasure"
            )
        measures[name] = measure
    return measures


def ranking_measures(judged_by: JudgedBy) -> dict[str, RankingMeasure]:
    """Return the measures that apply to rankings with a kind of judgement."""
    return {
        name: measure
        for name, measure in load_measures().items()
        if isinstance(measure, RankingMeasure) and not (measure.needs_qrels and judged_by == "answers")
    }


def parse_ranking_measure(text: str, judged_by: JudgedBy) -> tuple[RankingMeasure, int] | None:
    """Return measure and cutoff of a name such as `Success@20`; None if it does not apply."""
    match = _NAME_AT_CUTOFF.fullmatch(text)
    measure = None if match is None else ranking_measures(judged_by).get(match[1])
    return None if match is None or measure is None else (measure, int(match[2]))


@cache
def answer_functions(kind: AnswerKind) -> Mapping[str, AnswerFunction]:
    """Return the functions of the measures of one answer of a kind, the deciding measure first."""
    return {
        name: measure.functions[kind]
        for name, measure in load_measures().items()
        if isinstance(measure, AnswerMeasure) and kind in measure.functions
    }


def corpus_functions(kind: AnswerKind) -> dict[str, CorpusFunction]:
    """Return the functions of the measures of a set of answers of a kind."""
    return {
        name: measure.compute
        for name, measure in load_measures().items()
        if isinstance(measure, CorpusMeasure) and kind in measure.kinds
    }


def installed_versions() -> dict[str, str]:
    """Return the version of each measure of an installed package, for the identity of
    evaluations.
    """
    return {name: measure.version for name, measure in load_measures().items() if not MEASURES.is_built_in(name)}
