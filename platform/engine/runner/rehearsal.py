"""Steps with the shapes of typical requests, before the first request: on a GPU a kernel is compiled at its first
launch, which that step waits for."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from ....lora.manager import AdapterManager
from ....models.layers.linear import Linear
from ....models.model import LanguageModel
from ....spec_decode.control.factory import Speculation
from ...core.config import EngineConfig
from ...core.lora_request import LoRARequest
from ...core.request import Request
from ..features import NoAdapters
from ..queue.scheduler import Scheduler
from .model_runner import ModelRunner
from .warm_up import PROMPT, dummy, rehearse, run_through, warm_up

LENGTHS = (40, 160, 1100)
"""Tokens of prompts: more than the smallest tile of quantised products has, more than their second one and the
attention's tile of short rows have, and more than steps with small tiles of adapters have."""
_ROOM = 64
"""Tokens that a dummy may get in addition to its prompt, drafts included."""


def rehearse_engine(
    config: EngineConfig,
    scheduler: Scheduler,
    runner: ModelRunner,
    speculation: Speculation,
    adapters: AdapterManager | NoAdapters,
    model: LanguageModel,
) -> None:
    """Warm up before the first request, on a GPU with prompts and adapters too."""
    policy = speculation.policy
    if config.device != "cpu":
        if policy is not None:  # as many drafts as a step may have
            policy.hold(*max((choice for choice in policy.choices if choice[0] == 0), key=lambda choice: choice[1]))
        try:
            rehearse(scheduler, runner)
            rehearse_prompts(scheduler, runner)
            if config.lora is not None and isinstance(adapters, AdapterManager):
                method = "" if config.speculative is None else config.speculative.method
                rehearse_adapter(scheduler, runner, adapters, model, (method, speculation.drafter.needs.linears))
        finally:
            if policy is not None:
                policy.release()
    if policy is not None:
        warm_up(scheduler, runner, policy)


def rehearse_prompts(
    scheduler: Scheduler, runner: ModelRunner, adapters: AdapterManager | None = None, lora: LoRARequest | None = None
) -> None:
    """Long prompts, in steps in which another request decodes. With `lora` both have that adapter."""
    config, pool = scheduler.config, scheduler.pool
    if config.max_num_seqs < 2:
        return
    reserved = PROMPT + _ROOM  # the request that decodes, and this one's own tokens
    room = min(config.max_model_len - _ROOM, (pool.num_free - 4) * scheduler.prefix_cache.block_size - 2 * reserved)

    def add(request: Request) -> None:
        if adapters is not None:
            request.lora = lora
            adapters.resolve(request)
        scheduler.add(request)

    for length in sorted({min(length, room) for length in LENGTHS}):
        if length <= PROMPT:
            continue
        decoding, prompt = dummy("rehearsal decodes", 0), dummy("rehearsal of a prompt", 1, length=length)
        run_through(scheduler, runner, [decoding], [prompt], add)


def rehearse_adapter(
    scheduler: Scheduler,
    runner: ModelRunner,
    adapters: AdapterManager,
    model: LanguageModel,
    draft: tuple[str, Sequence[Linear]],
) -> None:
    """Rehearse with an adapter on every module of the model and of the drafter, which is then removed.

    Args:
        draft: the method of drafting, and the drafter's projections.
    """
    with tempfile.TemporaryDirectory(prefix="outrider-rehearsal-") as folder:
        lora = write_adapter(Path(folder), model, draft)
        adapters.catalog.load(lora, pinned=True)
        try:
            rehearse_prompts(scheduler, runner, adapters, lora)
        finally:
            adapters.catalog.unload(lora.lora_name, "abort")
            adapters.catalog.stats()  # its load is not reported


def write_adapter(folder: Path, model: LanguageModel, draft: tuple[str, Sequence[Linear]]) -> LoRARequest:
    """A PEFT adapter of zeros, of rank 1, for every module except experts."""
    method, draft_linears = draft
    tensors = _tensors([linear for linear in model.linears() if not linear.expert])
    vocab, hidden = model.config.vocab_size, model.config.embedding_size
    tensors |= _pair(model.embedding.names.table, vocab, hidden, "lora_embedding_A", "lora_embedding_B")
    if not model.config.tie_word_embeddings:
        tensors |= _pair("lm_head", hidden, vocab)
    _write(folder, tensors)
    if draft_linears:
        _write(folder / "draft" / method, _tensors(draft_linears))
    return LoRARequest("outrider rehearsal", path=folder)


def _tensors(linears: Sequence[Linear]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for linear in linears:
        whole = linear if linear.part is None else linear.part
        for name, size in whole.slices:
            found |= _pair(name, whole.in_features, size)
    return found


def _pair(
    name: str, inputs: int, outputs: int, a: str = "lora_A.weight", b: str = "lora_B.weight"
) -> dict[str, torch.Tensor]:
    prefix = f"base_model.model.{name}"
    return {f"{prefix}.{a}": torch.zeros(1, inputs), f"{prefix}.{b}": torch.zeros(outputs, 1)}


def _write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in tensors})
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
