import os
import subprocess
import sys

CODE = """
import numpy as np
from rag_model.index.postings.packing import write_varint
print(write_varint(np.zeros(9, np.uint8), 0, 300))
"""


def test_numba_compiles_without_a_cache_folder() -> None:
    """A container may have a disk that cannot be written."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": "/proc/no-such-folder"}
    process = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, env=environment)
    assert (process.returncode, process.stdout.strip()) == (0, "2"), process.stderr
