"""Command line of the search for the launch configs of the Triton kernels that are fastest on this machine's GPU."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...kernels.tuning import KINDS, VARIABLE, KernelConfigError
from ...kernels.tuning.files import ConfigFile, DeviceName, resumed
from ...platform.cli.options.option_types import list_of, positive_number
from ...platform.core.errors import InvalidRequestError, OutriderError
from .shapes import MODELS, ModelShape, WorkSizes

if TYPE_CHECKING:
    import torch

    from .search import Found, Timer

_DESCRIPTION = f"""\
Search the block sizes, warps, stages and splits of the Triton kernels for the shapes of a model, on this machine's
GPU. Each candidate must give the default's results, and is taken where it is at least 2% faster.

One JSON file a device is written, after each shape; the same command continues an interrupted search. Use the file with
`outrider serve --kernel-configs DIR`, or with the variable {VARIABLE}.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune; returns the exit status: 0 well, 1 a typed error (one line on stderr), 2 wrong usage."""
    namespace = build_parser().parse_args(arguments)
    try:
        return run(namespace)
    except OutriderError as error:
        print(f"tune: error: {error.message}", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python tools/tune",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    models = parser.add_mutually_exclusive_group(required=True)
    models.add_argument("--model", metavar="PATH", help="HF directory or hub id of the model to tune for")
    models.add_argument(
        "--shapes", type=list_of(str), metavar="NAME,NAME", help=f"sizes of published models: {', '.join(MODELS)}"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the device's file")
    parser.add_argument(
        "--kernels", type=list_of(str), metavar="NAME,NAME", help=f"only these (default: all): {', '.join(KINDS)}"
    )
    parser.add_argument(
        "--budget-seconds", type=positive_number, metavar="N", help="begin no trial after this time (default: no limit)"
    )
    return parser


def run(namespace: argparse.Namespace) -> int:
    """Tune with parsed options; returns the exit status.

    Raises:
        OutriderError: an unknown name, no such model, no GPU, or an output file that cannot be continued.
    """
    models = _models(namespace)
    kernels = _known("kernels", namespace.kernels or list(KINDS), KINDS)
    device = find_device()
    from .timer import CudaTimer

    return tune_models(models, kernels, device, CudaTimer(device), namespace.output, namespace.budget_seconds)


def find_device() -> torch.device:
    """Find the GPU.

    Raises:
        InvalidRequestError: there is no GPU, or no Triton.
    """
    import torch

    from ...kernels.dispatch import has_triton

    if not torch.cuda.is_available():
        raise InvalidRequestError("tuning measures the kernels on a CUDA device, and there is none", param="device")
    if not has_triton():
        raise InvalidRequestError("tuning needs Triton: pip install 'outrider[gpu]'", param="device")
    return torch.device("cuda", torch.cuda.current_device())


def _known(option: str, names: Sequence[str], known: Mapping[str, Any]) -> list[str]:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidRequestError(f"--{option}: there is no {unknown[0]!r}, but {', '.join(known)}", param=option)
    return list(dict.fromkeys(names))


def _models(namespace: argparse.Namespace) -> dict[str, ModelShape]:
    if namespace.model is None:
        return {name: MODELS[name] for name in _known("shapes", namespace.shapes, MODELS)}
    return {Path(namespace.model).name: model_shape(namespace.model)}


def model_shape(model: str) -> ModelShape:
    """Sizes of a model, from its config.json alone.

    Raises:
        OutriderError: no such model, or an architecture that is not served.
    """
    from ...models.checkpoint.json_files import read_json
    from ...models.checkpoint.loader import resolve_model_path
    from ...models.config import DTYPES, config_from_hf, stored_dtype
    from ...models.demo import DEMO_MODEL_NAME, demo_model_path

    path = demo_model_path() if model == DEMO_MODEL_NAME else resolve_model_path(model)
    raw = read_json(Path(path) / "config.json")
    dtype = stored_dtype(raw)
    config = config_from_hf(raw, DTYPES[dtype])
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    return ModelShape(config.hidden_size, config.intermediate_size, *heads, config.vocab_size, dtype)


def tune_models(
    models: Mapping[str, ModelShape],
    kernels: Sequence[str],
    device: torch.device,
    timer: Timer,
    folder: Path,
    budget: float | None,
    sizes: WorkSizes | None = None,
) -> int:
    """Search, write the found configs and print them; returns the exit status."""
    from tqdm import tqdm

    from ...kernels.paged_attention.schedule import gpu_of
    from .search import TRITON_VERSION, Searcher, make_jobs, tune

    name = _name(device)
    path = folder / name.file_name
    file = _begin(path, name, TRITON_VERSION)
    jobs = make_jobs(models, kernels, sizes or WorkSizes())
    print(f"{name.name}, Triton {TRITON_VERSION}: {len(jobs)} shapes of {len(kernels)} kernels", flush=True)
    ends = None if budget is None else time.monotonic() + budget
    with tqdm(unit="trial", dynamic_ncols=True) as bar:
        searcher = Searcher(
            device,
            gpu_of(device).arch,
            timer,
            has_time=lambda: ends is None or time.monotonic() < ends,
            on_trial=lambda: bar.update(),
        )
        bar.total = sum(searcher.num_trials(job) for job in jobs if job.key not in file.entries)
        done, is_whole = tune(jobs, searcher, file, path, lambda found: bar.set_description(_title(found)))
    print("\n".join(table(done)))
    kept = sum(job.key in file.entries for job in jobs)
    print(f"{len(done)} of {len(jobs)} shapes searched, {kept} kept from before; in {path}")
    if not is_whole:
        print("the budget has ended; the same command goes on")
    return 0


def _name(device: torch.device) -> DeviceName:
    from ...kernels.tuning.store import device_name

    return device_name(device) if device.type == "cuda" else DeviceName(device.type, (0, 0))


def _begin(path: Path, device: DeviceName, triton: str) -> ConfigFile:
    """File of an earlier run for this device, if it was measured with the same compiler; else an empty one."""
    try:
        file = resumed(path, device, triton)
    except KernelConfigError as error:
        raise OutriderError(f"--output: {error}; move it away to begin anew", param="output") from error
    if path.exists() and not file.entries:
        print(f"{path} is of another device or Triton: begun anew")
    return file


def _title(found: Found | None) -> str:
    return "kept" if found is None else found.job.kernel


def table(found: Sequence[Found]) -> list[str]:
    """Lines of a table, one for each shape: default and tuned times, the config, and the number of refused configs."""
    rows: list[tuple[str, ...]] = [("kernel", "shape", "default µs", "tuned µs", "speedup", "config", "refused")]
    rows += [_line(one) for one in found]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    pad: list[Callable[[str, int], str]] = [str.ljust, str.ljust, str.rjust, str.rjust, str.rjust, str.ljust, str.rjust]
    return ["  ".join(put(cell, width) for put, cell, width in zip(pad, row, widths, strict=True)) for row in rows]


def _line(found: Found) -> tuple[str, ...]:
    import dataclasses

    times = found.entry.times.values()
    old, new = sum(time.default for time in times), sum(time.tuned for time in times)
    shape = " ".join(f"{name}={n}" for name, n in zip(type(found.default).shape, found.job.shape, strict=True))
    config, default = dataclasses.asdict(found.entry.config), dataclasses.asdict(found.default)
    changes = [f"{name}={value}" for name, value in config.items() if value != default[name]]
    what = " ".join(changes) or "default"
    return (
        found.job.kernel,
        shape,
        f"{old:.1f}",
        f"{new:.1f}",
        f"{found.speedup:.2f}x",
        what,
        str(len(found.failures)),
    )
