"""Row deltas: lists of row numbers after a change of the rows."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.arrays import RowLists
from rag_model.errors import InputError
from rag_model.index.files.layout import find_row_lists
from rag_model.store.pulling import row_delta
from rag_model.store.pulling.row_delta import FileWithLists, apply_row_delta, write_row_delta

HEAD, TAIL = b"head" * 4, b"tail" * 20
D = 16


def write_lists(path: Path, lists: list[list[int]], code_bytes: int, gap: int, *, by_row: bool) -> FileWithLists:
    """Write lists whose codes depend on the rows, with a gap after every third list."""
    dtype = "<i8" if code_bytes else "<i4"
    gaps = [gap * (number % 3 == 0) for number in range(len(lists))]
    with path.open("wb") as file:
        file.write(HEAD)
        for rows, size in zip(lists, gaps, strict=True):
            file.write(bytes(row % 251 for row in rows for _ in range(code_bytes)))
            file.write(np.array(rows, dtype).tobytes() + bytes([len(rows) % 256]) * size)
        file.write(TAIL)
    lengths = np.array([*map(len, lists)], np.int64)
    row_lists = RowLists(len(HEAD), dtype, code_bytes, by_row, lengths, np.array(gaps, np.int64))
    return FileWithLists(path, row_lists, path.stat().st_size)


def rebuild(base: FileWithLists, target: FileWithLists, base_rows: list[int], folder: Path) -> int:
    """Write a delta, apply it, and check the result; return the size of the delta."""
    write_row_delta(base, target, np.array(base_rows, np.int64), folder / "delta")
    apply_row_delta(base.path, folder / "delta", target.size, folder / "made")
    assert (folder / "made").read_bytes() == target.path.read_bytes()
    return (folder / "delta").stat().st_size


COUNT = 7
ROWS = st.lists(st.integers(-1, COUNT - 1), max_size=9)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lists=st.tuples(*[st.lists(ROWS, min_size=COUNT, max_size=COUNT)] * 2),
    base_candidates=st.lists(st.sampled_from([-1, *range(COUNT)]), min_size=COUNT, max_size=COUNT),
    gap=st.sampled_from([0, 8]),
)
def test_links_are_rebuilt_from_any_base(
    lists: tuple[list[list[int]], list[list[int]]], base_candidates: list[int], gap: int, tmp_path: Path
) -> None:
    """Links may have empty slots between others, repeated numbers and any order."""
    highest, base_rows = -1, list[int]()
    for row in base_candidates:
        base_rows.append(row if row > highest else -1)
        highest = max(highest, row)
    files = [write_lists(tmp_path / name, part, 0, gap, by_row=True) for name, part in zip("ab", lists, strict=True)]
    rebuild(files[0], files[1], base_rows, tmp_path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lists_of_rows=st.tuples(*[st.lists(st.integers(0, 3), min_size=1, max_size=40)] * 2), data=st.data())
def test_inverted_lists_are_rebuilt_from_any_base(
    lists_of_rows: tuple[list[int], list[int]], data: st.DataObject, tmp_path: Path
) -> None:
    n_base, n_target = map(len, lists_of_rows)
    rows = sorted(data.draw(st.sets(st.integers(0, n_base - 1))))[:n_target]
    new_positions = sorted(data.draw(st.sets(st.integers(0, n_target - 1), min_size=len(rows), max_size=len(rows))))
    base_rows = [-1] * n_target
    for position, row in zip(new_positions, rows, strict=True):
        base_rows[position] = row
    lists = [[[row for row, n in enumerate(part) if n == number] for number in range(4)] for part in lists_of_rows]
    files = [write_lists(tmp_path / name, part, 3, 0, by_row=False) for name, part in zip("ab", lists, strict=True)]
    rebuild(files[0], files[1], base_rows, tmp_path)


def build_index(factory: str, vectors: Any, path: Path) -> Path:
    index = faiss.index_factory(D, factory)
    index.train(np.random.default_rng(1).normal(size=(3000, D)).astype(np.float32))
    index.add(vectors)
    faiss.write_index(index, str(path))
    return path


@pytest.mark.parametrize(
    ("factory", "share"),
    [("IVF16,PQ8np", 0.02), ("IVF16,SQ8", 0.02), ("OPQ8,IVF16,PQ8np", 0.04), ("HNSW8", 0.5), ("Flat", 0.5)],
)
def test_faiss_files_are_rebuilt(factory: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The delta of inverted lists is small: about 1 % of the rows changed."""
    monkeypatch.setattr(row_delta, "_BLOCK_BYTES", 4096)  # several blocks
    rows, count = np.random.default_rng(2).normal(size=(4040, D)).astype(np.float32), 4000
    base_rows = np.delete(np.arange(count), np.arange(0, count, 200))
    base_rows = np.insert(base_rows, [0, 77, 1000, *[3000] * 10, len(base_rows)], -1)
    vectors = np.where(base_rows[:, None] < 0, rows[-len(base_rows) :], rows[base_rows])
    paths = build_index(factory, rows[:count], tmp_path / "a"), build_index(factory, vectors, tmp_path / "b")
    files = [FileWithLists(path, find_row_lists(path) or RowLists.empty(), path.stat().st_size) for path in paths]
    assert (len(files[0].lists.lengths) > 0) == (factory != "Flat")
    assert (
        rebuild(files[0], files[1], base_rows.tolist() if factory != "Flat" else [], tmp_path) < share * files[1].size
    )


def test_damaged_delta_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    base, target = (
        write_lists(tmp_path / name, [[0, number], [1], [number, 0]], 0, 4, by_row=True)
        for name, number in (("a", 1), ("b", 2))
    )
    rebuild(base, target, [0, -1, 2], tmp_path)
    (tmp_path / "made").unlink()
    delta, damaged = (tmp_path / "delta").read_bytes(), tmp_path / "damaged"
    rng = np.random.default_rng(3)
    variants = [delta[:size] for size in range(0, len(delta), 7)]
    for offset in rng.integers(0, len(delta), 150).tolist():
        variants.append(delta[:offset] + bytes([int(rng.integers(256))]) + delta[offset + 1 :])
    rejected_count = 0
    for variant in variants:
        damaged.write_bytes(variant)
        with suppress(InputError):  # some damage only changes the result, which its digest detects
            apply_row_delta(base.path, damaged, target.size, tmp_path / "made")
        rejected_count += not (tmp_path / "made").exists()
        (tmp_path / "made").unlink(missing_ok=True)
    assert rejected_count > len(variants) / 2


def test_delta_of_another_base_is_refused(tmp_path: Path) -> None:
    base, target = (write_lists(tmp_path / name, [[0, 1], [1]], 0, 0, by_row=True) for name in "ab")
    rebuild(base, target, [0, 1], tmp_path)
    (tmp_path / "other").write_bytes(base.path.read_bytes()[:20])
    with pytest.raises(InputError, match="fetch the whole file"):
        apply_row_delta(tmp_path / "other", tmp_path / "delta", target.size, tmp_path / "out")


def test_lists_of_different_kinds_are_not_compared(tmp_path: Path) -> None:
    base = write_lists(tmp_path / "a", [[0], [1]], 3, 0, by_row=False)
    target = write_lists(tmp_path / "b", [[0, 1]], 3, 0, by_row=False)
    with pytest.raises(InputError, match="the numbers of rows or lists differ"):
        write_row_delta(base, target, np.array([0, 1]), tmp_path / "delta")
