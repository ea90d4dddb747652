"""The errors that users see: one sentence that says what happened, where, and what to do next.

An error crosses a process boundary as JSON: `error_to_dict` writes it, `error_from_dict` reads it.
"""

from typing import Any


def format_error(error: BaseException) -> str:
    """Return the message of an exception on one line, or its type if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def format_count(count: int, noun: str) -> str:
    """Return a number and its noun, in the singular or plural, for messages.

    >>> format_count(1, "passage"), format_count(2000, "passage")
    ('1 passage', '2,000 passages')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


class BookwheelError(Exception):
    """Base class of all errors; `exit_code` is the exit status of the command."""

    exit_code = 1

    def __init__(self, message: str = "", outcome: Any = None) -> None:
        """Set the message; `outcome` holds the results that a flow wrote before it ended with this
        error. It is None if there are none, and if the error comes from another process.
        """
        super().__init__(message)
        self.outcome = outcome


class InputError(BookwheelError):
    """An input (dump, question file, encoder, index) is missing, corrupt or mislabelled."""


class UnreachableError(InputError):
    """An input could not be reached; the same run may succeed later."""


class StoreError(BookwheelError):
    """The store is unreachable, unwritable or full, or one of its files is missing or damaged."""


class NotFoundError(StoreError):
    """The store is reachable but does not contain the named object."""


class ReadOnlyError(StoreError):
    """The store is read-only."""


class RefConflictError(StoreError):
    """Another writer moved the ref first; read the ref again before moving it."""


class NotReadyError(BookwheelError):
    """The requested snapshot or index is not loaded yet; a later request may succeed."""


class GoneError(BookwheelError):
    """The requested snapshot expired or was taken down."""


class EndpointError(BookwheelError):
    """A model behind an HTTP API is unreachable, refused the request, or sent an invalid reply."""


class StoppedError(BookwheelError):
    """The work was cancelled because no caller waits for it any more."""


class ServiceError(BookwheelError):
    """A running service is unreachable, busy or failing, or sent an invalid reply."""


class ResourceError(BookwheelError):
    """The work does not fit into memory or disk; raised before the work starts."""


class MissingExtraError(BookwheelError):
    """A dependency is missing or conflicts; the message contains the install command."""


class UsageError(BookwheelError):
    """The request is wrong: an unknown option, a bad factory string, an empty question."""

    exit_code = 2


class PromptTooLongError(UsageError, EndpointError):
    """A model behind an HTTP API rejected a prompt as too long; the message names the endpoint."""


class RefusedError(BookwheelError):
    """A gate or a verification failed; no data was lost and no ref was moved."""

    exit_code = 3


class GateRefusedError(RefusedError):
    """The gate refused a snapshot: the snapshot is published, but the ref did not move.

    `outcome` describes the snapshot.
    """


def error_to_dict(error: BookwheelError) -> dict[str, str]:
    """Return an error as JSON: its message, and its nearest class in this module.

    >>> error_to_dict(type("FullError", (StoreError,), {})("the store is full"))
    {'error': 'StoreError', 'message': 'the store is full'}
    """
    class_name = next(error_class.__name__ for error_class in type(error).__mro__ if error_class.__module__ == __name__)
    return {"error": class_name, "message": str(error)}


def error_from_dict(error: str, message: str) -> BookwheelError:
    """Rebuild an error from the result of `error_to_dict`; an unknown class is a BookwheelError."""
    error_class = globals().get(error)
    return (
        error_class if isinstance(error_class, type) and issubclass(error_class, BookwheelError) else BookwheelError
    )(message)
