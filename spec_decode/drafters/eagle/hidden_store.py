"""Keeps the target's hidden states for drafters that read them, fused, as an additional layer of the shared block table
(`step_writer`). For one EAGLE-3 head this costs one more product for each token, about 1% of a target with 24 layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....kernels.device_outcome import device_places
from ....models.batch import AdapterPreparer, KVLayerSpec, LayerKV
from ..step_writer import Places, StepWriter

Fuse = Callable[[Sequence[Tensor], Any], Tensor]
"""Function from hidden states [T, H] each, and their tokens' adapters, to the stored vectors [T, width]."""


class HiddenStore(StepWriter):
    """One vector for each position of each sequence."""

    def __init__(self, width: int, fuse: Fuse, device: torch.device, *, adapts: bool) -> None:
        """`width` elements a vector, an even number. `adapts`: adapters have a part in `fuse`."""
        super().__init__(self._put, device, adapts=adapts)
        self._width = width
        self._fuse = fuse
        self._halves: tuple[Tensor, Tensor] | None = None

    @property
    def spec(self) -> KVLayerSpec:
        """Its layer of the cache: half of the vector as a key, half as a value."""
        return KVLayerSpec(1, self._width // 2, is_attention=False)

    def bind_layer(self, kv: LayerKV, prepare_adapters: AdapterPreparer) -> None:
        """Set its layer of the cache."""
        self.bind(kv.k.shape[2], prepare_adapters)
        self._halves = (kv.k.view(-1, self._width // 2), kv.v.view(-1, self._width // 2))

    def _put(self, states: Sequence[Tensor], adapters: Any, places: Places) -> Tensor:
        """Write vectors [T, width]; returns them as written. Elements that are not finite are 0, as in the cache of
        attention: the next request to use the block does not attend to them, but 0 · NaN is NaN."""
        vectors = self._fuse(states, adapters).nan_to_num(0.0, 0.0, 0.0)
        assert self._halves is not None, "bind_layer comes first"
        for half, values in zip(self._halves, vectors.chunk(2, dim=-1), strict=True):
            half.index_copy_(0, places.slots, values)
        return vectors

    def read(self, block_tables: Sequence[Sequence[int]], starts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """[T, width] of B sequences' positions [start, start + count), which the target has computed."""
        assert self._halves is not None, "bind_layer comes first"
        self.flush()
        slots, _ = device_places(block_tables, starts, counts, self._block_size, None, 0, self._device)
        return torch.cat([half.index_select(0, slots) for half in self._halves], dim=-1)
