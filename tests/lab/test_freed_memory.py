"""Memory that is freed and wanted again is not cleared by the kernel again."""

import platform
import subprocess
import sys

import pytest

# Twenty times an array of 8 MB that is written whole: 2,048 pages each, or 4 huge ones and some.
CODE = """
import resource, sys
import numpy as np
from eagle3lib.lab.machine import keep_freed_memory
assert sys.argv[1] != "keep" or keep_freed_memory()
np.ones(1 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    np.ones(1 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a knob of glibc's")
def test_freed_memory_is_kept():
    def faults(how):
        done = subprocess.run(
            [sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert faults("keep") < 20
    assert faults("leave") > 200
