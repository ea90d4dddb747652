"""How the process of a service is set up."""

import subprocess
import sys

_LOGS = r"""
import logging
from rag_model.serving.runtime import prepare_process
prepare_process()
try:
    raise ValueError("a\x1b[2J")
except ValueError:
    logging.getLogger("rag_model").exception("index %s", "x\n2026-01-01 INFO served\x1b[31m\r")
"""


def test_a_name_in_the_log_commands_no_terminal_and_adds_no_line() -> None:
    log = subprocess.run([sys.executable, "-c", _LOGS], capture_output=True, text=True, check=True).stderr
    first_line, *trace = log.splitlines()
    assert first_line.endswith(r"ERROR index x\n2026-01-01 INFO served\u001b[31m\r")
    assert trace[0].startswith("Traceback")
    assert trace[-1] == r"ValueError: a\u001b[2J"
