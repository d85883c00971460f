"""The pool of threads of the native kernels: right results from any thread."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outrider.kernels.linear import NativeLinear, pack
from outrider.kernels.native import library
from outrider.kernels.native.compiler import KERNELS

pytestmark = pytest.mark.skipif(library() is None, reason="there are no native kernels here")


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_pool_stress_under_sanitizers(sanitizer, tmp_path):
    program = tmp_path / "stress"
    command = ["g++", "-std=c++17", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}", f"-I{KERNELS / 'native'}"]
    source = Path(__file__).with_name("pool_stress.cpp")
    built = subprocess.run([*command, str(source), "-o", str(program)], capture_output=True, text=True, check=False)
    if built.returncode:
        assert "cannot find" in built.stderr, built.stderr
        pytest.skip("the compiler has no such sanitizer")
    ran = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr


_PROCESS = """
import os, re, signal, threading, torch
from pathlib import Path
from outrider.kernels.linear import pack
from outrider.kernels.threads import use_pool

torch.manual_seed(0)
torch.set_num_threads(2)
use_pool(True)
product = pack(torch.randn(512, 512).bfloat16())
x = torch.randn(64, 512).bfloat16()
expected = product(x)

def good():
    return all(torch.equal(product(x), expected) for _ in range(50))

def num_threads():
    return len(os.listdir("/proc/self/task"))

child = os.fork()
if not child:  # it has no threads but this one, and makes its own
    alone = num_threads() == 1
    os._exit(0 if alone and good() and num_threads() == 2 else 1)
assert os.waitpid(child, 0)[1] == 0

def blocks(mask, number):
    return bool(int(mask, 16) >> (number - 1) & 1)

good()
states = [path.read_text() for path in Path("/proc/self/task").glob("*/status")]
masks = [re.search(r"SigBlk:\\s*(\\w+)", state)[1] for state in states]
assert any(blocks(mask, signal.SIGINT) for mask in masks)  # the pool's
assert not any(blocks(mask, signal.SIGSEGV) for mask in masks)  # faulthandler reports those

results = []
others = [threading.Thread(target=lambda: results.append(good())) for _ in range(3)]
for thread in others:
    thread.start()
results.append(good())
for thread in others:
    thread.join()
assert results == [True] * 4

for count in (1, 4, 2, 3):
    torch.set_num_threads(count)
    assert good()
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_forks_threads_and_their_number(tmp_path):
    if not isinstance(pack(torch.zeros(64, 64, dtype=torch.bfloat16)), NativeLinear):
        pytest.skip("the products are not native on this processor")
    command = [sys.executable, "-W", "ignore", "-c", _PROCESS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
