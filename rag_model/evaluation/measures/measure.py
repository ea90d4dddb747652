"""The three kinds of measures, and their registry, which installed packages can extend.

A `RankingMeasure` evaluates the ranked results of a retriever at a cutoff and is named `NAME@k`,
such as `Success@20`. An `AnswerMeasure` compares one answer with its gold answers. A
`CorpusMeasure` has one value for a set of answers, such as BLEU. An installed package registers a
measure through the entry point group `bookwheel.measures`; the name of the entry point is the name
of the measure.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from numbers import Real
from typing import Any, Literal, TypeAlias, get_args

from rag_model.errors import format_error
from rag_model.evaluation.bootstrap import Estimate, Resampling
from rag_model.plugins import Registry

JudgedBy = Literal["answers", "pages", "passages"]
JUDGED_BY: tuple[JudgedBy, ...] = get_args(JudgedBy)
AnswerKind = Literal["spans", "patterns", "labels", "texts", "clues"]
ANSWER_KINDS: tuple[AnswerKind, ...] = get_args(AnswerKind)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_NAME_AT_CUTOFF = re.compile(rf"({_NAME.pattern})@([1-9][0-9]{{0,5}})")

# A function of a prediction and its gold answers. It returns a value in [0, 1], or None if the
# measure does not apply.
AnswerFunction: TypeAlias = Callable[[str, Sequence[str]], float | None]
# A function of all predictions and the gold answers of each one. It returns the metric, or None if
# the measure does not apply.
CorpusFunction: TypeAlias = Callable[[Sequence[str], Sequence[Sequence[str]], Resampling], Estimate | None]
_ANSWERS_MODULE, _RETRIEVAL_MODULE = (f"rag_model.evaluation.measures.{name}" for name in ("answers", "retrieval"))
_TOLERANCE = 1e-9  # allowed rounding error beyond the range from 0 to 1


@dataclass(frozen=True, slots=True)
class Ranking:
    """The ranked results of one question, with its relevance judgements."""

    results: tuple[str, ...]  # distinct ids of pages or passages, best first
    # Grade by id; 0 or no grade means not relevant. If questions are judged by answers, only
    # retrieved passages have a grade: 1 if the passage contains an answer, else 0.
    grades: Mapping[str, int]


def return_no_cutoffs(depth: int, judged_by: JudgedBy) -> Sequence[int]:
    """Return no cutoffs, for a measure that is computed only if a recipe names it."""
    return ()


@dataclass(frozen=True, slots=True)
class RankingMeasure:
    """A measure of ranked results at a cutoff."""

    # A function of rankings and a cutoff. It returns one value in [0, 1] per ranking; a value must
    # not depend on other rankings.
    compute: Callable[[Sequence[Ranking], int], Sequence[float]]
    # A function of the search depth and the kind of judgement. It returns the cutoffs that reports
    # list, from 1 to the depth. Only built-in measures may return a larger cutoff: nDCG@10 of fewer
    # than 10 passages is computed as in trec_eval.
    report_cutoffs: Callable[[int, JudgedBy], Sequence[int]] = return_no_cutoffs
    # Whether the measure needs all relevant ids, which are unknown if questions are judged by
    # answers.
    needs_qrels: bool = False
    # kinds of judgement for which reports list the measure under `ranks`
    listed_apart: tuple[JudgedBy, ...] = ()
    # Version of the code. For a measure of an installed package, it is part of an evaluation's id.
    version: str = "1"


@dataclass(frozen=True, slots=True)
class AnswerMeasure:
    """A measure of single answers, with one function per kind of answer to which it applies."""

    functions: Mapping[AnswerKind, AnswerFunction]
    version: str = "1"  # version of the code, as in `RankingMeasure`


@dataclass(frozen=True, slots=True)
class CorpusMeasure:
    """A measure of a set of answers, which is not a mean over single answers."""

    kinds: tuple[AnswerKind, ...]  # kinds of answers to which the measure applies
    compute: CorpusFunction
    version: str = "1"  # version of the code, as in `RankingMeasure`


Measure: TypeAlias = RankingMeasure | AnswerMeasure | CorpusMeasure

# Reports follow this order. The first answer measure of a kind decides whether an answer is
# correct.
MEASURES: Registry[Measure] = Registry(
    "measure",
    "bookwheel.measures",
    {
        "Success": f"{_RETRIEVAL_MODULE}:SUCCESS",
        "nDCG": f"{_RETRIEVAL_MODULE}:NDCG",
        "R": f"{_RETRIEVAL_MODULE}:RECALL",
        "RR": f"{_RETRIEVAL_MODULE}:RECIPROCAL_RANK",
        "EM": f"{_ANSWERS_MODULE}:EXACT_MATCH",
        "Acc-3way": f"{_ANSWERS_MODULE}:ACCURACY_3WAY",
        "Acc-2way": f"{_ANSWERS_MODULE}:ACCURACY_2WAY",
        "AC": f"{_ANSWERS_MODULE}:STRICT_ACCURACY",
        "Q-BLEU-1": f"{_ANSWERS_MODULE}:Q_BLEU_1",
        "ROUGE-L": f"{_ANSWERS_MODULE}:ROUGE_L",
        "F1": f"{_ANSWERS_MODULE}:TOKEN_F1",
        "BLEU-1": f"{_ANSWERS_MODULE}:BLEU_1",
        "BLEU-4": f"{_ANSWERS_MODULE}:BLEU_4",
        "distinct-3": f"{_ANSWERS_MODULE}:DISTINCT_3",
        "gold-distinct-3": f"{_ANSWERS_MODULE}:GOLD_DISTINCT_3",
    },
)


@cache
def load_measures() -> Mapping[str, Measure]:
    """Load every measure by its name: the built-in ones, then those of installed packages.

    The functions of an installed measure are wrapped in functions that check the results. Therefore
    no invalid value is reported or stored, and errors name the measure's package.

    Raises:
        InputError: an installed measure cannot be imported, is not a measure, or has an invalid
            name or member.
    """
    measures: dict[str, Measure] = {}
    for name in MEASURES.list_names():
        measure: Any = MEASURES.find(name)
        if not _NAME.fullmatch(name):
            raise MEASURES.wrong_plugin_error(name, "has a wrong name", "use letters, digits, '-', '_' and '.'")
        measures[name] = measure if MEASURES.is_built_in(name) else _check_installed(name, measure)
    return measures


def _check_installed(name: str, measure: Any) -> Measure:
    """Check an installed measure, and wrap its functions so that their results are checked.

    Raises:
        InputError: the object is not a measure, or one of its members is invalid.
    """
    if not isinstance(measure, Measure):
        raise MEASURES.wrong_plugin_error(
            name, f"is {type(measure).__name__}", "register a RankingMeasure, an AnswerMeasure or a CorpusMeasure"
        )
    if not isinstance(measure.version, str) or not measure.version:
        raise MEASURES.wrong_plugin_error(name, f"has the version {measure.version!r:.60}", 'use text such as "1"')
    if isinstance(measure, RankingMeasure):
        _check_allowed_values(name, measure.listed_apart, JUDGED_BY, "listed_apart")
        _check_callables(name, compute=measure.compute, report_cutoffs=measure.report_cutoffs)
        return replace(
            measure,
            compute=partial(_call_on_rankings, name, measure.compute),
            report_cutoffs=partial(_call_report_cutoffs, name, measure.report_cutoffs),
        )
    if isinstance(measure, AnswerMeasure):
        _check_allowed_values(name, measure.functions, ANSWER_KINDS, "functions")
        functions = dict(measure.functions)
        _check_callables(name, **functions)
        return replace(
            measure,
            functions={kind: partial(_call_on_answer, name, compute) for kind, compute in functions.items()},
        )
    _check_allowed_values(name, measure.kinds, ANSWER_KINDS, "kinds")
    _check_callables(name, compute=measure.compute)
    return replace(measure, compute=partial(_call_on_corpus, name, measure.compute))


def _check_allowed_values(name: str, values: Any, allowed: Sequence[str], field_name: str) -> None:
    if isinstance(values, str) or not isinstance(values, Iterable) or not set(values) <= set(allowed):
        raise MEASURES.wrong_plugin_error(name, f"has {field_name} {values!r:.80}", f"use some of {', '.join(allowed)}")


def _check_callables(name: str, **functions: Any) -> None:
    for member, function in functions.items():
        if not callable(function):
            raise MEASURES.wrong_plugin_error(name, f"has {member} {function!r:.60}", "give a function")


def _call_on_rankings(
    name: str, compute: Callable[[Sequence[Ranking], int], Any], rankings: Sequence[Ranking], cutoff: int
) -> list[float]:
    values = MEASURES.call(name, lambda: _to_list(compute(rankings, cutoff)))
    if len(values) != len(rankings):
        raise MEASURES.wrong_plugin_error(
            name, f"returned {len(values)} values for {len(rankings)} rankings", "return one number for each of them"
        )
    return [_check_value(name, ranking_value) for ranking_value in values]


def _call_report_cutoffs(
    name: str, report_cutoffs: Callable[[int, JudgedBy], Any], depth: int, judged_by: JudgedBy
) -> list[int]:
    cutoffs = MEASURES.call(name, lambda: _to_list(report_cutoffs(depth, judged_by)))
    if not all(type(cutoff) is int and 1 <= cutoff <= depth for cutoff in cutoffs):
        raise MEASURES.wrong_plugin_error(
            name,
            f"reports the cutoffs {cutoffs!r:.80} of a search of depth {depth}",
            f"return whole numbers from 1 to {depth}",
        )
    return cutoffs


def _call_on_answer(name: str, compute: Callable[..., Any], prediction: str, golds: Sequence[str]) -> float | None:
    measure_value = MEASURES.call(name, compute, prediction, golds)
    return None if measure_value is None else _check_value(name, measure_value)


def _call_on_corpus(
    name: str,
    compute: Callable[..., Any],
    predictions: Sequence[str],
    golds: Sequence[Sequence[str]],
    resampling: Resampling,
) -> Estimate | None:
    estimate = MEASURES.call(name, compute, predictions, golds, resampling)
    if estimate is None:
        return None
    if not isinstance(estimate, Estimate):
        raise MEASURES.wrong_plugin_error(name, f"returned {estimate!r:.60}", "return an Estimate, or None")
    mean, low, high = (_check_value(name, bound) for bound in (estimate.value, estimate.low, estimate.high))
    return replace(estimate, value=mean, low=low, high=high)


def _to_list(values: Any) -> list[Any]:
    if isinstance(values, str | bytes | Mapping):
        raise TypeError(f"it returned {values!r:.60} instead of a list of numbers")
    try:
        return list(values)
    except TypeError as error:
        raise TypeError(f"it returned {values!r:.60} instead of a list of numbers, {format_error(error)}") from error


def _check_value(name: str, plugin_value: Any) -> float:
    """Check a value that an installed measure returned, and return it as a float in [0, 1]."""
    number = float(plugin_value) if isinstance(plugin_value, Real) else math.nan
    if not -_TOLERANCE <= number <= 1 + _TOLERANCE:  # This condition is also true for NaN.
        raise MEASURES.wrong_plugin_error(name, f"returned {plugin_value!r:.60}", "return numbers from 0 to 1")
    return min(1.0, max(0.0, number))


def list_ranking_measures(judged_by: JudgedBy) -> dict[str, RankingMeasure]:
    """Return the ranking measures that apply to a kind of judgement, by name."""
    return {
        name: measure
        for name, measure in load_measures().items()
        if isinstance(measure, RankingMeasure) and not (measure.needs_qrels and judged_by == "answers")
    }


def parse_ranking_measure(text: str, judged_by: JudgedBy) -> tuple[RankingMeasure, int] | None:
    """Return (measure, cutoff) of a name such as `Success@20`; None if it does not apply."""
    match = _NAME_AT_CUTOFF.fullmatch(text)
    measure = None if match is None else list_ranking_measures(judged_by).get(match[1])
    return None if match is None or measure is None else (measure, int(match[2]))


@cache
def list_answer_functions(kind: AnswerKind) -> Mapping[str, AnswerFunction]:
    """Return the functions of the measures of this kind of answer, by name. The first measure
    decides whether an answer is correct.
    """
    return {
        name: measure.functions[kind]
        for name, measure in load_measures().items()
        if isinstance(measure, AnswerMeasure) and kind in measure.functions
    }


def list_corpus_functions(kind: AnswerKind) -> dict[str, CorpusFunction]:
    """Return the functions of the corpus measures for this kind of answer, by name."""
    return {
        name: measure.compute
        for name, measure in load_measures().items()
        if isinstance(measure, CorpusMeasure) and kind in measure.kinds
    }


def list_measure_versions() -> dict[str, str]:
    """Return the version of each measure of an installed package, by name; the ids of evaluations
    depend on these versions.
    """
    return {name: measure.version for name, measure in load_measures().items() if not MEASURES.is_built_in(name)}
