"""How long a client waits, and how often it asks again."""

import math
from dataclasses import dataclass, fields

from rag_model.errors import UsageError


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The patience of a client; what a service answers by itself within these times is never cut off."""

    connect_seconds: float = 5.0  # to a connection: a host that is there accepts one within a second
    reply_seconds: float = 60.0  # between two pieces of a reply: the service itself gives up after 30
    tries: int = 5  # of one request, the first included; the waits between them add up to 4 to 8 seconds
    first_pause: float = 0.5  # seconds before the second try; each further pause is twice as long
    most_pause: float = 30.0  # seconds; a service that asks for a longer pause is not waited for

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            UsageError: a number is not finite, or below the least that makes sense.
        """
        for name in (field.name for field in fields(self)):
            value, least = getattr(self, name), 1 if name == "tries" else 0
            if not math.isfinite(value) or value < least:
                raise UsageError(f"{name} of the client is {value}: give a finite number of at least {least}")
            if name.endswith("_seconds") and value == 0:
                raise UsageError(f"{name} of the client is 0, so no reply could come in time: give more")
