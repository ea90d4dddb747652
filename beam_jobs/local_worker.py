"""A local worker process: Beam's own, without imports that no job needs.

Beam imports pandas and the client of every installed cloud library: more than half of the 1.5 s of
CPU time in which a worker starts when all of them are installed. Our jobs read dumps and stores
themselves.
"""

import sys

_UNUSED = (
    "apache_beam.io.aws.s3filesystem",
    "apache_beam.io.azure.blobstoragefilesystem",
    "apache_beam.io.gcp.bigquery",
    "apache_beam.io.gcp.gcsfilesystem",
    "apache_beam.io.hadoopfilesystem",
    "pandas",
)
_hidden = [name for name in _UNUSED if name not in sys.modules]
for name in _hidden:
    sys.modules[name] = None  # type: ignore[assignment] # appears as not installed, which Beam handles
from apache_beam.runners.worker import sdk_worker_main  # noqa: E402 - after the modules are hidden

for name in _hidden:
    del sys.modules[name]  # a chunker may import pandas, for example

if __name__ == "__main__":
    sdk_worker_main.main(sys.argv)  # type: ignore[no-untyped-call]
