"""The training loop: an interrupted and resumed run has the same result as an uninterrupted one."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from ...platform.core.errors import InvalidRequestError
from ...platform.core.interrupt import Interrupt
from ...platform.core.progress import Progress
from .data import Sample, plan_batches, plan_epoch
from .features import FeatureCache
from .measurement import Measured, measure
from .methods.base import TrainedDrafter
from .options import TrainOptions
from .output_files import aside
from .speed import Speed
from .target import Target

CHECKPOINT = Path("checkpoint") / "state.pt"
LOG = "training_log.jsonl"
MATRIX_RATE = 0.02
"""Highest learning rate of Muon (Jordan et al. 2024)."""
LARGEST_GRADIENT = 1.0
"""Largest norm of a step's gradient."""
_FIRST_STEPS = 4  # after which it is said how long the run will take


def rate_factor(step: int, steps: int, warmup: int) -> float:
    """Factor of the learning rates at a step: a linear rise, then a linear fall to zero."""
    warmup = min(warmup, steps // 2)
    return min((step + 1) / (warmup + 1), (steps - step) / (steps - warmup))


def make_optimizers(drafter: TrainedDrafter, options: TrainOptions) -> list[torch.optim.Optimizer]:
    """AdamW for all trained tensors, or Muon for the matrices of layers and AdamW for the rest."""
    matrices = drafter.matrices() if options.optimizer == "muon" else []
    chosen = {id(p) for p in matrices}
    rest = [p for p in drafter.parameters() if p.requires_grad and id(p) not in chosen]
    result: list[torch.optim.Optimizer] = []
    if rest:
        result.append(torch.optim.AdamW(rest, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True))
    if matrices:
        result.append(torch.optim.Muon(matrices, lr=MATRIX_RATE, momentum=0.95, weight_decay=0.0))
    return result


class Trainer:
    """Trains a drafter on samples, and keeps checkpoint and log in a folder."""

    def __init__(
        self,
        drafter: TrainedDrafter,
        target: Target,
        samples: Sequence[Sample],
        held_out: Sequence[Sample],
        options: TrainOptions,
        device: torch.device,
        products: torch.dtype,
    ) -> None:
        """`products`: dtype of matrix products."""
        self._drafter, self._options, self._device, self._products = drafter, options, device, products
        self._folder = Path(options.output)
        self._optimizers = make_optimizers(drafter, options)
        self._rates = [optimizer.param_groups[0]["lr"] for optimizer in self._optimizers]
        limit = int(options.feature_cache * 2**30)
        batches = plan_batches(samples, options.batch_tokens, options.seed)
        self._learned = FeatureCache(target, samples, batches, limit, device)
        measured_on = plan_batches(held_out, options.batch_tokens, 0)
        self._held_out = FeatureCache(target, held_out, measured_on, limit // 4, device)
        self.steps = options.steps or options.epochs * len(batches)

    @property
    def batches_per_epoch(self) -> int:
        """Steps that pass over the samples once."""
        return len(self._learned)

    def run(self, progress: Progress) -> Measured:
        """Train to the end; `progress` gets each measurement, and the state of the run. Returns the last measurement.

        Raises:
            KeyboardInterrupt: Ctrl-C; the checkpoint has been written. SystemExit: SIGTERM, likewise.
        """
        options = self._options
        first = self._load() if options.resume else 0
        self._drafter.train()
        speed = Speed(first, self.steps, options.eval_every, options.unroll_every)
        measured = self._measure(first, None, progress, speed) if first == 0 else None  # there is nothing to save yet
        shown = {"desc": options.method, "unit": "step", "disable": not options.progress}
        with Interrupt() as interrupt, tqdm(total=self.steps, initial=first, **shown) as bar:
            progress.doing(speed.describe)
            recent: list[float] = []
            saved = time.monotonic()
            for step, number in zip(range(first, self.steps), self._order(first), strict=False):
                began = time.monotonic()
                recent = [*recent[-49:], self._step(step, number)]
                done = step + 1
                speed.note(done, recent, self._learned.tokens(number), time.monotonic() - began)
                if done == min(first + max(_FIRST_STEPS, options.unroll_every + 1), self.steps):
                    progress.say(speed.describe())
                if done % options.eval_every == 0 or done == self.steps:
                    measured = self._measure(done, sum(recent) / len(recent), progress, speed)
                    progress.doing(speed.describe)
                ending = f", acceptance {measured.acceptance_length:.2f}" if measured else ""
                bar.set_postfix_str(f"loss {sum(recent) / len(recent):.4f}{ending}", refresh=False)
                bar.update()
                due = time.monotonic() - saved > 60 * options.save_minutes
                if due or interrupt.wanted or done == self.steps:
                    self._save(done)
                    saved = time.monotonic()
                if interrupt.wanted and done < self.steps:
                    raise interrupt.error()
            # A run that had ended before: there is nothing left to train, and the log is complete.
            return measured if measured is not None else self._measure(self.steps, None, progress, speed, log=False)

    def _order(self, first: int) -> Iterator[int]:
        """Numbers of the batches from step `first` on."""
        size = len(self._learned)
        for epoch in count(first // size):
            yield from plan_epoch(size, self._options.seed, epoch)[first % size if epoch == first // size else 0 :]

    def _step(self, step: int, number: int) -> float:
        factor = rate_factor(step, self.steps, self._options.warmup)
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
        self._drafter.whole = step % self._options.unroll_every == 0
        with self._precision():
            loss = self._drafter.loss(self._learned[number])
        if not bool(torch.isfinite(loss)):
            raise InvalidRequestError(f"the loss is not finite at step {step + 1}; a lower --lr may help", param="lr")
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in self._drafter.parameters() if p.requires_grad], LARGEST_GRADIENT)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def _precision(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._products == torch.bfloat16)

    def _measure(
        self, step: int, loss: float | None, progress: Progress, speed: Speed, *, log: bool = True
    ) -> Measured:
        options, rng, began = self._options, torch.get_rng_state(), time.monotonic()
        progress.doing(lambda: f"measuring on held-out samples at step {step} of {self.steps}")
        with self._precision():
            measured = measure(self._drafter, (self._held_out[n] for n in range(len(self._held_out))), options.k)
        torch.set_rng_state(rng)
        speed.measured(time.monotonic() - began)
        if log:
            self._log(step, loss, measured)
        progress.say(
            f"step {step}/{self.steps}: held-out loss {measured.loss:.4f}, acceptance length "
            f"{measured.acceptance_length:.3f} of {options.k + 1}, per position "
            + " ".join(f"{share:.2f}" for share in measured.per_position)
        )
        return measured

    def _log(self, step: int, loss: float | None, measured: Measured) -> None:
        line = {
            "step": step,
            "loss": None if loss is None else round(loss, 5),
            "held_out_loss": round(measured.loss, 5),
            "k": self._options.k,
            "acceptance_length": round(measured.acceptance_length, 4),
            "per_position": [round(share, 4) for share in measured.per_position],
        }
        with (self._folder / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _save(self, step: int) -> None:
        state = {
            "step": step,
            "products": self._products,
            "weights": self._drafter.state(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "rng": torch.get_rng_state(),
            "device_rng": torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None,
        }
        path = self._folder / CHECKPOINT
        path.parent.mkdir(exist_ok=True)
        with aside(path) as file:
            torch.save(state, file)

    def _load(self) -> int:
        """Restore the checkpoint and cut the log there; 0 when there is none yet."""
        path = self._folder / CHECKPOINT
        if not path.is_file():
            (self._folder / LOG).unlink(missing_ok=True)
            return 0
        try:
            state = torch.load(path, map_location=self._device, weights_only=True)
            self._drafter.load_state(state["weights"])
            for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            torch.set_rng_state(state["rng"].cpu())
            if state["device_rng"] is not None and self._device.type == "cuda":
                torch.cuda.set_rng_state(state["device_rng"].cpu(), self._device)
            step = int(state["step"])
        except Exception as error:  # a broken pickle fails in many ways
            raise InvalidRequestError(
                f"--resume: {path} is no checkpoint of this run: {error}", param="resume"
            ) from error
        self._cut_log(step)
        return step

    def _cut_log(self, step: int) -> None:
        path = self._folder / LOG
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            with aside(path) as file:
                file.write_text("".join(line + "\n" for line in lines if _parse_step(line) <= step), encoding="utf-8")


def checkpoint_products(folder: Path) -> torch.dtype | None:
    """Dtype of the products of an interrupted run; None if it cannot be read."""
    try:
        return torch.load(folder / CHECKPOINT, "cpu", mmap=True, weights_only=True)["products"]
    except Exception:  # missing or broken: an error names it when all of it is read
        return None


def remove_checkpoint(folder: Path) -> None:
    """Delete the checkpoint of a run whose results have been written: it is several times as large as they are."""
    (folder / CHECKPOINT).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # missing, or not empty
        (folder / CHECKPOINT).parent.rmdir()


def last_measurement(folder: Path) -> Measured:
    """The last measurement in the log of a run that has ended.

    Raises:
        InvalidRequestError: there is none.
    """
    try:
        line = json.loads((folder / LOG).read_text(encoding="utf-8").splitlines()[-1])
        return Measured(line["held_out_loss"], line["acceptance_length"], line["per_position"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        message = f"--resume: the run in {folder} has ended, but its log {LOG} cannot be read: {error}"
        raise InvalidRequestError(message, param="resume") from error


def _parse_step(line: str) -> float:
    """The step of a line of the log; infinity for one that was half written when the process ended."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return math.inf
