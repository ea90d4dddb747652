"""Parallel work: Beam pipelines over descriptors of parts and shards. Does not import Prefect."""

import logging

from rag_model.allocator import plain_arrow


def _wanted(record: logging.LogRecord) -> bool:
    """Drop useless messages of Beam to the root logger.

    These are that a Google client library, which is not used here, is absent; and whole traces of a job server, whose
    cause is reported in one sentence.
    """
    return not record.getMessage().startswith("apitools not found") and record.module != "portable_runner"


logging.getLogger().addFilter(_wanted)
plain_arrow()
