"""Images of arrays: what is no image is told in one line."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from rag_model.npy import map_array, read_header


def test_a_header_that_claims_to_be_long_is_refused_in_one_line(tmp_path: Path) -> None:
    image = BytesIO()
    np.save(image, np.arange(6, dtype=np.float32).reshape(2, 3))
    sound = image.getvalue()
    lying = sound[:8] + (20_000).to_bytes(2, "little") + sound[10:] + b" " * 20_000
    (tmp_path / "lying.npy").write_bytes(lying)
    for read in (lambda: read_header(BytesIO(lying)), lambda: map_array(tmp_path / "lying.npy")):
        with pytest.raises(ValueError, match="Header info length") as refused:
            read()
        assert "\n" not in str(refused.value)
    assert read_header(BytesIO(sound))[0] == (2, 3)
