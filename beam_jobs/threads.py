"""The number of threads of a process's numeric libraries."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")


def limit_threads(threads: int) -> None:
    """Limit each numeric library of this process to `threads` threads, whether it is loaded already or not."""
    os.environ |= dict.fromkeys(_VARIABLES, str(threads))
    import faiss  # noqa: PLC0415 - after the environment is set

    faiss.omp_set_num_threads(threads)


@contextmanager
def own_threads() -> Iterator[None]:
    """Undo the effect of `limit_threads` at the end of the block."""
    import faiss  # noqa: PLC0415 - workers of other jobs do not need it

    before, threads = {name: os.environ.get(name) for name in _VARIABLES}, faiss.omp_get_max_threads()
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}
