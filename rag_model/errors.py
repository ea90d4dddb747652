"""The errors that users see: one sentence that says what, where, and what to do next.

One process tells another of an error by `told`, and the other one raises what `raised` makes of it.
"""

from typing import Any


def reason(problem: BaseException) -> str:
    """Return what an exception says, on one line; its type if it says nothing."""
    return " ".join(str(problem).split()) or type(problem).__name__


class BookwheelError(Exception):
    """Base of all errors raised on purpose; `exit_code` is the exit status of the command line."""

    exit_code = 1


class InputError(BookwheelError):
    """An input (dump, question file, encoder, index) is missing, truncated, corrupt or not what it claims."""


class StoreError(BookwheelError):
    """The store is unreachable, unwritable or full, or one of its files is missing or damaged."""


class NotFoundError(StoreError):
    """The store answers, and what was named is not in it."""


class ReadOnlyError(StoreError):
    """The store can be read where it lies, and is never written there."""


class RefConflictError(StoreError):
    """Another writer moved the ref first; read it again before deciding whether to move it."""


class EndpointError(BookwheelError):
    """A model behind an HTTP API could not be asked, refused, or replied with what is no answer."""


class StoppedError(BookwheelError):
    """The work was given up before its end, since no caller waits for it any more."""


class ServiceError(BookwheelError):
    """A running service cannot be reached, is busy, fails, or sends what is no reply of bookwheel."""


class ResourceError(BookwheelError):
    """The work would not fit (memory, disk); raised before it starts."""


class MissingExtraError(BookwheelError):
    """A dependency is not installed, or two exclude each other; the message holds the exact install line."""


class UsageError(BookwheelError):
    """The request itself is wrong: an unknown option, a bad factory string, an empty question."""

    exit_code = 2


class PromptTooLongError(UsageError, EndpointError):
    """A model behind an HTTP API says that a prompt is too long for it; the message names the endpoint."""


class RefusedError(BookwheelError):
    """A gate or a verification failed: nothing was lost, and no ref was moved."""

    exit_code = 3


class GateRefusedError(RefusedError):
    """The gate refused a snapshot: it is published, and the ref did not move."""

    def __init__(self, message: str, outcome: Any = None) -> None:
        """Keep the outcome, which describes the snapshot; None: another process was refused."""
        super().__init__(message)
        self.outcome = outcome


def told(failed: BookwheelError) -> dict[str, str]:
    """Return an error as JSON values: its sentence, and the name of its class or nearest ancestor in this module.

    >>> told(type("FullError", (StoreError,), {})("the store is full"))
    {'error': 'StoreError', 'message': 'the store is full'}
    """
    known = next(kind.__name__ for kind in type(failed).__mro__ if kind.__module__ == __name__)
    return {"error": known, "message": str(failed)}


def raised(error: str, message: str) -> BookwheelError:
    """Return the error that `told` told; a BookwheelError where this version does not know the name."""
    kind = globals().get(error)
    return (kind if isinstance(kind, type) and issubclass(kind, BookwheelError) else BookwheelError)(message)
