"""Impossible settings are refused before anything starts, memory limits are respected, and secrets are masked."""

import ctypes
import math
import mmap
import os
from dataclasses import fields
from pathlib import Path

import pytest

from rag_model.errors import ResourceError, UsageError
from rag_model.secrets import mask_secrets
from rag_model.serving.answering import available_retrievers, loaded_snapshot
from rag_model.serving.answering.available_retrievers import check_memory
from rag_model.serving.answering.loaded_snapshot import fill_page_cache
from rag_model.serving.settings import ServiceSettings
from tests.fixtures.serving import Library, make_settings

NUMBERS = [field.name for field in fields(ServiceSettings) if type(field.default) in (int, float)]


@pytest.mark.parametrize(
    "limits", [{"retrievers": ("rrf(hnsw",)}, {"max_depth": 0}, {"max_k": 0}, {"poll_seconds": 0.0}]
)
def test_settings_that_cannot_work_are_refused(limits: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"give|not closed"):
        make_settings(**limits)


@pytest.mark.parametrize("name", NUMBERS)
def test_invalid_limit_is_refused(name: str) -> None:
    for value in (math.nan, math.inf, -math.inf, -1, True):
        with pytest.raises(UsageError, match=f"{name} is "):
            make_settings(**{name: value})


def test_wait_has_an_upper_limit() -> None:
    with pytest.raises(UsageError, match=r"poll_seconds is 1e\+300: give at most"):
        make_settings(poll_seconds=1e300)


def test_index_larger_than_memory_is_refused_unless_it_is_mapped(
    shared_library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = shared_library.store.snapshots.get(shared_library.red).content
    loaded = make_settings(in_memory=True)
    check_memory(content, ["hnsw"], loaded)
    monkeypatch.setattr(available_retrievers, "get_free_bytes", lambda: content.files["index/hnsw.faiss"].size - 1)
    with pytest.raises(ResourceError, match="serve without --in-memory"):
        check_memory(content, ["hnsw"], loaded)
    check_memory(content, ["hnsw"], ServiceSettings())


def test_mapped_files_are_read_into_the_page_cache_if_they_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts the cached pages of two files whose pages it was told to drop."""
    first, second = tmp_path / "first", tmp_path / "second"
    for path, size in ((first, 2 << 20), (second, 2 << 20)):
        with path.open("wb") as file:
            file.write(os.urandom(size))
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if compute_cached_share(first) == 1:
        pytest.skip("the file system of the temporary folder has no disk whose pages the kernel could drop")
    monkeypatch.setattr(loaded_snapshot, "get_free_bytes", lambda: 3 << 20)
    fill_page_cache([first, second], mapped_bytes=2 << 20)
    assert compute_cached_share(first) < 1, "it would not fit beside the mapped index"
    fill_page_cache([first, second])
    assert compute_cached_share(first) == 1
    assert compute_cached_share(second) < 1, "it would not fit beside the first file"


def compute_cached_share(path: Path) -> float:
    """Return the share of a file's pages that are in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        size = ctypes.c_size_t(len(mapped))
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(first)), size, pages)
        del first  # The map cannot be closed while a pointer to it exists.
        assert not failed
        return sum(page & 1 for page in pages) / len(pages)


def test_secrets_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hushhush")
    monkeypatch.setenv("HF_TOKEN", "hf")  # too short to be a secret
    message = "cannot read https://me:word@host/a?sig=0f (key hushhush) of hf"
    assert mask_secrets(message) == "cannot read https://***@host/a?*** (key ***) of hf"
    assert mask_secrets("latest@3 is refused: k is 0") == "latest@3 is refused: k is 0"
