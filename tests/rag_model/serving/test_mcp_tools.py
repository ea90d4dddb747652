"""What an agent is told where there is nothing to answer from, and where a library fails."""

import asyncio
from pathlib import Path

import pytest

from rag_model.errors import UsageError
from rag_model.serving.following.follower import PulledFolder
from rag_model.serving.mcp_server import call_tool, explain_failure
from rag_model.serving.service import Service
from rag_model.store.pulling.pull import pull
from tests.fixtures.serving import Library, with_limits


def test_a_snapshot_that_does_not_open_is_told_with_the_reason(made_library: Library, dest: Path) -> None:
    (pull(made_library.store, made_library.red, dest).path / "index" / "hnsw.faiss").unlink()
    service = Service(PulledFolder(dest), with_limits(poll_seconds=3600.0))
    service.start()
    with pytest.raises(UsageError, match=r"no snapshot is open yet: .*hnsw\.faiss was not pulled"):
        asyncio.run(call_tool(service, "search", {"question": "who?"}))
    service.close()


def test_a_snapshot_that_takes_too_long_is_not_waited_for_longer(dest: Path) -> None:
    service = Service(PulledFolder(dest), with_limits(request_seconds=0.01))  # it is never started
    with pytest.raises(UsageError, match="it is being loaded"):
        asyncio.run(call_tool(service, "snapshot", {}))
    service.close()


def test_a_failure_of_a_library_keeps_its_words_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE_SECRET", "hushhush")
    assert explain_failure(RuntimeError("at 0x7f")) == "the tool failed unexpectedly: the server's log says why"
    assert "at 0x7f" in caplog.text
    assert explain_failure(UsageError("the key\nhushhush is wrong")) == "the key *** is wrong"
