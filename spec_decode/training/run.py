"""One training run, from options and samples to the files in the output folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ...platform.core.progress import EVERY, Progress
from .build import new_drafter, read_head
from .data import Sample
from .measurement import Measured
from .methods.base import TrainedDrafter
from .options import BLOCK_HEADS, TrainOptions, wrong
from .outlook import outlook
from .products import product_dtype
from .run_folder import has_ended
from .target import Target, load_target
from .trainer import Trainer, checkpoint_products, last_measurement, remove_checkpoint

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NUM_AUX = 3


def choose_device(name: str) -> torch.device:
    """The device for "auto", "cpu" or "cuda".

    Raises:
        InvalidRequestError: there is no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise wrong("device", "cuda: there is no GPU that torch can use")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


class Loaded(NamedTuple):
    """Drafter and data of a run."""

    target: Target
    drafter: TrainedDrafter
    device: torch.device
    products: torch.dtype
    """Dtype of matrix products."""


def load(options: TrainOptions, samples: Sequence[Sample] = ()) -> Loaded:
    """Everything before the first step: mismatches are found here.

    Args:
        samples: the head's vocabulary is chosen from them; without any it is an arbitrary one.

    Raises:
        OutriderError: a typed error for a mismatch.
    """
    device, dtype = choose_device(options.device), _DTYPES[options.dtype]
    products = checkpoint_products(Path(options.output)) if options.resume else None
    products = products or product_dtype(dtype, device)
    target = _target(options, device)
    if products != dtype:
        target.compute_in_float32()
    return Loaded(target, new_drafter(options, target, samples).to(device), device, products)


def train_draft(
    options: TrainOptions,
    samples: Sequence[Sample],
    held_out: Sequence[Sample],
    report: Callable[[str], None] = lambda line: None,
    begin: Callable[[], None] = lambda: None,
) -> Measured:
    """Train, and write the results into `options.output`, a folder that exists once `begin` has been called.

    Args:
        begin: called when everything has been loaded, before anything is written.

    Raises:
        OutriderError: a typed error for a mismatch.
        KeyboardInterrupt: Ctrl-C; `options.resume` continues from the checkpoint. SystemExit: SIGTERM, likewise.
    """
    folder = Path(options.output)
    if options.resume and has_ended(folder):
        report(f"the run in {folder} has ended")
        return last_measurement(folder)
    with Progress(report, None if options.progress else EVERY) as progress:
        progress.doing(lambda: f"loading {options.model}")
        loaded = load(options, samples)
        drafter = loaded.drafter
        trainer = Trainer(drafter, loaded.target, samples, held_out, options, loaded.device, loaded.products)
        begin()
        for line in outlook(options, drafter, samples, held_out, trainer.steps, trainer.batches_per_epoch):
            progress.say(line)
        measured = trainer.run(progress)
        drafter.export(folder)
        remove_checkpoint(folder)
    return measured


def _target(options: TrainOptions, device: torch.device) -> Target:
    layers: tuple[int, ...] | None = ()
    if options.draft is not None:
        head = read_head(options)
        layers = () if head is None else head.config.aux_layers
    elif options.method == "eagle3" or options.method in BLOCK_HEADS:
        layers = options.aux_layers
        if layers is not None and len(layers) != _NUM_AUX and options.method == "eagle3":
            raise wrong("aux_layers", f"must name {_NUM_AUX} layers, got {len(layers)}")
    return load_target(options.model, options.adapter, _DTYPES[options.dtype], device, layers)
