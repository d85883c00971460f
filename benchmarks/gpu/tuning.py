"""Search for kernel configs within a run's time, with `tools/tune`, for one model."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.kernels.tuning.files import resumed
from outrider.tools.tune.shapes import ModelShape as TunedShape
from outrider.tools.tune.shapes import WorkSizes

from .models import ModelShape
from .report import Context


@torch.inference_mode()
def measure_tuning(context: Context, root: Path, shape: ModelShape) -> None:
    """Measure defaults and found configs, shape by shape; the device's file stays in the report's folder."""
    if context.device != "cuda":
        context.skip("tune", "kernels of GPUs alone")
        return
    from outrider.kernels.paged_attention.schedule import gpu_of
    from outrider.kernels.tuning.store import device_name
    from outrider.tools.tune.search import TRITON_VERSION, Found, Searcher, make_jobs, tune
    from outrider.tools.tune.space import SPACES
    from outrider.tools.tune.timer import CudaTimer

    device = torch.device(context.device, torch.cuda.current_device())
    name = device_name(device)
    path = context.report.folder / name.file_name
    file = resumed(path, name, TRITON_VERSION)
    model = TunedShape(shape.hidden, shape.inner, shape.heads, shape.kv_heads, shape.head_dim, shape.vocab)
    searcher = Searcher(device, gpu_of(device).arch, CudaTimer(device), has_time=lambda: context.seconds_left > 0)

    def report(found: Found | None) -> None:
        if found is None:
            return
        times = found.entry.times.values()
        context.row(
            f"{found.job.kernel} {found.job.shape}",
            default_microseconds=sum(time.default for time in times),
            tuned_microseconds=sum(time.tuned for time in times),
            config=str(found.entry.config),
        )

    jobs = make_jobs({shape.name: model}, SPACES, WorkSizes())
    _, is_whole = tune(jobs, searcher, file, path, report)
    if not is_whole:
        context.skip("the other shapes", "no time left")
