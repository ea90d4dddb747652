"""Optional dependencies: one clear error with the exact install line."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from rag_model.errors import MissingExtraError

# All of them write the module `faiss`: over each other, if several are installed.
_FAISS = (
    *("faiss-cpu", "faiss-gpu", "faiss-gpu-cuvs", "faiss-gpu-cu11", "faiss-gpu-cu12", "faiss-gpu-cu12-cuvs"),
    *("faiss-gpu-cu13-cuvs", "faiss-cuda"),
)
_NONE = "none"


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


def versions(*distributions: str) -> dict[str, str]:
    """Return the versions of distributions by their names, as provenance has them; `none` is that of an absent one.

    >>> versions("no-such-distribution")
    {'no-such-distribution': 'none'}
    """
    return {name: _version(name) for name in distributions}


def faiss_packages() -> dict[str, str]:
    """Return the versions of the installed distributions of faiss by their names; of a sound environment, one."""
    return {name: own for name in _FAISS if (own := _own_version(name)) != _NONE}


def check_one_faiss() -> None:
    """Check that the module `faiss` is of one distribution.

    Raises:
        MissingExtraError: it is of several, which wrote over each other; the message contains the `pip` lines.
    """
    if len(found := faiss_packages()) > 1:
        raise MissingExtraError(
            f"{' and '.join(found)} are installed over each other, as both write the module faiss: run `pip uninstall "
            f"--yes {' '.join(found)}`, then `pip install --no-deps` with the one to keep"
        )


def _version(distribution: str) -> str:
    """Return a version; as that of faiss-cpu, whose name memo keys have, that of the faiss that is there."""
    if distribution == _FAISS[0]:
        return next(iter(faiss_packages().values()), _NONE)
    return _own_version(distribution)


def _own_version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return _NONE
