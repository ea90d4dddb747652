"""Import optional dependencies and report their versions."""

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from threading import get_ident
from types import ModuleType

from rag_model.errors import MissingExtraError

# Each of these distributions installs the module `faiss`, so two of them overwrite each other.
_FAISS_DISTRIBUTIONS = (
    *("faiss-cpu", "faiss-gpu", "faiss-gpu-cuvs", "faiss-gpu-cu11", "faiss-gpu-cu12", "faiss-gpu-cu12-cuvs"),
    *("faiss-gpu-cu13-cuvs", "faiss-cuda"),
)
_NO_VERSION = "none"


def require(module: str, extra: str) -> ModuleType:
    """Import `module`, which belongs to the optional extra `extra`.

    >>> require("json", extra="model").__name__
    'json'

    Raises:
        MissingExtraError: The module is not installed; the message contains the `pip install` line.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".", maxsplit=1)[0]:
            raise
        raise MissingExtraError(
            f"{module} is not installed: run `pip install 'bookwheel[{extra}]'` and try again"
        ) from error


class _ModuleHidingFinder(MetaPathFinder):
    def __init__(self, names: Collection[str]) -> None:
        self._names, self._thread = names, get_ident()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in self._names and get_ident() == self._thread:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


@contextmanager
def hide_modules(*names: str) -> Iterator[None]:
    """Until the block ends, make modules that are not imported yet appear as not installed to this
    thread.
    """
    finder = _ModuleHidingFinder(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def format_versions(*distributions: str) -> str:
    """Return the names and versions of distributions as text for memo keys; `none` if not
    installed.

    >>> format_versions("no-such-distribution")
    'no-such-distribution none'
    """
    return ", ".join(f"{name} {_get_version(name)}" for name in distributions)


def get_versions(*distributions: str) -> dict[str, str]:
    """Return the versions of distributions by name, for provenance; `none` if not installed.

    >>> get_versions("no-such-distribution")
    {'no-such-distribution': 'none'}
    """
    return {name: _get_version(name) for name in distributions}


def list_faiss_packages() -> dict[str, str]:
    """Return the versions of all installed faiss distributions; a sound environment has one."""
    return {
        name: version_text
        for name in _FAISS_DISTRIBUTIONS
        if (version_text := _get_distribution_version(name)) != _NO_VERSION
    }


def check_single_faiss() -> None:
    """Check that exactly one distribution provides the module `faiss`.

    Raises:
        MissingExtraError: Several distributions provide it and have overwritten each other's files;
            the message contains the `pip` lines.
    """
    if len(packages := list_faiss_packages()) > 1:
        raise MissingExtraError(
            f"{' and '.join(packages)} are installed over each other, as both write the module "
            f"faiss: run `pip uninstall --yes {' '.join(packages)}`, then `pip install --no-deps` "
            "with the one to keep"
        )


def _get_version(distribution: str) -> str:
    """Return a distribution's version; for `faiss-cpu`, that of any installed faiss build."""
    if distribution == _FAISS_DISTRIBUTIONS[0]:
        return next(iter(list_faiss_packages().values()), _NO_VERSION)
    return _get_distribution_version(distribution)


@cache  # cached, because every task looks versions up
def _get_distribution_version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return _NO_VERSION
