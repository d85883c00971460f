"""Input of a forward pass: ragged rows of tokens and the slots of their KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..kernels.device_outcome import DeviceTokens
from ..kernels.memory import lazy_zeros
from ..kernels.paged_attention import CACHE_FLOAT8, LayerKV
from ..kernels.rope import Rotation
from ..kernels.staging import to_device
from ..platform.core.batch import RowStates
from ..platform.core.errors import InvalidRequestError
from .attention import ReplayableAttention
from .states.memory import LayerStates, StatePass

if TYPE_CHECKING:
    from .attention import AttentionBackend

__all__ = [
    "DeviceTokens",
    "DraftWeights",
    "ForwardBatch",
    "KVLayerSpec",
    "LayerKV",
    "SequenceRows",
    "allocate_kv",
    "build_batch",
    "kv_dtype",
]


READY_BYTES = 1 << 26
"""Bytes of a CPU's cache that get memory at the start: this takes hundredths of a second, or a tenth if a virtual
machine must get the memory first."""


class AdapterPreparer(Protocol):
    """Function from each row's (adapter handle, number of tokens) to the adapters' inputs of one forward pass, whose
    `replayable` is True if captured passes can read them; None if no row has an adapter."""

    def __call__(self, rows: Sequence[tuple[Any, int]], *, always: bool = False) -> Any:
        """`always`: return inputs that add nothing instead of None, if captured passes may read any."""


class DraftWeights(NamedTuple):
    """Handle of tokens that stand for drafts in a pass of the target that drafts for itself: in place of the adapter,
    its draft weights apply, or the base model's if it has none."""

    adapter: Any
    """The request's adapter; None: the base model."""


class KVLayerSpec(NamedTuple):
    """Cache of one layer for a token: a key and, if they are not `shared`, a value of `head_dim` for each KV head."""

    num_kv_heads: int
    head_dim: int
    is_attention: bool = True
    """True when attention reads it; other contents of a layer of the cache are never rounded to fewer bits."""
    shared: bool = False
    """True: keys are the values too."""

    @property
    def num_elements(self) -> int:
        """Elements for each token, keys and values together."""
        return (1 if self.shared else 2) * self.num_kv_heads * self.head_dim


class Rope(Protocol):
    """Angles of positions: `layers.rope.RotaryEmbedding`, or none."""

    @property
    def short_context(self) -> int | None:
        """See `RopeConfig.short_context`."""
        ...

    def rotations(
        self, positions: Tensor, end: int, in_long_prompt: Tensor | None = None, *, gathers: bool = True
    ) -> tuple[Rotation, ...]:
        """See `RotaryEmbedding.rotations`."""
        ...


class PagedModel(Protocol):
    """Model for which a batch is built: a decoder, or a head with layers of its own."""

    @property
    def device(self) -> torch.device:
        """Device on which it runs."""
        ...

    @property
    def rope(self) -> Rope:
        """Rotary embedding of its layers."""
        ...

    @property
    def attention(self) -> AttentionBackend:
        """Attention backend of its layers."""
        ...


@dataclass(slots=True)
class SequenceRows:
    """B ragged rows of one forward pass, on the host. Row b computes positions [start, start + query_len)."""

    token_ids: list[int]
    """[T], row after row."""
    query_lens: list[int]
    """[B], each at least 1."""
    starts: list[int]
    """[B], the first position of each row; the KV of all earlier positions is in the cache."""
    block_tables: Sequence[Sequence[int]]
    """[B], blocks in order, enough for start + query_len positions."""
    first_key: int = 0
    """First position that holds keys, for layers that begin later than the tokens; no query sees earlier ones."""
    device_tokens: Sequence[DeviceTokens] = ()
    """Tokens on the device that replace those of `token_ids` at their indices."""
    overshoot: Tensor | None = None
    """[B] int64 on the device: number of positions by which each row starts before `starts`, which was planned before
    the start was known. None: 0."""
    unused: Tensor | None = None
    """[B] int64 on the device: tokens at each row's end that do not count, so that its last token precedes them;
    for passes with a result for each row's last token. None: 0."""
    states: Sequence[RowStates] = ()
    """[B] states that each row reads and writes; (): the model has none."""
    prompt_lens: Sequence[int] = ()
    """[B] tokens of each row's prompt, for a rotary embedding that turns long prompts otherwise; (): none is long."""

    def long_prompts(self, short_context: int | None) -> list[bool]:
        """[B] True for rows within the short context of a prompt beyond it; empty when there is none."""
        if short_context is None:
            return []
        found = [n > short_context > start for n, start in zip(self.prompt_lens, self.starts, strict=False)]
        return found if any(found) else []

    def settled(self) -> SequenceRows:
        """Rows whose starts the host knows. The host waits for them, except on a CPU, which computes in order."""
        if self.overshoot is None:
            return self
        early = self.overshoot.tolist()
        starts = [start - by for start, by in zip(self.starts, early, strict=True)]
        return replace(self, starts=starts, overshoot=None)

    def known_tokens(self, device: torch.device) -> list[int]:
        """Token ids [T]; the host waits for those that are on the device."""
        if not self.device_tokens:
            return self.token_ids
        ids = to_device(np.array(self.token_ids, dtype=np.int64), device)
        for tokens in self.device_tokens:
            tokens.fill(ids)
        return ids.tolist()

    def last_of(self, *states: Tensor) -> Sequence[Tensor]:
        """States [B, H] of each row's last token, for each of `states` [T, H]."""
        if self.unused is None:  # an index takes longer than all else that a short pass asks of the host
            if len(self.token_ids) == len(self.query_lens):
                return states
            if len(self.query_lens) == 1:
                return [of_all[-1:] for of_all in states]
        index = self.last_tokens(states[0].device)
        return [of_all.index_select(0, index) for of_all in states]

    def last_tokens(self, device: torch.device) -> Tensor:
        """Index [B] int64 of each row's last token."""
        last = to_device(np.array([*accumulate(self.query_lens)], dtype=np.int64) - 1, device)
        return last if self.unused is None else last - self.unused


@dataclass(slots=True)
class ForwardBatch:
    """Rows on the device, with all that the layers share. Made by `build_batch`, used for one pass."""

    input_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64"""
    rotations: tuple[Rotation, ...]
    """Angles in the model's dtype, for each of the model's rotations; most models have one."""
    attention: Any
    """Plan of the attention backend."""
    kv: Sequence[LayerKV]
    """Layers of the cache that belong to this model."""
    adapters: Any = None
    """Input of the LoRA sites of linears and embeddings (lora.layers.LoraBatch) for these T tokens; None when no row
    has an adapter."""
    states: StatePass | None = None
    """States of the rows, for layers that have them."""
    layer_inputs: Tensor | None = None
    """[T, L, P] each layer's own input, which a decoder that has such inputs adds to its copy of the batch."""

    def memory_of_states(self) -> Sequence[LayerStates]:
        """Memory of each layer with states.

        Raises:
            InvalidRequestError: the batch was made by a part that keeps no states.
        """
        if self.states is None:
            raise InvalidRequestError("a model with recurrent state is not supported here", param="model")
        return self.states.memory


def kv_dtype(dtype: torch.dtype, kv_cache_dtype: str) -> torch.dtype:
    """Dtype in which the attention of a model of `dtype` keeps KV, for the option's value "auto" or "fp8"."""
    return dtype if kv_cache_dtype == "auto" else CACHE_FLOAT8


def allocate_kv(
    specs: Sequence[KVLayerSpec],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    kv_cache_dtype: str = "auto",
) -> list[LayerKV]:
    """Cache of `num_blocks` zeroed blocks for each layer; zeros because attention reads slots that were never written.

    `dtype` is the model's; for `kv_cache_dtype` see `kv_dtype`.

    On a CPU the first blocks get memory at once, and the others, which may be gigabytes, at their first use.
    """
    layers = []
    for spec in specs:
        shape = (spec.num_kv_heads, num_blocks, block_size, spec.head_dim)
        kept = kv_dtype(dtype, kv_cache_dtype) if spec.is_attention else dtype
        keys = lazy_zeros(shape, kept, device)
        layers.append(LayerKV(keys, keys if spec.shared else lazy_zeros(shape, kept, device)))
    if torch.device(device).type == "cpu":
        num_bytes = sum(part.nbytes for layer in layers for part in layer)
        num_ready = min(num_blocks, num_blocks * READY_BYTES // max(num_bytes, 1))
        for layer in layers:
            for part in layer:
                part[:, :num_ready].zero_()
    return layers


@torch.inference_mode()
def build_batch(
    rows: SequenceRows,
    model: PagedModel,
    kv: Sequence[LayerKV],
    adapters: Any = None,
    states: Sequence[LayerStates] = (),
) -> ForwardBatch:
    """Put `rows` on the model's device and plan their attention over `kv`, the model's layers of the cache. `states`:
    memory of its layers with a recurrent state."""
    if rows.overshoot is not None and (states or not isinstance(model.attention, ReplayableAttention)):
        rows = rows.settled()
    # Few calls of numpy and torch are made: between two steps, with cold caches, each takes microseconds. Lists are
    # slower only for many rows, or for prompts, whose step takes far longer still.
    places: list[int] = []
    end = 0
    for start, count in zip(rows.starts, rows.query_lens, strict=True):
        places += range(start, start + count)
        end = max(end, start + count)
    positions = np.array(places, dtype=np.int64)
    on_device = to_device(positions, model.device)
    attention = model.attention.plan(rows, positions, kv[0].k.shape[2]) if kv else None
    if attention is not None and rows.overshoot is not None:
        attention.settle(rows.overshoot, on_device)
    long_prompts = rows.long_prompts(model.rope.short_context)
    in_long = to_device(np.repeat(long_prompts, rows.query_lens), model.device) if long_prompts else None
    rotations = model.rope.rotations(on_device, end, in_long, gathers=not model.attention.looks_up_angles)
    input_ids = to_device(np.array(rows.token_ids, dtype=np.int64), model.device)
    for tokens in rows.device_tokens:
        tokens.fill(input_ids)
    return ForwardBatch(
        input_ids=input_ids,
        positions=on_device,
        rotations=rotations,
        attention=attention,
        kv=kv,
        states=StatePass(rows, states) if states else None,
        adapters=adapters,
    )
