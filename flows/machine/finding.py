"""One finding of `doctor`, and its requests to servers."""

import json
import urllib.request
from dataclasses import dataclass
from typing import Any

_PATIENCE = 5.0  # seconds until a server that does not answer counts as down
AMISS = (OSError, ValueError, KeyError, TypeError)  # errors of a server that is down, or is of another kind


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    what: str
    ok: bool
    found: str
    todo: str = ""  # what to do if it is not ok


def fetch_json(url: str) -> Any:
    """Return the JSON response of a server.

    Raises:
        OSError, ValueError: the server does not answer, or its response is not JSON.
    """
    with urllib.request.urlopen(url, timeout=_PATIENCE) as answer:
        return json.load(answer)


def report_no_answer(what: str, url: str, failed: Exception, todo: str) -> Finding:
    """Return the finding for a server that gave no valid response."""
    return Finding(what, False, f"{url} does not answer as it should ({getattr(failed, 'reason', failed)})", todo)
