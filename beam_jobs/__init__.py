"""Where work runs in parallel: Beam pipelines over descriptors of parts and shards. Knows nothing of Prefect."""

import logging


def _wanted(record: logging.LogRecord) -> bool:
    """Drop what Beam tells the root logger for nothing.

    That a Google client library, which nothing here uses, is absent; and whole traces out of a job server: what matters
    of them is told in one sentence.
    """
    return not record.getMessage().startswith("apitools not found") and record.module != "portable_runner"


logging.getLogger().addFilter(_wanted)
