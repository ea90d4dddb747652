from pathlib import Path

import pytest

from rag_model.errors import ResourceError, UsageError
from rag_model.process import check_disk, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("16GB", 16 * 1000**3),
        ("16G", 16 * 1000**3),
        ("512MiB", 512 * 1024**2),
        ("512 mib", 512 * 1024**2),
        ("1.5TB", 1500 * 1000**3),
        ("4096", 4096),
        ("7B", 7),
    ],
)
def test_sizes_with_decimal_and_binary_units_are_parsed(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "16 apples", "0", "1e9", "16GBs"])
def test_invalid_amount_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not an amount of memory"):
        parse_bytes(text)


def test_sizes_are_formatted_with_decimal_units() -> None:
    assert [format_bytes(count) for count in (512e6, 16e9, 1234.5e9)] == ["512 MB", "16.0 GB", "1,234.5 GB"]


def test_full_disk_is_refused(tmp_path: Path) -> None:
    check_disk(tmp_path, 1000, "merging HNSW32", "set TMPDIR")
    with pytest.raises(
        ResourceError, match=r"merging HNSW32 needs .* of disk in .*, and .* are free: free some, or set"
    ):
        check_disk(tmp_path, 1 << 60, "merging HNSW32", "set TMPDIR")
