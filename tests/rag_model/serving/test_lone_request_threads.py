"""A request that is alone in the service gets more threads, unless these threads had to wait for cores."""

import torch

from rag_model.serving.runtime import LoneRequestThreads, limit_compute_threads


def count_threads_within(team: LoneRequestThreads) -> int:
    with team.apply():
        return torch.get_num_threads()


def test_extra_threads_compute_only_within_the_block() -> None:
    initial_threads = torch.get_num_threads()
    limit_compute_threads(1)
    try:
        team = LoneRequestThreads(1, 2)
        with team.apply():
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 1
    finally:
        limit_compute_threads(initial_threads)


def test_one_thread_computes_for_longer_after_each_wait() -> None:
    initial_threads = torch.get_num_threads()
    limit_compute_threads(1)
    try:
        team = LoneRequestThreads(1, 2)
        for backoff in (4, 8, 16, 32, 64, 128, 128):
            team.record_times(cpu_seconds=0.002, seconds=0.01)
            assert [count_threads_within(team) for _ in range(backoff)] == [1] * backoff
        team.record_times(cpu_seconds=0.009, seconds=0.01)
        team.record_times(cpu_seconds=0.002, seconds=0.01)
        assert [count_threads_within(team) for _ in range(4)] == [1] * 4
        with team.apply():
            assert torch.get_num_threads() == 2
    finally:
        limit_compute_threads(initial_threads)
