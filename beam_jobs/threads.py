"""How many threads the numeric libraries of a process run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")


def limit_threads(threads: int) -> None:
    """Give the numeric libraries of this process `threads` threads each, loaded already or not."""
    os.environ |= dict.fromkeys(_VARIABLES, str(threads))
    import faiss  # noqa: PLC0415 - after the environment is set

    faiss.omp_set_num_threads(threads)


@contextmanager
def own_threads() -> Iterator[None]:
    """Let `limit_threads` last no longer than the block."""
    import faiss  # noqa: PLC0415 - a worker of another job does without it

    before, threads = {name: os.environ.get(name) for name in _VARIABLES}, faiss.omp_get_max_threads()
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}
