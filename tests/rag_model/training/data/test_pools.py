"""Pools by label, their bounds by score, the agreement of both by hand, and what is refused."""

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
FOUND = [build_passage("", text) for text in "abcde"]


def told(*pairs: tuple[bool, float]) -> list[RagVerdict]:
    return [RagVerdict(*pair) for pair in pairs]


def test_pools_are_by_label_and_their_bounds_by_score() -> None:
    own = build_pooled_example(EXAMPLE, FOUND, told((False, -4), (True, -1), (False, -2), (True, -3), (True, -2)), 2)
    assert own is not None
    assert [positive.text for positive in own.positives] == ["b", "e"], "the likeliest first, and two of them"
    assert [negative.text for negative in own.negatives] == ["c", "a"]
    assert (own.best_negative_log_p, own.worst_positive_log_p) == (-2, -3), "of all, kept or not"
    assert (own.id, own.answers) == ("q", ("x",))


def test_agreement_is_the_share_of_pairs_in_the_right_order() -> None:
    # pairs (right, wrong): (-1, -2) and (-1, -4) in order, (-2, -2) equal, (-2, -4) in order
    assert compute_agreement(told((True, -1), (True, -2), (False, -2), (False, -4))) == (3 + 0.5) / 4
    assert compute_agreement(told((True, -4), (False, -1))) == 0


def test_questions_without_both_pools_are_dropped_and_counted() -> None:
    judged = [
        (EXAMPLE, FOUND[:2], told((True, -1), (False, -2))),
        (EXAMPLE, FOUND[:2], told((True, -1), (True, -2))),
        (EXAMPLE, FOUND[:2], told((False, -1), (False, -2))),
        (EXAMPLE, [], []),
    ]
    pools = build_pools(judged, 5)
    assert (len(pools), pools.all_right, pools.all_wrong) == (1, 1, 2)
    assert pools[0].positives == (FOUND[0],)
    assert (pools.agreement.value, pools.agreement.n) == (1.0, 1)
    with pytest.raises(InputError, match=r"none of 3 questions .* \(1 are all right, 2 all wrong\): use another"):
        build_pools(judged[1:], 5)


def test_scores_that_are_equal_or_contrary_are_refused() -> None:
    flat = told((True, -1), (False, -1), (False, -1))
    contrary = told((True, -3), (False, -1), (False, -2))
    for verdicts in (flat, contrary):
        pools = build_pools([(EXAMPLE, FOUND[:3], verdicts)] * 9, 5)
        with pytest.raises(RefusedError, match="score does not separate right passages from wrong ones"):
            check_agreement(pools)
    mixed = [told((True, -1), (False, -2)), told((True, -2), (False, -1))] * 10
    with pytest.raises(RefusedError, match=r"area under the ROC curve 0\.500"):
        check_agreement(build_pools([(EXAMPLE, FOUND[:2], one) for one in mixed], 5))
    good = (EXAMPLE, FOUND[:2], told((True, -1), (False, -2)))
    with pytest.raises(RefusedError, match="over 4 questions"):
        check_agreement(build_pools([good] * 4, 5))
    check_agreement(build_pools([good] * 9, 5))
