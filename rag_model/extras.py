"""Optional dependencies: one clear error with the exact install line."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from rag_model.errors import MissingExtraError


def require(module: str, extra: str) -> ModuleType:
    """Import `module`, which the extra `extra` installs.

    >>> require("json", extra="model").__name__
    'json'

    Raises:
        MissingExtraError: it is not installed; the message contains the `pip install` line.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.split(".")[0] != module.split(".", maxsplit=1)[0]:
            raise
        raise MissingExtraError(
            f"{module} is not installed: run `pip install 'bookwheel[{extra}]'` and try again"
        ) from missing


def installed(*distributions: str) -> str:
    """Return names and versions of distributions, as a part of memo keys; `none` is the version of an absent one.

    >>> installed("no-such-distribution")
    'no-such-distribution none'
    """
    return ", ".join(f"{name} {_version(name)}" for name in distributions)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "none"
