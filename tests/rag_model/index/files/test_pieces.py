"""Each slice is one read of the location in the piece's table, which never reaches into other bytes."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from rag_model.errors import InputError, ResourceError
from rag_model.index.files.pieces import (
    SLICE_LOCATION_DTYPE,
    SliceLocation,
    digest_slices,
    open_piece_head,
    path_opener,
    read_slice_table,
    write_sliced_piece,
)

SLICES = [b"first", b"", b"third one", b"\0"]
ROWS = [2, 0, 5, 1]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_sliced_piece(tmp_path / "piece", "stamp", [np.arange(3)], SLICES, ROWS)
    return tmp_path / "piece"


def read_locations(path: Path, shards: int = len(SLICES)) -> list[SliceLocation]:
    data = path.read_bytes()
    return SliceLocation.from_table(
        read_slice_table(lambda start, end: data[start:end], len(data), shards, "the piece")[:-1]
    )


def test_slice_locations_match_the_slices(path: Path) -> None:
    data, locations = path.read_bytes(), read_locations(path)
    assert [data[location.start : location.end] for location in locations] == SLICES
    assert [location.rows for location in locations] == ROWS
    for location, content in zip(locations, SLICES, strict=True):
        assert location.matches(content)
        assert not location.matches(content + b"\0")
        assert not location.matches(content[:-1] + b"?")


def test_head_is_verified(path: Path) -> None:
    with open_piece_head(path_opener(path), len(SLICES), "stamp", 1, "the piece") as piece:
        assert piece.read(0).tolist() == [0, 1, 2]
    with pytest.raises(InputError, match="the piece is a piece of another build"):
        open_piece_head(path_opener(path), len(SLICES), "other", 1, "the piece")
    data = path.read_bytes()
    for position in (0, 60, data.index(SLICES[0]) - 1):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(InputError, match=r"the piece, .*piece, is truncated or damaged: delete that file"):
            open_piece_head(path_opener(path), len(SLICES), "stamp", 1, "the piece")
    path.unlink()
    with pytest.raises(InputError, match=r"cannot read the piece \(No such file or directory\)"):
        open_piece_head(path_opener(path), len(SLICES), "stamp", 1, "the piece")


def test_slice_digest_does_not_depend_on_locations(path: Path, tmp_path: Path) -> None:
    """The digest ignores the lengths of other slices and empty slices, but not the order of parts."""
    other_path = tmp_path / "other"
    write_sliced_piece(other_path, "stamp", [np.arange(9)], [b"of another length", b"more", *SLICES[2:]], [1, 1, 5, 1])
    tables = [np.array(read_locations(piece_path), SLICE_LOCATION_DTYPE) for piece_path in (path, other_path)]
    assert tables[0]["start"][2] != tables[1]["start"][2]
    columns = [digest_slices(np.array(column, SLICE_LOCATION_DTYPE)) for column in ([tables[0][2]], [tables[1][2]])]
    assert columns[0] == columns[1]
    assert digest_slices(tables[0][[2, 1]]) == digest_slices(tables[0][[2]]) != digest_slices(tables[0][[2, 0]])
    assert digest_slices(tables[0][[2, 0]]) != digest_slices(tables[0][[0, 2]])


_MIN_INT64, _MAX_INT64 = np.iinfo(np.int64).min, np.iinfo(np.int64).max
_TABLE = (len(SLICES) + 1) * SLICE_LOCATION_DTYPE.itemsize


def change_location(path: Path, field: str, value: int, *, sealed: bool) -> None:
    """Set a field of the third slice's location; with `sealed`, update the digest of the table too."""
    data = path.read_bytes()
    table = np.frombuffer(data[-_TABLE - 16 : -16], SLICE_LOCATION_DTYPE).copy()
    table[field][2] = value
    seal = hashlib.sha256(table.tobytes()).digest()[-16:] if sealed else data[-16:]
    path.write_bytes(data[: -_TABLE - 16] + table.tobytes() + seal)


@pytest.mark.parametrize(("field", "value"), [("start", 9), ("size", 0), ("rows", 6), ("rows", 1 << 62)])
def test_changed_table_is_refused(field: str, value: int, path: Path) -> None:
    """`rows` must be right because a snapshot reports the imbalance of cells from it."""
    change_location(path, field, value, sealed=False)
    with pytest.raises(InputError, match="the piece is truncated or damaged"):
        read_locations(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [*((field, value) for field in ("start", "size") for value in (-1, _MIN_INT64, 1 << 62, _MAX_INT64)), ("rows", -1)],
)
def test_location_outside_the_piece_is_refused(field: str, value: int, path: Path) -> None:
    change_location(path, field, value, sealed=True)
    with pytest.raises(InputError, match="the piece is truncated or damaged"):
        read_locations(path)


def test_location_within_the_table_is_refused(path: Path) -> None:
    slices_end = path.stat().st_size - _TABLE - 16
    change_location(path, "start", slices_end - len(SLICES[2]), sealed=True)
    assert read_locations(path)[2].end == slices_end
    change_location(path, "start", slices_end - len(SLICES[2]) + 1, sealed=True)
    with pytest.raises(InputError, match="the piece is truncated or damaged"):
        read_locations(path)


@pytest.mark.parametrize("size", [0, 1, 39, 215])
def test_truncated_piece_is_refused(size: int, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(InputError, match="the piece is truncated or damaged"):
        read_locations(path)


def test_piece_without_shards_has_no_slices(tmp_path: Path) -> None:
    write_sliced_piece(tmp_path / "piece", "stamp", [], [], [])
    assert read_locations(tmp_path / "piece", 0) == []


def test_unwritable_piece_is_a_resource_error(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="cannot write"):
        write_sliced_piece(tmp_path / "no" / "piece", "stamp", [], SLICES, ROWS)
