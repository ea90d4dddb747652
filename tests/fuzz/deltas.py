"""Kinds of delta files, which are read as a pull reads them, with the earlier file in the same folder."""

from pathlib import Path

import numpy as np

from rag_model.arrays import RowLists
from rag_model.corpus.passage_delta import apply_delta, write_delta
from rag_model.corpus.passages import PassageWriter
from rag_model.corpus.ragged_file import SparseVectors
from rag_model.corpus.records import Passage
from rag_model.store.pulling import delta_files
from rag_model.store.pulling.delta_files import apply_splice, write_splice
from rag_model.store.pulling.row_delta import FileWithLists, apply_row_delta, write_row_delta

_ROWS, _SIZE = 60, 9000
_DATA = np.random.default_rng(5).integers(0, 256, _SIZE, np.uint8).tobytes()


def _write_passages(path: Path, edited: int) -> Path:
    with PassageWriter(path) as writer:
        for row in range(_ROWS):
            text = f"passage {row}{' edited' if row == edited else ''}"
            writer.write(Passage(f"{row}", "1", 7, "Pigs", "", text, 0, 2, Passage.hash_of("Pigs", text), row or None))
    return path


def _make_passage_delta(folder: Path) -> Path:
    write_delta(_write_passages(folder / "before", -1), _write_passages(folder / "after", 7), folder / "delta")
    return folder / "delta"


def _read_passage_delta(path: Path) -> None:
    parent_path = path.parent / "before.parquet"
    if not parent_path.exists():
        _write_passages(parent_path, -1)
    apply_delta(parent_path, path, _ROWS, path.parent / "output")


def _write_file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _make_splice(folder: Path) -> Path:
    earlier = _write_file(folder / "before", _DATA)
    write_splice(earlier, _write_file(folder / "after", _DATA[:5000] + b"new" + _DATA[5003:]), folder / "splice")
    return folder / "splice"


def _read_splice(path: Path) -> None:
    apply_splice(_write_file(path.parent / "before.bytes", _DATA), path, _SIZE, path.parent / "output")


def _make_packed_head(folder: Path) -> Path:
    delta_files.pack_file(_write_file(folder / "file", _DATA), _SIZE, folder / "packed")
    return folder / "packed"


def _read_packed(path: Path) -> None:
    delta_files.unpack_file(path, _SIZE, path.parent / "output")


def _write_lists(path: Path, links: list[int]) -> FileWithLists:
    data = np.array(links, "<i4").tobytes()
    lengths = np.full(len(links) // 4, 4, np.int64)
    _write_file(path, b"head" + data + b"tail")
    return FileWithLists(path, RowLists(4, "<i4", 0, True, lengths, np.zeros_like(lengths)), len(data) + 8)


def _make_row_delta(folder: Path) -> Path:
    base, target = (
        _write_lists(folder / "before", [*range(40)] * 4),
        _write_lists(folder / "after", [*range(39, -1, -1)] * 4),
    )
    write_row_delta(base, target, np.arange(40), folder / "delta")
    return folder / "delta"


def _read_row_delta(path: Path) -> None:
    base = _write_lists(path.parent / "before.bytes", [*range(40)] * 4)
    apply_row_delta(base.path, path, base.size, path.parent / "output")


_BASE_ROWS = np.array([0, 1, -1, 5, -1, -1])
_TERMS = SparseVectors(
    np.array([3, 70_000, 4, 5], np.int32), np.array([9, 255, 1, 2], np.uint8), np.array([0, 2, 2, 4])
)


def _make_new_terms(folder: Path) -> Path:
    delta_files.write_new_terms(_BASE_ROWS, _TERMS, folder / "delta")
    return folder / "delta"


def _read_new_terms(path: Path) -> None:
    delta_files.read_new_terms(path, _SIZE)


DELTAS = (
    ("new rows of weighted terms", _make_new_terms, _read_new_terms),
    ("row delta", _make_row_delta, _read_row_delta),
    ("passage delta", _make_passage_delta, _read_passage_delta),
    ("splice", _make_splice, _read_splice),
    ("packed head", _make_packed_head, _read_packed),
)
