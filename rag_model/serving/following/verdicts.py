"""What trials in child processes found, beside the snapshots, so that neither a restart nor the next look repeats them.

```
DEST/.trials/<digest of what was tried, and of the versions that tried it>.json    {"died": "was ended by SIGSEGV"}
```

An empty `died` says that it passed.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rag_model.child import DiedError
from rag_model.digest import digest_json
from rag_model.errors import RefusedError
from rag_model.extras import installed
from rag_model.json_text import parse_json
from rag_model.landing import landing

_FOLDER = ".trials"
_ENGINES = ("faiss-cpu", "torch", "transformers", "tokenizers")


def decide(
    dest: Path, tried: Any, what: str, advice: str, trial: Callable[[], object], *, remember: bool = False
) -> None:
    """Run a trial, unless its outcome is known.

    Args:
        dest: the folder of the pulled snapshots.
        tried: a JSON value that names all that was tried, by digests.
        what: what the child did, for errors: `a process that opened and searched index/hnsw.faiss`.
        advice: what to do where it died.
        trial: calls the child.
        remember: also what passed, which is not tried again.

    Raises:
        BookwheelError: what was tried cannot be used; the sentence is the child's.
        RefusedError: the child died, now or at an earlier trial.
    """
    record = dest / _FOLDER / f"{_identity(tried)}.json"
    died = _died(record)
    if died is None:
        try:
            trial()
        except DiedError as dead:
            died = str(dead)
        if died or remember:
            _write(record, died or "")
    if died:
        raise RefusedError(f"{what} {died}: {advice}, or delete {record} to try it once more")


def _identity(tried: Any) -> str:
    return digest_json([version("bookwheel"), installed(*_ENGINES), tried]).partition(":")[2]


def _died(record: Path) -> str | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(parse_json(record.read_bytes())["died"])
    return None


def _write(record: Path, died: str) -> None:
    with suppress(OSError), landing(record) as temporary:  # without it the trial is repeated, in a child again
        temporary.write_text(json.dumps({"died": died}))
