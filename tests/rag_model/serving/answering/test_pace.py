"""What is expected to be quick: what was so lately, of the same kind."""

from rag_model.serving.answering.pace import Pace

QUICK, SLOW = 0.001, 0.1  # seconds


def noted(*answers: tuple[str, float]) -> Pace:
    pace = Pace()
    for kind, seconds in answers:
        pace.note(kind, seconds)
    return pace


def test_only_what_was_quick_for_long_enough_is_expected_to_be() -> None:
    assert not noted().is_quick("hnsw")
    assert not noted(*[("hnsw", QUICK)] * 4).is_quick("hnsw")
    assert noted(*[("hnsw", QUICK)] * 10).is_quick("hnsw")
    assert not noted(*[("hnsw", SLOW)] * 10).is_quick("hnsw")


def test_a_slow_answer_or_another_kind_begins_again() -> None:
    quick = [("hnsw", QUICK)] * 10
    assert not noted(*quick, ("hnsw", SLOW)).is_quick("hnsw")
    assert not noted(*quick, ("exact", QUICK)).is_quick("hnsw")
    assert not noted(*quick).is_quick("exact")
    assert noted(("hnsw", SLOW), *quick).is_quick("hnsw")
