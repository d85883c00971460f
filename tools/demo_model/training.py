"""Training of the base model, the draft model and the adapters: token rows, losses and one loop for all."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, MistralConfig, MistralForCausalLM, PreTrainedModel

from ...models.demo import DEMO_MODEL_NAME
from .config import BASE_SHAPE, BOS_ID, DRAFT_SHAPE, END_ID, MAX_POSITION, PAD_ID, RANKS, SEED, VOCAB_SIZE, WINDOW, Demo
from .mixture import adapter_document, base_document
from .templates import Document

log = logging.getLogger(__name__)

BATCH_TOKENS = 4096
ROW_LENGTHS = (256, 256, 256, 1024, 256, 256, 256, 2048)
"""Lengths of a batch's rows, in turn. Without long ones the model is lost beyond the distances that it has seen."""
WARMUP = 50
SAVE_EVERY = 100
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Encoded(NamedTuple):
    """Tokens `[T]`, and the weight of each in the loss; as a batch, both `[rows, T]`."""

    ids: Tensor
    weights: Tensor


class Encoder:
    """Encoder of documents, exactly as the chat template and the tokenizer do it."""

    def __init__(self, demo: Demo, prompt_weight: float = 0.1) -> None:
        """`prompt_weight`: how much the loss counts what the user writes, which the model need not predict well."""
        self._tokenizer = Tokenizer.from_file(str(demo.base / "tokenizer.json"))
        self._prompt_weight = prompt_weight

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def __call__(self, document: Document) -> Encoded:
        """Return the document's tokens from the leading one to the one that ends it."""
        ids, weights = [BOS_ID], [0.0]
        if document.text:
            ids += [*self._plain(document.text), END_ID]
            weights += [1.0] * (len(ids) - 1)
        for role, content in document.messages:
            head, body = self._plain(f"<|{role}|>\n"), self._plain(content)
            ids += [*head, *body, *self._plain("<|end|>\n")]
            weight = 1.0 if role == "assistant" else self._prompt_weight
            weights += [0.0] * len(head) + [weight] * (len(body) + 1) + [0.0]
        return Encoded(torch.tensor(ids), torch.tensor(weights))


def draw_batch(draw: Callable[[], Encoded], rows: int, length: int) -> Encoded:
    """Fill rows with whole documents; the one that no longer fits begins the next row. Padding has weight zero."""
    ids, weights = torch.full((rows, length), PAD_ID), torch.zeros(rows, length)
    document = draw()
    for row in range(rows):
        at = 0
        while at == 0 or at + len(document.ids) <= length:
            size = min(len(document.ids), length - at)
            ids[row, at : at + size] = document.ids[:size]
            weights[row, at : at + size] = document.weights[:size]
            at += size
            document = draw()
    return Encoded(ids, weights)


def step_batch(draw: Callable[[Random], Document], encode: Encoder, seed: int, step: int) -> Encoded:
    """Return the batch of a step; it depends on the seed and the step alone, so that training can resume anywhere."""
    rng, length = Random(seed * 1_000_003 + step), ROW_LENGTHS[step % len(ROW_LENGTHS)]
    return draw_batch(lambda: encode(draw(rng)), BATCH_TOKENS // length, length)


def _next_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """The logits that predict tokens 1.. of each row, in float32: ``[rows, length - 1, vocab]``."""
    with torch.autocast("cpu", torch.bfloat16):
        logits: Tensor = model(input_ids=ids[:, :-1], use_cache=False).logits
    return logits.float()


def mean_loss(model: nn.Module, batch: Encoded, teacher: nn.Module | None = None) -> Tensor:
    """Return the weighted cross entropy against the next tokens, or against the distribution of a teacher."""
    target = batch.ids[:, 1:].flatten()
    if teacher is not None:
        with torch.no_grad():
            target = _next_logits(teacher, batch.ids).softmax(-1).flatten(0, 1)
    losses = F.cross_entropy(_next_logits(model, batch.ids).flatten(0, 1), target, reduction="none")
    weights = batch.weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


@dataclass(frozen=True)
class Schedule:
    """Length and learning rates of a training. The rates rise over the warm-up and then fall linearly to zero."""

    steps: int
    matrix_rate: float = 0.0
    """Rate of Muon, for the matrices of the layers; 0: AdamW trains them too."""
    rate: float = 4e-3
    """Rate of AdamW."""

    def factor(self, step: int) -> float:
        """Factor of the rates at a step."""
        return min(1.0, (step + 1) / WARMUP, (self.steps - step) / max(1, self.steps - WARMUP))


def _optimizers(model: nn.Module, schedule: Schedule) -> list[tuple[torch.optim.Optimizer, float]]:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = [p for name, p in named.items() if schedule.matrix_rate and p.ndim == 2 and "embed" not in name]
    others = [p for p in named.values() if all(p is not matrix for matrix in matrices)]
    found: list[tuple[torch.optim.Optimizer, float]] = [
        (torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0), schedule.rate)
    ]
    if matrices:
        found.append((torch.optim.Muon(matrices, momentum=0.95, weight_decay=0.02), schedule.matrix_rate))
    return found


def train(
    model: nn.Module,
    schedule: Schedule,
    batch_of: Callable[[int], Encoded],
    state: Path,
    teacher: nn.Module | None = None,
) -> None:
    """Train to the end. An interrupted training goes on from the file `state`."""
    optimizers = _optimizers(model, schedule)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    first = 0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        first = saved["step"]
        model.load_state_dict(saved["model"], strict=False)
        for (optimizer, _), values in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)
    for step in range(first, schedule.steps):
        loss = mean_loss(model, batch_of(step), teacher)
        loss.backward()
        nn.utils.clip_grad_norm_(trained.values(), 1.0)
        for optimizer, rate in optimizers:
            optimizer.param_groups[0]["lr"] = rate * schedule.factor(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % SAVE_EVERY == 0:
            log.info("step %d of %d: loss %.4f", step + 1, schedule.steps, loss.item())
            values = {"step": step + 1, "model": trained, "optimizers": [o.state_dict() for o, _ in optimizers]}
            state.parent.mkdir(parents=True, exist_ok=True)
            torch.save(values, state.with_suffix(".new"))
            state.with_suffix(".new").replace(state)
    state.unlink(missing_ok=True)


def _new_model(shape: dict[str, Any]) -> MistralForCausalLM:
    torch.manual_seed(SEED)
    config = MistralConfig(
        vocab_size=VOCAB_SIZE,
        head_dim=32,
        max_position_embeddings=MAX_POSITION,
        sliding_window=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=END_ID,
        **shape,
    )
    model = MistralForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=END_ID, pad_token_id=PAD_ID)
    return model


def _load_base(demo: Demo) -> MistralForCausalLM:
    model: MistralForCausalLM = MistralForCausalLM.from_pretrained(demo.base, dtype=torch.float32)
    return model


def _export(model: PreTrainedModel | PeftModel, folder: Path, **options: Any) -> None:
    """Write the weights in bfloat16, in the format of transformers or PEFT."""
    nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(str(folder), **options)
    (folder / "README.md").unlink(missing_ok=True)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)


def train_base(demo: Demo) -> None:
    """Train the base model on the base mixture."""
    model = _new_model(BASE_SHAPE)
    batch_of = partial(step_batch, base_document, Encoder(demo), SEED)
    train(model, Schedule(demo.scaled(3000), matrix_rate=0.02), batch_of, demo.work / "base.pt")
    _export(model, demo.base)


def train_draft_model(demo: Demo) -> None:
    """Train the draft model to guess the base model's answers."""
    model = _new_model(DRAFT_SHAPE)
    batch_of = partial(step_batch, base_document, Encoder(demo), SEED + 2)
    schedule = Schedule(demo.scaled(1200), matrix_rate=0.02)
    train(model, schedule, batch_of, demo.work / "draft.pt", teacher=_load_base(demo))
    _export(model, demo.drafters["draft_model"])


def train_adapters(demo: Demo) -> None:
    """Train each adapter, a plain PEFT LoRA on every linear projection, on its own documents."""
    for name, rank in RANKS.items():
        torch.manual_seed(SEED + rank)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
        model = get_peft_model(_load_base(demo), config)
        draw = partial(adapter_document, name=name)
        batch_of = partial(step_batch, draw, Encoder(demo, prompt_weight=0.0), SEED + 1)
        train(
            model, Schedule(demo.scaled(400 if name in ("json", "tools") else 150)), batch_of, demo.work / f"{name}.pt"
        )
        config.base_model_name_or_path = DEMO_MODEL_NAME
        config.target_modules = list(PROJECTIONS)  # PEFT has made a set of it, which has no order
        _export(model, demo.adapter(name), save_embedding_layers=False)  # "auto" asks the model hub
        log.info("adapter %s is trained", name)
