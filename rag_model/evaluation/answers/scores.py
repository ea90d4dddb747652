"""The measures of a set of answers, with their confidence intervals.

The kind of the answers selects the measures: spans (Natural Questions, TriviaQA, WebQuestions),
patterns (CuratedTREC), labels (FEVER), texts (MS MARCO), or clues, which are questions written for
a given entity (Jeopardy). Spans and patterns also have grounding measures; texts and clues also
have BLEU and n-gram diversity. Questions with evidence also have the measures of KILT.

The citation measures are those of ALCE (Gao et al. 2023, section 3):

* `cited`: the share of the answers with a statement that have a citation.
* `citation-recall`: the share of statements that are supported by all their cited entries together.
  A statement without citations is not supported.
* `citation-precision`: the share of correct citations, over the answers with a citation. A citation
  of an entry is correct if the cited entries together support the statement, and this entry either
  supports it alone or cannot be left out. A number that is not in the context is an incorrect
  citation.
* `gold-citation-precision`, for questions with gold passages or pages: the share of the cited
  entries that contain a gold passage or page. `gold-citation-recall`: the share of the gold
  passages or pages that were cited. If there are several evidence sets, the best one counts.

Statements are sentences, as in ALCE. ALCE judges support with an entailment model; this module uses
`supports_statement`, which compares words.

Grounding measures apply to spans and patterns. A passage *contains* an answer if its text, without
the title, contains the tokens of the answer (as in DPR) or matches the answer's pattern.

* `EM-unheld`: EM over the questions for which no passage contains a gold answer. It measures the
  knowledge in the model's weights. Lewis et al. 2020 (section 4.1) report 11.8 % for Natural
  Questions, where an extractive reader would have 0.
* `override`: the share of answers that neither equal nor contain a gold answer, over the questions
  for which a passage contains a gold answer. The model has read it but answered differently.
* `supported`: the share of answers that a passage supports (`supports_statement`), over the
  non-empty answers. This measure needs no gold answers, so a service can monitor it.
* `from-passages`: the share of answers that are more likely with the passages than without,
  log p(y|x) > log p(y|question), if the model computes likelihoods. All other answers come from the
  model's weights. The measure applies only to answers without citations, because any citation is
  more likely with passages than without.
* `override-live`: the share of answers that are neither supported nor from passages. A service
  without gold answers monitors this rate (`serving.monitoring.overrides`); comparing it here with
  `override` shows how to interpret it.

Grounding measures do not apply to the closed book, which has no passages.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rag_model.errors import UsageError
from rag_model.evaluation.answers.readings import ReadContextEntry, Reading
from rag_model.evaluation.bootstrap import (
    DEFAULT_RESAMPLING,
    Estimate,
    Resampling,
    estimate_difference,
    estimate_mean,
)
from rag_model.evaluation.matching import compile_pattern, supports_statement
from rag_model.evaluation.measures.answers import FEVER_3WAY, label_match
from rag_model.evaluation.measures.measure import AnswerKind, list_answer_functions, list_corpus_functions
from rag_model.evaluation.measures.retrieval import r_precision, recall_at
from rag_model.evaluation.questions import Question
from rag_model.evaluation.retrieval.judging import build_answer_matcher
from rag_model.reading.answer import Statement

CITES_ANY, CITATION_RECALL, CITATION_PRECISION = "cited", "citation-recall", "citation-precision"
GOLD_CITATION_RECALL, GOLD_CITATION_PRECISION = "gold-citation-recall", "gold-citation-precision"
CITATION_MEASURES = (CITES_ANY, CITATION_RECALL, CITATION_PRECISION, GOLD_CITATION_RECALL, GOLD_CITATION_PRECISION)
EM_UNHELD, OVERRIDE, SUPPORTED, FROM_PASSAGES = "EM-unheld", "override", "supported", "from-passages"
OVERRIDE_LIVE = "override-live"
GROUNDING_MEASURES = (EM_UNHELD, OVERRIDE, SUPPORTED, FROM_PASSAGES, OVERRIDE_LIVE)
_EXTRACTIVE_KINDS = ("spans", "patterns")  # kinds of answers that a passage may contain verbatim
_KILT_DEPTH = 5  # cutoff of KILT's recall@k


def measure_citations(question: Question, reading: Reading) -> Mapping[str, float]:
    """Return the citation measures that apply to one answer.

    The result is empty if the prompt had no numbered context or the answer has no statement.
    """
    statements = [statement for statement in reading.statements if statement.text.strip()]
    if not reading.context or not statements:
        return {}
    verdict_lists = [_check_citations(statement, reading, question) for statement in statements]
    citation_measures = {CITES_ANY: float(any(statement.cited for statement in statements))}
    citation_measures[CITATION_RECALL] = sum(
        _is_supported(statement, statement.cited, reading, question) for statement in statements
    ) / len(statements)
    if verdicts := [is_correct for citation_verdicts in verdict_lists for is_correct in citation_verdicts]:
        citation_measures[CITATION_PRECISION] = sum(verdicts) / len(verdicts)
    return {**citation_measures, **_measure_gold_citations(question, reading, statements)}


def _check_citations(statement: Statement, reading: Reading, question: Question) -> list[bool]:
    """Return whether each citation of a statement is correct, as in the module's docstring."""
    is_supported = _is_supported(statement, statement.cited, reading, question)
    citation_verdicts = [
        is_supported
        and (
            _is_supported(statement, [cited_number], reading, question)
            or not _is_supported(
                statement,
                [other_number for other_number in statement.cited if other_number != cited_number],
                reading,
                question,
            )
        )
        for cited_number in statement.cited
    ]
    return citation_verdicts + [False] * len(statement.unknown)


def _is_supported(statement: Statement, cited_numbers: Sequence[int], reading: Reading, question: Question) -> bool:
    texts = [f"{entry.title} {entry.text}" for entry in map(reading.get_entry, cited_numbers)]
    return supports_statement(texts, statement.text, question.text, question.answers)


def _measure_gold_citations(question: Question, reading: Reading, statements: Iterable[Statement]) -> dict[str, float]:
    gold_sets = [set(question.passages)] if question.passages else [set(pages) for pages in question.evidence]
    cited_entries = [
        reading.get_entry(cited_number)
        for cited_number in dict.fromkeys(cited_number for statement in statements for cited_number in statement.cited)
    ]
    if not gold_sets or not cited_entries:
        return dict.fromkeys([GOLD_CITATION_RECALL], 0.0) if gold_sets else {}
    entry_ids = [_list_entry_ids(entry, reading, by_page=not question.passages) for entry in cited_entries]
    all_gold_ids = set().union(*gold_sets)
    return {
        GOLD_CITATION_PRECISION: sum(not all_gold_ids.isdisjoint(ids) for ids in entry_ids) / len(entry_ids),
        GOLD_CITATION_RECALL: max(len(gold_set & set().union(*entry_ids)) / len(gold_set) for gold_set in gold_sets),
    }


def _list_entry_ids(entry: ReadContextEntry, reading: Reading, *, by_page: bool) -> set[str]:
    passages = [reading.passages[position] for position in entry.places]
    return {passage.page_id if by_page else passage.id for passage in passages}


def measure_grounding(
    question: Question, reading: Reading, em: float, *, patterns: bool = False
) -> Mapping[str, float]:
    """Return the grounding measures that apply to one answer; `em` is its exact match, 0 or 1.

    Raises:
        InputError: a gold pattern is not a regular expression.
    """
    if not reading.passages:
        return {}
    measures: dict[str, float] = {}
    has_gold_answer = build_answer_matcher(question, patterns=patterns)
    if question.answers and any(has_gold_answer(passage.text) for passage in reading.passages):
        measures[OVERRIDE] = float(not em and not has_gold_answer(reading.answer))
    elif question.answers:
        measures[EM_UNHELD] = em
    if reading.answer.strip():
        measures[SUPPORTED] = float(
            any(supports_statement([passage.text], reading.answer, question.text) for passage in reading.passages)
        )
    has_citations = any(statement.cited or statement.unknown for statement in reading.statements)
    if reading.log_likelihood is not None and reading.closed_book is not None and not has_citations:
        measures[FROM_PASSAGES] = float(reading.log_likelihood > reading.closed_book)
    if SUPPORTED in measures and FROM_PASSAGES in measures:
        measures[OVERRIDE_LIVE] = float(not measures[SUPPORTED] and not measures[FROM_PASSAGES])
    return measures


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """One question, the model's answer to it, and the measures of the answer."""

    question: Question
    reading: Reading
    measures: Mapping[str, float]  # value by name, for the measures that apply to the question


def score_answer(question: Question, reading: Reading, kind: AnswerKind = "spans") -> ScoredAnswer:
    """Compare one answer with the gold answers, and its passages with the question's evidence.

    Raises:
        InputError: a pattern is malformed, or exceeds the time limit of a match.
        MissingExtraError: a package that a measure of this kind needs is not installed.
    """
    values = {name: compute(reading.answer, question.answers) for name, compute in list_answer_functions(kind).items()}
    measures = {name: measure for name, measure in values.items() if measure is not None}
    passage_measures = {**_compute_kilt_measures(question, reading, measures), **measure_citations(question, reading)}
    if kind in _EXTRACTIVE_KINDS:
        passage_measures |= measure_grounding(
            question, reading, measures[get_deciding_measure(kind)], patterns=kind == "patterns"
        )
    return ScoredAnswer(question, reading, {**measures, **passage_measures})


def _compute_kilt_measures(question: Question, reading: Reading, measures: Mapping[str, float]) -> dict[str, float]:
    if not question.evidence:
        return {}
    precision = r_precision(reading.page_ids, question.evidence)
    kilt_values = {f"KILT-{name}": measure if precision == 1 else 0.0 for name, measure in measures.items()}
    recall = recall_at(reading.page_ids, question.evidence, _KILT_DEPTH)
    return {"R-precision": precision, f"recall@{_KILT_DEPTH}": recall, **kilt_values}


def get_deciding_measure(kind: AnswerKind) -> str:
    """Return the measure that decides whether answers of this kind are correct."""
    return next(iter(list_answer_functions(kind)))


def list_measures(kind: AnswerKind, *, evidence: bool) -> list[str]:
    """Return the names of all measures that answers of this kind can have.

    Args:
        kind: the kind of the answers.
        evidence: whether any question names evidence pages.
    """
    answer_names = list(list_answer_functions(kind))
    kilt_names = (
        ["R-precision", f"recall@{_KILT_DEPTH}", *(f"KILT-{name}" for name in answer_names)] if evidence else []
    )
    grounding_names = GROUNDING_MEASURES if kind in _EXTRACTIVE_KINDS else ()
    return [*answer_names, *kilt_names, *CITATION_MEASURES, *grounding_names, *list_corpus_functions(kind)]


def check_gold_answers(questions: Sequence[Question], kind: AnswerKind) -> None:
    """Check, before a model answers for hours, that the questions have gold answers of this kind.

    Raises:
        UsageError: no question has an answer, or the kind is labels and no answer is a FEVER label.
        InputError: a pattern is malformed.
        MissingExtraError: a package that a measure of this kind needs is not installed.
    """
    golds = [gold for question in questions for gold in question.answers]
    if not golds:
        raise UsageError("no question has a gold answer: give a file with answers")
    if kind == "patterns":
        for gold in golds:
            compile_pattern(gold)
    if kind == "labels" and all(label_match(gold, [gold], FEVER_3WAY) is None for gold in golds):
        raise UsageError(f"no question has one of the labels {', '.join(FEVER_3WAY)}: measure its answers as spans")
    for measure_answer in list_answer_functions(kind).values():
        measure_answer("a", ["a"])
    for measure_corpus in list_corpus_functions(kind).values():
        measure_corpus(["a"], [["a"]], Resampling(draws=1))


def estimate_measures(
    scored_answers: Sequence[ScoredAnswer], kind: AnswerKind = "spans", resampling: Resampling = DEFAULT_RESAMPLING
) -> dict[str, Estimate]:
    """Return each measure of a set of answers, in [0, 1], with its interval.

    `Estimate.n` is the number of questions to which a measure applies. FEVER's two-way accuracy
    applies to questions with one of two labels, and KILT's measures to questions with evidence.
    Texts and clues also have BLEU-1, BLEU-4, distinct-3 (the ratio of distinct to all trigrams of
    the answers) and gold-distinct-3 (the same ratio for the first gold answer of each question).

    Raises:
        UsageError: there are no answers.
    """
    if not scored_answers:
        raise UsageError("there are no answers to measure: give at least one question")
    values_by_measure: dict[str, list[float]] = {}
    for answer in scored_answers:
        for name, measure in answer.measures.items():
            values_by_measure.setdefault(name, []).append(measure)
    means = {name: estimate_mean(column, resampling) for name, column in values_by_measure.items()}
    predictions, golds = (
        [answer.reading.answer for answer in scored_answers],
        [answer.question.answers for answer in scored_answers],
    )
    estimates = {name: compute(predictions, golds, resampling) for name, compute in list_corpus_functions(kind).items()}
    return {**means, **{name: estimate for name, estimate in estimates.items() if estimate is not None}}


def compare_answers(
    after: Sequence[ScoredAnswer], before: Sequence[ScoredAnswer], resampling: Resampling = DEFAULT_RESAMPLING
) -> dict[str, Estimate]:
    """Return the mean difference of each measure, `after` minus `before`, over the questions that
    are in both.

    Questions are joined by id. Corpus measures, such as BLEU, are omitted, because they have no
    value per question.
    """
    measures_before_by_question = {answer.question.id: answer.measures for answer in before}
    measure_pairs = [
        (answer.measures, measures_before_by_question[answer.question.id])
        for answer in after
        if answer.question.id in measures_before_by_question
    ]
    names = dict.fromkeys(
        name for after_measures, before_measures in measure_pairs for name in after_measures if name in before_measures
    )
    difference_by_measure = {}
    for name in names:
        value_pairs = [
            (after_measures[name], before_measures[name])
            for after_measures, before_measures in measure_pairs
            if name in after_measures and name in before_measures
        ]
        after_values, before_values = zip(*value_pairs, strict=True)
        difference_by_measure[name] = estimate_difference(after_values, before_values, resampling)
    return difference_by_measure
