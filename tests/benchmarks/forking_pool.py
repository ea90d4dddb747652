"""A pool of Beam's Python workers that are forked from a process that has imported what they need.

Beam's own pool starts Python anew for each worker of each job, which takes two or more CPU seconds.
"""

import sys
from multiprocessing import get_context
from subprocess import TimeoutExpired
from typing import Any

from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners.worker.sdk_worker import SdkHarness
from apache_beam.runners.worker.worker_pool_main import BeamFnExternalWorkerPoolServicer

_IMPORTED = ["tests.benchmarks.forking_pool", "beam_jobs.corpus", "beam_jobs.index", "torch", "transformers"]


class _Worker:
    """A process, as Beam's pool ends one."""

    def __init__(self, *arguments: Any) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED)
        self._process = context.Process(target=_run_worker, args=arguments)
        self._process.start()
        self.terminate, self.kill = self._process.terminate, self._process.kill

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.is_alive():
            raise TimeoutExpired("a worker", timeout or 0.0)


def _run_worker(url: str, worker_id: str, state_cache_size: int, buffer_milliseconds: int) -> None:
    SdkHarness(
        url,
        worker_id=worker_id,
        state_cache_size=state_cache_size,
        data_buffer_time_limit_ms=buffer_milliseconds,
    ).run()


class ForkingPool(BeamFnExternalWorkerPoolServicer):  # type: ignore[misc]
    """Beam's pool but for how it starts a worker."""

    def StartWorker(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Fork a worker."""
        settings = self._state_cache_size, self._data_buffer_time_limit_ms
        self._worker_processes[request.worker_id] = _Worker(request.control_endpoint.url, request.worker_id, *settings)
        return beam_fn_api_pb2.StartWorkerResponse()


if __name__ == "__main__":
    ForkingPool.start(port=int(sys.argv[2]))[1].wait_for_termination()
