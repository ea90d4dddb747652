"""The error of a failed job: one sentence, wherever it failed."""

import re
from pathlib import Path

from rag_model import errors
from rag_model.store.store import Store

FAILED = "failed"  # stage suffix under which a worker reports its error
WORKER_DIED = "Worker subprocess exited with return code"  # Beam's message
_ENGINES = (  # what Flink says, and what the user is told after "the ... job"
    (
        re.compile(r"StatusRuntimeException: (CANCELLED|UNAVAILABLE)"),  # of a connection to a worker
        errors.ResourceError,
        "lost workers more often than the engine tries again, perhaps for want of memory: "
        "finished work is recorded; give each worker more, or run fewer on a machine, and run again",
    ),
    (
        re.compile(r"TimeoutException: Timeout has occurred: \d+ ms"),  # of a request for slots
        errors.ResourceError,
        "waited in vain for as many slots as --parallelism says; perhaps a machine was lost: "
        "finished work is recorded; add TaskManagers or ask for fewer slots, and run again",
    ),
    (
        re.compile(r"JobCancellationException|in state CANCELLED"),
        errors.BookwheelError,
        "was cancelled on its engine: finished work is recorded; run it again to continue",
    ),
)
_RAISED = re.compile(r"^rag_model\.errors\.(\w+): (.*?)(?: \[while running .*\])?$", re.MULTILINE)  # in a trace


def told(store: Store, run: str, stage: str, failure: BaseException, log: Path) -> errors.BookwheelError:
    """Return the error to show to the user.

    Args:
        store: the store with the workers' reports.
        run: the name of the job's run.
        stage: the job's stage.
        failure: the exception that the runner raised.
        log: the log file of local workers.
    """
    reports = store.runs.read_all(run, stage + FAILED)
    raised = _RAISED.findall(str(failure))  # of a chain of errors the last one is for the user
    if reports:
        return errors.raised(**reports[0])
    if raised:
        return errors.raised(*raised[-1])
    if WORKER_DIED in str(failure):
        return errors.ResourceError(
            f"a worker process of the {stage} job was killed, perhaps for want of memory (its log: {log}): "
            "finished work is recorded; run it again, with one worker (-- --direct_num_workers=1) if it happens again"
        )
    for pattern, kind, sentence in _ENGINES:
        if pattern.search(str(failure)):
            return kind(f"the {stage} job {sentence}")
    return errors.BookwheelError(
        f"the {stage} job failed on its runner ({type(failure).__name__}: {_last_line(failure)}): "
        "finished work is recorded; run it again with --debug for the trace"
    )


def _last_line(failure: BaseException) -> str:
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
