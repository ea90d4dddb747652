"""Plugin registries: look up the objects that are built in or in installed packages, by name.

A package registers an object through an entry point of a group
(`[project.entry-points."bookwheel.index_kinds"]` in its `pyproject.toml`). Installed packages are
searched only for names that are not built in, and an object is imported when it is looked up. A
package cannot replace a built-in object.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from threading import RLock
from typing import Generic, ParamSpec, TypeVar

from rag_model.errors import BookwheelError, InputError

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


class Registry(Generic[T]):
    """Objects of one category by name. Thread-safe."""

    def __init__(self, noun: str, group: str, built_in: Mapping[str, str], base: type | None = None) -> None:
        """Create a registry.

        Args:
            noun: word for an object in messages, such as `measure`.
            group: group of entry points, such as `bookwheel.index_kinds`.
            built_in: built-in objects, name -> `module:object`.
            base: class of which the objects of installed packages must be instances; None if the
                callers check them.
        """
        self.noun, self.group = noun, group
        self._built_in = {name: EntryPoint(name, value, group) for name, value in built_in.items()}
        self._base = base
        self._loaded: dict[str, T] = {}
        self._lock = RLock()  # reentrant: a module may look up another object while it is imported

    def find(self, name: str) -> T | None:
        """Return the object of this name, or None if there is none.

        Raises:
            InputError: The package that provides the object cannot be imported or registers a wrong
                object, or two packages provide the name.
        """
        with self._lock:
            if name not in self._loaded:
                entry_point = self._built_in.get(name) or self._find_entry_point(name)
                if entry_point is None:
                    return None
                self._loaded[name] = self._load(entry_point)
            return self._loaded[name]

    def find_loaded(self, name: str) -> T | None:
        """Return the object of this name if it has been imported, without importing it."""
        return self._loaded.get(name)

    def describe(self, name: str) -> str:
        """Return an object's name, entry point and package, for messages.

        An example is `measure 'AP' (average_precision:AP of the package average-precision 1.0)`.
        """
        entry_point = self._built_in.get(name) or self._find_entry_point(name)
        if entry_point is None:
            return f"{self.noun} {name!r}"
        package = f" of the package {entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else ""
        return f"{self.noun} {name!r} ({entry_point.value}{package})"

    def wrong_plugin_error(self, name: str, problem: str, expected: str) -> InputError:
        """Return an error that says how an object breaks the contract of its category, and what to
        do.
        """
        return InputError(f"{self.describe(name)} {problem}: {expected}, or uninstall its package")

    def call(self, name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function that belongs to the object of this name; errors name the object's
        package.

        Raises:
            InputError: The function raised an exception that is not a `BookwheelError`.
            BookwheelError: The function raised this error.
        """
        try:
            return function(*args, **kwargs)
        except BookwheelError:
            raise
        except Exception as error:  # code of other packages may raise any exception
            error_text = " ".join(f"{type(error).__name__}: {error}".split())
            raise InputError(f"{self.describe(name)} fails ({error_text}): repair or uninstall its package") from error

    def is_built_in(self, name: str) -> bool:
        """Return whether the object of this name is built in."""
        return name in self._built_in

    def iter_built_in(self) -> Iterator[T]:
        """Yield the built-in objects, in the order of registration."""
        yield from (plugin for name in self._built_in if (plugin := self.find(name)) is not None)

    def iter_plugins(self) -> Iterator[T]:
        """Yield the objects that installed packages provide, sorted by name.

        Raises:
            InputError: For the same reasons as `find`.
        """
        plugin_names = self.list_names()[len(self._built_in) :]
        yield from (plugin for name in plugin_names if (plugin := self.find(name)) is not None)

    def list_names(self) -> list[str]:
        """Return the built-in names, then the sorted names of plugins, without importing them."""
        plugin_names = {entry_point.name for entry_point in _list_entry_points(self.group)} - self._built_in.keys()
        return [*self._built_in, *sorted(plugin_names)]

    def _find_entry_point(self, name: str) -> EntryPoint | None:
        entry_points_by_value = {
            entry_point.value: entry_point for entry_point in _list_entry_points(self.group) if entry_point.name == name
        }
        if len(entry_points_by_value) > 1:
            raise InputError(
                f"{self.noun} {name!r} is registered by "
                f"{' and by '.join(sorted(entry_points_by_value))}: uninstall one of them"
            )
        return next(iter(entry_points_by_value.values()), None)

    def _load(self, entry_point: EntryPoint) -> T:
        try:
            plugin: T = entry_point.load()
        except Exception as error:  # importing a package may raise any exception
            raise InputError(
                f"{self.describe(entry_point.name)} cannot be imported ({error}): repair or uninstall its package"
            ) from error
        if self._base and not self.is_built_in(entry_point.name) and not isinstance(plugin, self._base):
            raise self.wrong_plugin_error(
                entry_point.name,
                f"is {type(plugin).__name__}",
                f"register an instance of {self._base.__name__}",
            )
        return plugin


def _list_entry_points(group: str) -> Sequence[EntryPoint]:
    """Return a group's entry points, which are read again if a package was installed meanwhile."""
    search_path = tuple((folder, _get_change_time(Path(folder))) for folder in sys.path)
    return _read_entry_points(search_path).get(group, ())


@lru_cache(maxsize=1)  # cached, because it reads hundreds of files, and a build calls it often
def _read_entry_points(search_path: tuple[tuple[str, int], ...]) -> Mapping[str, Sequence[EntryPoint]]:
    all_entry_points = entry_points()
    return {
        group_name: tuple(all_entry_points.select(group=group_name))
        for group_name in all_entry_points.groups
        if group_name.startswith("bookwheel.")
    }


def _get_change_time(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0
