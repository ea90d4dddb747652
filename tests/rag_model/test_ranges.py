"""The range cache stores blocks that share pages of the disk, evicts them one by one, and closes without delay."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rag_model.errors import StoreError
from rag_model.ranges import BlockLayout, CachedFile, RangeCache, digest_ranges, evict_unused_files, pack_bounds
from tests.fixtures.serving import wait_until

_PAGE = 4096


def open_file(cache: RangeCache, data: bytes, bounds: list[int], name: str = "lists") -> CachedFile:
    layout = BlockLayout.unpack(len(data), _PAGE, pack_bounds(bounds))
    return cache.open(name, name, layout, digest_ranges(data, bounds), lambda start, end: data[start:end])


def count_disk_bytes(cache: RangeCache) -> int:
    return sum(512 * path.stat().st_blocks for path in cache.folder.glob("*.ranges"))


def draw_bounds(rng: np.random.Generator, count: int) -> list[int]:
    return [0, *np.cumsum(rng.integers(1, 3 * _PAGE, size=count)).tolist()]


def test_reads_equal_the_file_while_blocks_are_evicted_and_found_again(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    bounds, max_bytes = draw_bounds(rng, 60), 24 * _PAGE
    data = rng.bytes(bounds[-1])
    for _ in range(4):  # each time with the sparse file of the previous process
        cache = RangeCache(tmp_path, max_bytes)
        file = open_file(cache, data, bounds)
        for start, size in rng.integers(0, [len(data), 4 * _PAGE], size=(100, 2)).tolist():
            assert file.read(start, start + size) == data[start : start + size]
            assert count_disk_bytes(cache) <= max_bytes
        cache.close()


def test_a_range_of_whole_blocks_reads_exactly_these(tmp_path: Path) -> None:
    bounds = draw_bounds(np.random.default_rng(2), 20)
    cache = RangeCache(tmp_path, 1 << 20)
    file = open_file(cache, bytes(bounds[-1]), bounds)
    assert file.count_missing_bytes(bounds[3], bounds[7]) == bounds[7] - bounds[3]
    with cache.hold():
        file.load([bounds[3], bounds[11]], [bounds[7], bounds[11]])
    assert (cache.requests, cache.fetched_bytes) == (1, bounds[7] - bounds[3])
    assert file.count_missing_bytes(bounds[2], bounds[8]) == bounds[3] - bounds[2] + bounds[8] - bounds[7]


def test_eviction_of_a_block_keeps_its_neighbour_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = [0, 6000, 12_000]  # the second page has bytes of both blocks
    data, write = np.random.default_rng(3).bytes(bounds[-1]), os.pwrite
    cache = RangeCache(tmp_path, 5 * _PAGE)
    file, other_file = open_file(cache, data, bounds), open_file(cache, data, bounds, "others")
    file.read(0, 1)

    def write_while_others_evict(descriptor: int, block: memoryview, offset: int) -> int:
        size = write(descriptor, block, offset)
        monkeypatch.undo()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(other_file.read, 0, len(data)).result()
        return size

    monkeypatch.setattr(os, "pwrite", write_while_others_evict)
    with cache.hold():
        file.load([6000], [6001])
        assert file.count_missing_bytes(0, 6000) == 6000  # evicted
        assert file.read_loaded(6000, 12_000) == data[6000:]


def test_files_are_deleted_while_another_process_creates_them(tmp_path: Path) -> None:
    folder, is_done = tmp_path / "ranges", threading.Event()

    def evict() -> None:
        while not is_done.is_set():
            evict_unused_files(folder, 0)

    with ThreadPoolExecutor(1) as pool:
        eviction = pool.submit(evict)
        try:
            for _ in range(200):
                cache = RangeCache(folder, 1 << 20)
                file = open_file(cache, bytes(6000), [0, 6000])
                assert not str(file.path.readlink()).startswith("/memfd:"), "the cache is in memory, not on the disk"
                cache.close()
        finally:
            is_done.set()
        eviction.result()
    evict_unused_files(folder, 0)
    assert not list(folder.iterdir())


def test_files_are_deleted_if_others_cannot_be(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.ranges")  # waits for a writer when it is opened
    (tmp_path / "folder.ranges").mkdir()
    os.utime(tmp_path / "folder.ranges", (0, 0))
    (tmp_path / "lists.ranges").write_bytes(bytes(_PAGE))
    evict_unused_files(tmp_path, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.ranges"]


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "letter"
    target.write_text("Dear reader")
    (tmp_path / "lists.ranges").symlink_to(target)
    assert open_file(RangeCache(tmp_path, 1 << 20), bytes(6000), [0, 6000]).read(0, 6000) == bytes(6000)
    assert target.read_text() == "Dear reader"


def test_a_cache_on_a_full_disk_warns_once_that_it_is_in_memory(
    tmp_path: Path, build_disk_prefix: Callable[[str, Path], list[str]]
) -> None:
    code = """if True:
        import sys
        from pathlib import Path
        from tests.rag_model.test_ranges import RangeCache, open_file

        cache = RangeCache(Path(sys.argv[1]), 1 << 30)
        for name in ("lists", "passages"):
            assert open_file(cache, bytes(6000), [0, 6000], name).read(0, 6000) == bytes(6000)
    """
    folder = tmp_path / "small"
    command = [*build_disk_prefix("1m", folder), sys.executable, "-c", code, str(folder / "ranges")]
    root = Path(__file__).parents[2]  # of the tests, which the command imports
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=root)
    assert (result.returncode, result.stderr) == (
        0,
        f"cannot write the cache of ranges in {folder}/ranges (less than 67 MB of its disk are free): free some space, "
        "or set BOOKWHEEL_CACHE to a folder of another disk; up to 268 MB are cached in memory instead\n",
    )


def test_a_read_that_fails_leaves_no_cycle_of_objects(tmp_path: Path) -> None:
    def fail(start: int, end: int) -> bytes:
        raise StoreError("the network is down")

    file = RangeCache(tmp_path, 1 << 20).open("lists", "lists", BlockLayout(_PAGE, _PAGE), bytes(16), fail)
    gc.disable()  # the error refers to the objects of all callers
    try:
        try:
            file.read(0, _PAGE)
        except StoreError as error:
            failed_error = weakref.ref(error)
        wait_until(lambda: failed_error() is None)  # the thread that read may still hold it
    finally:
        gc.enable()


def test_a_cache_closes_while_the_store_holds_a_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rag_model.ranges._MAX_SILENT_SECONDS", 0.01)
    is_requested, may_answer = threading.Event(), threading.Event()

    def answer_late(start: int, end: int) -> bytes:
        is_requested.set()
        may_answer.wait()
        return b""

    cache = RangeCache(tmp_path, 1 << 20)
    file = cache.open("lists", "lists", BlockLayout(_PAGE, _PAGE), bytes(16), answer_late)
    cache.load_later([(file, np.array([0]), np.array([_PAGE]))])
    assert is_requested.wait(300)
    cache.close()  # A cache that waited for the response would never return.
    may_answer.set()


@pytest.mark.parametrize("lengths", [[3, 5], [3, 0, 4], []])
def test_boundaries_of_another_file_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="do not add up to the size"):
        BlockLayout.unpack(7, _PAGE, pack_bounds([0, *np.cumsum(lengths, dtype=int).tolist()]))
