"""`bookwheel reproduce`: compare a published table with bookwheel's own values."""

import sys
from collections.abc import Iterator
from pathlib import Path

from flows.command.reply import Common, Reply
from flows.outcome import ReproduceOutcome, ReproductionIncompleteError, ReproductionRefusedError
from flows.reproduce import DEFAULT_FOLDER, format_plan, plan_reproduction
from flows.reproduce import reproduce as reproduce_flow
from flows.reproduction import find_reproduction
from flows.stage import run_flow
from rag_model.errors import UsageError
from rag_model.untrusted_text import escape_controls


def reproduce(
    reproduction: str,
    /,
    *beam_options: str,
    store: str | None = None,
    data: Path = Path(DEFAULT_FOLDER),
    rows: tuple[str, ...] = (),
    fraction: float | None = None,
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
        reproduction: dpr, rag, or a TOML file of data sets, libraries and rows.
        beam_options: Options of Beam and its runner, after `--`.
        store: The store of snapshots: a folder, s3://…, gs://… or az://…. Required to run.
        data: Folder of local copies of data sets and models; missing data is downloaded to it.
        rows: Only rows with this name; `*` stands for any text. Repeat it for more.
        fraction: Try all steps on this share of passages and questions, such as .01; do not
            compare the values.
        dry_run: Report bytes, disk, hours and licences; download and build nothing.
        print_file: Print the reproduction's TOML file, to start your own from it; do nothing
            else.
    """
    if beam_options and not beam_options[0].startswith("-"):
        raise UsageError(
            f"reproduce takes one reproduction, and {beam_options[0]!r} is a second one: run it separately"
        )
    if print_file:
        text = find_reproduction(reproduction).read_text(encoding="utf-8")
        return Reply({"file": text}, text.rstrip())
    plan = plan_reproduction(reproduction, str(data), rows, fraction)
    document = plan.describe()
    lines = format_plan(document)
    if dry_run:
        return Reply(document, "\n".join(lines))
    if store is None:
        raise UsageError("reproduce needs --store to run: give one, or --dry-run")
    print(escape_controls("\n".join(lines)), file=sys.stderr, flush=True)
    try:
        outcome = run_flow(reproduce_flow, reproduction, store, str(data), rows, fraction, beam_options)
    except (ReproductionRefusedError, ReproductionIncompleteError) as error:
        return Reply(error.outcome.to_json(), "\n".join(_iter_lines(error.outcome)), str(error), error.exit_code)
    return Reply(outcome.to_json(), "\n".join(_iter_lines(outcome)))


def _iter_lines(outcome: ReproduceOutcome) -> Iterator[str]:
    yield f"{'row':<32} {'data':<18} {'measure':<12}{'published':>10}{'ours':>8}{'difference':>12}  verdict"
    for line in outcome.lines:
        published = "" if line["published"] is None else f"{line['published']:.2f}"
        value = "" if line["value"] is None else f"{line['value']:.2f}"
        difference = "" if line["difference"] is None else f"{line['difference']:+.2f}"
        yield (
            f"{line['row']:<32} {line['data']:<18} {line['measure']:<12}{published:>10}{value:>8}"
            f"{difference:>12}  {line['verdict']}"
        )
    yield ""
    yield outcome.summary
    yield from (f"note         {note}" for note in outcome.notes)
    yield f"evaluation   {outcome.evaluation or outcome.unrecorded}"
    if outcome.report:
        yield f"report       {outcome.report}"
