"""Measures of one answer against its gold answers: exact match, token F1, labels, BLEU and ROUGE-L.

An answer is compared with every gold answer, and the best value counts. Exact match and F1 are
SQuAD's (Rajpurkar et al. 2016) with its normalisation, as in the papers on DPR and RAG. FEVER's
answers are labels (Thorne et al. 2018). BLEU and ROUGE-L come from sacrebleu and rouge-score. All
values are in [0, 1], although sacrebleu itself uses percent.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rag_model.evaluation.bootstrap import Estimate, Resampling, estimate_from_sums
from rag_model.evaluation.matching import pattern_match
from rag_model.evaluation.measures.measure import AnswerMeasure, CorpusMeasure
from rag_model.extras import require

FEVER_3WAY = ("SUPPORTS", "REFUTES", "NOT ENOUGH INFO")
FEVER_2WAY = FEVER_3WAY[:2]  # the RAG paper's two-way accuracy

BleuCounts: TypeAlias = npt.NDArray[np.float64]

_PUNCTUATION = str.maketrans("", "", string.punctuation)  # only ASCII, as in SQuAD's script
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Return `text` in SQuAD's normal form: lower case, no ASCII punctuation, no articles.

    >>> normalise("The  Eiffel-Tower, a landmark!")
    'eiffeltower landmark'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, golds: Iterable[str]) -> float:
    """Return 1.0 if the normalised prediction equals any normalised gold answer, else 0.0.

    >>> exact_match("the Eiffel Tower.", ["Eiffel tower", "La Tour Eiffel"])
    1.0
    """
    normalised = normalise(prediction)
    return float(any(normalised == normalise(gold) for gold in golds))


def token_f1(prediction: str, golds: Iterable[str]) -> float:
    """Return the best F1 of the bags of normalised words over the golds; 0.0 without golds.

    F1 = 2 P R / (P + R) with P the share of the prediction's words that are in the gold answer, and
    R the reverse. If both have no words F1 is 1.0, if only one has none it is 0.0 (the rule of
    SQuAD 2.0), so that F1 is never below exact match.

    >>> round(token_f1("born in Paris", ["Paris, France"]), 3)
    0.4
    """
    words = normalise(prediction).split()
    return max((_bag_f1(words, normalise(gold).split()) for gold in golds), default=0.0)


def _bag_f1(predicted_words: Sequence[str], gold_words: Sequence[str]) -> float:
    if not predicted_words or not gold_words:
        return float(predicted_words == gold_words)
    overlap = (Counter(predicted_words) & Counter(gold_words)).total()
    return 2 * overlap / (len(predicted_words) + len(gold_words))  # equal to 2PR/(P+R)


def find_label(prediction: str, labels: Sequence[str]) -> str | None:
    """Return the label that equals the prediction after SQuAD's normalisation, or None.

    >>> find_label("not enough info.", FEVER_3WAY)
    'NOT ENOUGH INFO'
    """
    normalised = normalise(prediction)
    return next((label for label in labels if normalise(label) == normalised), None)


def label_match(prediction: str, golds: Iterable[str], labels: Sequence[str]) -> float | None:
    """Return 1.0 if the prediction is a gold label, else 0.0; None if no gold is one of `labels`.

    None excludes the question from the mean: FEVER's two-way accuracy covers the claims with one of
    two labels.
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
    """Return the best ROUGE-L F-measure over the golds (rouge-score, no stemming); 0.0 without
    golds.

    rouge-score uses only ASCII letters and digits: text in other scripts is ignored.

    Raises:
        MissingExtraError: `rouge-score` is not installed.
    """
    scorer = _rouge_scorer()
    return max((float(scorer.score(gold, prediction)["rougeL"].fmeasure) for gold in golds), default=0.0)


@cache
def _rouge_scorer() -> Any:
    return require("rouge_score.rouge_scorer", "train").RougeScorer(["rougeL"])


def bleu_counts(prediction: str, golds: Sequence[str], order: int = 4) -> BleuCounts:
    """Return the counts of one answer for corpus BLEU, (2 order + 2,); zeros without golds.

    The counts are, in this order: the clipped n-gram matches by n, the n-grams of the answer by n,
    its length, and the length of the closest gold. sacrebleu counts them (tokenizer 13a,
    case-sensitive).

    Raises:
        MissingExtraError: `sacrebleu` is not installed.
    """
    if not golds:
        return np.zeros(2 * order + 2)
    score = _bleu_metric(order).sentence_score(prediction, list(golds))
    return np.array([*score.counts, *score.totals, score.sys_len, score.ref_len], np.float64)


def bleu(counts: BleuCounts) -> float:
    """Return the corpus BLEU in [0, 1] from `bleu_counts` summed over the answers, (2 order + 2,).

    BLEU = min(1, exp(1 - r/c)) (Π_n p_n)^(1/N) (Papineni et al. 2002); an order without a match is
    smoothed by sacrebleu's default. It measures the set of answers, and is not the mean of BLEU
    scores of single answers.
    """
    order = len(counts) // 2 - 1
    values = counts.astype(int).tolist()
    matches, totals, lengths = values[:order], values[order:-2], values[-2:]
    score = _bleu_metric(order).compute_bleu(matches, totals, *lengths, smooth_method="exp", max_ngram_order=order)
    return float(score.score) / 100


@cache
def _bleu_metric(order: int) -> Any:
    return require("sacrebleu.metrics", "train").BLEU(max_ngram_order=order, effective_order=True)


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
