"""A worker process of this machine: Beam's own, without what no job of ours asks it for.

Beam imports pandas, and what speaks to every cloud whose client is installed: more than half of the 1.5 s of processor
time that a worker takes to start beside all of them. Our jobs read dumps and stores by themselves.
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
    sys.modules[name] = None  # type: ignore[assignment] # "not installed" to who imports it, which Beam expects
from apache_beam.runners.worker import sdk_worker_main  # noqa: E402 - what is hidden must be hidden by now

for name in _hidden:
    del sys.modules[name]  # a chunker, say, may want pandas

if __name__ == "__main__":
    sdk_worker_main.main(sys.argv)  # type: ignore[no-untyped-call]
