"""`bookwheel reproduce`: compare a published table with bookwheel's own values."""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

from cyclopts import Parameter

from flows.command.reply import Common, Reply
from flows.outcome import ReproduceOutcome, ReproductionIncompleteError, ReproductionRefusedError
from flows.parameters import derive_command
from flows.reproduce import format_plan, plan_reproduction
from flows.reproduce import reproduce as reproduce_flow
from flows.reproduction import find_reproduction
from flows.stage import run_flow
from rag_model.errors import UsageError
from rag_model.untrusted_text import escape_controls

_STORE_HELP = "The store of snapshots: a folder, s3://…, gs://… or az://…. Required to run."


@derive_command(reproduce_flow, "reproduction", excluded=["store"])
def reproduce(
    arguments: dict[str, Any],
    *,
    store: Annotated[str | None, Parameter(help=_STORE_HELP)] = None,
    dry_run: bool = False,
    print_file: bool = False,
    common: Common | None = None,
) -> Reply:
    """Reproduce a published table: fetch its data, build its libraries, evaluate its rows.

    Before the work starts, bytes, disk, hours and licences are reported on standard error. Data,
    libraries and evaluations that exist are reused, so an interrupted run continues when the same
    command is run again. The table is an evaluation in the store, as HTML and Markdown: the
    published value, ours, the difference, its interval and a verdict. A row that fails is in the
    table with its reason, and the others go on. Exit 3 if a value differs by more than its
    tolerance and its interval, and 1 if a row failed.

    Args:
        dry_run: Report bytes, disk, hours and licences; download and build nothing.
        print_file: Print the reproduction's TOML file, to start your own from it; do nothing
            else.
    """
    if print_file:
        text = find_reproduction(arguments["reproduction"]).read_text(encoding="utf-8")
        return Reply({"file": text}, text.rstrip())
    plan = plan_reproduction(*(arguments[name] for name in ("reproduction", "folder", "rows", "fraction")))
    document = plan.describe()
    lines = format_plan(document)
    if dry_run:
        return Reply(document, "\n".join(lines))
    if store is None:
        raise UsageError("reproduce needs --store to run: give one, or --dry-run")
    print(escape_controls("\n".join(lines)), file=sys.stderr, flush=True)
    try:
        outcome = run_flow(reproduce_flow, store=store, **arguments)
    except (ReproductionRefusedError, ReproductionIncompleteError) as error:
        text = "\n".join(_iter_outcome_lines(error.outcome))
        return Reply(asdict(error.outcome), text, str(error), error.exit_code)
    return Reply(asdict(outcome), "\n".join(_iter_outcome_lines(outcome)))


def _iter_outcome_lines(outcome: ReproduceOutcome) -> Iterator[str]:
    yield f"{'row':<32} {'data':<18} {'measure':<12}{'published':>10}{'ours':>8}{'difference':>12}  verdict"
    for line in outcome.lines:
        published_text = "" if line["published"] is None else f"{line['published']:.2f}"
        own_text = "" if line["value"] is None else f"{line['value']:.2f}"
        difference_text = "" if line["difference"] is None else f"{line['difference']:+.2f}"
        yield (
            f"{line['row']:<32} {line['data']:<18} "
            f"{line['measure']:<12}{published_text:>10}{own_text:>8}{difference_text:>12}  "
            f"{line['verdict']}"
        )
    yield ""
    yield outcome.summary
    yield from (f"note         {note}" for note in outcome.notes)
    yield f"evaluation   {outcome.evaluation or outcome.unrecorded}"
    if outcome.report:
        yield f"report       {outcome.report}"
