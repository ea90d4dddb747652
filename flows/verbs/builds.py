"""`bookwheel reindex`, `add-index` and `import`: build a snapshot."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from beam_jobs.explain import ReuseReport
from beam_jobs.explain import explain as explain_build
from flows.add_index import add_index as add_index_flow
from flows.command.reply import Common, Reply, format_index_metrics, format_numbers, parse_age
from flows.import_library import import_library as import_flow
from flows.outcome import BuildOutcome, build_and_reply
from flows.parameters import derive_command
from flows.reindex import reindex as reindex_flow
from flows.stage import run_flow
from rag_model.corpus.records import StructureName, is_wiki_site
from rag_model.errors import GateRefusedError, UnreachableError, UsageError, format_count
from rag_model.secrets import mask_secrets
from rag_model.snapshots.recipe import Recipe
from rag_model.store.store import Store
from rag_model.untrusted_text import escape_controls

if TYPE_CHECKING:
    from flows.maintain import WatchOutcome


@derive_command(reindex_flow, excluded=["base"])
def reindex(
    arguments: dict[str, Any],
    *,
    licence: str = "",
    text: Literal["wikitext", "html"] | None = None,
    structures: tuple[str, ...] = (),
    every: str | None = None,
    explain: bool = False,
    common: Common | None = None,
) -> Reply:
    """Build a snapshot from a dump, check it, publish it, and move the ref if the gate allows it.

    Unchanged articles and passages keep the passages and vectors of the ref's snapshot, or of the
    snapshot of `latest` if the ref is new. An interrupted run is resumed by running the same
    command again.

    Args:
        licence: Licence of the text, shown with each hit; only that of Wikimedia's wikis is
            known without it.
        text: If DUMP is a wiki's address: read the wikitext, which is the default, or HTML as the
            site renders it.
        structures: Also make passages of a wiki's structures: tables, infobox or lists, separated
            by commas. By default those of the recipe.
        every: Follow a wiki until interrupted: check for changes after each interval, such as 1m.
        explain: Report what would be reused, what changed, and the expected cost, from past builds;
            the dump is chunked, but nothing is built.
    """
    recipe = arguments["recipe"] or Recipe()
    names = tuple(name.strip() for option in structures for name in option.split(","))
    arguments["recipe"] = replace(
        recipe,
        licence=licence or recipe.licence,
        site=replace(recipe.site, text=text or recipe.site.text),
        chunk=replace(recipe.chunk, structures=cast("tuple[StructureName, ...]", names) or recipe.chunk.structures),
    )
    dump, store = arguments["dump"], arguments["store"]
    shared_arguments = {name: arguments[name] for name in ("encoder", "recipe", "ref", "limit", "beam_options")}
    if every is not None:
        if not is_wiki_site(dump):
            raise UsageError(
                f"--every follows a wiki, and {dump} is not a wiki's address: give mediawiki+https:// and its address"
            )
        if explain or arguments["dry_run"]:
            raise UsageError("--every builds after each change: leave out --dry-run and --explain")
        if (seconds := parse_age(every)) < 1:
            raise UsageError(f"--every is {every!r}, too short a pause for a wiki: give 1s or more")
        from flows.maintain import watch  # noqa: PLC0415 - imports Prefect's client

        _follow_wiki(seconds, partial(run_flow, watch, dump, store, **shared_arguments), common)
    if explain:
        reuse_report = explain_build(Store.open(store), dump, *shared_arguments.values())
        return Reply(asdict(reuse_report), "\n".join(_format_reuse(reuse_report)))
    return build_and_reply(_format_outcome, reindex_flow, **arguments)


def _follow_wiki(seconds: float, check_for_changes: "Callable[[], WatchOutcome]", common: Common | None) -> NoReturn:
    """Look for changes until interrupted; an unreachable wiki and a refused snapshot do not end it.

    A message that repeats the last one is printed as one short line.
    """
    last_message = ""
    while True:
        start_time = time.monotonic()
        try:
            outcome = check_for_changes()
        except (UnreachableError, GateRefusedError) as error:
            message = escape_controls(mask_secrets(str(error)))
            gate_state = "refused" if isinstance(error, GateRefusedError) else "unreachable"
            line = f"still {gate_state} at {time.strftime('%H:%M:%S')}" if message == last_message else message
            print(f"bookwheel: {line}", file=sys.stderr, flush=True)
            last_message = message
        else:
            last_message = ""
            if outcome.built is not None:
                as_json = common is not None and common.json
                text = json.dumps(asdict(outcome.built)) if as_json else _format_outcome(outcome.built)
                print(escape_controls(text), flush=True)
        time.sleep(max(0.0, start_time + seconds - time.monotonic()))


def _format_outcome(outcome: BuildOutcome) -> str:
    if outcome.snapshot is None:
        parts_text = format_count(outcome.counts["parts"], "part")
        dropped_counts = outcome.counts.get("dropped")
        dropped_text = f", dropped {format_numbers(dropped_counts)}" if dropped_counts else ""
        return f"would read {parts_text}, {outcome.counts['bytes']:,} bytes{dropped_text}; nothing was built"
    counts = outcome.counts
    lines = [
        f"snapshot  {outcome.snapshot}",
        f"ref       {outcome.ref}@{outcome.number}" if outcome.number else f"ref       {outcome.ref} did not move",
        f"articles  {counts['articles']:,}, dropped {format_numbers(counts['dropped']) or 'none'}",
        f"passages  {counts['passages']:,}, of which {counts['embedded']:,} embedded and {counts['reused']:,} reused",
        *_describe_truncation(counts),
        *format_index_metrics(outcome.metrics),
        f"seconds   {format_numbers(outcome.seconds)}",
        *(f"warning   {warning}" for warning in outcome.warnings),
        f"report    {outcome.report}",
    ]
    return "\n".join(lines)


def _describe_truncation(counts: Mapping[str, Any]) -> Iterator[str]:
    if counts.get("truncated"):
        yield (
            f"truncated {counts['truncated']:,} of the embedded passages: the encoder does not "
            "read their ends; use fewer words per passage"
        )


def _format_reuse(reuse_report: ReuseReport) -> Iterator[str]:
    yield f"parent    {reuse_report.parent or 'none: nothing to reuse'}"
    yield f"{'stage':<14}{'reused':>12}{'of':>12} {'unit':<10}{'tasks recorded':>16}  changed"
    for row in reuse_report.stages:
        changed_text = format_numbers(dict(row.changed)) or "nothing"
        tasks_text = f"{row.recorded:,} of {row.tasks:,}"
        yield f"{row.stage:<14}{row.reused:>12,}{row.total:>12,} {row.unit:<10}{tasks_text:>16}  {changed_text}"
    yield from (f"endpoint  {sentence}" for sentence in reuse_report.requests)
    yield from _format_forecast(reuse_report.forecast)


def _format_forecast(forecast: Mapping[str, Any]) -> Iterator[str]:
    if not forecast:
        yield "forecast  none: no build of this ref has recorded its cost"
        return
    changed_text = format_count(forecast["changed"], "changed passage")
    yield f"forecast  for {changed_text}, from the cost of {format_count(forecast['builds'], 'build')}"
    yield f"{'stage':<14}{'CPU s':>12}{'time, s':>12}{'CPU s per 1,000 changed':>26}"
    stages = forecast["stages"]
    totals = {cost: sum(stage.get(cost, 0.0) for stage in stages.values()) for cost in ("cpu", "seconds")}
    cpu_per_passage = sum(stage["per_passage"].get("cpu", 0.0) for stage in stages.values())
    for name, stage in {**stages, "total": {**totals, "per_passage": {"cpu": cpu_per_passage}}}.items():
        cpu_seconds, per_thousand = stage.get("cpu", math.nan), 1000 * stage["per_passage"].get("cpu", math.nan)
        yield f"{name:<14}{cpu_seconds:>12,.1f}{stage['seconds']:>12,.1f}{per_thousand:>26,.2f}"


@derive_command(add_index_flow, "snapshot")
def add_index(arguments: dict[str, Any], *, common: Common | None = None) -> Reply:
    """Build additional indexes over a snapshot's vectors, or replace its own, without its dump.

    The new snapshot has the same passages and vectors. It is checked and published like any build.
    """
    return build_and_reply(_format_indexes, add_index_flow, **arguments)


def _format_indexes(outcome: BuildOutcome) -> str:
    move_sentence = f"{outcome.ref}@{outcome.number} is" if outcome.number else f"{outcome.ref} did not move to"
    lines = format_index_metrics(outcome.metrics)
    return "\n".join([f"{move_sentence} snapshot {outcome.snapshot}; see {outcome.report}", *lines])


@derive_command(import_flow, "passages", excluded=["vectors"])
def import_library(arguments: dict[str, Any], *vectors: str, common: Common | None = None) -> Reply:
    """Make a snapshot from passages and vectors; encode only a few, to check the encoder.

    Args:
        vectors: .npy, Parquet or faiss Flat files, or folders of them; row i for passage i. By
            default read from PASSAGES. Beam's options after `--`.
    """
    vector_files = tuple(takewhile(lambda word: not word.startswith("-"), vectors))
    arguments |= {"vectors": vector_files, "beam_options": vectors[len(vector_files) :]}
    return build_and_reply(_format_import, import_flow, **arguments)


def _format_import(outcome: BuildOutcome) -> str:
    move_sentence = f"{outcome.ref}@{outcome.number} is" if outcome.number else f"{outcome.ref} did not move to"
    passages_text = format_count(outcome.counts["passages"], "passage")
    return f"{move_sentence} snapshot {outcome.snapshot}: {passages_text}; see {outcome.report}"
