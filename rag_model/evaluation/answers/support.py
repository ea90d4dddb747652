"""Whether texts support a statement: the rule that stands in for a model of entailment.

ALCE (Gao et al. 2023, "Enabling Large Language Models to Generate Text with Citations") asks a model of natural
language inference. Here a text supports a statement

* that holds a gold answer, if it holds one that the statement holds, by DPR's token match;
* otherwise, if it holds the statement word for word, or every number of it and at least three quarters of its other key
  tokens, in any order. Key tokens are those of letters and digits that are neither stop words nor in the question.

So words decide, not meaning: a text that denies the statement supports it too, and one that says it in other words does
not. Several texts support a statement if they do so together.
"""

import math
from collections.abc import Iterable, Sequence

from rag_model.evaluation.questions.match import Answers, tokens

_SHARE = 0.75  # of the key tokens that are no numbers
_STOP = (
    "a about after all also an and any are as at be because been before but by can could did do does for from had has "
    "have he her his how i if in into is it its may more most no not of on or other our over s she so some such t than "
    "that the their them then there these they this those to under up was we were what when where which while who whom "
    "whose why will with would you your"
)
_COMMON = frozenset(_STOP.split())


def key_tokens(statement: str, question: str = "") -> list[str]:
    """Return the tokens of letters and digits that are neither stop words nor in the question, each once.

    >>> key_tokens("It was published in 1945 by Secker.", "Who published it?")
    ['1945', 'secker']
    """
    common = _COMMON.union(tokens(question))
    return [token for token in dict.fromkeys(tokens(statement)) if token not in common and token.isalnum()]


def supports(texts: Sequence[str], statement: str, question: str = "", golds: Iterable[str] = ()) -> bool:
    """Return whether texts support a statement together, by the rule above; False without texts.

    >>> supports(["In 1945 it was first published."], "It was published in 1945.", "When was it published?")
    True
    """
    if not texts:
        return False
    said = [gold for gold in golds if Answers([gold]).are_in(statement)]
    held = Answers(said or [statement])
    if any(held.are_in(text) for text in texts):
        return True
    return not said and _holds_keys(texts, key_tokens(statement, question))


def _holds_keys(texts: Sequence[str], keys: Sequence[str]) -> bool:
    known = {token for text in texts for token in tokens(text)}
    numbers = [key for key in keys if key.isnumeric()]
    words = [key for key in keys if not key.isnumeric()]
    found = sum(word in known for word in words)
    return bool(keys) and known.issuperset(numbers) and found >= math.ceil(_SHARE * len(words))
