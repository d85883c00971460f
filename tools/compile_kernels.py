"""Compile every Triton kernel without a GPU, and read its resources from the compiler's output.

All `kernels/<op>/triton.py` that have `compile_cases()` are built for Ampere, Hopper and Blackwell. Registers a thread,
bytes of the stack (spilled registers) and shared memory a block are printed as a table. A kernel that spills, that
needs more shared memory than a block can have, or that does not compile is an error.

As at run time, pointers and strides are taken to be divisible by 16: wide loads depend on it. Arguments that are not
specialised are not, and integers that are 1 are constants: `CompileCase.ones`.

Usage: python tools/compile_kernels.py [--arch 80 90 100] [--only TEXT ...] [--one-each] [--jobs N]
       [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

if importlib.util.find_spec("torch") is None:
    # The modules of the kernels import torch for their wrappers; Triton compiles without it.
    sys.modules |= {name: MagicMock() for name in ("torch", "torch.nn", "torch.nn.functional")}

from outrider.kernels.compile_case import CompileCase

ROOT = Path(__file__).resolve().parent.parent
ALIGNED = ["tt.divisibility", 16]
FIRST_FP8_ARCH = 89
# Bytes of shared memory a block may have, by compute capability (CUDA C++ Programming Guide, technical specifications).
MAX_SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


class Usage(NamedTuple):
    """Resources of one kernel on one architecture."""

    name: str
    arch: int
    registers: int
    """Registers of a thread."""
    stack: int
    """Bytes of a thread: spilled registers, or arrays with computed indices, which no kernel here has."""
    shared: int
    """Bytes of a block."""
    num_warps: int
    seconds: float
    """Time to compile; next to nothing when Triton's cache has the kernel."""
    error: str
    """Reason of a refusal; empty without one."""


def find_cases(only: Sequence[str] = ()) -> dict[str, CompileCase]:
    """Cases by name: all, or those whose names contain one of `only`.

    Raises:
        ValueError: two cases share a name.
    """
    cases: dict[str, CompileCase] = {}
    for path in sorted((ROOT / "kernels").glob("*/triton.py")):
        module = importlib.import_module(f"outrider.kernels.{path.parent.name}.triton")
        for case in module.compile_cases():
            if case.name in cases:
                raise ValueError(f"two compile cases are called {case.name!r}")
            cases[case.name] = case
    return {name: case for name, case in cases.items() if not only or any(text in name for text in only)}


def one_a_kernel(cases: dict[str, CompileCase], arch: int) -> dict[str, CompileCase]:
    """The first case of every kernel that is for `arch`."""
    first: dict[int, CompileCase] = {}
    for case in cases.values():
        if _is_meant(case, arch):
            first.setdefault(id(case.kernel), case)
    return {case.name: case for case in first.values()}


def compile_case(case: CompileCase, arch: int) -> Usage:
    """Compile `case` for compute capability `arch` / 10 and check its resources."""
    start = time.monotonic()
    try:
        registers, stack, shared = _compile(case, arch)
    except Exception as error:  # any error of the compiler becomes a row of the table
        problem = f"{type(error).__name__}: {error}"
        return Usage(case.name, arch, 0, 0, 0, case.num_warps, time.monotonic() - start, problem)
    problems = []
    if stack:
        problems.append(f"spills to {stack} bytes of stack")
    if shared > MAX_SHARED[arch]:
        problems.append(f"{shared} bytes of shared memory, at most {MAX_SHARED[arch]}")
    seconds = time.monotonic() - start
    return Usage(case.name, arch, registers, stack, shared, case.num_warps, seconds, "; ".join(problems))


def _compile(case: CompileCase, arch: int) -> tuple[int, int, int]:
    """(registers, stack, shared memory)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(case.kernel.arg_names)
    if list(case.signature) != names:
        raise ValueError(f"the signature must name {names}, in this order; got {list(case.signature)}")
    declared = {name for name, kind in case.signature.items() if kind == "constexpr"}
    if declared != set(case.constexprs):
        raise ValueError(f"constexprs must be {sorted(declared)}; got {sorted(case.constexprs)}")
    unspecialised = {parameter.name for parameter in case.kernel.params if parameter.do_not_specialize}
    unaligned = {parameter.name for parameter in case.kernel.params if parameter.do_not_specialize_on_alignment}
    if wrong := {name for name in case.ones if case.signature[name][0] != "i" or name in unspecialised}:
        raise ValueError(f"ones must be integers that are specialised; got {sorted(wrong)}")
    signature = case.signature | dict.fromkeys(case.ones, "constexpr")
    attributes: dict[tuple[int, ...], Any] = {
        (index,): [ALIGNED]
        for index, (name, kind) in enumerate(signature.items())
        if (kind.startswith("*") and name not in unaligned)
        or (kind.startswith("i") and "stride" in name and name not in unspecialised)
    }
    values = case.constexprs | dict.fromkeys(case.ones, 1)
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, stack = _resources(compiled.asm["cubin"])
    return registers, stack, compiled.metadata.shared


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack and local memory) that a compiled kernel takes a thread."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", output)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no registers: {output!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _compile_named(job: tuple[str, int]) -> Usage:
    name, arch = job
    return compile_case(find_cases()[name], arch)


def _is_meant(case: CompileCase, arch: int) -> bool:
    """True when this architecture has the types of the case."""
    has_types = arch >= FIRST_FP8_ARCH or not any("fp8" in kind for kind in case.signature.values())
    return arch in case.archs and has_types


def compile_all(cases: dict[str, CompileCase], arch: int, jobs: int) -> list[Usage]:
    """Compile every case that is for `arch`, in `jobs` processes."""
    work = [(name, arch) for name, case in cases.items() if _is_meant(case, arch)]
    if jobs == 1:
        return [compile_case(cases[name], arch) for name, _ in work]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_compile_named, work))


def table(usages: Sequence[Usage]) -> str:
    """Lines of the table, one for each kernel and architecture."""
    width = max((len(usage.name) for usage in usages), default=6)
    lines = [f"{'kernel':<{width}}  {'arch':>6} {'warps':>5} {'regs':>5} {'stack':>5} {'shared':>7} {'s':>5}"]
    lines += [
        f"{u.name:<{width}}  {'sm_' + str(u.arch):>6} {u.num_warps:>5} {u.registers:>5} {u.stack:>5} {u.shared:>7} "
        f"{u.seconds:>5.1f}{'  ' + u.error if u.error else ''}"
        for u in usages
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Compile, print, and return the exit status."""
    parser = argparse.ArgumentParser(description="Compile every Triton kernel without a GPU")
    parser.add_argument("--arch", type=int, nargs="+", default=sorted(MAX_SHARED), choices=sorted(MAX_SHARED))
    parser.add_argument("--only", nargs="+", default=(), metavar="TEXT", help="cases whose name contains one of these")
    parser.add_argument("--one-each", action="store_true", help="one case for each kernel")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there too")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1: nothing would be compiled")
    usages: list[Usage] = []
    for arch in options.arch:
        cases = find_cases(options.only)
        if not cases:
            parser.error(f"no case is called like {' or '.join(options.only)}")
        if options.one_each:
            cases = one_a_kernel(cases, arch)
        usages += compile_all(cases, arch, options.jobs)
    print(table(usages))
    if options.json is not None:
        options.json.write_text(json.dumps([usage._asdict() for usage in usages], indent=1) + "\n", encoding="utf-8")
    refused = [usage for usage in usages if usage.error]
    print(f"{len(usages) - len(refused)} compiled, {len(refused)} refused")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
