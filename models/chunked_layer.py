"""Layer of a model in which some layers see their chunk of positions alone (Llama 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from .batch import ForwardBatch, LayerKV
from .decoder_layer import DecoderLayer
from .layers.norm import RMSNorm


class ChunkedLayer(DecoderLayer):
    """Layer of Llama with norms of queries and keys if it rotates, or queries that grow with their position."""

    def _make_projections(self) -> None:
        super()._make_projections()
        config, chunked = self._config, self._config.chunked
        assert chunked is not None, "the config has such layers"
        self._temperature = None if self._index in chunked.rotated else chunked.temperature
        if self._index in chunked.rotated and chunked.normalised:
            # The norm of a vector is that of the rotated vector, which the checkpoint's authors normalise.
            shape = config.num_heads + config.num_kv_heads, config.head_dim
            self.qk_norm = RMSNorm.unscaled(shape, config.rms_norm_eps, **self._common)

    def _attend_qkv(self, qkv: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        if self._temperature is not None:
            scale, floor = self._temperature
            factors = torch.log1p(torch.floor((batch.positions.float() + 1.0) / floor)) * scale + 1.0
            qkv[:, : self._config.num_heads * self._config.head_dim].mul_(factors[:, None])
        return super()._attend_qkv(qkv, batch, kv)
