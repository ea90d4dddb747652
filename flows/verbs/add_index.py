"""`bookwheel add-index`: build indexes over an existing snapshot."""

from typing import Any

from flows.add_index import add_index as add_index_flow
from flows.command.reply import Common, Reply, format_index_metrics
from flows.outcome import BuildOutcome, build_and_reply
from flows.parameters import derive_command


@derive_command(add_index_flow, "snapshot")
def add_index(arguments: dict[str, Any], *, common: Common | None = None) -> Reply:
    """Build additional indexes over a snapshot's vectors, or replace its own, without its dump.

    The new snapshot has the same passages and vectors. It is checked and published like any build.
    """
    return build_and_reply(_format_outcome, add_index_flow, **arguments)


def _format_outcome(outcome: BuildOutcome) -> str:
    move_sentence = f"{outcome.ref}@{outcome.number} is" if outcome.number else f"{outcome.ref} did not move to"
    lines = format_index_metrics(outcome.metrics)
    return "\n".join([f"{move_sentence} snapshot {outcome.snapshot}; see {outcome.report}", *lines])
