"""The only error of the cleaner: a page that it gives up."""


class Unparsable(Exception):  # noqa: N818 - it names the page's state; the part continues without the page
    """A page exceeds a limit of the cleaner; `reason` says which, without a full stop."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
