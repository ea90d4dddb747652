"""Create the automations of a file on a Prefect server, and the webhook that they call.

    BOOKWHEEL_WEBHOOK=https://… python -m flows.machine.automations infra/prefect-automations.yaml

Prefect's own `automation create` needs the id of the webhook's block, which differs on every
server, and creates duplicates if it runs twice.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml  # type: ignore[import-untyped]
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import get_client
from prefect.events.schemas.automations import AutomationCore
from prefect.types import SecretDict
from pydantic import SecretStr, ValidationError

from flows.stage import WEBHOOK_VARIABLE
from rag_model.errors import BookwheelError, InputError, UsageError, format_error

_BLOCK_NAME = "bookwheel"  # name of the saved `Webhook` block


def create_automations(file: Path, webhook: str) -> list[str]:
    """Create the automations of a file on the configured server.

    Automations of the server with the same names are replaced.

    Args:
        file: YAML whose key `automations` has a list in the form of Prefect's API. A `call-webhook`
            action without a block gets the block that this function saves.
        webhook: the URL that the block calls.

    Returns:
        the names of the automations.

    Raises:
        InputError: the file is missing or contains no automations.
        UsageError: the webhook is not an HTTP URL.
    """
    if not webhook.startswith(("http://", "https://")):
        raise UsageError(f"{WEBHOOK_VARIABLE} is not a web address: give one such as https://…")
    definitions = _read_definitions(file)
    webhook_block = Webhook(url=SecretStr(webhook), headers=SecretDict({"Content-Type": "application/json"}))
    block_id = str(webhook_block.save(_BLOCK_NAME, overwrite=True))
    automations = [_parse_automation(file, definition, block_id) for definition in definitions]
    with get_client(sync_client=True) as client:
        for automation in automations:
            for old_automation in client.read_automations_by_name(automation.name):
                client.delete_automation(old_automation.id)
            client.create_automation(automation)
    return [automation.name for automation in automations]


def _read_definitions(file: Path) -> list[dict[str, Any]]:
    try:
        return cast(list[dict[str, Any]], yaml.safe_load(file.read_text(encoding="utf-8"))["automations"])
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise InputError(f"{file} contains no automations ({error}): give infra/prefect-automations.yaml") from error


def _parse_automation(file: Path, definition: dict[str, Any], block: str) -> AutomationCore:
    try:
        action_fields = [
            {"block_document_id": block, **action} if action["type"] == "call-webhook" else action
            for action in definition["actions"]
        ]
        return AutomationCore.model_validate({**definition, "actions": action_fields})
    except (ValidationError, KeyError, TypeError) as error:
        raise InputError(f"{file} contains an automation that Prefect refuses: {format_error(error)}") from error


def main(argv: Sequence[str]) -> int:
    """Create the automations of a file; print their names."""
    webhook = os.environ.get(WEBHOOK_VARIABLE, "")
    try:
        if len(argv) != 1 or not webhook:
            raise UsageError(f"give one file of automations, and set {WEBHOOK_VARIABLE} to the URL that they call")
        print("\n".join(create_automations(Path(argv[0]), webhook)))
    except BookwheelError as error:
        print(f"bookwheel: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
