"""Compilation of the C++ kernels into a shared library, once for each machine, compiler and version of the sources."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

KERNELS = Path(__file__).parent.parent
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_SECONDS = 300

# No -ffast-math: a row's result must not depend on a compiler's order of sums. The order is written in the sources.
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-fno-math-errno",
    "-Wall",
    "-Wno-psabi",
)


class BuildError(RuntimeError):
    """Failure to build: there is no compiler, or it reported an error."""


def sources() -> list[Path]:
    """C++ source files in a fixed order."""
    return sorted(KERNELS.glob("*/native.cpp"))


def build(cache: Path | None = None) -> Path:
    """Path of the shared library, which is compiled unless the cache has it.

    Args:
        cache: Where it is kept; None: `outrider/native` in the user's cache folder.

    Raises:
        BuildError: there is no compiler, or it fails; the message has the reason.
        OSError: the cache cannot be written.
    """
    if not sys.platform.startswith("linux"):
        raise BuildError(f"they are built on Linux only, not on {sys.platform}")
    compiler = _compiler()
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider" / "native"
    target = cache / f"kernels-{_key(compiler)}.so"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(cache):
        if not target.exists():  # else another process has compiled it meanwhile
            logger.info("compiling the native CPU kernels (once)")
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                library = Path(scratch) / target.name
                _compile(compiler, Path(scratch), library)
                library.replace(target)  # atomic: other processes look for it without the lock
    return target


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Exclusive lock of a folder: processes that start together, as ranks do, compile one after the other."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compiler() -> list[str]:
    chosen = os.environ.get("CXX", "").split()
    for candidate in [chosen] if chosen else [[name] for name in COMPILERS]:
        if shutil.which(candidate[0]):
            return candidate
    raise BuildError(f"no C++ compiler is found ({' '.join(chosen) or ', '.join(COMPILERS)})")


def _key(compiler: list[str]) -> str:
    """Digest of everything that the library depends on: sources, compiler, flags and the processor's features."""
    digest = hashlib.sha256(
        repr((compiler, FLAGS, _contraction(), _run([*compiler, "--version"]), os.uname().machine)).encode()
    )
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(errors="replace").splitlines()
        digest.update(next((line for line in lines if line.lower().startswith(("flags", "features"))), "").encode())
    for path in (*sources(), *sorted(KERNELS.glob("native/*.h"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _contraction() -> str:
    """Flag for fused multiply-adds. Without AVX512 the compiler vectorises generic code, and fuses other operations for
    other numbers of rows, whose bits would then depend on the batch."""
    cpuinfo = Path("/proc/cpuinfo")
    has_avx512 = cpuinfo.exists() and "avx512f" in cpuinfo.read_text(errors="replace").split()
    return f"-ffp-contract={'fast' if has_avx512 else 'off'}"


def _compile(compiler: list[str], scratch: Path, library: Path) -> None:
    # OpenMP's calls stay open in the library and are answered by the runtime that torch has loaded: two runtimes would
    # each keep threads that spin for the other's core. clang speaks to another runtime, so it gets no threads.
    is_clang = "clang" in _run([*compiler, "--version"])
    openmp = "-fopenmp-simd" if is_clang else "-fopenmp"
    include = f"-I{KERNELS / 'native'}"

    def compile_one(source: Path) -> Path:
        target = scratch / f"{source.parent.name}.o"
        _run([*compiler, *FLAGS, _contraction(), openmp, include, "-c", str(source), "-o", str(target)])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources()))
    _run([*compiler, "-shared", "-pthread", *map(str, objects), "-o", str(library)])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed: {done.stderr.strip()[-1000:]}")
    return done.stdout
