"""Answers that are regular expressions match as in DrQA, and within a time limit."""

import pytest

from rag_model.errors import InputError
from rag_model.evaluation import matching
from rag_model.evaluation.matching import pattern_match, pattern_search


def test_patterns_match_as_in_drqa() -> None:
    assert pattern_match("1,783 metres", [r"8 ?km", r"1,?783"])
    assert pattern_match("MOUNT Everest", ["mount (everest|k2)"])
    assert not pattern_match("about 1783", [r"1,?783"])  # from the start
    assert pattern_search("It is\nabout 1783 metres", [r"1,?783"])
    assert pattern_match("one\ntwo", ["one$"])  # `$` at every line
    assert not pattern_match("x", [])


def test_a_pattern_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "_TIMEOUT_SECONDS", 0.05)
    with pytest.raises(InputError, match="without nested repetitions"):
        pattern_match("a" * 64 + "b", ["(a|aa)+$"])


@pytest.mark.parametrize("pattern", ["(", "a" * 10_001, r"\p{Nope}", "(?P<a>x)(?P=b)"])
def test_an_invalid_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(InputError, match=r"pattern|regular expression"):
        pattern_match("x", [pattern])
