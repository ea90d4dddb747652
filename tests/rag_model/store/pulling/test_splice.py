"""A splice rebuilds a file from an earlier file and the bytes that the earlier file does not have."""

import struct
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.errors import InputError
from rag_model.index.files.tensors import TensorStream, find_common_ranges, write_tensors
from rag_model.store.pulling import delta_files
from rag_model.store.pulling.delta_files import apply_splice, write_splice
from tests.fixtures.work_counters import measure_peaks

DATA = np.random.default_rng(1).integers(0, 256, 20_000, np.uint8).tobytes()
OFFSETS = st.lists(st.integers(0, len(DATA)), max_size=6)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(offsets=OFFSETS, new_bytes=st.binary(max_size=40))
def test_splice_rebuilds_any_file_from_any_other(offsets: list[int], new_bytes: bytes, tmp_path: Path) -> None:
    """The files consist of stretches in any order, with new bytes between them."""
    later = new_bytes.join(DATA[min(pair) : max(pair)] for pair in pairwise(offsets))
    build_splice(DATA, later, tmp_path)
    build_splice(later, DATA, tmp_path)


def build_splice(earlier: bytes, later: bytes, folder: Path) -> int:
    """Build and apply the splice from one file to another, and return its size."""
    (folder / "earlier").write_bytes(earlier)
    (folder / "later").write_bytes(later)
    write_splice(folder / "earlier", folder / "later", folder / "splice")
    apply_splice(folder / "earlier", folder / "splice", len(later), folder / "made")
    assert (folder / "made").read_bytes() == later
    return (folder / "splice").stat().st_size


def test_splice_omits_bytes_of_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_files, "_WINDOW_BYTES", 1 << 12)  # so that stretches span several windows
    later = b"".join([DATA[:3000], b"new", DATA[3016:9000], DATA[9016:], b"more"])
    assert build_splice(DATA, later, tmp_path) < 200
    assert build_splice(DATA, b"", tmp_path) < 200
    assert build_splice(bytes(9999), bytes(12345), tmp_path) < 500


def test_memory_of_write_splice_is_limited(tmp_path: Path) -> None:
    size = 12 << 20
    earlier = np.random.default_rng(2).integers(0, 256, size, np.uint8).tobytes()
    (tmp_path / "earlier").write_bytes(earlier)
    (tmp_path / "later").write_bytes(earlier[: 5 << 20] + b"new" + earlier[5 << 20 :])
    paths = (tmp_path / "earlier", tmp_path / "later", tmp_path / "splice")
    (peak_bytes,) = measure_peaks(partial(write_splice, *paths))
    assert peak_bytes < 4 * size  # hashes of the whole file would need eight times its size


@pytest.mark.parametrize(
    "steps",
    [
        [(4, 0, 96), (0, 0, 0)],  # more new bytes than the splice has
        [(3, 0, 97), (1, 0, 97)],  # too long
        [(3, 0, 96)],  # too short
        [(3, 19_990, 97)],
        [(3, -1, 97)],
        [(-1, 0, 97), (4, 0, 0)],
        [(3, 0, 1 << 62), (0, 1 << 62, 1 << 62)],
        [*[(0, 0, 0)] * 4, (3, 0, 97)],  # empty steps could repeat without end
        [],
    ],
)
def test_invalid_splice_is_refused(steps: list[tuple[int, int, int]], tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(np.array(steps, "<i8").tobytes() + b"abc")
    head = struct.pack("<QQ", len(steps), 3)
    delta_files.pack_file(tmp_path / "raw", 24 * len(steps) + 3, tmp_path / "splice", head)
    check_refused(tmp_path)


@pytest.mark.parametrize("head", [b"", b"\xff" * 16, struct.pack("<QQ", 1, 1 << 40), struct.pack("<QQ", 1, 76)])
def test_damaged_splice_is_refused(head: bytes, tmp_path: Path) -> None:
    (tmp_path / "splice").write_bytes(head)
    check_refused(tmp_path)


def check_refused(folder: Path) -> None:
    (folder / "earlier").write_bytes(DATA)
    with pytest.raises(InputError, match="fetch the whole file"):
        apply_splice(folder / "earlier", folder / "splice", 100, folder / "made")
    assert not (folder / "made").exists()


def write_ragged(path: Path, lengths: np.ndarray, codes: np.ndarray) -> Path:
    """Write a file like that of an index of token vectors."""
    arrays = {
        "centroids": np.ones((64, 8), np.float32),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "ids": codes[:, 0].astype(np.uint16),
        "codes": codes,
    }
    write_tensors(path, [TensorStream(name, a.dtype, a.shape, [a]) for name, a in arrays.items()], {"codec": "PQ"})
    return path


def test_rows_of_a_token_index_are_copied_without_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    lengths, count = rng.integers(1, 40, 2000), 2000
    base_rows = np.insert(np.delete(np.arange(count), [0, 7, 1500]), [5, 1800, 1997], -1)
    new_lengths = np.where(base_rows < 0, 9, lengths[base_rows])
    codes = np.split(rng.integers(0, 256, (int(lengths.sum()), 16), np.uint8), np.cumsum(lengths)[:-1])
    new_codes = [codes[row] if row >= 0 else rng.integers(0, 256, (9, 16), np.uint8) for row in base_rows]
    base = write_ragged(tmp_path / "base", lengths, np.concatenate(codes))
    target = write_ragged(tmp_path / "target", new_lengths, np.concatenate(new_codes))
    stretches = find_common_ranges(base, target, lambda: base_rows)
    assert stretches is not None
    monkeypatch.setattr(delta_files, "_find_match_candidates", None)
    write_splice(base, target, tmp_path / "splice", stretches)
    assert (tmp_path / "splice").stat().st_size < 0.01 * target.stat().st_size
    apply_splice(base, tmp_path / "splice", target.stat().st_size, tmp_path / "made")
    assert (tmp_path / "made").read_bytes() == target.read_bytes()
    # Even with wrong rows the splice gives the same file, from fewer equal bytes.
    write_splice(base, target, tmp_path / "splice", find_common_ranges(base, target, lambda: np.sort(base_rows)))
    apply_splice(base, tmp_path / "splice", target.stat().st_size, tmp_path / "made")
    assert (tmp_path / "made").read_bytes() == target.read_bytes()
    (tmp_path / "other").write_bytes(b"other")
    assert find_common_ranges(tmp_path / "other", target, lambda: base_rows) is None
