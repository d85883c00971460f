"""Kernels as a processor with AVX2 alone compiles them, on any x86 that has AVX2."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from outrider.kernels import native as building

from .kept_libraries import kept

COMPILER = shutil.which("g++") or shutil.which("c++")
INFO = Path("/proc/cpuinfo")
MACHINES = ["native", "avx2"]


@contextmanager
def use_kernels(module: ModuleType, machine: str, scratch: Path) -> Iterator[None]:
    """Let `module` (a package's `native`, which sits next to its native.cpp) use kernels of a machine of `MACHINES`."""
    module._functions.cache_clear()
    with pytest.MonkeyPatch.context() as monkeypatch:
        if machine == "avx2":
            if COMPILER is None or not INFO.exists() or "avx2" not in INFO.read_text().split():
                pytest.skip("no compiler, or another kind of processor")
            library = ctypes.PyDLL(str(_compile(Path(module.__file__ or "").with_suffix(".cpp"), scratch)))
            monkeypatch.setattr(module, "function", partial(building.bind, library))
        elif module._functions() is None:
            pytest.skip("no kernels")
        yield
    module._functions.cache_clear()


def _compile(source: Path, scratch: Path) -> Path:
    options = ["-O1", "-march=haswell", "-std=c++17", "-fPIC", "-w", "-fno-math-errno", "-fopenmp", "-ffp-contract=off"]
    options += ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]  # undefined behaviour is a crash
    command = [str(COMPILER), *options, f"-I{Path(building.__file__).parent}"]

    def compile_it() -> Path:
        made = scratch / "kernels.so"
        subprocess.run([*command, "-c", str(source), "-o", f"{made}.o"], check=True, timeout=120)
        # Without OpenMP's library: torch has loaded one.
        subprocess.run([COMPILER, "-shared", f"{made}.o", "-o", str(made)], check=True, timeout=120)
        return made

    return kept([*command, source.parent.name], [source], compile_it)
