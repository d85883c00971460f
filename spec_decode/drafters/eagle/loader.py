"""Loading of EAGLE heads: the functions that the registry of drafters names."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ....models.checkpoint.json_files import read_json
from ....models.checkpoint.paths import resolve_model_path
from ....models.quantization import unpack
from ....platform.core.speculative_config import SpeculativeConfig
from ..autoregressive import token_drafter_options, warn_of_short_reach
from ..checkpoint import PARAM, fill, fill_randomly, quantise
from ..factory import DrafterContext
from .config import EagleConfig, eagle_kv_bytes_per_token, head_tensors, read_eagle_config, with_tensors
from .drafter import EagleDrafter
from .head import EagleHead
from .parallel import ParallelEagleDrafter

if TYPE_CHECKING:
    from ....models.model import ModelConfig


def load(config: SpeculativeConfig, context: DrafterContext) -> EagleDrafter:
    """Load `config.model` as an EAGLE head of the method that it names ("eagle" or "eagle3").

    Raises:
        InvalidRequestError: it does not fit the target, or is no such head; with both figures.
        NotFoundError, UnsupportedModelError: as for any model.
    """
    path = _path(config)
    head_config = read_eagle_config(read_json(path / "config.json"), config.method, context.target.config)
    form = head_config.layer.quantization
    if context.load_format == "dummy":
        head = EagleHead(_for_random_weights(head_config), context.target, context.device)
        quantise(head.quantizable(), config, context, None if form is None else form.method)
        slots = head.weight_slots()
        if "d2t" in slots:
            slots.pop("d2t").load(torch.zeros(head_config.draft_vocab_size, dtype=torch.int64))
        fill_randomly(slots, context.seed)
    else:
        stored = head_tensors(path)
        if form is not None:
            stored = unpack(stored, form, lambda _: True, PARAM)
        head = EagleHead(with_tensors(head_config, stored.keys()), context.target, context.device)
        quantise(head.quantizable(), config, context, None if form is None else form.method)
        fill(path, head.weight_slots(), stored)
    warn_of_short_reach(config.model, head_config.layer.max_position_embeddings, context.max_model_len)
    drafter = ParallelEagleDrafter if head_config.drafts_in_parallel else EagleDrafter
    return drafter(head, **token_drafter_options(config, context))


def check(config: SpeculativeConfig, target: ModelConfig, model_path: Path) -> None:
    """Refuse a head that does not fit the target, from its config.json alone."""
    read_eagle_config(read_json(_path(config) / "config.json"), config.method, target)


def kv_bytes_per_token(config: SpeculativeConfig, dtype: str, kv_cache_dtype: str) -> int:
    """Bytes a token of the head's KV and of the hidden states that it keeps; see `draft_kv_bytes_per_token`."""
    return eagle_kv_bytes_per_token(_path(config), dtype, kv_cache_dtype)


def _path(config: SpeculativeConfig) -> Path:
    return resolve_model_path(config.model or "", draft=True, revision=config.revision, cache_dir=config.download_dir)


def _for_random_weights(config: EagleConfig) -> EagleConfig:
    """`config` with embedding and head of its own if the target's do not fit."""
    smaller = config.draft_vocab_size != config.layer.vocab_size
    other = config.layer.hidden_size != config.target_hidden_size
    return dataclasses.replace(config, own_embedding=other, own_head=other or smaller, own_vocabulary=smaller)
