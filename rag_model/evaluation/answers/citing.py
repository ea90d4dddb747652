"""Citation recall and precision of one answer, as ALCE defines them (Gao et al. 2023, section 3), by `support`.

* `cited`: whether the answer cites anything, over the answers that state something.
* `citation-recall`: the share of statements that what they cite supports together; one without citations is not
  supported.
* `citation-precision`: the share of citations that are right, over the answers that cite: its statement is supported,
  and the cited entry supports it alone, or the others of the statement do not support it without the entry. A number
  that the context does not have is wrong.
* `gold-citation-precision`, `gold-citation-recall`, where the question names passages or pages: the share of entries
  cited that hold one of them, and the share of them that was cited (of the best set of pages, where there are several).

ALCE's statements are sentences, as here. Its judge is a model of entailment; here it is words.
"""

from collections.abc import Iterable, Mapping, Sequence

from rag_model.evaluation.answers.readings import ReadExcerpt, Reading
from rag_model.evaluation.answers.support import supports
from rag_model.evaluation.questions.files import Question
from rag_model.reading.citations import Statement

CITED, RECALL, PRECISION = "cited", "citation-recall", "citation-precision"
GOLD_RECALL, GOLD_PRECISION = "gold-citation-recall", "gold-citation-precision"
CITING = (CITED, RECALL, PRECISION, GOLD_RECALL, GOLD_PRECISION)


def citing(question: Question, reading: Reading) -> Mapping[str, float]:
    """Return the measures above that apply to one answer; none where no context was numbered, or nothing is stated."""
    told = [one for one in reading.statements if one.text.strip()]
    if not reading.context or not told:
        return {}
    right = [_right(one, reading, question) for one in told]
    found = {CITED: float(any(one.cited for one in told))}
    found[RECALL] = sum(_supported(one, one.cited, reading, question) for one in told) / len(told)
    if citations := [value for values in right for value in values]:
        found[PRECISION] = sum(citations) / len(citations)
    return {**found, **_gold(question, reading, told)}


def _right(statement: Statement, reading: Reading, question: Question) -> list[bool]:
    """Return of each citation whether it is right; those of unknown numbers are wrong."""
    whole = _supported(statement, statement.cited, reading, question)
    right = [
        whole
        and (
            _supported(statement, [number], reading, question)
            or not _supported(statement, [other for other in statement.cited if other != number], reading, question)
        )
        for number in statement.cited
    ]
    return right + [False] * len(statement.unknown)


def _supported(statement: Statement, numbers: Sequence[int], reading: Reading, question: Question) -> bool:
    texts = [f"{one.title} {one.text}" for one in map(reading.excerpt, numbers)]
    return supports(texts, statement.text, question.text, question.answers)


def _gold(question: Question, reading: Reading, told: Iterable[Statement]) -> dict[str, float]:
    wanted = [set(question.passages)] if question.passages else [set(pages) for pages in question.evidence]
    cited = [reading.excerpt(number) for number in dict.fromkeys(number for one in told for number in one.cited)]
    if not wanted or not cited:
        return dict.fromkeys([GOLD_RECALL], 0.0) if wanted else {}
    names = [_names(one, reading, pages=not question.passages) for one in cited]
    every = set().union(*wanted)
    return {
        GOLD_PRECISION: sum(not every.isdisjoint(some) for some in names) / len(names),
        GOLD_RECALL: max(len(one & set().union(*names)) / len(one) for one in wanted),
    }


def _names(excerpt: ReadExcerpt, reading: Reading, *, pages: bool) -> set[str]:
    shown = [reading.passages[place] for place in excerpt.places]
    return {one.page_id if pages else one.id for one in shown}
