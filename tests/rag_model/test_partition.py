"""A row is found in its part, whatever the parts' lengths."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rag_model.partition import Partition


@given(st.lists(st.integers(0, 5), max_size=8), st.data())
def test_rows_are_found_in_their_parts(lengths: list[int], data: st.DataObject) -> None:
    parts = Partition(lengths)
    places = [(part, row) for part, length in enumerate(lengths) for row in range(length)]
    assert parts.n == len(places)
    rows = data.draw(st.lists(st.sampled_from(range(parts.n)), max_size=9).map(sorted)) if places else []
    asked = np.array(rows, dtype=np.int64)
    found = list(parts.split(asked))
    assert [(part, row) for part, _, local in found for row in local.tolist()] == [places[row] for row in rows]
    assert [row for _, span, _ in found for row in asked[span].tolist()] == rows
