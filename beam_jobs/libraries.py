"""Versions of the libraries that decide a stage's output: part of every record's key."""

from importlib.metadata import version


def versions(*distributions: str) -> dict[str, str]:
    """Return the installed version of each distribution, by name.

    Raises:
        importlib.metadata.PackageNotFoundError: one is not installed.
    """
    return {name: version(name) for name in distributions}
