"""UNO (arXiv 2609.04010): the target drafts for itself, through a LoRA that was trained to read noise.

    position   0 ... n-1            n       n+1    n+2        a block of 3 tokens makes 3 drafts
    token      KV of the target's   tn      noise  noise      uniformly random token ids
    weights    step                 own     draft  draft      of the request; of the adapter's drafts, else the base's
    predicts                        d0      d1     d2

The block is one more pass of the target before the one that verifies, with its causal attention. Each token sees what
is before it, so tn and the context are read as the target reads them, and d0 is the target's own next token. The
verification overwrites the KV of the block. Nothing but the LoRA takes memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from ...models.batch import DraftWeights, ForwardBatch, SequenceRows
from ...models.checkpoint.paths import resolve_model_path
from ...platform.core.speculative_config import SpeculativeConfig
from ..verify.draft_sampling import Drafting
from .autoregressive import TokenDrafterOptions, token_drafter_options
from .base import DrafterNeeds, DraftRow, Proposal, TargetOutput
from .block import BlockDrafter
from .checkpoint import refuse
from .factory import DrafterContext

if TYPE_CHECKING:
    from ...kernels.device_outcome import DeviceOutcome
    from ...models.model import LanguageModel, ModelConfig

_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Constants of SplitMix64 (Steele et al. 2014)."""
_WORD = (1 << 64) - 1
LOWEST = 1
"""Lowest token of the noise, as in the authors' code."""


def load(config: SpeculativeConfig, context: DrafterContext) -> UnoDrafter:
    """A drafter that runs the target. The engine reads the LoRA, as it reads adapters'.

    Raises:
        InvalidRequestError: the target has layers with recurrent state.
    """
    if context.target.state_layers:
        raise refuse("uno is not served with layers of recurrent state, which noise would change")
    stop = config.uno_mask_token_id or context.target.config.vocab_size
    return UnoDrafter(context.target, draft_folder(config), stop, **token_drafter_options(config, context))


def check(config: SpeculativeConfig, target: ModelConfig, model_path: Path) -> None:
    """Refuse a folder without a LoRA, and noise beyond the target's vocabulary."""
    draft_folder(config)
    noise = config.uno_mask_token_id
    if noise is not None and noise > target.vocab_size:
        raise refuse(f"uno_mask_token_id is {noise}, the target's vocabulary has {target.vocab_size} tokens")


def draft_folder(config: SpeculativeConfig) -> Path:
    """The PEFT folder of the base model's draft weights: `model`, or the folder "adapter" in it, as in the authors'
    repositories.

    Raises:
        NotFoundError: there is no such folder or repository.
        InvalidRequestError: it holds no PEFT adapter.
    """
    path = resolve_model_path(config.model or "", draft=True, revision=config.revision, cache_dir=config.download_dir)
    for folder in (path, path / "adapter"):
        if (folder / "adapter_config.json").is_file():
            return folder
    raise refuse(f"{config.model} is no draft LoRA: it has no adapter_config.json, nor has its folder adapter")


def noise_token(position: int, stop: int) -> int:
    """Token in [LOWEST, stop) that stands for a draft at `position`: SplitMix64 of the position."""
    word = (position + 1) * _MIX[0] & _WORD
    word = (word ^ word >> 30) * _MIX[1] & _WORD
    word = (word ^ word >> 27) * _MIX[2] & _WORD
    return LOWEST + (word ^ word >> 31) % (stop - LOWEST)


class UnoDrafter(BlockDrafter):
    """Drafts by passes of the target."""

    def __init__(self, target: LanguageModel, folder: Path, stop: int, **options: Unpack[TokenDrafterOptions]) -> None:
        """`target` is only run. `folder`: the base model's draft weights. `stop`: noise is drawn below it."""
        super().__init__(target, target.config.vocab_size, 0, **options)
        self._target, self._folder, self._stop = target, folder, stop

    @property
    def needs(self) -> DrafterNeeds:
        """The target's layers, and draft weights for its projections."""
        return DrafterNeeds(target_draft=self._folder, drafts_on_device=True)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """Draft for the rows with `max_drafts` in one pass of the target."""
        return super().propose(rows, target)

    def _stand_ins(self, start: int, count: int) -> list[int]:
        return [noise_token(position, self._stop) for position in range(start, start + count)]

    def _handles(self, row: DraftRow, count: int) -> list[tuple[Any, int]]:
        own = row.request.handles(len(row.tokens) - 1, 1)
        return own if count == 1 else [*own, (DraftWeights(row.request.adapter), count - 1)]

    def _rows(self, drafting: Sequence[Drafting], outcome: DeviceOutcome | None) -> SequenceRows:
        rows = super()._rows(drafting, outcome)
        return dataclasses.replace(rows, prompt_lens=[s.row.request.num_prompt_tokens for s in drafting])

    def _forward(self, batch: ForwardBatch) -> Tensor:
        return self._target.forward(batch).hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._target.compute_logits(hidden)
