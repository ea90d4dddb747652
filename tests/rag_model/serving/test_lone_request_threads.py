"""A request that has the service to itself gets more threads, unless they had to wait."""

import torch

from rag_model.serving.runtime import LoneRequestThreads, limit_compute_threads


def threads_within(team: LoneRequestThreads) -> int:
    with team.apply():
        return torch.get_num_threads()


def test_a_team_computes_within_the_block_alone() -> None:
    before = torch.get_num_threads()
    limit_compute_threads(1)
    try:
        team = LoneRequestThreads(1, 2)
        with team.apply():
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 1
    finally:
        limit_compute_threads(before)


def test_after_each_wait_one_thread_computes_for_longer() -> None:
    before = torch.get_num_threads()
    limit_compute_threads(1)
    try:
        team = LoneRequestThreads(1, 2)
        for backoff in (4, 8, 16, 32, 64, 128, 128):
            team.record_times(cpu_seconds=0.002, seconds=0.01)
            assert [threads_within(team) for _ in range(backoff)] == [1] * backoff
        team.record_times(cpu_seconds=0.009, seconds=0.01)
        team.record_times(cpu_seconds=0.002, seconds=0.01)
        assert [threads_within(team) for _ in range(4)] == [1] * 4
        with team.apply():
            assert torch.get_num_threads() == 2
    finally:
        limit_compute_threads(before)
