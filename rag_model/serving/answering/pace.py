"""Whether the next question of a caller who asks alone is likely to be answered within milliseconds."""

from collections.abc import Hashable

_QUICK = 0.05  # seconds: an event loop that is busy for longer keeps others waiting
_ENOUGH = 8  # quick answers of one kind, one after the other, before the next one is expected to be quick


class Pace:
    """How long answers of one kind took lately. Not safe among threads."""

    def __init__(self) -> None:
        """Expect nothing."""
        self._kind: Hashable = None
        self._quick = 0

    def note(self, kind: Hashable, seconds: float) -> None:
        """Take note of an answer; one of another kind, or a slow one, begins again."""
        self._quick = self._quick + 1 if kind == self._kind and seconds < _QUICK else 0
        self._kind = kind

    def is_quick(self, kind: Hashable) -> bool:
        """Return whether the next answer of a kind is likely to be quick."""
        return self._quick >= _ENOUGH and kind == self._kind
