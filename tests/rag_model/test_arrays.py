"""Images of arrays: what is no image is told in one line."""

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


def test_a_header_that_claims_to_be_long_is_refused_in_one_line(tmp_path: Path) -> None:
    image = BytesIO()
    np.save(image, np.arange(6, dtype=np.float32).reshape(2, 3))
    sound = image.getvalue()
    lying = sound[:8] + (20_000).to_bytes(2, "little") + sound[10:] + b" " * 20_000
    (tmp_path / "lying.npy").write_bytes(lying)
    for read in (lambda: read_npy_header(BytesIO(lying)), lambda: map_npy(tmp_path / "lying.npy")):
        with pytest.raises(ValueError, match="Header info length") as refused:
            read()
        assert "\n" not in str(refused.value)
    assert read_npy_header(BytesIO(sound))[0] == (2, 3)


def test_headers_are_read_by_threads_at_once() -> None:
    """Python 3.11's parser fails where a callback of its garbage collection lets another thread parse meanwhile."""
    image, failed = BytesIO(), list[BaseException]()
    np.save(image, np.zeros(3, [("row", "<u4"), ("code", "u1", (16,))]))

    def read() -> None:
        try:
            for _ in range(4_000):
                read_npy_header(BytesIO(image.getvalue()))
        except BaseException as raised:  # a SystemError
            failed.append(raised)

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
    assert failed == []


@given(st.lists(st.integers(0, 5), max_size=8), st.data())
def test_rows_are_found_in_their_parts(lengths: list[int], data: st.DataObject) -> None:
    parts = RowPartition(lengths)
    places = [(part, row) for part, length in enumerate(lengths) for row in range(length)]
    assert parts.n == len(places)
    rows = data.draw(st.lists(st.sampled_from(range(parts.n)), max_size=9).map(sorted)) if places else []
    asked = np.array(rows, dtype=np.int64)
    found = list(parts.split(asked))
    assert [(part, row) for part, _, local in found for row in local.tolist()] == [places[row] for row in rows]
    assert [row for _, span, _ in found for row in asked[span].tolist()] == rows
