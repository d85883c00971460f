"""Command line of the search for the launch configs of the Triton kernels that are fastest on this machine's GPU."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...kernels.dispatch import has_triton
from ...kernels.tuning import VARIABLE, KernelConfigError
from ...kernels.tuning.files import DeviceName, resumed
from ...platform.cli.options.option_types import positive_number
from ...platform.core.errors import InvalidRequestError, OutriderError

if TYPE_CHECKING:
    from .search import Searcher
    from .workloads import ModelShape, WorkSizes

_DESCRIPTION = f"""\
Search the block sizes, warps, stages and splits of the Triton kernels for the shapes of a model, on this machine's
GPU. Each candidate must give the default's results, and is taken if it is at least 2% faster.

One JSON file a device is written, after each shape; the same command continues an interrupted search. Use the file with
`outrider serve --kernel-configs DIR`, or with the variable {VARIABLE}.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune; returns the exit status: 0 well, 1 a typed error (one line on stderr), 2 wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python tools/tune",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", required=True, metavar="PATH", help="HF directory or hub id; its config.json is read"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the device's file")
    parser.add_argument(
        "--budget-seconds", type=positive_number, metavar="N", help="begin no trial after this time (default: no limit)"
    )
    options = parser.parse_args(arguments)
    try:
        model = model_shape(options.model)
        name, searcher = find_device(options.budget_seconds)
        tune_model(model, name, searcher, options.output)
    except OutriderError as error:
        print(f"tune: error: {error.message}", file=sys.stderr)
        return 1
    return 0


def find_device(budget: float | None) -> tuple[DeviceName, Searcher]:
    """Find the GPU, and a searcher on it that begins no trial after `budget` seconds.

    Raises:
        InvalidRequestError: there is no GPU, or no Triton.
    """
    import torch

    if not torch.cuda.is_available():
        raise InvalidRequestError("tuning measures the kernels on a CUDA device, and there is none", param="device")
    if not has_triton():
        raise InvalidRequestError("tuning needs Triton: pip install 'outrider[gpu]'", param="device")
    from ...kernels.paged_attention.schedule import describe_gpu
    from ...kernels.tuning.store import device_name
    from .search import Searcher

    device = torch.device("cuda", torch.cuda.current_device())
    ends = time.monotonic() + (budget or float("inf"))
    return device_name(device), Searcher(device, describe_gpu(device).arch, has_time=lambda: time.monotonic() < ends)


def model_shape(model: str) -> ModelShape:
    """Sizes of a model, from its config.json alone.

    Raises:
        OutriderError: no such model, or an architecture that is not served.
    """
    from ...models.checkpoint.json_files import read_model_config
    from ...models.checkpoint.paths import resolve_model_path
    from ...models.config import DTYPES, config_from_hf, stored_dtype
    from .workloads import ModelShape

    raw = read_model_config(resolve_model_path(model))
    dtype = DTYPES[stored_dtype(raw)]
    config = config_from_hf(raw, dtype)
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    return ModelShape(config.hidden_size, config.intermediate_size, *heads, config.vocab_size, dtype)


def tune_model(
    model: ModelShape, device: DeviceName, searcher: Searcher, folder: Path, sizes: WorkSizes | None = None
) -> None:
    """Search, write the found configs and print them.

    Raises:
        OutriderError: the path exists and is no such file.
    """
    from .search import TRITON_VERSION, make_jobs, tune
    from .workloads import WorkSizes

    path = folder / device.file_name
    try:
        file = resumed(path, device, TRITON_VERSION)
    except KernelConfigError as error:
        raise OutriderError(f"--output: {error}; move it away to start over", param="output") from error
    if path.exists() and not file.entries:
        print(f"{path} is of another device or Triton: started over")
    jobs = make_jobs(model, sizes or WorkSizes())
    kept = sum(job.key in file.entries for job in jobs)
    print(f"{device.name}, Triton {TRITON_VERSION}: {len(jobs)} shapes, {kept} kept from before; in {path}", flush=True)
    if not tune(jobs, searcher, file, path, lambda found: print(found, flush=True)):
        print("the budget has ended; the same command continues")
