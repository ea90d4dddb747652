r"""Whether live answers rest on their passages, without a gold answer.

Two measures of an answer y to a question x, for which the passages z_1..k were read:

    unsupported(x, y) = no z_i supports y                                     (`evaluation.answers.support`)
    override(x, y)    = unsupported(x, y) and log p(y|x) >= log p(y|x, z_1..k)

An evaluation counts an override where a passage holds a gold answer and the model gives another one. Live there is no
gold answer, so likelihoods decide. The probabilities of all answers to a question sum to 1: what the passages take from
y they give to other answers. So where they make y less likely, they speak for another answer, and the memory of the
weights spoke over them. An unsupported answer that the passages make likelier was drawn from them: it is wrong, or says
it in other words, and is no override.

`unsupported` needs texts alone. `override` needs a model that tells the likelihood of a given text. An endpoint does
not, so it is asked the question closed book, once, and the two answers are compared:

    override(x, y) = unsupported(x, y) and same(y, closed book(x))

Two answers are the same if in SQuAD's normal form, as in EM, one's words stand in the other in a row. Answers whose
wording differs are not the same, so this rate is a lower one than that by likelihoods.
"""

from rag_model.evaluation.answers.measures import normalise
from rag_model.evaluation.answers.support import supports
from rag_model.reading.answer import Answer
from rag_model.reading.confidence import Scores

GIVEN, EMPTY, ABSTAINED = OUTCOMES = ("given", "empty", "abstained")


def outcome_of(answer: Answer) -> str:
    """Return which of `OUTCOMES` an answer is."""
    if answer.abstained:
        return ABSTAINED
    return GIVEN if answer.plain.strip() else EMPTY


def texts_read(answer: Answer) -> list[str]:
    """Return the texts that an answer was read from; none closed book."""
    return [one.text for one in answer.context] or [one.hit.passage.text for one in answer.support if one.hit.row >= 0]


def is_unsupported(answer: Answer) -> bool:
    """Return whether passages were read and none of them supports the answer; takes about a millisecond."""
    texts = texts_read(answer)
    return bool(texts) and not any(supports([text], answer.plain, answer.question) for text in texts)


def is_repeated(answer: Answer, alone: Answer) -> bool:
    """Return whether the closed-book answer `alone` is the same: one's words are in the other's; an empty one is not.

    >>> is_repeated(Answer("?", "It is the Eiffel Tower.", None, ()), Answer("?", "Eiffel tower", None, ()))
    True
    """
    said, known = normalise(answer.plain), normalise(alone.plain)
    return bool(said and known) and (f" {said} " in f" {known} " or f" {known} " in f" {said} ")


def is_remembered(reader: Scores, answer: Answer) -> bool:
    """Return whether log p(y|x) >= log p(y|x, z_1..k): the model is as sure of an answer without its passages.

    Citations are left out of y, since closed book there is nothing to cite; so `reader` must not ask for them.

    Raises:
        UsageError: the model does not tell likelihoods.
    """
    read = [one.hit for one in answer.support if one.hit.row >= 0]
    alone, beside = reader.log_likelihood([answer.question] * 2, [(), read], [answer.plain] * 2)
    return alone >= beside
