"""Whether an answer agrees with the passages that it was read from: measures of one answer, for spans and patterns.

A passage *holds* an answer by DPR's token match over its text, its title left out; patterns are searched in it.

* `EM-unheld`: EM, over the questions of which no passage read holds a gold answer: what the model knew by itself.
  Lewis et al. 2020 (section 4.1) report 11.8 % for Natural Questions, where an extractive reader would have 0.
* `override`: the share of answers that neither are nor contain a gold answer, over the questions of which a passage
  holds one: the model had read the answer and gave another one.
* `supported`: the share of answers that a passage read supports (`support`), over the answers that are not empty. It
  needs no gold answer, so a service can watch it.
* `from-passages`: the share of answers that the passages make more likely than the question alone does, where the model
  tells likelihoods: log p(y|x) > log p(y|question). The others come from the memory of the weights. It applies to
  answers without citations: closed book there is nothing to cite, so passages make any citation likelier.
* `override-live`: the share of answers that are neither supported nor from passages: the override rate of a service,
  which has no gold answer (`serving.watching.grounding`). Beside `override` it says what that rate means here.

Closed book nothing was read, and none of them applies.
"""

from collections.abc import Mapping

from rag_model.evaluation.answers.readings import Reading
from rag_model.evaluation.answers.support import supports
from rag_model.evaluation.questions.files import Question
from rag_model.evaluation.retrieval.retrieved import matcher

UNHELD, OVERRIDE, SUPPORTED, FROM_PASSAGES = "EM-unheld", "override", "supported", "from-passages"
OVERRIDE_LIVE = "override-live"
GROUNDS = (UNHELD, OVERRIDE, SUPPORTED, FROM_PASSAGES, OVERRIDE_LIVE)


def grounds(question: Question, reading: Reading, right: float, *, patterns: bool = False) -> Mapping[str, float]:
    """Return the measures above that apply to one answer; `right` is its EM.

    Raises:
        InputError: a gold answer is no regular expression, where they are patterns.
    """
    if not reading.passages:
        return {}
    found: dict[str, float] = {}
    holds = matcher(question, patterns=patterns)
    if question.answers and any(holds(passage.text) for passage in reading.passages):
        found[OVERRIDE] = float(not right and not holds(reading.answer))
    elif question.answers:
        found[UNHELD] = right
    if reading.answer.strip():
        found[SUPPORTED] = float(any(supports([one.text], reading.answer, question.text) for one in reading.passages))
    cites = any(one.cited or one.unknown for one in reading.statements)
    if reading.log_likelihood is not None and reading.closed_book is not None and not cites:
        found[FROM_PASSAGES] = float(reading.log_likelihood > reading.closed_book)
    if SUPPORTED in found and FROM_PASSAGES in found:
        found[OVERRIDE_LIVE] = float(not found[SUPPORTED] and not found[FROM_PASSAGES])
    return found
