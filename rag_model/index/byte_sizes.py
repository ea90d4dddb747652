"""Parse and format amounts of memory and disk, and check free disk space."""

import re
import shutil
from pathlib import Path

from rag_model.errors import ResourceError, UsageError

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Parse a number of bytes: 16GB is 16 * 1000^3, 512MiB is 512 * 1024^2, 512 is bytes.

    >>> parse_bytes("512MiB")
    536870912

    Raises:
        UsageError: the text is not an amount, or is 0.
    """
    match = _AMOUNT.fullmatch(text.strip())
    amount = int(float(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2].upper()]) if match else 0
    if amount < 1:
        raise UsageError(f"{text!r} is not an amount of memory: give one such as 16GB, 512MiB, or a number of bytes")
    return amount


def format_bytes(count: float) -> str:
    """Format a number of bytes as GB, or as MB below 1 GB: 16.0 GB."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"


def check_disk(folder: Path, size: int, work: str, other: str) -> None:
    """Check that a folder's disk has `size` bytes free.

    Args:
        folder: the folder to write into.
        size: the bytes needed.
        work: the work that needs them, the subject of the error message.
        other: an alternative to freeing space, the end of the error message.

    Raises:
        ResourceError: there is too little free space.
    """
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ResourceError(
            f"{work} needs {format_bytes(size)} of disk in {folder}, and {format_bytes(free)} are "
            f"free: free some, or {other}"
        )
