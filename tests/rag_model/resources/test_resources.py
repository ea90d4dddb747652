"""What one process is given lies within its limits, and a GPU is asked for only where cores would take too long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.encoders.architecture import Architecture
from rag_model.errors import ResourceError
from rag_model.resources import (
    CORE_FLOPS,
    PROCESS_BYTES,
    RunLimits,
    RunResources,
    WorkEstimate,
    choose_resources,
    estimate_decoding_bytes,
    estimate_weight_bytes,
)

BART = Architecture(parameters=139_000_000, layers=12, hidden=768, heads=12, vocabulary=50_265)


@given(
    held=st.integers(PROCESS_BYTES, 10**12),
    seconds=st.floats(0, 1e7),
    memory=st.integers(1, 10**12),
    cores=st.integers(1, 64),
    gpus=st.integers(0, 8),
    hours=st.floats(0, 100),
)
def test_what_is_given_is_within_the_limits(
    held: int, seconds: float, memory: int, cores: int, gpus: int, hours: float
) -> None:
    limits = RunLimits(str(memory), cores, gpus)
    try:
        needs = choose_resources(WorkEstimate({}, {"train": held - PROCESS_BYTES}, seconds * CORE_FLOPS), limits, hours)
    except ResourceError:
        assert 1.25 * held > memory - 1
        return
    assert held <= needs.memory <= memory
    assert 1 <= needs.cores <= cores
    assert needs.gpus <= min(1, gpus)
    if needs.gpus:
        assert seconds / cores > 3600 * hours or seconds / cores > 1


def test_a_night_on_cores_is_enough_or_a_gpu_is_asked_for() -> None:
    def given_a_night(hours: float) -> RunResources:
        return choose_resources(
            WorkEstimate({}, {"train": 3 * PROCESS_BYTES}, 3600 * hours * CORE_FLOPS), RunLimits("32GiB", 8, 2), 6.0
        )

    assert (given_a_night(1).cores, given_a_night(1).gpus) == (1, 0)
    long, endless = given_a_night(24), given_a_night(100)
    assert (long.cores, long.gpus) == (4, 0)
    assert (endless.cores, endless.gpus) == (1, 1)
    assert endless.hours < long.hours


def test_what_does_not_fit_says_how_much_would() -> None:
    with pytest.raises(ResourceError, match=r"train needs 12\.5 GB of memory, and a run may use 4\.0 GB"):
        choose_resources(WorkEstimate({}, {"train": 10**10 - PROCESS_BYTES, "mine": 1}, 1.0), RunLimits("4GB", 1), 0)


def test_more_is_held_of_more() -> None:
    assert estimate_weight_bytes(BART, BART) == 2 * 4 * BART.parameters
    assert (
        estimate_decoding_bytes(BART, 40, 50)
        > estimate_decoding_bytes(BART, 20, 50)
        > estimate_decoding_bytes(BART, 20, 10)
    )
