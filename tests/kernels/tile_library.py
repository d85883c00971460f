"""Library of the products by AMX tiles: on a processor that has them, and with emulated instructions on one without."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from outrider.kernels.native import compiler

from .kept_libraries import kept

COMPILER = shutil.which("g++")
_INFO = Path("/proc/cpuinfo")
_FLAGS = set(_INFO.read_text().split()) if _INFO.exists() else set()
CAN_COMPUTE = COMPILER is not None and {"avx512_bf16", "avx512_vnni", "avx512bw"}.issubset(_FLAGS)
"""True: tests of the tiles can run."""
EMULATES = "amx_tile" not in _FLAGS
"""True: a handler computes the tile instructions."""
_SOURCES = ("experts", "linear", "lora", "native", "quantized_linear")


def compile_with_tiles(command: list[str], scratch: Path, library: Path) -> None:
    """Compile the products for a processor with tiles into `library`; the handler too, if this one has none."""
    options = ["-O1", "-march=native", "-std=c++17", "-fPIC", "-w", "-fno-math-errno", "-fopenmp"]
    compile_one = [*command, *options, f"-I{compiler.KERNELS / 'native'}"]
    sources = [compiler.KERNELS / name / "native.cpp" for name in _SOURCES]
    if EMULATES:
        sources.append(Path(__file__).with_name("tile_trap.cpp"))

    def compile_all() -> Path:
        objects = [scratch / f"{index}.o" for index in range(len(sources))]
        jobs = [
            subprocess.Popen([*compile_one, "-c", str(source), "-o", str(made)])
            for source, made in zip(sources, objects, strict=True)
        ]
        assert [job.wait(120) for job in jobs] == [0] * len(jobs)
        made = scratch / "tiles.so"
        # Symbolic: the trap's `syscall` is that of the library.
        subprocess.run([*command, "-shared", "-Wl,-Bsymbolic", *objects, "-o", made], check=True, timeout=60)
        return made

    shutil.copyfile(kept(compile_one, sources, compile_all), library)
