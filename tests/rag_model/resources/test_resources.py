"""The resources of a process stay within its limits, and a GPU is requested only if cores would take too long."""

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
    memory_used=st.integers(PROCESS_BYTES, 10**12),
    seconds=st.floats(0, 1e7),
    memory=st.integers(1, 10**12),
    cores=st.integers(1, 64),
    gpus=st.integers(0, 8),
    hours=st.floats(0, 100),
)
def test_resources_are_within_the_limits(
    memory_used: int, seconds: float, memory: int, cores: int, gpus: int, hours: float
) -> None:
    limits = RunLimits(str(memory), cores, gpus)
    try:
        work = WorkEstimate({}, {"train": memory_used - PROCESS_BYTES}, seconds * CORE_FLOPS)
        resources = choose_resources(work, limits, hours)
    except ResourceError:
        assert 1.25 * memory_used > memory - 1
        return
    assert memory_used <= resources.memory <= memory
    assert 1 <= resources.cores <= cores
    assert resources.gpus <= min(1, gpus)
    if resources.gpus:
        assert seconds / cores > 3600 * hours or seconds / cores > 1


def test_gpu_is_requested_only_if_cores_take_too_long() -> None:
    def choose_for_a_night(hours: float) -> RunResources:
        return choose_resources(
            WorkEstimate({}, {"train": 3 * PROCESS_BYTES}, 3600 * hours * CORE_FLOPS), RunLimits("32GiB", 8, 2), 6.0
        )

    assert (choose_for_a_night(1).cores, choose_for_a_night(1).gpus) == (1, 0)
    long, very_long = choose_for_a_night(24), choose_for_a_night(100)
    assert (long.cores, long.gpus) == (4, 0)
    assert (very_long.cores, very_long.gpus) == (1, 1)
    assert very_long.hours < long.hours


def test_work_that_does_not_fit_names_the_required_memory() -> None:
    with pytest.raises(ResourceError, match=r"train needs 12\.5 GB of memory, and a run may use 4\.0 GB"):
        choose_resources(WorkEstimate({}, {"train": 10**10 - PROCESS_BYTES, "mine": 1}, 1.0), RunLimits("4GB", 1), 0)


def test_decoding_memory_grows_with_batch_and_length() -> None:
    assert estimate_weight_bytes(BART, BART) == 2 * 4 * BART.parameters
    assert (
        estimate_decoding_bytes(BART, 40, 50)
        > estimate_decoding_bytes(BART, 20, 50)
        > estimate_decoding_bytes(BART, 20, 10)
    )
