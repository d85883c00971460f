"""Matrix products of a model's step, compared with the ceilings of the processor.

    python benchmarks/cpu_ceilings.py --model PATH [--rows 1,8,32,160,512] [--rounds 7] [--output-json F]

The ceilings are measured beside the products, in turn: reading memory larger than all caches, and multiply-adds of
bfloat16 pairs between registers (AVX512-BF16; other processors are not measured). A product of R rows must read its
weight once and multiply it R times: the least time is the larger of the two. Weights are random, of the model's shapes.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from script import make_parser, write_result
from torch import Tensor

from outrider.kernels.linear import pack
from outrider.kernels.native.compiler import FLAGS

READ_BYTES = 1 << 28
DOTS = 200_000
DOTS_AT_ONCE = 24
PAIRS = 32
"""Number of multiply-adds of one instruction."""


def ceilings(folder: str) -> ctypes.CDLL:
    """Compile the C++ beside this file."""
    target = Path(folder) / "ceilings.so"
    source = Path(__file__).with_suffix(".cpp")
    subprocess.run(["c++", *FLAGS, "-w", "-fopenmp", "-shared", str(source), "-o", str(target)], check=True)
    library = ctypes.CDLL(str(target))
    library.read_all.argtypes, library.read_all.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_float
    library.multiply_pairs.argtypes, library.multiply_pairs.restype = (ctypes.c_int64,), ctypes.c_int64
    return library


def shapes(path: Path) -> list[tuple[int, int]]:
    """(out, in) of every product of a decoder's step, the head included."""
    config = json.loads((path / "config.json").read_text())
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, config["num_key_value_heads"] * head_dim
    layer = [(queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)]
    return layer * config["num_hidden_layers"] + [(config["vocab_size"], hidden)]


def seconds(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@torch.inference_mode()
def measure(path: Path, rows: list[int], rounds: int) -> dict[str, Any]:
    """Ceilings, and for each number of rows its time beside the least possible one; medians over the rounds."""
    linears = [(pack(torch.randn(out, inner).bfloat16()), inner) for out, inner in shapes(path)]
    num_weights = sum(out * inner for out, inner in shapes(path))
    inputs = {(count, inner): torch.randn(count, inner).bfloat16() for count in rows for _, inner in linears}
    memory: Tensor = torch.ones(READ_BYTES, dtype=torch.uint8)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        library = ceilings(folder)
        for _ in range(rounds):
            taken = seconds(lambda: library.read_all(memory.data_ptr(), READ_BYTES))
            found.setdefault("bytes", []).append(READ_BYTES / taken)
            began = time.perf_counter()
            threads = library.multiply_pairs(DOTS)
            work = DOTS * DOTS_AT_ONCE * PAIRS * threads
            found.setdefault("multiply_adds", []).append(work / (time.perf_counter() - began))
            for count in rows:
                taken = seconds(lambda count=count: [linear(inputs[count, inner]) for linear, inner in linears])  # type: ignore[misc]
                found.setdefault(f"rows {count}", []).append(taken)
    medians = {name: statistics.median(values) for name, values in found.items()}
    products = []
    for count in rows:
        taken = medians[f"rows {count}"]
        least = max(2 * num_weights / medians["bytes"], count * num_weights / medians["multiply_adds"])
        products.append(
            {
                "rows": count,
                "seconds": taken,
                "gigabytes_per_second": 2 * num_weights / taken / 1e9,
                "gigamacs_per_second": count * num_weights / taken / 1e9,
                "of_the_ceiling": least / taken,
            }
        )
    return {
        "weights": num_weights,
        "read_gigabytes_per_second": medians["bytes"] / 1e9,
        "register_gigamacs_per_second": medians["multiply_adds"] / 1e9,
        "products": products,
        "rounds": found,
    }


def main() -> None:
    """Measure, print and write."""
    parser = make_parser(__doc__, rounds=7, model=True)
    parser.add_argument("--rows", default="1,8,32,160,512")
    namespace = parser.parse_args()
    if "avx512_bf16" not in Path("/proc/cpuinfo").read_text():
        sys.exit("this processor has no AVX512-BF16: its ceilings are not measured here")
    result = measure(Path(namespace.model), [int(count) for count in namespace.rows.split(",")], namespace.rounds)
    print(f"memory {result['read_gigabytes_per_second']:.0f} GB/s, ", end="")
    print(f"registers {result['register_gigamacs_per_second']:.0f} billion multiply-adds/s")
    for row in result["products"]:
        print(
            f"{row['rows']:5} rows  {row['seconds'] * 1e3:8.2f} ms  {row['gigabytes_per_second']:6.1f} GB/s  "
            f"{row['gigamacs_per_second']:6.0f} G/s  {row['of_the_ceiling']:.2f} of the ceiling"
        )
    settings = {"rows": namespace.rows, "rounds": namespace.rounds, "threads": torch.get_num_threads()}
    claim = "Matrix products of a step over the nearer limit of the processor"
    write_result(namespace.output_json, claim, Path(namespace.model).name, {"settings": settings, **result})


if __name__ == "__main__":
    main()
