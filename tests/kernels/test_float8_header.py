"""kernels/native/float8.h as each kind of processor compiles it: all numbers, to bfloat16 and back."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from outrider.kernels import native

SOURCE = """
#include "float8.h"
using namespace outrider;
extern "C" void widen_all(const fp8* from, int64_t count, bf16* to) { widen(from, count, to); }
extern "C" void narrow_all(const float* from, int64_t count, fp8* to) {
    for (int64_t i = 0; i < count; i += LANES) store(to + i, load(from + i, count - i), count - i);
}
"""
COMPILER = shutil.which("g++") or shutil.which("c++")
INFO = Path("/proc/cpuinfo")
FLAGS = INFO.read_text().split() if INFO.exists() else []
# What a processor must have for code made for it to run here.
NEEDS = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512bw", "native": ""}


@pytest.fixture(scope="module", params=NEEDS)
def functions(request, tmp_path_factory):
    if COMPILER is None or (NEEDS[request.param] and NEEDS[request.param] not in FLAGS):
        pytest.skip("no compiler, or another kind of processor")
    scratch = tmp_path_factory.mktemp("float8")
    source, made = scratch / "float8.cpp", scratch / "float8.so"
    source.write_text(SOURCE)
    options = ["-O3", f"-march={request.param}", "-std=c++17", "-fPIC", "-shared", "-Wno-psabi"]
    folder = Path(native.__file__).parent
    subprocess.run([COMPILER, *options, f"-I{folder}", str(source), "-o", str(made)], check=True, timeout=120)
    return ctypes.CDLL(str(made))


@pytest.mark.parametrize("count", [256, 77, 16, 5])
def test_widening_and_rounding_are_exact(functions, count):
    raw = torch.arange(256, dtype=torch.uint8)
    raw = raw[raw & 0x7F != 0x7F][-count:].contiguous()  # NaN is never written
    want = raw.view(torch.float8_e4m3fn).to(torch.bfloat16)
    got = torch.full((len(raw) + 1,), 7.0, dtype=torch.bfloat16)
    functions.widen_all(ctypes.c_void_p(raw.data_ptr()), ctypes.c_int64(len(raw)), ctypes.c_void_p(got.data_ptr()))
    assert got[:-1].view(torch.int16).equal(want.view(torch.int16))
    assert got[-1] == 7.0
    back, numbers = torch.zeros_like(raw), want.float()
    functions.narrow_all(
        ctypes.c_void_p(numbers.data_ptr()), ctypes.c_int64(len(raw)), ctypes.c_void_p(back.data_ptr())
    )
    assert back.equal(raw)
