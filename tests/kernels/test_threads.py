"""A thread that computes concurrently with another one has no helpers."""

import os
import subprocess
import sys

import pytest

_COUNT = """
import os, sys, threading, torch
from outrider.kernels.threads import compute_alone

def work():
    if sys.argv[1] == "alone":
        compute_alone()
    x = torch.ones(512, 512, dtype=torch.bfloat16)
    for _ in range(3):
        torch.nn.functional.linear(x, x)
        x.float().exp()
    counts.append((torch.get_num_threads(), len(os.listdir("/proc/self/task"))))

torch.ones(1 << 20).exp()  # this thread has its helpers
counts = []
before = len(os.listdir("/proc/self/task"))
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(torch.get_num_threads(), counts[0][0], counts[0][1] - before)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="torch uses no more threads than there are processors")
@pytest.mark.parametrize(("how", "expected"), [("alone", "2 1 1"), ("usual", "2 2 2")])
def test_helpers(how: str, expected: str, tmp_path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", _COUNT, how]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected  # threads of the first one, of the other one, and threads that it added
