"""Heads for multi-token prediction as drafters. They pair tokens and hidden states as EAGLE heads do, and are run by
the same `EagleDrafter`.

The first head of the checkpoint makes all drafts, one after the other: each reads the head's own output of the one
before. Public checkpoints have one head (MiMo-V2 and Step-3.5 have three); vLLM too runs the first one again.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ....models.checkpoint.loader import use_renamed
from ....models.checkpoint.paths import resolve_model_path
from ....models.config import DTYPES
from ....platform.core.errors import NotFoundError
from ....platform.core.speculative_config import SpeculativeConfig
from ..autoregressive import token_drafter_options
from ..checkpoint import fill, fill_randomly, quantise
from ..eagle.drafter import EagleDrafter
from ..factory import DrafterContext
from .config import head_tensors, mtp_kv_bytes_per_token, read_mtp_config, with_tensors
from .head import MtpHead

if TYPE_CHECKING:
    from ....models.model import ModelConfig


def load(config: SpeculativeConfig, context: DrafterContext) -> EagleDrafter:
    """Load the first head of `config.model`, which is the target's folder unless the user names another.

    Raises:
        InvalidRequestError: there is no head, or it does not fit the target; the message names what is missing.
        NotFoundError, UnsupportedModelError: as for any model.
    """
    path = _path(config)
    head_config = read_mtp_config(path, DTYPES[context.dtype], context.target.config)
    form = head_config.layer.quantization
    stored = {} if context.load_format == "dummy" else head_tensors(path, head_config)
    head = MtpHead(with_tensors(head_config, stored) if stored else head_config, context.target, context.device)
    quantise(head.linears(), config, context, None if form is None else form.method)
    slots = head.weight_slots()
    if stored:
        use_renamed(slots, stored, head.renamed_slots())
        fill(path, slots, stored)
    else:
        fill_randomly(slots, context.seed)
    return EagleDrafter(head, **token_drafter_options(config, context))


def check(config: SpeculativeConfig, target: ModelConfig, model_path: Path) -> None:
    """Refuse a checkpoint without a head, from its config.json and the names of its tensors, if it has any."""
    path = _path(config)
    head_config = read_mtp_config(path, target.dtype, target)
    try:
        head_tensors(path, head_config)
    except NotFoundError:
        return  # random weights need no files; else `load` raises it


def kv_bytes_per_token(config: SpeculativeConfig, dtype: str, kv_cache_dtype: str) -> int:
    """Bytes a token of the head's KV and of the hidden states that it keeps; see `draft_kv_bytes_per_token`."""
    return mtp_kv_bytes_per_token(_path(config), dtype, kv_cache_dtype)


def _path(config: SpeculativeConfig) -> Path:
    return resolve_model_path(config.model or "", revision=config.revision, cache_dir=config.download_dir)
