"""A local worker process: Beam's own, without imports that no job needs."""

import sys

from beam_jobs.workers import hide_unused_modules, prevent_pandas_import

with hide_unused_modules():
    from apache_beam.runners.worker import sdk_worker_main

if __name__ == "__main__":
    prevent_pandas_import()
    sdk_worker_main.main(sys.argv)  # type: ignore[no-untyped-call]
