"""What one process is given lies within its limits, and a GPU is asked for only where cores would take too long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.encoders.architecture import Architecture
from rag_model.errors import ResourceError
from rag_model.needs.machine import CORE, PROCESS, Most, Needs, Work, needs_of
from rag_model.needs.reading import decoding_bytes, weights

BART = Architecture(parameters=139_000_000, layers=12, hidden=768, heads=12, vocabulary=50_265)


@given(
    held=st.integers(PROCESS, 10**12),
    seconds=st.floats(0, 1e7),
    memory=st.integers(1, 10**12),
    cores=st.integers(1, 64),
    gpus=st.integers(0, 8),
    hours=st.floats(0, 100),
)
def test_what_is_given_is_within_the_limits(
    held: int, seconds: float, memory: int, cores: int, gpus: int, hours: float
) -> None:
    limits = Most(str(memory), cores, gpus)
    try:
        needs = needs_of(Work({}, {"train": held - PROCESS}, seconds * CORE), limits, hours)
    except ResourceError:
        assert 1.25 * held > memory - 1
        return
    assert held <= needs.memory <= memory
    assert 1 <= needs.cores <= cores
    assert needs.gpus <= min(1, gpus)
    if needs.gpus:
        assert seconds / cores > 3600 * hours or seconds / cores > 1


def test_a_night_on_cores_is_enough_or_a_gpu_is_asked_for() -> None:
    def given_a_night(hours: float) -> Needs:
        return needs_of(Work({}, {"train": 3 * PROCESS}, 3600 * hours * CORE), Most("32GiB", 8, 2), 6.0)

    assert (given_a_night(1).cores, given_a_night(1).gpus) == (1, 0)
    long, endless = given_a_night(24), given_a_night(100)
    assert (long.cores, long.gpus) == (4, 0)
    assert (endless.cores, endless.gpus) == (1, 1)
    assert endless.hours < long.hours


def test_what_does_not_fit_says_how_much_would() -> None:
    with pytest.raises(ResourceError, match=r"takes 12\.5 GB of memory to train, and a run may have 4\.0 GB"):
        needs_of(Work({}, {"train": 10**10 - PROCESS, "mine": 1}, 1.0), Most("4GB", 1), 0)


def test_more_is_held_of_more() -> None:
    assert weights(BART, BART) == 2 * 4 * BART.parameters
    assert decoding_bytes(BART, 40, 50) > decoding_bytes(BART, 20, 50) > decoding_bytes(BART, 20, 10)
