"""Whether live answers rest on their passages, without a gold answer.

An evaluation counts an *override* where a passage holds a gold answer and the model gives another one. Live there is
no gold answer; what can be seen is that no passage read supports what was said (`evaluation.answers.support`), as where
the memory of the weights answers against them. The evaluation's `supported` is the same measure.
"""

from rag_model.evaluation.answers.support import supports
from rag_model.reading.answer import Answer

GIVEN, EMPTY, ABSTAINED = OUTCOMES = ("given", "empty", "abstained")


def outcome_of(answer: Answer) -> str:
    """Return which of `OUTCOMES` an answer is."""
    if answer.abstained:
        return ABSTAINED
    return GIVEN if answer.plain.strip() else EMPTY


def is_overriding(answer: Answer) -> bool:
    """Return whether passages were read and none of them supports the answer; takes about a millisecond."""
    texts = [one.text for one in answer.context] or [one.hit.passage.text for one in answer.support if one.hit.row >= 0]
    return bool(texts) and not any(supports([text], answer.plain, answer.question) for text in texts)
