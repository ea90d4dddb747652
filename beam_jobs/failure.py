"""Turn the failure of a job into one sentence, wherever it happened."""

import re
from pathlib import Path

from rag_model import errors
from rag_model.store.store import Store

FAILED_SUFFIX = "failed"  # stage suffix under which a worker reports its error
WORKER_DIED = "Worker subprocess exited with return code"  # Beam's message
_ENGINE_FAILURES = (  # Flink's message, the error class, and the text that follows "the ... job"
    (
        # of a connection to a worker
        re.compile(r"StatusRuntimeException: (CANCELLED|UNAVAILABLE)"),
        errors.ResourceError,
        "lost workers more often than the engine retries, perhaps because they ran out of memory: "
        "finished work is recorded; give each worker more memory, or run fewer on a machine, and "
        "run again",
    ),
    (
        re.compile(r"TimeoutException: Timeout has occurred: \d+ ms"),  # of a request for slots
        errors.ResourceError,
        "timed out waiting for as many slots as --parallelism requests; perhaps a machine was "
        "lost: finished work is recorded; add TaskManagers or request fewer slots, and run again",
    ),
    (
        re.compile(r"JobCancellationException|in state CANCELLED"),
        errors.BookwheelError,
        "was cancelled on its engine: finished work is recorded; run it again to continue",
    ),
)
_RAISED_ERROR = re.compile(r"^rag_model\.errors\.(\w+): (.*?)(?: \[while running .*\])?$", re.MULTILINE)  # in a trace


def explain_failure(store: Store, run: str, stage: str, failure: BaseException, log: Path) -> errors.BookwheelError:
    """Return the error to show to the user.

    Args:
        store: the store with the workers' reports.
        run: the name of the job's run.
        stage: the job's stage.
        failure: the exception that the runner raised.
        log: the log file of local workers.
    """
    reports = store.runs.read_reports(run, stage + FAILED_SUFFIX)
    # the last error of a chain is the one for the user
    raised_errors = _RAISED_ERROR.findall(str(failure))
    if reports:
        return errors.error_from_dict(**reports[0])
    if raised_errors:
        return errors.error_from_dict(*raised_errors[-1])
    if WORKER_DIED in str(failure):
        return errors.ResourceError(
            f"a worker process of the {stage} job was killed, perhaps because memory ran out (log: "
            f"{log}): finished work is recorded; run again, with one worker (-- "
            "--direct_num_workers=1) if it happens again"
        )
    for pattern, error_class, sentence in _ENGINE_FAILURES:
        if pattern.search(str(failure)):
            return error_class(f"the {stage} job {sentence}")
    return errors.BookwheelError(
        f"the {stage} job failed on its runner ({type(failure).__name__}: {_last_line(failure)}): "
        "finished work is recorded; run it again with --debug for the trace"
    )


def _last_line(failure: BaseException) -> str:
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
