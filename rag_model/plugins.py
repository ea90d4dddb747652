"""What can be added from outside: objects by name, some built in, others brought by installed packages.

A package brings one by an entry point of a group (`[project.entry-points."bookwheel.index_kinds"]` in its
`pyproject.toml`): no line of bookwheel changes. Installed packages are looked through only where a name is not built
in, and nothing is imported before it is asked for.
"""

from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Objects of one sort by name. Safe to share among threads."""

    def __init__(self, group: str, built_in: Mapping[str, str]) -> None:
        """Know `built_in`, names with `module:object`, and the entry points of `group`."""
        self.group = group
        self._built_in = {name: EntryPoint(name, value, group) for name, value in built_in.items()}
        self._loaded: dict[str, T] = {}
        self._lock = Lock()

    def find(self, name: str) -> T | None:
        """Return the object of that name; None: there is none.

        Raises:
            Exception: what its module raises on import.
        """
        with self._lock:
            if name not in self._loaded:
                found = self._built_in.get(name) or next(iter(entry_points(group=self.group, name=name)), None)
                if found is None:
                    return None
                self._loaded[name] = found.load()
            return self._loaded[name]

    def built_in(self) -> Iterator[T]:
        """Yield the objects that are built in, in their order."""
        yield from (found for name in self._built_in if (found := self.find(name)) is not None)

    def brought(self) -> Iterator[T]:
        """Yield the objects that installed packages bring, by name; one named as a built-in object is left out."""
        names = {point.name for point in entry_points(group=self.group)} - self._built_in.keys()
        yield from (found for name in sorted(names) if (found := self.find(name)) is not None)

    def names(self) -> list[str]:
        """Return all names: those built in first, in their order, then the others, sorted."""
        brought = {point.name for point in entry_points(group=self.group)} - self._built_in.keys()
        return [*self._built_in, *sorted(brought)]
