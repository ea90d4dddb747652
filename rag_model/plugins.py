"""Plugins: objects by name, some built in, others provided by installed packages.

A package provides one by an entry point of a group (`[project.entry-points."bookwheel.index_kinds"]` in its
`pyproject.toml`); bookwheel itself is not changed. Installed packages are searched only for a name that is not built
in, and an object is imported only when it is used. A package cannot replace a built-in object.
"""

from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from threading import RLock
from typing import Generic, TypeVar

from rag_model.errors import InputError

T = TypeVar("T")


class Registry(Generic[T]):
    """Objects of one category by name. Safe to share among threads."""

    def __init__(self, noun: str, group: str, built_in: Mapping[str, str]) -> None:
        """Register `built_in` (name -> `module:object`) and the entry points of `group`; `noun` is for messages."""
        self.noun, self.group = noun, group
        self._built_in = {name: EntryPoint(name, value, group) for name, value in built_in.items()}
        self._loaded: dict[str, T] = {}
        self._lock = RLock()  # a module may ask for another object while it is imported

    def find(self, name: str) -> T | None:
        """Return the object of that name; None if there is none.

        Raises:
            InputError: the package that provides it cannot be imported, or two packages provide that name.
        """
        with self._lock:
            if name not in self._loaded:
                point = self._built_in.get(name) or self._brought(name)
                if point is None:
                    return None
                self._loaded[name] = self._load(point)
            return self._loaded[name]

    def is_built_in(self, name: str) -> bool:
        """Whether the object of that name is built in."""
        return name in self._built_in

    def built_in(self) -> Iterator[T]:
        """Yield the built-in objects, in the order of registration."""
        yield from (found for name in self._built_in if (found := self.find(name)) is not None)

    def brought(self) -> Iterator[T]:
        """Yield the objects that installed packages provide, by name.

        Raises:
            InputError: as `find`.
        """
        others = self.names()[len(self._built_in) :]
        yield from (found for name in others if (found := self.find(name)) is not None)

    def names(self) -> list[str]:
        """Return all names: the built-in ones in their order, then the others, sorted; imports nothing."""
        brought = {point.name for point in entry_points(group=self.group)} - self._built_in.keys()
        return [*self._built_in, *sorted(brought)]

    def _brought(self, name: str) -> EntryPoint | None:
        found = {point.value: point for point in entry_points(group=self.group, name=name)}
        if len(found) > 1:
            raise InputError(
                f"{self.noun} {name!r} is registered by {' and by '.join(sorted(found))}: uninstall one of them"
            )
        return next(iter(found.values()), None)

    def _load(self, point: EntryPoint) -> T:
        try:
            loaded: T = point.load()
        except Exception as broken:  # a package may raise anything when it is imported
            raise InputError(
                f"{self.noun} {point.name!r} ({point.value}) cannot be imported ({broken}): "
                "repair or uninstall its package"
            ) from broken
        return loaded
