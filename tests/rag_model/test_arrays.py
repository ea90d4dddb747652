"""Headers of array files are read by several threads, and damaged headers are refused in one line."""

import gc
import sys
import threading
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.arrays import RowPartition, map_npy, read_npy_header


def test_a_header_with_a_false_length_is_refused_in_one_line(tmp_path: Path) -> None:
    image = BytesIO()
    np.save(image, np.arange(6, dtype=np.float32).reshape(2, 3))
    intact = image.getvalue()
    forged = intact[:8] + (20_000).to_bytes(2, "little") + intact[10:] + b" " * 20_000
    (tmp_path / "forged.npy").write_bytes(forged)
    for read in (lambda: read_npy_header(BytesIO(forged)), lambda: map_npy(tmp_path / "forged.npy")):
        with pytest.raises(ValueError, match="Header info length") as error:
            read()
        assert "\n" not in str(error.value)
    assert read_npy_header(BytesIO(intact))[0] == (2, 3)


def test_threads_read_headers_at_the_same_time() -> None:
    """Python 3.11's parser fails if a callback of the garbage collection lets another thread parse at the same time."""
    image, errors = BytesIO(), list[BaseException]()
    np.save(image, np.zeros(3, [("row", "<u4"), ("code", "u1", (16,))]))

    def read() -> None:
        try:
            for _ in range(4_000):
                read_npy_header(BytesIO(image.getvalue()))
        except BaseException as error:  # a SystemError
            errors.append(error)

    def callback(phase: str, info: dict[str, int]) -> None:
        sum(range(50))

    threads = [threading.Thread(target=read) for _ in range(4)]
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    gc.callbacks.append(callback)
    sys.setswitchinterval(1e-6)
    gc.set_threshold(700, 10, 10)  # as a process that does not set it
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(callback)
    assert errors == []


@given(st.lists(st.integers(0, 5), max_size=8), st.data())
def test_row_partition_splits_rows_by_part(lengths: list[int], data: st.DataObject) -> None:
    parts = RowPartition(lengths)
    locations = [(part, row) for part, length in enumerate(lengths) for row in range(length)]
    assert parts.n == len(locations)
    rows = data.draw(st.lists(st.sampled_from(range(parts.n)), max_size=9).map(sorted)) if locations else []
    row_array = np.array(rows, dtype=np.int64)
    splits = list(parts.split(row_array))
    assert [(part, row) for part, _, local in splits for row in local.tolist()] == [locations[row] for row in rows]
    assert [row for _, span, _ in splits for row in row_array[span].tolist()] == rows
