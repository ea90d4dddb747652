"""Stop a generator between two tokens, where no caller waits for the answer any more."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rag_model.errors import StoppedError
from rag_model.generate.generator import Contexts, Generator, State


def stoppable(generator: Generator, stop: Callable[[], bool]) -> Generator:
    """Return `generator` with a question before each of its passes: `StoppedError` is raised once `stop` is true."""
    made: Any = _Stoppable(generator, stop)
    return made  # type: ignore[no-any-return]


class _Stoppable:
    def __init__(self, generator: Generator, stop: Callable[[], bool]) -> None:
        self._generator, self._stop = generator, stop

    def begin(self, contexts: Contexts) -> tuple[Tensor, State]:
        self._go_on()
        return self._generator.begin(contexts)

    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        self._go_on()
        return self._generator.step(state, tokens)

    def follow(self, state: State, tokens: Tensor) -> Tensor:
        self._go_on()
        return self._generator.follow(state, tokens)

    def _go_on(self) -> None:
        if self._stop():
            raise StoppedError("no caller waits for this answer any more, so it was given up")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)
