"""Every error a user can meet: one sentence that says what, where, and what to do next."""


class BookwheelError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line exits with."""

    exit_code = 1


class InputError(BookwheelError):
    """An input (dump, question file, encoder, index) is missing, truncated, corrupt or not what it claims."""


class StoreError(BookwheelError):
    """The store is unreachable, unwritable, full, or holds something that is not what was written."""


class RefConflictError(StoreError):
    """Another writer moved the ref first; read it again before deciding whether to move it."""


class ResourceError(BookwheelError):
    """The work would not fit (memory, disk); raised before it starts."""


class MissingExtraError(BookwheelError):
    """An optional dependency is not installed; the message holds the exact install line."""


class UsageError(BookwheelError):
    """The request itself is wrong: an unknown option, a bad factory string, an empty question."""

    exit_code = 2


class RefusedError(BookwheelError):
    """A gate or a verification said no: nothing was lost, and nothing was moved."""

    exit_code = 3
