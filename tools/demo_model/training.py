"""The training loop that every stage shares, and the base and draft models."""

import json
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from .batches import Batch, Encoded, draw_batch
from .config import BOS, END, MAX_POSITION, PAD, SPECIAL_TOKENS, VOCAB_SIZE, ModelShape, Schedule
from .documents import Document

log = logging.getLogger(__name__)

LossFunction = Callable[[Batch], Tensor]
"""Returns the mean weighted loss of a batch."""


def new_model(shape: ModelShape, seed: int) -> LlamaForCausalLM:
    """Return a freshly initialised Llama of the given shape."""
    torch.manual_seed(seed)
    pad, bos, end = (SPECIAL_TOKENS.index(token) for token in (PAD, BOS, END))
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        pad_token_id=pad,
        bos_token_id=bos,
        eos_token_id=end,
        use_cache=True,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=end, pad_token_id=pad)
    return model


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def batch_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits that predict tokens 1.. of each row, in float32: ``[rows, length - 1, vocab]``."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return logits.float()


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the weighted cross entropy of the batch."""
    logits = batch_logits(model, batch.ids)
    losses = F.cross_entropy(logits.flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
    weights = batch.weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


def distillation_loss(student: nn.Module, teacher: nn.Module, batch: Batch) -> Tensor:
    """Return the weighted cross entropy of the student against the teacher's distribution."""
    with torch.no_grad():
        target = batch_logits(teacher, batch.ids).softmax(-1)
    logits = batch_logits(student, batch.ids)
    losses = -(target * logits.log_softmax(-1)).sum(-1).flatten()
    weights = batch.weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


def optimizers(model: nn.Module, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Return AdamW for every trainable parameter, or Muon for the layers' matrices where it has a rate."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in named if schedule.matrix_rate and p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in matrices}
    others = [p for _, p in named if id(p) not in chosen]
    result: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=schedule.other_rate, betas=(0.9, 0.98), weight_decay=0.0)
    ]
    if matrices:
        result.append(torch.optim.Muon(matrices, lr=schedule.matrix_rate, momentum=0.95, weight_decay=0.02))
    return result


def rate_factor(step: int, schedule: Schedule) -> float:
    """Return what the learning rates are multiplied with at a step: a linear rise, then a linear fall to zero."""
    rise = (step + 1) / schedule.warmup
    fall = (schedule.steps - step) / max(1, schedule.steps - schedule.warmup)
    return min(1.0, rise, fall)


def step_batch(
    draw_document: Callable[[Random], Document],
    encode: Callable[[Document], Encoded],
    schedule: Schedule,
    seed: int,
    step: int,
) -> Batch:
    """Return the batch of a step; it depends on the seed and the step alone, so that training can resume anywhere."""
    rows, length = schedule.rows, schedule.length
    if step >= schedule.steps - schedule.long_steps and step % 2:
        tokens = rows * length
        length = schedule.long_lengths[step // 2 % len(schedule.long_lengths)]
        rows = max(1, tokens // length)
    return draw_batch(Random(seed * 1_000_003 + step), draw_document, encode, rows, length)


class Trainer:
    """Runner of a schedule. It keeps its state in ``folder`` and continues from it after an interruption."""

    def __init__(self, model: nn.Module, schedule: Schedule, folder: Path) -> None:
        self.model = model
        self.schedule = schedule
        self._optimizers = optimizers(model, schedule)
        self._rates = [optimizer.param_groups[0]["lr"] for optimizer in self._optimizers]
        self._state = folder / "state.pt"
        self._log = folder / "loss.jsonl"
        folder.mkdir(parents=True, exist_ok=True)

    def run(
        self, batch_of: Callable[[int], Batch], loss_of: LossFunction, export: Callable[[], None], every: int = 100
    ) -> float:
        """Train to the end and call ``export`` every ``every`` steps. Returns the mean loss of the last 50 steps."""
        first = self._resume()
        losses: list[float] = []
        started, tokens = time.monotonic(), 0
        for step in range(first, self.schedule.steps):
            batch = batch_of(step)
            losses.append(self._step(step, loss_of, batch))
            tokens += batch.ids.numel()
            if (step + 1) % 50 == 0 or step + 1 == self.schedule.steps:
                self._report(step + 1, losses[-50:], tokens / (time.monotonic() - started))
            if (step + 1) % every == 0 or step + 1 == self.schedule.steps:
                self._save(step + 1)
                export()
        return last_loss(self._log.parent)

    def _step(self, step: int, loss_of: LossFunction, batch: Batch) -> float:
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * rate_factor(step, self.schedule)
        loss = loss_of(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(_trainable(self.model), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def _report(self, step: int, losses: list[float], speed: float) -> None:
        mean = sum(losses) / len(losses)
        log.info("step %d of %d: loss %.4f, %d tokens/s", step, self.schedule.steps, mean, speed)
        with self._log.open("a") as file:
            file.write(json.dumps({"step": step, "loss": round(mean, 4), "tokens_per_s": round(speed)}) + "\n")

    def _save(self, step: int) -> None:
        trained = {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}
        state = {"step": step, "model": trained, "optimizers": [o.state_dict() for o in self._optimizers]}
        torch.save(state, self._state.with_suffix(".new"))
        self._state.with_suffix(".new").replace(self._state)

    def _resume(self) -> int:
        if not self._state.exists():
            self._log.unlink(missing_ok=True)
            return 0
        state = torch.load(self._state, weights_only=True)
        self.model.load_state_dict(state["model"], strict=False)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        log.info("going on from step %d", state["step"])
        return state["step"]


def _trainable(model: nn.Module) -> Iterable[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def last_loss(folder: Path) -> float:
    """Return the last loss that a stage wrote into its folder."""
    return json.loads((folder / "loss.jsonl").read_text().splitlines()[-1])["loss"]


def export_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write a bfloat16 copy of the model in the Hugging Face format."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    nn.Module.to(copy, torch.bfloat16)
    copy.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
