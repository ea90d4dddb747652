"""Amounts of memory and disk in text form, and whether a disk has so much."""

import re
import shutil
from pathlib import Path

from rag_model.errors import ResourceError, UsageError

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Read a number of bytes: `16GB` is 16 * 1000^3, `512MiB` is 512 * 1024^2, a bare number is bytes.

    >>> parse_bytes("512MiB")
    536870912

    Raises:
        UsageError: it is not an amount, or is 0.
    """
    match = _AMOUNT.fullmatch(text.strip())
    amount = int(float(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2].upper()]) if match else 0
    if amount < 1:
        raise UsageError(f"{text!r} is not an amount of memory: give one such as 16GB, 512MiB, or a number of bytes")
    return amount


def gigabytes(count: float) -> str:
    """Format a number of bytes: 16.0 GB; below 1 GB in MB."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"


def check_disk(place: Path, size: int, work: str, other: str) -> None:
    """Check that the disk of a folder has room for `size` bytes; the last two are words of the refusal.

    Raises:
        ResourceError: it has not.
    """
    free = shutil.disk_usage(place).free
    if size > free:
        raise ResourceError(
            f"{work} needs {gigabytes(size)} of disk in {place}, and {gigabytes(free)} are free: free some, or {other}"
        )
