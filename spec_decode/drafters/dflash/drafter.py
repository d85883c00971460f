"""DFlash and DSpark as drafters: all drafts of a row from one pass over a block of masks.

    position    0 ... n-1             n    n+1   n+2         block of 3 tokens, of which 2 are masks
    token       the target's context  tn   mask  mask        DFlash: the masks predict drafts; DSpark: tn does, too
    layers' KV  from the target's     from the block's own
                hidden states         hidden states

The KV of the context is written after every step, like hidden states for EAGLE heads, so the drafter never lags. The
KV of the block lies where the next step's context will be, and is overwritten by it.

A block has one mask for each draft that is wanted, as in vLLM, and not always as many as in training. Drafts of DFlash
are independent of each other given the context; those of DSpark are drawn in their order (`markov`).

B rows, T tokens of their blocks, K drafts, V tokens of the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from torch import Tensor

from ....kernels.device_outcome import DeviceOutcome
from ....kernels.staging import to_device
from ....models.batch import AdapterPreparer, ForwardBatch, LayerKV
from ....models.checkpoint.json_files import read_json
from ....models.checkpoint.paths import resolve_model_path
from ....models.quantization import unpack
from ....platform.core.speculative_config import SpeculativeConfig
from ...verify.draft_sampling import Drafting, draw, last_drafts, stays_on_device
from ..autoregressive import TokenDrafterOptions, token_drafter_options, warn_of_short_reach
from ..base import DrafterNeeds, DraftRow, Proposal, TargetOutput
from ..block import BlockDrafter
from ..checkpoint import PARAM, fill, fill_randomly, quantise, read_tensor, refuse
from ..factory import DrafterContext
from ..step_writer import StepWriter
from .config import (
    MASK_EMBEDDING,
    DFlashConfig,
    dflash_kv_bytes_per_token,
    head_tensors,
    read_dflash_config,
    with_tensors,
)
from .head import DFlashHead

if TYPE_CHECKING:
    from ....models.model import ModelConfig


def load(config: SpeculativeConfig, context: DrafterContext) -> DFlashDrafter:
    """Load `config.model` as a drafter of the method that it names ("dflash" or "dspark").

    Raises:
        InvalidRequestError: it does not fit the target, is no such drafter, or its blocks are shorter than the user's
        `num_speculative_tokens`; with both figures.
        NotFoundError, UnsupportedModelError: as for any model.
    """
    path = _path(config)
    head_config = _read_config(config, context.target.config)
    form = head_config.layer.quantization
    stored = {}
    if context.load_format == "dummy":
        head_config = _for_random_weights(head_config)
    else:
        stored = head_tensors(path)
        stored = stored if form is None else unpack(stored, form, lambda _: True, PARAM)
        head_config = with_tensors(head_config, stored.keys())
    head = DFlashHead(head_config, context.target, context.device)
    quantise(head.quantizable(), config, context, None if form is None else form.method)
    slots = head.weight_slots()
    if context.load_format == "dummy":
        if "d2t" in slots:
            slots.pop("d2t").load(torch.zeros(head_config.draft_vocab_size, dtype=torch.int64))
        fill_randomly(slots, context.seed)
    else:
        fill(path, slots, stored)
        if (path / MASK_EMBEDDING).is_file():
            head.load_mask_embedding(read_tensor(path / MASK_EMBEDDING))
    warn_of_short_reach(config.model, head_config.layer.max_position_embeddings, context.max_model_len)
    return DFlashDrafter(head, **token_drafter_options(config, context))


def check(config: SpeculativeConfig, target: ModelConfig, model_path: Path) -> None:
    """Refuse a drafter that does not fit the target, from its config.json alone."""
    _read_config(config, target)


def kv_bytes_per_token(config: SpeculativeConfig, dtype: str, kv_cache_dtype: str) -> int:
    """Bytes a token of the drafter's KV; see `draft_kv_bytes_per_token`."""
    return dflash_kv_bytes_per_token(_path(config), dtype, kv_cache_dtype)


def _path(config: SpeculativeConfig) -> Path:
    return resolve_model_path(config.model or "", draft=True, revision=config.revision, cache_dir=config.download_dir)


def _read_config(config: SpeculativeConfig, target: ModelConfig) -> DFlashConfig:
    found = read_dflash_config(read_json(_path(config) / "config.json"), config.method, target)
    if config.drafts_given and config.num_speculative_tokens > found.max_drafts:
        raise refuse(
            f"num_speculative_tokens is {config.num_speculative_tokens}, but a block of {config.model} makes "
            f"{found.max_drafts} drafts (block_size {found.block_size})"
        )
    return found


def _for_random_weights(config: DFlashConfig) -> DFlashConfig:
    """`config` with embedding and head of its own if the target's do not fit."""
    smaller = config.draft_vocab_size != config.layer.vocab_size
    other = config.layer.hidden_size != config.target_hidden_size
    return dataclasses.replace(config, own_embedding=other, own_head=other or smaller, own_vocabulary=smaller)


class DFlashDrafter(BlockDrafter):
    """Drafts by a `DFlashHead`."""

    def __init__(self, head: DFlashHead, **options: Unpack[TokenDrafterOptions]) -> None:
        """`head` belongs to the drafter."""
        self._head, self._config = head, head.config
        super().__init__(head, head.config.draft_vocab_size, 0 if head.config.sample_from_anchor else 1, **options)
        self._context: StepWriter | None = None

    @property
    def weights(self) -> Sequence[Any]:
        """See `Drafter`."""
        return (self._head,)

    @property
    def needs(self) -> DrafterNeeds:
        """Its layers, the target layers that it reads, and its projections."""
        config = self._config
        return DrafterNeeds(
            kv_layers=config.kv_layers,
            aux_layers=config.aux_layers,
            linears=tuple(self._head.linears()),
            max_drafts=config.max_drafts,
            max_positions=config.layer.max_position_embeddings - 1,
            drafts_on_device=True,
            never_lags=True,
            more_slots=self._first,
        )

    def bind(self, kv: Sequence[LayerKV], prepare_adapters: AdapterPreparer) -> None:
        """Its layers of the engine's cache; all of one block size."""
        super().bind(kv, prepare_adapters)
        self._context = StepWriter(partial(self._head.write_context, kv), self._head.device, adapts=True)
        self._context.bind(self._block_size, prepare_adapters)

    @torch.inference_mode()
    def watch(self, rows: Sequence[DraftRow], target: TargetOutput) -> None:
        """Write the step's context, now or later."""
        assert self._context is not None, "bind comes first"
        step = target.on_device
        self._context.defer(rows, target.aux, None if step is None else step.overshoot)

    @torch.inference_mode()
    def flush(self) -> None:
        """Write the context of earlier steps."""
        if self._context is not None:
            self._context.flush()

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """Write the step's context, and draft for the rows with `max_drafts` in one pass."""
        assert self._context is not None, "bind comes first"
        step = target.on_device
        self._context.write(rows, target.aux, None if step is None else step.overshoot)
        return super().propose(rows, target)

    def _stand_ins(self, start: int, count: int) -> list[int]:
        return [self._config.mask_token_id] * count

    def _forward(self, batch: ForwardBatch) -> Tensor:
        return self._head.forward(batch)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._head.logits(hidden)

    def _draw(
        self, drafting: list[Drafting], outputs: Iterator[tuple[Tensor, Tensor]], outcome: DeviceOutcome | None
    ) -> None:
        """Draw all drafts; those of DSpark with the bias by the token before."""
        markov, vocabulary = self._head.markov, self._head.vocabulary
        overshoot = None if outcome is None else outcome.total
        before: Tensor | None = None if outcome is None else outcome.next_tokens
        state: Tensor | None = None
        for hidden, logits in outputs:
            wanted, confidence = drafting[: len(hidden)], None
            if markov is not None:
                if wanted[0].num_drafts:
                    before = _last_tokens(wanted, hidden)
                elif before is None:
                    before = _tensor([s.row.tokens[-1] for s in drafting], hidden)
                embedded = markov.embed(before[: len(wanted)])
                bias, state = markov.bias(embedded, hidden, None if state is None else state[: len(wanted)])
                logits.add_(bias)
                if wanted[0].row.is_rated and not stays_on_device(hidden):
                    confidence = markov.confidence(embedded, hidden)
            there = None if overshoot is None else overshoot[: len(wanted)]
            draw(wanted, logits, vocabulary, self._edit_logits, overshoot=there, confidence=confidence)


def _last_tokens(drafting: Sequence[Drafting], like: Tensor) -> Tensor:
    """The last draft [B] of each sequence."""
    ids, on_device = last_drafts(drafting)
    found = _tensor([chunk[0] for chunk in ids], like)
    for tokens in on_device:
        tokens.fill(found)
    return found


def _tensor(ids: Sequence[int], like: Tensor) -> Tensor:
    return to_device(np.array(ids, dtype=np.int64), like.device)
