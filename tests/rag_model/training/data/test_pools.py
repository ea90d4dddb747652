"""Pools of passages by label, with bounds by score, and the agreement between labels and scores."""

import pytest

from rag_model.errors import InputError, RefusedError
from rag_model.training.data.examples import Example, build_passage
from rag_model.training.data.judging import (
    RagVerdict,
    build_pooled_example,
    build_pools,
    check_agreement,
    compute_agreement,
)

EXAMPLE = Example("q", "who?", ("x",))
PASSAGES = [build_passage("", text) for text in "abcde"]


def build_verdicts(*pairs: tuple[bool, float]) -> list[RagVerdict]:
    return [RagVerdict(*pair) for pair in pairs]


def test_pools_follow_labels_and_bounds_follow_scores() -> None:
    verdicts = build_verdicts((False, -4), (True, -1), (False, -2), (True, -3), (True, -2))
    pooled = build_pooled_example(EXAMPLE, PASSAGES, verdicts, 2)
    assert pooled is not None
    assert [positive.text for positive in pooled.positives] == ["b", "e"], "the two with the highest scores"
    assert [negative.text for negative in pooled.negatives] == ["c", "a"]
    assert (pooled.best_negative_log_p, pooled.worst_positive_log_p) == (-2, -3), "of all five passages"
    assert (pooled.id, pooled.answers) == ("q", ("x",))


def test_agreement_is_the_share_of_ordered_pairs() -> None:
    # Of the pairs (right, wrong), three are in order, and (-2, -2) is equal.
    assert compute_agreement(build_verdicts((True, -1), (True, -2), (False, -2), (False, -4))) == (3 + 0.5) / 4
    assert compute_agreement(build_verdicts((True, -4), (False, -1))) == 0


def test_questions_without_both_pools_are_dropped() -> None:
    judged = [
        (EXAMPLE, PASSAGES[:2], build_verdicts((True, -1), (False, -2))),
        (EXAMPLE, PASSAGES[:2], build_verdicts((True, -1), (True, -2))),
        (EXAMPLE, PASSAGES[:2], build_verdicts((False, -1), (False, -2))),
        (EXAMPLE, [], []),
    ]
    pools = build_pools(judged, 5)
    assert (len(pools), pools.all_right, pools.all_wrong) == (1, 1, 2)
    assert pools[0].positives == (PASSAGES[0],)
    assert (pools.agreement.value, pools.agreement.n) == (1.0, 1)
    with pytest.raises(InputError, match=r"none of 3 questions .* \(1 are all right, 2 all wrong\): use another"):
        build_pools(judged[1:], 5)


def test_equal_and_contrary_scores_are_refused() -> None:
    equal = build_verdicts((True, -1), (False, -1), (False, -1))
    contrary = build_verdicts((True, -3), (False, -1), (False, -2))
    for verdicts in (equal, contrary):
        pools = build_pools([(EXAMPLE, PASSAGES[:3], verdicts)] * 9, 5)
        with pytest.raises(RefusedError, match="score does not separate right passages from wrong ones"):
            check_agreement(pools)
    mixed = [build_verdicts((True, -1), (False, -2)), build_verdicts((True, -2), (False, -1))] * 10
    with pytest.raises(RefusedError, match=r"area under the ROC curve 0\.500"):
        check_agreement(build_pools([(EXAMPLE, PASSAGES[:2], verdicts) for verdicts in mixed], 5))
    good = (EXAMPLE, PASSAGES[:2], build_verdicts((True, -1), (False, -2)))
    with pytest.raises(RefusedError, match="over 4 questions"):
        check_agreement(build_pools([good] * 4, 5))
    check_agreement(build_pools([good] * 9, 5))
