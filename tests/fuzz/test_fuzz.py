"""Hostile files of every kind are read or refused in one sentence; none crashes, hangs or needs a gigabyte."""

import pytest

from tests.fixtures.forked_processes import SHARED
from tests.fuzz.campaign import try_kinds
from tests.fuzz.kinds import KINDS
from tests.fuzz.mutation import mutate

CASES = 25  # mutations of each kind; `make fuzz` tries more


@SHARED
@pytest.mark.timeout(300)
def test_mutated_files_are_read_or_refused() -> None:
    results = try_kinds(KINDS, 0, CASES)
    assert {result.kind: result.defects for result in results if result.defects} == {}
    assert all(sum(result.counts.values()) == CASES for result in results)
    assert sum(result.counts["refused"] for result in results) > CASES * len(KINDS) / 2, "damage is noticed"


def test_a_mutation_depends_only_on_its_number() -> None:
    data = bytes(range(256)) * 8
    assert mutate(data, 7) == mutate(data, 7)
    assert len({mutate(data, number) for number in range(50)}) > 45
    assert mutate(b'{"a": 1}', 3) == mutate(b'{"a": 1}', 3)
    assert [mutate(b"", number) for number in range(9)] == [b""] * 9
