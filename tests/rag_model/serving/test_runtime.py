"""The setup of a service's process."""

import logging
import sys

import pytest

from rag_model.serving.runtime import prepare_process


def test_log_escapes_control_characters_and_line_breaks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    switch_interval = sys.getswitchinterval()
    with monkeypatch.context() as patched:
        patched.setattr(logging.root, "handlers", [])
        prepare_process()
        try:
            raise ValueError("a\x1b[2J")  # noqa: TRY301 - the log contains its traceback
        except ValueError:
            logging.getLogger("rag_model.serving").exception("index %s", "x\n2026-01-01 INFO served\x1b[31m\r")
    sys.setswitchinterval(switch_interval)
    first_line, *trace = capsys.readouterr().err.splitlines()
    assert first_line.endswith(r"ERROR index x\n2026-01-01 INFO served\u001b[31m\r")
    assert trace[0].startswith("Traceback")
    assert trace[-1] == r"ValueError: a\u001b[2J"
