"""Measures of answers: exact match, token F1, labels, BLEU, ROUGE-L, Q-BLEU-1 and distinct n-grams.

An answer is compared with every gold answer, and the best value is used. Exact match and F1 are
computed as in SQuAD (Rajpurkar et al. 2016), with its normalization of texts, as in the papers on
DPR and RAG. The answers of FEVER are labels (Thorne et al. 2018). BLEU and ROUGE-L are computed by
sacrebleu and rouge-score. All values are in [0, 1], although sacrebleu itself uses percent.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, partial
from itertools import chain
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rag_model.evaluation.bootstrap import DEFAULT_RESAMPLING, Estimate, Resampling, estimate_from_sums
from rag_model.evaluation.matching import pattern_match, tokenize
from rag_model.evaluation.measures.measure import AnswerMeasure, CorpusMeasure
from rag_model.extras import require

FEVER_3WAY = ("SUPPORTS", "REFUTES", "NOT ENOUGH INFO")
FEVER_2WAY = FEVER_3WAY[:2]  # labels of the RAG paper's two-way accuracy on FEVER

BleuCounts: TypeAlias = npt.NDArray[np.float64]

# The script of SQuAD, too, removes only ASCII punctuation.
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_QUESTION_WORDS = frozenset(["what", "which", "why", "who", "whom", "whose", "where", "when", "how"])
_OPEN_QUESTION_WORDS = ("what", "which")  # The next word belongs to these, as in `what year`.
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


def normalise(text: str) -> str:
    """Normalize `text` as SQuAD does: lower case, no ASCII punctuation, no articles.

    >>> normalise("The  Eiffel-Tower, a landmark!")
    'eiffeltower landmark'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, golds: Iterable[str]) -> float:
    """Return 1.0 if the normalized prediction equals any normalized gold answer, else 0.0.

    >>> exact_match("the Eiffel Tower.", ["Eiffel tower", "La Tour Eiffel"])
    1.0
    """
    normalized_prediction = normalise(prediction)
    return float(any(normalized_prediction == normalise(gold) for gold in golds))


def token_f1(prediction: str, golds: Iterable[str]) -> float:
    """Return the best F1 of normalized words over the gold answers; 0.0 if there are none.

    F1 = 2 P R / (P + R), where P is the share of the prediction's words that are in the gold
    answer, and R is the share of the gold answer's words that are in the prediction. If neither has
    words, F1 is 1.0; if only one has no words, it is 0.0 (the rule of SQuAD 2.0). Thus F1 is never
    below exact match.

    >>> round(token_f1("born in Paris", ["Paris, France"]), 3)
    0.4
    """
    words = normalise(prediction).split()
    gold_word_lists = [normalise(gold).split() for gold in golds]
    if not words:
        return float([] in gold_word_lists)
    return max((_compute_bag_f1(words, gold_words) for gold_words in gold_word_lists), default=0.0)


def _compute_bag_f1(predicted_words: Sequence[str], gold_words: Sequence[str]) -> float:
    overlap = (Counter(predicted_words) & Counter(gold_words)).total()
    return 2 * overlap / (len(predicted_words) + len(gold_words)) if overlap else 0.0  # 2PR/(P+R)


def find_label(prediction: str, labels: Sequence[str]) -> str | None:
    """Return the label that equals the prediction after SQuAD's normalization, or None.

    >>> find_label("not enough info.", FEVER_3WAY)
    'NOT ENOUGH INFO'
    """
    normalized_prediction = normalise(prediction)
    return next((label for label in labels if normalise(label) == normalized_prediction), None)


def label_match(prediction: str, golds: Iterable[str], labels: Sequence[str]) -> float | None:
    """Return 1.0 if the prediction is a gold label, else 0.0; None if no gold answer is in
    `labels`.

    A question with None is not part of the mean, because FEVER's two-way accuracy covers only the
    claims with one of two labels.
    """
    gold_labels = {find_label(gold, labels) for gold in golds} - {None}
    return float(find_label(prediction, labels) in gold_labels) if gold_labels else None


def strict_match(prediction: str, golds: Iterable[str]) -> float:
    """Return KILT's accuracy: 1.0 if the stripped prediction equals a stripped gold answer.

    >>> strict_match("SUPPORTS ", ["SUPPORTS"]), strict_match("supports", ["SUPPORTS"])
    (1.0, 0.0)
    """
    return float(bool(prediction.strip()) and prediction.strip() in {gold.strip() for gold in golds})


def rouge_l(prediction: str, golds: Iterable[str]) -> float:
    """Return the best ROUGE-L F-measure over the gold answers, or 0.0 if there are none.

    It is computed by rouge-score without stemming, which ignores all characters except ASCII
    letters and digits.

    Raises:
        MissingExtraError: `rouge-score` is not installed.
    """
    scorer = _create_rouge_scorer()
    return max((float(scorer.score(gold, prediction)["rougeL"].fmeasure) for gold in golds), default=0.0)


@cache
def _create_rouge_scorer() -> Any:
    return require("rouge_score.rouge_scorer", "train").RougeScorer(["rougeL"])


def bleu_counts(prediction: str, golds: Sequence[str], order: int = 4) -> BleuCounts:
    """Return the (2 order + 2,) counts of one answer for corpus BLEU; 0 if it has no gold answers.

    The counts are, in this order: the clipped n-gram matches for each n, the n-grams of the answer
    for each n, the length of the answer, and the length of the gold answer that is closest in
    length. sacrebleu counts them with its tokenizer 13a, case-sensitively.

    Raises:
        MissingExtraError: `sacrebleu` is not installed.
    """
    if not golds:
        return np.zeros(2 * order + 2)
    score = _create_bleu_metric(order).sentence_score(prediction, list(golds))
    return np.array([*score.counts, *score.totals, score.sys_len, score.ref_len], np.float64)


def bleu(counts: BleuCounts) -> float:
    """Return the corpus BLEU in [0, 1] from the (2 order + 2,) sums of `bleu_counts` over answers.

    BLEU = min(1, exp(1 - r/c)) (Π_n p_n)^(1/N) (Papineni et al. 2002). If no n-gram of some length
    matches, sacrebleu's default method smooths p_n. BLEU is a measure of the set of answers, not
    the mean of the BLEU scores of single answers.
    """
    max_n = len(counts) // 2 - 1
    count_values = counts.astype(int).tolist()
    matches, totals, lengths = count_values[:max_n], count_values[max_n:-2], count_values[-2:]
    bleu_score = _create_bleu_metric(max_n).compute_bleu(
        matches, totals, *lengths, smooth_method="exp", max_ngram_order=max_n
    )
    return float(bleu_score.score) / 100


@cache
def _create_bleu_metric(max_n: int) -> Any:
    return require("sacrebleu.metrics", "train").BLEU(max_ngram_order=max_n, effective_order=True)


def corpus_bleu(
    order: int, predictions: Sequence[str], golds: Sequence[Sequence[str]], resampling: Resampling
) -> Estimate:
    """Return the corpus BLEU of the n-grams up to `order`, with its interval."""
    counts = [bleu_counts(prediction, answers, order) for prediction, answers in zip(predictions, golds, strict=True)]
    return estimate_from_sums(np.stack(counts), bleu, resampling)


EXACT_MATCH = AnswerMeasure({"spans": exact_match, "patterns": pattern_match})
TOKEN_F1 = AnswerMeasure({"spans": token_f1, "texts": token_f1})
ACCURACY_3WAY = AnswerMeasure({"labels": partial(label_match, labels=FEVER_3WAY)})
ACCURACY_2WAY = AnswerMeasure({"labels": partial(label_match, labels=FEVER_2WAY)})
STRICT_ACCURACY = AnswerMeasure({"labels": strict_match})
ROUGE_L = AnswerMeasure({"texts": rouge_l, "clues": rouge_l})
BLEU_1 = CorpusMeasure(("texts", "clues"), partial(corpus_bleu, 1))
BLEU_4 = CorpusMeasure(("texts", "clues"), partial(corpus_bleu, 4))


# weights w_i of Q-BLEU-1: of named entities, question words, content words and function words
_KIND_WEIGHTS = (0.6, 0.2, 0.1, 0.1)
_ANSWERABILITY_WEIGHT = 0.7  # δ of Q-BLEU-1


def q_bleu(prediction: str, golds: Sequence[str]) -> float:
    """Return the best Q-BLEU-1 (Nema & Khapra 2018) over the gold answers, in [0, 1]; 0.0 if there
    are none.

    Q-BLEU-1 combines BLEU-1 with the answerability A of a generated question:

        Q-BLEU-1 = δ A + (1 - δ) BLEU-1,    A = Σ_i w_i 2 P(S_i) R(S_i) / (P(S_i) + R(S_i))

    where P and R are the precision and recall of the words of kind i: named entities, question
    words, other content words, and function words. If neither text has words of a kind, this kind
    adds nothing, so a perfect text may score below 1. The weights and δ are those of the
    authors' script for SQuAD (.6, .2, .1, .1 and .7), because the RAG paper measures Jeopardy
    questions with a version tuned on SQuAD.

    The kinds follow the authors' rules. A named entity begins with a capital letter, unless it is a
    question word at the beginning. The word after `what` or `which` counts as part of the question
    word. Function words are in a list. Two details differ: P and R are those of the equation,
    whereas the script computes BLEU-1 in both directions, including its penalty for short texts.
    Words are split at whitespace and stripped of punctuation, whereas the script uses the Penn
    Treebank tokenizer.

    >>> round(q_bleu("Who wrote Animal Farm", ["Who wrote Animal Farm?"]), 3)  # no function word
    0.93
    """
    return max((_score_gold(prediction, gold) for gold in golds), default=0.0)


def _score_gold(prediction: str, gold: str) -> float:
    predicted_words, gold_words = _split_words(prediction), _split_words(gold)
    groups = zip(_KIND_WEIGHTS, _group_words(predicted_words), _group_words(gold_words), strict=True)
    answerability = math.fsum(weight * _compute_bag_f1(predicted, gold_kind) for weight, predicted, gold_kind in groups)
    bleu_1 = _compute_bleu_1(predicted_words, gold_words)
    return _ANSWERABILITY_WEIGHT * answerability + (1 - _ANSWERABILITY_WEIGHT) * bleu_1


def _split_words(text: str) -> list[str]:
    return [word for word in (token.strip(string.punctuation) for token in text.split()) if word]


def _group_words(words: Sequence[str]) -> tuple[list[str], list[str], list[str], list[str]]:
    """Return the named entities, question words, other content words and function words, in lower
    case.
    """
    question_positions = set(
        chain.from_iterable(_find_question_words(words, position) for position in range(len(words)))
    )
    entities = [
        word
        for position, word in enumerate(words)
        if word[0].isupper() and (position or word.lower() not in _QUESTION_WORDS)
    ]
    content_words = [
        word
        for position, word in enumerate(words)
        if position not in question_positions and not word[0].isupper() and word not in _FUNCTION_WORD_SET
    ]
    function_words = [word for word in words if word.lower() in _FUNCTION_WORD_SET]
    question_words = [words[position] for position in sorted(question_positions)]
    lower_case_groups = [
        [word.lower() for word in group] for group in (entities, question_words, content_words, function_words)
    ]
    return lower_case_groups[0], lower_case_groups[1], lower_case_groups[2], lower_case_groups[3]


def _find_question_words(words: Sequence[str], position: int) -> list[int]:
    """Return the position of a question word, and of the next word if they form a phrase."""
    word = words[position].lower()
    if word not in _QUESTION_WORDS:
        return []
    return [position, position + 1] if word in _OPEN_QUESTION_WORDS and position + 1 < len(words) else [position]


def _compute_bleu_1(predicted_words: Sequence[str], gold_words: Sequence[str]) -> float:
    """Return BLEU-1: the clipped precision of the words, times BLEU's penalty for short texts."""
    overlap = (Counter(map(str.lower, predicted_words)) & Counter(map(str.lower, gold_words))).total()
    if not overlap:
        return 0.0
    return overlap / len(predicted_words) * min(1.0, math.exp(1 - len(gold_words) / len(predicted_words)))


def distinct_ngram_ratio(
    texts: Sequence[str], order: int = 3, resampling: Resampling = DEFAULT_RESAMPLING
) -> Estimate | None:
    """Return the ratio of distinct n-grams to all n-grams and its interval; None if there are none.

    Lewis et al. 2020 (table 5) report this ratio for trigrams of Jeopardy questions: .324 for BART,
    .468 for RAG-Token, .538 for RAG-Sequence and .900 for the gold texts.

    Texts are tokenized as in DPR, in lower case. The interval is value ± z s with the standard
    error s of the jackknife over the texts (Efron & Tibshirani 1993, chapter 11). A bootstrap would
    draw some texts several times, so its ratios would be too low. `Estimate.n` counts texts.

    >>> distinct_ngram_ratio(["this state has a coast", "this state has a king"]).value  # 4 of 6
        0.6666666666666666
    """
    text_ngrams = [_count_ngrams(tokenize(text), order) for text in texts]
    n_ngrams = sum(map(Counter.total, text_ngrams))
    if not n_ngrams:
        return None
    n_texts_by_ngram = Counter(ngram for ngrams in text_ngrams for ngram in ngrams)
    leave_one_out = [
        (len(n_texts_by_ngram) - sum(n_texts_by_ngram[ngram] == 1 for ngram in ngrams)) / (n_ngrams - ngrams.total())
        for ngrams in text_ngrams
        if ngrams.total() < n_ngrams
    ]
    ratio = len(n_texts_by_ngram) / n_ngrams
    half_width = NormalDist().inv_cdf((1 + resampling.level) / 2) * _compute_jackknife_error(leave_one_out)
    return Estimate(ratio, max(0.0, ratio - half_width), min(1.0, ratio + half_width), len(texts))


def _count_ngrams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(words[i:] for i in range(n)), strict=False))


def _compute_jackknife_error(leave_one_out: Sequence[float]) -> float:
    """Return the standard error from the leave-one-out values: s² = (n - 1) / n Σ (θ_i - mean)²."""
    n = len(leave_one_out)
    if n < 2:
        return 0.0
    mean = math.fsum(leave_one_out) / n
    return math.sqrt((n - 1) / n * math.fsum((estimate - mean) ** 2 for estimate in leave_one_out))


def _compute_distinct_3(
    predictions: Sequence[str], golds: Sequence[Sequence[str]], resampling: Resampling
) -> Estimate | None:
    return distinct_ngram_ratio(predictions, resampling=resampling)


def _compute_gold_distinct_3(
    predictions: Sequence[str], golds: Sequence[Sequence[str]], resampling: Resampling
) -> Estimate | None:
    """Return the ratio of distinct trigrams in the first gold answer of each question."""
    return distinct_ngram_ratio([answers[0] for answers in golds if answers], resampling=resampling)


Q_BLEU_1 = AnswerMeasure({"clues": q_bleu})
DISTINCT_3 = CorpusMeasure(("texts", "clues"), _compute_distinct_3)
GOLD_DISTINCT_3 = CorpusMeasure(("texts", "clues"), _compute_gold_distinct_3)
