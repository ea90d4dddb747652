"""`bookwheel doctor`: check this machine, the store and the servers before a run."""

from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from flows.command.reply import Common, Reply
from flows.machine.doctor import examine
from flows.machine.finding import Finding


def doctor(
    *beam_options: Annotated[str, Parameter(help="Options of Beam and its runner, after `--`, as for reindex.")],
    store: Annotated[str | None, Parameter(help="A store to test; no file is left in it.")] = None,
    common: Common | None = None,
) -> Reply:
    """Check versions, memory, disk, GPU, the store, Prefect and Beam; exit 3 if a check fails."""
    findings = list(examine(store, beam_options))
    amiss = [finding for finding in findings if not finding.ok]
    document = {"ok": not amiss, "findings": [asdict(finding) for finding in findings]}
    refusal = f"{len(amiss)} of {len(findings)} checks failed: {amiss[0].what}: {amiss[0].todo}" if amiss else ""
    return Reply(document, "\n".join(map(_line, findings)), refusal)


def _line(finding: Finding) -> str:
    told = f"{'ok' if finding.ok else 'AMISS':<6}{finding.what:<26}{finding.found}"
    return told if finding.ok else f"{told}; {finding.todo}"
