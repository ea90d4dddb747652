"""Measure one answer: exact match and token F1, labels, BLEU and ROUGE-L.

An answer is compared with every accepted answer, and the best value counts. Exact match and F1 are SQuAD's (Rajpurkar
et al. 2016), with its normalisation, as in DPR's and RAG's papers; FEVER's answers are labels
(Thorne et al. 2018). BLEU and ROUGE-L come from sacrebleu and
rouge-score. All are shares in [0, 1]; sacrebleu itself uses percent.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rag_model.extras import require

FEVER_3WAY = ("SUPPORTS", "REFUTES", "NOT ENOUGH INFO")
FEVER_2WAY = FEVER_3WAY[:2]  # the RAG paper's second figure: claims that the encyclopedia supports or refutes

Counts: TypeAlias = npt.NDArray[np.float64]

_PUNCTUATION = str.maketrans("", "", string.punctuation)  # only ASCII, as in SQuAD's script
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Return `text` in SQuAD's normal form: lower case, no ASCII punctuation, no article, single spaces.

    >>> normalise("The  Eiffel-Tower, a landmark!")
    'eiffeltower landmark'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, golds: Iterable[str]) -> float:
    """Return 1.0 if the normalised prediction equals any normalised gold, else (or without golds) 0.0.

    >>> exact_match("the Eiffel Tower.", ["Eiffel tower", "La Tour Eiffel"])
    1.0
    """
    said = normalise(prediction)
    return float(any(said == normalise(gold) for gold in golds))


def token_f1(prediction: str, golds: Iterable[str]) -> float:
    """Return the best F1 of the normalised words, as bags, over the golds; 0.0 without golds.

    F1 = 2 P R / (P + R) with P the share of the prediction's words that the gold has and R the reverse. If one side has
    no words, F1 is 1.0 if both have none (SQuAD 2.0's rule), else 0.0, so that it is never below exact match.

    >>> round(token_f1("born in Paris", ["Paris, France"]), 3)
    0.4
    """
    said = normalise(prediction).split()
    return max((_f1(said, normalise(gold).split()) for gold in golds), default=0.0)


def _f1(said: Sequence[str], gold: Sequence[str]) -> float:
    if not said or not gold:
        return float(said == gold)
    same = (Counter(said) & Counter(gold)).total()
    return 2 * same / (len(said) + len(gold))  # equal to 2PR/(P+R)


def label_of(prediction: str, labels: Sequence[str]) -> str | None:
    """Return the label that equals the prediction after SQuAD's normalisation; None if there is none.

    >>> label_of("not enough info.", FEVER_3WAY)
    'NOT ENOUGH INFO'
    """
    said = normalise(prediction)
    return next((label for label in labels if normalise(label) == said), None)


def label_match(prediction: str, golds: Iterable[str], labels: Sequence[str]) -> float | None:
    """Return 1.0 if the prediction is a gold label, else 0.0; None if no gold is one of `labels`.

    None excludes a question from the mean: FEVER's two-way accuracy is over the claims labelled with one of the two.
    """
    wanted = {label_of(gold, labels) for gold in golds} - {None}
    return float(label_of(prediction, labels) in wanted) if wanted else None


def rouge_l(prediction: str, golds: Iterable[str]) -> float:
    """Return the best ROUGE-L F-measure over the golds (rouge-score, no stemming); 0.0 without golds.

    rouge-score uses only ASCII letters and digits: text in other scripts is ignored.

    Raises:
        MissingExtraError: `rouge-score` is not installed.
    """
    scorer = _rouge()
    return max((float(scorer.score(gold, prediction)["rougeL"].fmeasure) for gold in golds), default=0.0)


@cache
def _rouge() -> Any:
    return require("rouge_score.rouge_scorer", "train").RougeScorer(["rougeL"])


def bleu_counts(prediction: str, golds: Sequence[str], order: int = 4) -> Counts:
    """Return one answer's counts for corpus BLEU, (2 order + 2,): zeros without golds.

    In order: the n-grams shared with the golds, by n, clipped; all its n-grams, by n; its length; the length of the
    closest gold. Counted as sacrebleu does (tokenizer 13a, case kept).

    Raises:
        MissingExtraError: `sacrebleu` is not installed.
    """
    if not golds:
        return np.zeros(2 * order + 2)
    score = _bleu(order).sentence_score(prediction, list(golds))
    return np.array([*score.counts, *score.totals, score.sys_len, score.ref_len], np.float64)


def bleu(counts: Counts) -> float:
    """Return the corpus BLEU in [0, 1] from `bleu_counts` summed over the answers, (2 order + 2,).

    BLEU = min(1, exp(1 - r/c)) (Π_n p_n)^(1/N) (Papineni et al. 2002), an order without a match smoothed by sacrebleu's
    default. It is a measure of a set of answers, not the mean of single BLEU scores.
    """
    order = len(counts) // 2 - 1
    whole = counts.astype(int).tolist()
    same, said, lengths = whole[:order], whole[order:-2], whole[-2:]
    score = _bleu(order).compute_bleu(same, said, *lengths, smooth_method="exp", max_ngram_order=order)
    return float(score.score) / 100


@cache
def _bleu(order: int) -> Any:
    return require("sacrebleu.metrics", "train").BLEU(max_ngram_order=order, effective_order=True)
