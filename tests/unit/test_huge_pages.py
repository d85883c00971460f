"""Large tensors ask for huge pages, where the system gives them to those who ask."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Prints the flags of the mapping that a tensor lies in: `hg` says that huge pages were asked for.
# How many there are to give depends on what else the machine does.
SCRIPT = """
import outrider, re, torch
x = torch.ones(64 << 20, dtype=torch.uint8)
for line in open("/proc/self/smaps"):
    if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
        inside = int(found[1], 16) <= x.data_ptr() < int(found[2], 16)
    elif inside and line.startswith("VmFlags:"):
        print(line)
"""


def flags(**environment: str) -> list[str]:
    variables = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"} | environment
    done = subprocess.run(
        [sys.executable, "-I", "-c", SCRIPT], env=variables, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.skipif(
    not SETTING.exists() or "[madvise]" not in SETTING.read_text(), reason="the system decides alone about huge pages"
)
def test_large_tensors_ask_for_huge_pages_unless_the_user_says_no() -> None:
    assert "hg" in flags()
    without = flags(THP_MEM_ALLOC_ENABLE="0")
    assert without
    assert "hg" not in without
