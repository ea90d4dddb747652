"""Q-BLEU-1: BLEU-1 that minds whether a generated question can be answered (Nema & Khapra 2018).

    Q-BLEU-1 = δ A + (1 - δ) BLEU-1,    A = Σ_i w_i 2 P(S_i) R(S_i) / (P(S_i) + R(S_i))

with P and R the precision and recall of the words of kind i: named entities, question words, other content words, and
function words. Weights and δ are those that the authors' script names for SQuAD, as the RAG paper's Jeopardy questions
are measured with a version tuned on it: .6, .2, .1, .1 and .7. A kind without a word in either text adds nothing, so a
perfect text may score below 1.

Kinds are told by the authors' rules: a named entity begins with a capital letter, a first word that is a question word
apart; what follows `what` or `which` belongs to it; function words are in a list. Two things differ. P and R are those
of the equation, while the script takes BLEU-1 both ways, with its penalty for short texts; and words are split at
whitespace, without the punctuation around them, while the script has the Penn Treebank tokenizer.
"""

import math
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import chain

_QUESTION = frozenset(["what", "which", "why", "who", "whom", "whose", "where", "when", "how"])
_OPEN = ("what", "which")  # the word after these says what is asked for
_FUNCTION_WORDS = (
    "a about above after again against all am an and any are as at be because been before being below between both but "
    "by can did do does doing don down during each few for from further had has have having he her here hers herself "
    "him himself his i if in into is it its itself just me more most my myself no nor not now of off on once only or "
    "other our ours ourselves out over own s same she should so some such t than that the their theirs them themselves "
    "then there these they this those through to too under until up very was we were while will with you your yours "
    "yourself yourselves"
)
_FUNCTION = frozenset(_FUNCTION_WORDS.split())


@dataclass(frozen=True, slots=True)
class Weights:
    """How much each kind of word counts; they sum to 1. δ is how much answerability counts beside BLEU-1."""

    entities: float = 0.6
    question: float = 0.2
    content: float = 0.1
    function: float = 0.1
    delta: float = 0.7


SQUAD = Weights()


def q_bleu(prediction: str, golds: Sequence[str], weights: Weights = SQUAD) -> float:
    """Return the best Q-BLEU-1 over the golds, in [0, 1]; 0.0 without golds.

    >>> round(q_bleu("Who wrote Animal Farm", ["Who wrote Animal Farm?"]), 3)  # no function word
    0.93
    """
    return max((_q_bleu(prediction, gold, weights) for gold in golds), default=0.0)


def _q_bleu(prediction: str, gold: str, weights: Weights) -> float:
    said, wanted = _words(prediction), _words(gold)
    *kinds, delta = astuple(weights)
    pairs = zip(kinds, _kinds(said), _kinds(wanted), strict=True)
    answerable = math.fsum(weight * _f1(one, other) for weight, one, other in pairs)
    return float(delta * answerable + (1 - delta) * _bleu_1(said, wanted))


def _words(text: str) -> list[str]:
    return [word for word in (token.strip(string.punctuation) for token in text.split()) if word]


def _kinds(words: Sequence[str]) -> tuple[list[str], list[str], list[str], list[str]]:
    """Return named entities, question words, other content words and function words, in lower case."""
    asking = set(chain.from_iterable(_asking(words, place) for place in range(len(words))))
    entities = [w for place, w in enumerate(words) if w[0].isupper() and (place or w.lower() not in _QUESTION)]
    content = [
        word
        for place, word in enumerate(words)
        if place not in asking and not word[0].isupper() and word not in _FUNCTION
    ]
    function = [word for word in words if word.lower() in _FUNCTION]
    question = [words[place] for place in sorted(asking)]
    lowered = [[word.lower() for word in kind] for kind in (entities, question, content, function)]
    return lowered[0], lowered[1], lowered[2], lowered[3]


def _asking(words: Sequence[str], place: int) -> list[int]:
    """Return the places of a question word and of what it asks for; none where there is no question word."""
    word = words[place].lower()
    if word not in _QUESTION:
        return []
    return [place, place + 1] if word in _OPEN and place + 1 < len(words) else [place]


def _f1(said: Sequence[str], wanted: Sequence[str]) -> float:
    same = (Counter(said) & Counter(wanted)).total()
    return 2 * same / (len(said) + len(wanted)) if same else 0.0  # equal to 2PR/(P+R)


def _bleu_1(said: Sequence[str], wanted: Sequence[str]) -> float:
    """Return the clipped precision of words, with BLEU's penalty for a short text."""
    same = (Counter(map(str.lower, said)) & Counter(map(str.lower, wanted))).total()
    if not same:
        return 0.0
    return same / len(said) * min(1.0, math.exp(1 - len(wanted) / len(said)))
