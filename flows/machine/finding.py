"""One thing that `doctor` looked at, and how it asks a server."""

import json
import urllib.request
from dataclasses import dataclass
from typing import Any

_PATIENCE = 5.0  # seconds until a server that does not answer counts as down
AMISS = (OSError, ValueError, KeyError, TypeError)  # of a server that is down, or is another than one thinks


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    what: str
    ok: bool
    found: str
    todo: str = ""  # what to do where it is not ok


def ask(url: str) -> Any:
    """Return a server's JSON.

    Raises:
        OSError, ValueError: it does not answer, or with something else.
    """
    with urllib.request.urlopen(url, timeout=_PATIENCE) as answer:
        return json.load(answer)


def unanswered(what: str, url: str, failed: Exception, todo: str) -> Finding:
    """Return the finding of a server that did not say what was asked."""
    return Finding(what, False, f"{url} does not answer as it should ({getattr(failed, 'reason', failed)})", todo)
