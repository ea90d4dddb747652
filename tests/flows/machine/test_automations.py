"""What a Prefect server is told to do by itself: our file is one that it takes, and told twice it does it once."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import get_client
from prefect.blocks.webhook import Webhook

from flows.machine.automations import create_automations, main

FILE = Path(__file__).parents[3] / "infra" / "prefect-automations.yaml"


def test_told_twice_there_is_one_of_each_and_its_webhook_is_the_newer(prefect_server: None) -> None:
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


def test_runs_that_it_is_told_of_are_those_of_our_deployments() -> None:
    (automation,) = yaml.safe_load(FILE.read_text())["automations"]
    tag = automation["trigger"]["match_related"]["prefect.resource.id"].removeprefix("prefect.tag.")
    deployments = yaml.safe_load(FILE.with_name("prefect.yaml").read_text())["deployments"]
    assert all(tag in deployment["tags"] for deployment in deployments)


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(
    ("written", "webhook", "code", "says"),
    [
        ("automations: []", "", 2, "BOOKWHEEL_WEBHOOK"),
        ("automations: []", "ftp://s3cret", 2, "not a web address"),
        ("nothing: here", "http://x/s3cret", 1, "contains no automations"),
        ("automations: [{name: a, actions: []}]", "http://x/s3cret", 1, "Prefect refuses"),
        ("automations: [{name: a, trigger: {}}]", "http://x/s3cret", 1, "Prefect refuses"),
    ],
)
def test_what_is_given_wrong(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    written: str,
    webhook: str,
    code: int,
    says: str,
) -> None:
    (tmp_path / "file.yaml").write_text(written)
    monkeypatch.setenv("BOOKWHEEL_WEBHOOK", webhook)
    assert main([str(tmp_path / "file.yaml")]) == code
    output = capsys.readouterr().err
    assert says in output
    assert "s3cret" not in output
