"""A Prefect server accepts our file of automations, and creates each of them once."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import get_client
from prefect.blocks.webhook import Webhook

from flows.machine.automations import create_automations, main

FILE = Path(__file__).parents[3] / "infra" / "prefect-automations.yaml"


def test_creating_automations_twice_keeps_one_of_each_with_the_newer_webhook(prefect_server: None) -> None:
    names = create_automations(FILE, "http://127.0.0.1:9/first")
    assert create_automations(FILE, "http://127.0.0.1:9/second") == names == ["bookwheel-failed"]
    with get_client(sync_client=True) as client:
        (automation,) = client.read_automations_by_name("bookwheel-failed")
    assert automation.enabled
    (action,) = automation.actions
    block: Any = Webhook.load("bookwheel")
    assert action.block_document_id == block._block_document_id
    assert block.url.get_secret_value() == "http://127.0.0.1:9/second"
    assert "second" not in repr(block)


def test_automations_match_the_tags_of_our_deployments() -> None:
    (automation,) = yaml.safe_load(FILE.read_text())["automations"]
    tag = automation["trigger"]["match_related"]["prefect.resource.id"].removeprefix("prefect.tag.")
    deployments = yaml.safe_load(FILE.with_name("prefect.yaml").read_text())["deployments"]
    assert all(tag in deployment["tags"] for deployment in deployments)


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(
    ("text", "webhook", "code", "message"),
    [
        ("automations: []", "", 2, "BOOKWHEEL_WEBHOOK"),
        ("automations: []", "ftp://s3cret", 2, "not a web address"),
        ("nothing: here", "http://x/s3cret", 1, "contains no automations"),
        ("automations: [{name: a, actions: []}]", "http://x/s3cret", 1, "Prefect refuses"),
        ("automations: [{name: a, trigger: {}}]", "http://x/s3cret", 1, "Prefect refuses"),
    ],
)
def test_wrong_files_and_webhooks_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    webhook: str,
    code: int,
    message: str,
) -> None:
    (tmp_path / "file.yaml").write_text(text)
    monkeypatch.setenv("BOOKWHEEL_WEBHOOK", webhook)
    assert main([str(tmp_path / "file.yaml")]) == code
    output = capsys.readouterr().err
    assert message in output
    assert "s3cret" not in output
