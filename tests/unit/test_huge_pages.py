"""Large tensors lie on huge pages, where the system gives them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SCRIPT = """
import outrider, torch
x = torch.ones(64 << 20, dtype=torch.uint8)
line = next(line for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages:"))
print(int(line.split()[1]))
"""


def huge_kilobytes(**environment: str) -> int:
    variables = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"} | environment
    done = subprocess.run(
        [sys.executable, "-I", "-c", SCRIPT], env=variables, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(
    not SETTING.exists() or "[madvise]" not in SETTING.read_text(), reason="the system decides alone about huge pages"
)
def test_large_tensors_lie_on_huge_pages_unless_the_user_says_no() -> None:
    without = huge_kilobytes(THP_MEM_ALLOC_ENABLE="0")
    assert huge_kilobytes() > without + (32 << 10)
