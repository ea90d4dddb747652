"""`bookwheel reindex`: one call of the flow."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from flows.outcome import GateRefusedError, Reindexed
from flows.reindex import DEFAULT_ENCODER
from flows.reindex import reindex as reindex_flow
from flows.reply import Common, Reply, StoreUrl
from rag_model.build.recipe import read_recipe
from rag_model.errors import UsageError


def reindex(
    *beam_options: Annotated[
        str, Parameter(help="Of Beam and its runner, after `--`: `-- --runner=FlinkRunner --flink_master=host:8081`.")
    ],
    dump: Annotated[str, Parameter(help="Path, URL or glob: a MediaWiki dump, JSONL, Parquet, or psgs_w100.tsv.")],
    store: StoreUrl,
    encoder: Annotated[str, Parameter(help="Passage encoder: a folder or a hub name.")] = DEFAULT_ENCODER,
    recipe: Annotated[Path | None, Parameter(help="A TOML file; what it leaves out keeps its default.")] = None,
    ref: Annotated[str, Parameter(help="The name to move to the new snapshot.")] = "latest",
    limit: Annotated[int | None, Parameter(help="Read only so many articles, for a quick look.")] = None,
    dry_run: Annotated[bool, Parameter(negative="", help="Plan and say what would be read; build nothing.")] = False,
    common: Common | None = None,
) -> Reply:
    """Build a snapshot from a dump, check it, publish it, and move the ref if the gate agrees.

    A run that was interrupted is resumed by running the same command again.
    """
    if beam_options and not beam_options[0].startswith("-"):
        raise UsageError(f"reindex takes no argument {beam_options[0]!r}: a dump is given as --dump {beam_options[0]}")
    try:
        outcome = reindex_flow(dump, store, encoder, read_recipe(recipe), ref, limit, dry_run, beam_options)
    except GateRefusedError as refused:
        return Reply(refused.outcome.to_json(), _words(refused.outcome), str(refused))
    return Reply(outcome.to_json(), _words(outcome))


def _words(outcome: Reindexed) -> str:
    if outcome.snapshot is None:
        return f"would read {outcome.counts['parts']} parts, {outcome.counts['bytes']:,} bytes; nothing was built"
    counts = outcome.counts
    lines = [
        f"snapshot  {outcome.snapshot}",
        f"ref       {outcome.ref}@{outcome.number}" if outcome.number else f"ref       {outcome.ref} did not move",
        f"articles  {counts['articles']:,}, dropped {_listed(counts['dropped']) or 'none'}",
        f"passages  {counts['passages']:,}, of which {counts['embedded']:,} embedded and {counts['reused']:,} reused",
        *(f"index     {name}: {_listed(figures)}" for name, figures in outcome.metrics.items()),
        f"seconds   {_listed(outcome.seconds)}",
        f"report    {outcome.report}",
    ]
    return "\n".join(lines)


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in values.items())
