"""A local worker process: Beam's own, without imports that no job needs."""

import sys

from beam_jobs.workers import hide_unused_modules, keep_arrow_from_pandas

with hide_unused_modules():
    from apache_beam.runners.worker import sdk_worker_main

if __name__ == "__main__":
    keep_arrow_from_pandas()
    sdk_worker_main.main(sys.argv)  # type: ignore[no-untyped-call]
