"""Grounding measures: citations, and whether an answer agrees with its passages.

Citation measures are those of ALCE (Gao et al. 2023, section 3):

* `cited`: whether the answer has a citation, over the answers with a statement.
* `citation-recall`: the share of statements that their cited entries together support. A statement
  without citations is not supported.
* `citation-precision`: the share of correct citations, over the answers with a citation. A citation
  is correct if its statement is supported, and the entry supports the statement alone or the other
  entries that the statement cites do not support it without the entry. A number that is not in the
  context is wrong.
* `gold-citation-precision`, `gold-citation-recall`, for questions that name passages or pages: the
  share of cited entries that hold one of these, and the share of these that was cited (of the best
  evidence set, if there are several).

ALCE's statements are sentences, as here. ALCE judges support with an entailment model, this module
with `supports`, which compares words.

Grounding measures apply to spans and patterns. A passage *holds* an answer by DPR's token match
over its text without its title, or if a pattern matches in it.

* `EM-unheld`: EM over the questions with no passage that holds a gold answer, which measures the
  knowledge in the weights. Lewis et al. 2020 (section 4.1) report 11.8 % for Natural Questions,
  where an extractive reader would have 0.
* `override`: the share of answers that neither equal nor contain a gold answer, over the questions
  with a passage that holds one. The model has read the answer and given another one.
* `supported`: the share of answers that a passage supports (`supports`), over the non-empty
  answers. It needs no gold answer, so that a service can monitor it.
* `from-passages`: the share of answers that are more likely with the passages than without,
  log p(y|x) > log p(y|question), if the model gives likelihoods. The other answers come from the
  weights. The measure applies to answers without citations, because any citation is more likely
  with passages than without.
* `override-live`: the share of answers that are neither supported nor from passages, which is the
  override rate of a service without gold answers (`serving.monitoring.overrides`). Compare it with
  `override` to interpret that rate.

No grounding measure applies to the closed book, which reads no passages.
"""

from collections.abc import Iterable, Mapping, Sequence

from rag_model.evaluation.answers.readings import ReadContextEntry, Reading
from rag_model.evaluation.matching import supports
from rag_model.evaluation.questions import Question
from rag_model.evaluation.retrieval.judging import answer_matcher
from rag_model.reading.citations import Statement

CITES_ANY, CITATION_RECALL, CITATION_PRECISION = "cited", "citation-recall", "citation-precision"
GOLD_CITATION_RECALL, GOLD_CITATION_PRECISION = "gold-citation-recall", "gold-citation-precision"
CITATION_MEASURES = (CITES_ANY, CITATION_RECALL, CITATION_PRECISION, GOLD_CITATION_RECALL, GOLD_CITATION_PRECISION)


def measure_citations(question: Question, reading: Reading) -> Mapping[str, float]:
    """Return the citation measures that apply to one answer.

    The result is empty if the context was not numbered or the answer has no statement.
    """
    statements = [statement for statement in reading.statements if statement.text.strip()]
    if not reading.context or not statements:
        return {}
    verdicts = [_check_citations(statement, reading, question) for statement in statements]
    values = {CITES_ANY: float(any(statement.cited for statement in statements))}
    values[CITATION_RECALL] = sum(
        _is_supported(statement, statement.cited, reading, question) for statement in statements
    ) / len(statements)
    if citations := [is_right for marks in verdicts for is_right in marks]:
        values[CITATION_PRECISION] = sum(citations) / len(citations)
    return {**values, **_gold_measures(question, reading, statements)}


def _check_citations(statement: Statement, reading: Reading, question: Question) -> list[bool]:
    """Return for each citation whether it is correct; unknown numbers are wrong."""
    is_supported = _is_supported(statement, statement.cited, reading, question)
    verdicts = [
        is_supported
        and (
            _is_supported(statement, [number], reading, question)
            or not _is_supported(
                statement,
                [other_number for other_number in statement.cited if other_number != number],
                reading,
                question,
            )
        )
        for number in statement.cited
    ]
    return verdicts + [False] * len(statement.unknown)


def _is_supported(statement: Statement, numbers: Sequence[int], reading: Reading, question: Question) -> bool:
    texts = [f"{entry.title} {entry.text}" for entry in map(reading.context_entry, numbers)]
    return supports(texts, statement.text, question.text, question.answers)


def _gold_measures(question: Question, reading: Reading, statements: Iterable[Statement]) -> dict[str, float]:
    gold_sets = [set(question.passages)] if question.passages else [set(pages) for pages in question.evidence]
    cited_entries = [
        reading.context_entry(number)
        for number in dict.fromkeys(number for statement in statements for number in statement.cited)
    ]
    if not gold_sets or not cited_entries:
        return dict.fromkeys([GOLD_CITATION_RECALL], 0.0) if gold_sets else {}
    entry_names = [_entry_ids(entry, reading, pages=not question.passages) for entry in cited_entries]
    all_gold = set().union(*gold_sets)
    return {
        GOLD_CITATION_PRECISION: sum(not all_gold.isdisjoint(names) for names in entry_names) / len(entry_names),
        GOLD_CITATION_RECALL: max(len(gold_set & set().union(*entry_names)) / len(gold_set) for gold_set in gold_sets),
    }


def _entry_ids(entry: ReadContextEntry, reading: Reading, *, pages: bool) -> set[str]:
    passages = [reading.passages[position] for position in entry.places]
    return {passage.page_id if pages else passage.id for passage in passages}


EM_UNHELD, OVERRIDE, SUPPORTED, FROM_PASSAGES = "EM-unheld", "override", "supported", "from-passages"
OVERRIDE_LIVE = "override-live"
GROUNDING_MEASURES = (EM_UNHELD, OVERRIDE, SUPPORTED, FROM_PASSAGES, OVERRIDE_LIVE)


def measure_grounding(
    question: Question, reading: Reading, right: float, *, patterns: bool = False
) -> Mapping[str, float]:
    """Return the grounding measures that apply to one answer; `right` is its EM.

    Raises:
        InputError: a gold pattern is not a regular expression.
    """
    if not reading.passages:
        return {}
    measures: dict[str, float] = {}
    matches = answer_matcher(question, patterns=patterns)
    if question.answers and any(matches(passage.text) for passage in reading.passages):
        measures[OVERRIDE] = float(not right and not matches(reading.answer))
    elif question.answers:
        measures[EM_UNHELD] = right
    if reading.answer.strip():
        measures[SUPPORTED] = float(
            any(supports([passage.text], reading.answer, question.text) for passage in reading.passages)
        )
    cites = any(statement.cited or statement.unknown for statement in reading.statements)
    if reading.log_likelihood is not None and reading.closed_book is not None and not cites:
        measures[FROM_PASSAGES] = float(reading.log_likelihood > reading.closed_book)
    if SUPPORTED in measures and FROM_PASSAGES in measures:
        measures[OVERRIDE_LIVE] = float(not measures[SUPPORTED] and not measures[FROM_PASSAGES])
    return measures
