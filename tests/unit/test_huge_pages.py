"""Large tensors and packed weights ask for huge pages, if the system gives them on request."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.kernels.memory import WeightMemory

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Prints the flags of the mappings that a large tensor and a packed weight lie in: `hg` says that huge pages were asked
# for. How many there are to give depends on what else the machine does.
SCRIPT = """
import outrider, re, torch
from outrider.kernels.memory import weight_memory
with weight_memory.of_model():
    tensors = torch.ones(64 << 20, dtype=torch.uint8), weight_memory.take(1000)
for x in tensors:
    for line in open("/proc/self/smaps"):
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= x.data_ptr() < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            print(line.strip())
"""


def flags(**environment: str) -> list[list[str]]:
    variables = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"} | environment
    done = subprocess.run(
        [sys.executable, "-I", "-c", SCRIPT], env=variables, capture_output=True, text=True, check=True
    )
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(
    not SETTING.exists() or "[madvise]" not in SETTING.read_text(), reason="the system decides alone about huge pages"
)
def test_tensors_ask_for_huge_pages_unless_switched_off() -> None:
    assert ["hg" in of_tensor for of_tensor in flags()] == [True, True]
    assert ["hg" in of_tensor for of_tensor in flags(THP_MEM_ALLOC_ENABLE="0")] == [False, False]


def test_weights_of_a_model_lie_side_by_side_and_do_not_overlap() -> None:
    memory = WeightMemory()
    sizes = [1000, 64, 1, 70 << 20, 3 << 20]
    with memory.of_model():
        weights = [memory.take(size) for size in sizes]
        assert memory.take(0).numel() == 0
    assert weights[1].data_ptr() == weights[0].data_ptr() + 1024
    for number, weight in enumerate(weights):
        assert weight.data_ptr() % 64 == 0
        weight.fill_(number + 1)
    for number, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        assert weight.numel() == size
        assert bool((weight == number + 1).all())


def test_other_weights_have_memory_of_their_own() -> None:
    memory = WeightMemory()
    with memory.of_model():
        first = memory.take(4096)
    other = memory.take(4096)
    with memory.of_model():
        second = memory.take(4096)
    places = sorted(weight.data_ptr() for weight in (first, other, second))
    assert all(after - before >= 4096 + 64 for before, after in itertools.pairwise(places))
