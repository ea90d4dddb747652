"""`bookwheel doctor`: check this machine, the store and the servers before a run."""

from dataclasses import asdict

from flows.command.reply import Common, Reply
from flows.machine.doctor import Finding, run_checks


def doctor(
    *beam_options: str,
    store: str | None = None,
    common: Common | None = None,
) -> Reply:
    """Check versions, memory, disk, GPU, the store, Prefect and Beam; exit 3 if a check fails.

    Args:
        beam_options: Options of Beam and its runner, after `--`, as for reindex.
        store: A store to test; no file is left in it.
    """
    findings = list(run_checks(store, beam_options))
    failed = [finding for finding in findings if not finding.ok]
    document = {"ok": not failed, "findings": [asdict(finding) for finding in findings]}
    refusal = f"{len(failed)} of {len(findings)} checks failed: {failed[0].what}: {failed[0].todo}" if failed else ""
    return Reply(document, "\n".join(map(_format_finding, findings)), refusal)


def _format_finding(finding: Finding) -> str:
    line = f"{'ok' if finding.ok else 'AMISS':<6}{finding.what:<26}{finding.found}"
    return line if finding.ok else f"{line}; {finding.todo}"
