"""The training loop: the same result whether it ran through or was interrupted and resumed."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from ...platform.core.errors import InvalidRequestError
from .acceptance import Measured, measure
from .data import Batch, Sample, collate, plan_epoch
from .drafter import Drafter
from .options import TrainOptions
from .store import write_torch
from .target import Target

CHECKPOINT = Path("checkpoint") / "state.pt"
LOG = "training_log.jsonl"


class Interrupt:
    """While open, the first Ctrl-C only sets `wanted`, so that a step is finished; a second one interrupts at once."""

    def __init__(self) -> None:
        self.wanted = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True


def rate_factor(step: int, steps: int, warmup: int) -> float:
    """What learning rates are multiplied with at a step: a linear rise, then a linear fall to zero."""
    warmup = min(warmup, steps // 2)
    return min((step + 1) / (warmup + 1), (steps - step) / (steps - warmup))


def make_optimizers(drafter: Drafter, options: TrainOptions) -> list[torch.optim.Optimizer]:
    """AdamW for what is trained, or Muon for the matrices of layers and AdamW for the rest."""
    matrices = drafter.matrices() if options.optimizer == "muon" else []
    chosen = {id(p) for p in matrices}
    rest = [p for p in drafter.parameters() if p.requires_grad and id(p) not in chosen]
    result: list[torch.optim.Optimizer] = []
    if rest:
        result.append(torch.optim.AdamW(rest, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0))
    if matrices:
        result.append(torch.optim.Muon(matrices, lr=options.matrix_lr, momentum=0.95, weight_decay=0.0))
    return result


class Trainer:
    """Trains a drafter on samples, and keeps checkpoint and log in a folder."""

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        samples: Sequence[Sample],
        held_out: Sequence[Sample],
        options: TrainOptions,
        device: torch.device,
    ) -> None:
        self._drafter, self._target, self._options, self._device = drafter, target, options, device
        self._samples, self._held_out = samples, held_out
        self._folder = Path(options.output)
        self._optimizers = make_optimizers(drafter, options)
        self._rates = [optimizer.param_groups[0]["lr"] for optimizer in self._optimizers]
        self.steps = options.steps or sum(
            len(plan_epoch(samples, options.batch_tokens, options.seed, epoch)) for epoch in range(options.epochs)
        )

    def run(self, report: Callable[[str], None] = lambda line: None) -> Measured:
        """Train to the end; `report` gets a line for each measurement. Returns the last one.

        Raises:
            KeyboardInterrupt: Ctrl-C; the checkpoint has been written.
        """
        options = self._options
        first = self._load() if options.resume else 0
        self._drafter.train()
        with (
            Interrupt() as interrupt,
            tqdm(
                total=self.steps, initial=first, desc=options.method, unit="step", disable=not options.progress
            ) as bar,
        ):
            measured = self._measure(first, None, report) if first == 0 else None
            batches = self._batches(first)
            recent: list[float] = []
            for step in range(first, self.steps):
                recent = [*recent[-49:], self._step(step, next(batches))]
                done = step + 1
                if done % options.eval_every == 0 or done == self.steps:
                    measured = self._measure(done, sum(recent) / len(recent), report)
                shown = f", acceptance {measured.acceptance_length:.2f}" if measured else ""
                bar.set_postfix_str(f"loss {sum(recent) / len(recent):.4f}{shown}", refresh=False)
                bar.update()
                if interrupt.wanted or done % options.save_every == 0 or done == self.steps:
                    self._save(done)
                if interrupt.wanted and done < self.steps:
                    raise KeyboardInterrupt
        # A run that had ended before: there is nothing left to train, and the log is complete.
        return measured if measured is not None else self._measure(self.steps, None, report, log=False)

    def _batches(self, first: int) -> Iterator[Batch]:
        """Batches from step `first` on."""
        skipped = 0
        for epoch in count():
            plan = plan_epoch(self._samples, self._options.batch_tokens, self._options.seed, epoch)
            for indices in plan:
                skipped += 1
                if skipped > first:
                    yield collate([self._samples[i] for i in indices], self._device, self._options.prompt_weight)

    def _step(self, step: int, batch: Batch) -> float:
        factor = rate_factor(step, self.steps, self._options.warmup)
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
        with self._precision():
            loss = self._drafter.loss(self._target.features(batch))
        if not bool(torch.isfinite(loss)):
            raise InvalidRequestError(f"the loss is not finite at step {step + 1}; a lower --lr may help", param="lr")
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in self._drafter.parameters() if p.requires_grad], self._options.clip)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def _precision(self) -> torch.autocast:
        """Products in bfloat16 where that is asked for."""
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._options.dtype == "bfloat16")

    def _measure(self, step: int, loss: float | None, report: Callable[[str], None], *, log: bool = True) -> Measured:
        options = self._options
        plan = plan_epoch(self._held_out, options.batch_tokens, 0, 0)
        batches = (collate([self._held_out[i] for i in indices], self._device) for indices in plan)
        rng = torch.get_rng_state()
        with self._precision():
            measured = measure(self._drafter, self._target, batches, options.k)
        torch.set_rng_state(rng)
        if log:
            self._log(step, loss, measured)
        report(
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
            "weights": self._drafter.state(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "rng": torch.get_rng_state(),
            "device_rng": torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None,
        }
        path = self._folder / CHECKPOINT
        path.parent.mkdir(exist_ok=True)
        write_torch(path, state)

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
            aside = path.with_name(path.name + ".new")
            aside.write_text("".join(line + "\n" for line in lines if _step_of(line) <= step), encoding="utf-8")
            os.replace(aside, path)


def _step_of(line: str) -> float:
    """The step of a line of the log; infinity for one that was half written when the process ended."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return math.inf
