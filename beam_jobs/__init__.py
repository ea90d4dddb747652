"""Beam jobs whose elements are small descriptions of parts and shards. Prefect is not imported.

* `chunk`, `embed`, `index`, `gate`: one module for each job; `index_work` contains the tasks of the
  index jobs. `corpus` has the smaller jobs over a snapshot, such as deltas and redaction.
* `job`, `tasks`, `pipeline`: run the tasks of a job, in this process or on Beam's workers.
* `job_settings`, `options`, `workers`: where jobs run, and with which workers and memory.
* `flink`, `local_worker`: the job server of Flink, Spark or Prism, and the fork server of local
  worker processes.
* `explain`: report which results a build would reuse.
"""

import logging

from rag_model.process import configure_native_libraries


def _is_useful_record(record: logging.LogRecord) -> bool:
    """Return False for log records of Beam that do not help a user.

    Beam warns if a Google client library is missing, although it is not used here, and logs stack
    traces of the job server, although their cause is reported in one sentence.
    """
    return not record.getMessage().startswith("apitools not found") and record.module != "portable_runner"


logging.getLogger().addFilter(_is_useful_record)
configure_native_libraries()
