"""What a process that serves sets up for itself, by whatever door it is asked."""

import logging
import sys

from rag_model.allocator import reuse_freed
from rag_model.secrets import without_secrets

_SWITCH = 0.001  # seconds that one thread may keep Python from the others: at 5 ms, its default, questions queue up


class _Discreet(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))


def prepare() -> None:
    """Log to standard error, without secrets: what changes, and what goes wrong; let threads take short turns.

    What a batch of questions frees stays for the next one (`reuse_freed`).
    """
    reuse_freed()
    handler = logging.StreamHandler()
    handler.setFormatter(_Discreet("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("rag_model.serving").setLevel(logging.INFO)
    sys.setswitchinterval(_SWITCH)
