"""`bookwheel add-index`: build indexes over an existing snapshot."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flows.add_index import add_index as add_index_flow
from flows.command.reply import Common, Reply, StoreUrl, format_index_metrics
from flows.outcome import BuildOutcome, build_and_reply
from rag_model.snapshots.recipe import read_recipe


def add_index(
    snapshot: str,
    /,
    *beam_options: Annotated[str, Parameter(help="Options of Beam and its runner, after `--`.")],
    store: StoreUrl,
    recipe: Annotated[
        Path | None,
        Parameter(help="A TOML file with indexes and a gate; by default the snapshot's own indexes are built again."),
    ] = None,
    index: Annotated[
        tuple[str, ...], Parameter(negative="", help="Build only this index of the recipe; repeat it for more.")
    ] = (),
    ref: Annotated[str, Parameter(help="The ref to move to the new snapshot.")] = "latest",
    common: Common | None = None,
) -> Reply:
    """Build additional indexes over a snapshot's vectors, or replace its own, without its dump.

    The new snapshot has the same passages and vectors. It is checked and published like any build.

    Parameters
    ----------
    snapshot
        A ref, ref@number, an id, or a unique prefix of one.
    """
    read_settings = read_recipe(recipe) if recipe else None
    return build_and_reply(_format_outcome, add_index_flow, snapshot, store, read_settings, index, ref, beam_options)


def _format_outcome(outcome: BuildOutcome) -> str:
    move_sentence = f"{outcome.ref}@{outcome.number} is" if outcome.number else f"{outcome.ref} did not move to"
    lines = format_index_metrics(outcome.metrics)
    return "\n".join([f"{move_sentence} snapshot {outcome.snapshot}; see {outcome.report}", *lines])
