"""Error messages for an agent if no snapshot is open, or if a library fails."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rag_model.errors import UsageError
from rag_model.serving.following.follower import PulledFolder
from rag_model.serving.service import Service
from rag_model.store.pulling.pull import pull
from tests.fixtures.serving import Library, make_settings


def test_snapshot_that_does_not_open_is_reported_with_the_reason(
    shared_library: Library, dest: Path, mcp_server: Any
) -> None:
    (pull(shared_library.store, shared_library.red, dest).path / "index" / "hnsw.faiss").unlink()
    service = Service(PulledFolder(dest), make_settings(poll_seconds=3600.0))
    service.start()
    with pytest.raises(UsageError, match=r"no snapshot is open: .*hnsw\.faiss was not pulled"):
        asyncio.run(mcp_server.call_tool(service, "search", {"question": "who?"}))
    service.close()


def test_tool_fails_if_loading_the_snapshot_takes_too_long(dest: Path, mcp_server: Any) -> None:
    service = Service(PulledFolder(dest), make_settings(request_seconds=0.01))  # The service is never started.
    with pytest.raises(UsageError, match="it is being loaded"):
        asyncio.run(mcp_server.call_tool(service, "snapshot", {}))
    service.close()


def test_unexpected_error_is_logged_and_not_sent_to_the_agent(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, mcp_server: Any
) -> None:
    monkeypatch.setenv("STORE_SECRET", "hushhush")
    reply = mcp_server.explain_failure(RuntimeError("at 0x7f"))
    assert reply == "the tool failed unexpectedly: the server's log says why"
    assert "at 0x7f" in caplog.text
    assert mcp_server.explain_failure(UsageError("the key\nhushhush is wrong")) == "the key *** is wrong"
