"""Measures of n-grams: Q-BLEU-1 of generated questions, and the ratio of distinct n-grams."""

import math
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from statistics import NormalDist

from rag_model.evaluation.bootstrap import DEFAULT_RESAMPLING, Estimate, Resampling
from rag_model.evaluation.matching import tokenize
from rag_model.evaluation.measures.measure import AnswerMeasure, CorpusMeasure

_QUESTION_WORDS = frozenset(["what", "which", "why", "who", "whom", "whose", "where", "when", "how"])
_OPEN_QUESTION_WORDS = ("what", "which")  # the next word belongs to the question word
_FUNCTION_WORDS = (
    "a about above after again against all am an and any are as at be because been before being "
    "below between both but by can did do does doing don down during each few for from further had "
    "has have having he her here hers herself him himself his i if in into is it its itself just "
    "me more most my myself no nor not now of off on once only or other our ours ourselves out "
    "over own s same she should so some such t than that the their theirs them themselves then "
    "there these they this those through to too under until up very was we were while will with "
    "you your yours yourself yourselves"
)
_FUNCTION_WORD_SET = frozenset(_FUNCTION_WORDS.split())


@dataclass(frozen=True, slots=True)
class QBleuWeights:
    """Weights of the word kinds, which sum to 1, and δ, the weight of answerability."""

    entities: float = 0.6
    question: float = 0.2
    content: float = 0.1
    function: float = 0.1
    delta: float = 0.7


SQUAD_WEIGHTS = QBleuWeights()


def q_bleu(prediction: str, golds: Sequence[str], weights: QBleuWeights = SQUAD_WEIGHTS) -> float:
    """Return the best Q-BLEU-1 over the golds, in [0, 1]; 0.0 without golds (Nema & Khapra 2018).

    Q-BLEU-1 is BLEU-1 that weighs whether a generated question can be answered:

        Q-BLEU-1 = δ A + (1 - δ) BLEU-1,    A = Σ_i w_i 2 P(S_i) R(S_i) / (P(S_i) + R(S_i))

    with P and R the precision and recall of the words of kind i: named entities, question words,
    other content words, and function words. A kind without a word in either text adds nothing, so
    that a perfect text may score below 1. The default weights and δ are those that the authors'
    script names for SQuAD (.6, .2, .1, .1 and .7), because the RAG paper measures Jeopardy
    questions with a version tuned on SQuAD.

    The kinds follow the authors' rules: a named entity begins with a capital letter, except a
    question word at the beginning; the word after `what` or `which` belongs to it; function words
    are in a list. Two details differ. P and R are those of the equation, whereas the script
    computes BLEU-1 in both directions, with its penalty for short texts. Words are split at
    whitespace, without the punctuation around them, whereas the script uses the Penn Treebank
    tokenizer.

    >>> round(q_bleu("Who wrote Animal Farm", ["Who wrote Animal Farm?"]), 3)  # no function word
    0.93
    """
    return max((_score_gold(prediction, gold, weights) for gold in golds), default=0.0)


def _score_gold(prediction: str, gold: str, weights: QBleuWeights) -> float:
    predicted_words, gold_words = _split_words(prediction), _split_words(gold)
    *kind_weights, delta = astuple(weights)
    pairs = zip(kind_weights, _group_words(predicted_words), _group_words(gold_words), strict=True)
    answerable = math.fsum(weight * _group_f1(predicted, gold_kind) for weight, predicted, gold_kind in pairs)
    return float(delta * answerable + (1 - delta) * _compute_bleu_1(predicted_words, gold_words))


def _split_words(text: str) -> list[str]:
    return [word for word in (token.strip(string.punctuation) for token in text.split()) if word]


def _group_words(words: Sequence[str]) -> tuple[list[str], list[str], list[str], list[str]]:
    """Return named entities, question words, other content and function words, in lower case."""
    question_positions = set(
        chain.from_iterable(_find_question_words(words, position) for position in range(len(words)))
    )
    entities = [
        word
        for position, word in enumerate(words)
        if word[0].isupper() and (position or word.lower() not in _QUESTION_WORDS)
    ]
    content = [
        word
        for position, word in enumerate(words)
        if position not in question_positions and not word[0].isupper() and word not in _FUNCTION_WORD_SET
    ]
    function = [word for word in words if word.lower() in _FUNCTION_WORD_SET]
    question = [words[position] for position in sorted(question_positions)]
    lowered = [[word.lower() for word in kind] for kind in (entities, question, content, function)]
    return lowered[0], lowered[1], lowered[2], lowered[3]


def _find_question_words(words: Sequence[str], position: int) -> list[int]:
    """Return the positions of a question word and of its next word, if it belongs to it."""
    word = words[position].lower()
    if word not in _QUESTION_WORDS:
        return []
    return [position, position + 1] if word in _OPEN_QUESTION_WORDS and position + 1 < len(words) else [position]


def _group_f1(predicted_words: Sequence[str], gold_words: Sequence[str]) -> float:
    overlap = (Counter(predicted_words) & Counter(gold_words)).total()
    # Equal to 2PR/(P+R).
    return 2 * overlap / (len(predicted_words) + len(gold_words)) if overlap else 0.0


def _compute_bleu_1(predicted_words: Sequence[str], gold_words: Sequence[str]) -> float:
    """Return the clipped precision of words, times BLEU's penalty for a short text."""
    overlap = (Counter(map(str.lower, predicted_words)) & Counter(map(str.lower, gold_words))).total()
    if not overlap:
        return 0.0
    return overlap / len(predicted_words) * min(1.0, math.exp(1 - len(gold_words) / len(predicted_words)))


DISTINCT_ORDER = 3  # trigrams, as in the paper


def distinct_ngram_ratio(
    texts: Sequence[str], order: int = DISTINCT_ORDER, resampling: Resampling = DEFAULT_RESAMPLING
) -> Estimate | None:
    """Return the ratio of distinct to all n-grams with its interval; None without an n-gram.

    Lewis et al. 2020 (table 5) report this ratio for trigrams of Jeopardy questions: .324 for BART,
    .468 for RAG-Token, .538 for RAG-Sequence and .900 for the gold texts.

    Tokens are DPR's, in lower case. The interval is value ± z s of the jackknife over the texts
    (Efron & Tibshirani 1993, chapter 11): a bootstrap would draw a text twice, with all its
    n-grams, and would be too low. `Estimate.n` counts texts.

    >>> distinct_ngram_ratio(["this state has a coast", "this state has a king"]).value  # 4 of 6 trigrams
    0.6666666666666666
    """
    text_ngrams = [_count_ngrams(tokenize(text), order) for text in texts]
    total = sum(map(Counter.total, text_ngrams))
    if not total:
        return None
    text_counts = Counter(ngram for ngrams in text_ngrams for ngram in ngrams)  # texts per n-gram
    leave_one_out = [
        (len(text_counts) - sum(text_counts[ngram] == 1 for ngram in ngrams)) / (total - ngrams.total())
        for ngrams in text_ngrams
        if ngrams.total() < total
    ]
    value = len(text_counts) / total
    width = NormalDist().inv_cdf((1 + resampling.level) / 2) * _jackknife_error(leave_one_out)
    return Estimate(value, max(0.0, value - width), min(1.0, value + width), len(texts))


def _count_ngrams(words: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(words[start:] for start in range(order)), strict=False))


def _jackknife_error(leave_one_out: Sequence[float]) -> float:
    """Return the standard error from the leave-one-out values: s² = (n - 1) / n Σ (θ_i - mean)²."""
    count = len(leave_one_out)
    if count < 2:
        return 0.0
    mean = math.fsum(leave_one_out) / count
    return math.sqrt((count - 1) / count * math.fsum((value - mean) ** 2 for value in leave_one_out))


def _distinct_3(predictions: Sequence[str], golds: Sequence[Sequence[str]], resampling: Resampling) -> Estimate | None:
    return distinct_ngram_ratio(predictions, DISTINCT_ORDER, resampling)


def _gold_distinct_3(
    predictions: Sequence[str],
    golds: Sequence[Sequence[str]],
    resampling: Resampling,
) -> Estimate | None:
    """Return the ratio of the first gold answer of each question."""
    return distinct_ngram_ratio([answers[0] for answers in golds if answers], DISTINCT_ORDER, resampling)


Q_BLEU_1 = AnswerMeasure({"clues": q_bleu})
DISTINCT_3 = CorpusMeasure(("texts", "clues"), _distinct_3)
GOLD_DISTINCT_3 = CorpusMeasure(("texts", "clues"), _gold_distinct_3)
