"""Experts alongside an MLP (Gemma 4), with a router that normalises its input."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...kernels.experts import route
from ..config import DecoderConfig
from .experts import ExpertForm, ExpertLayers
from .linear import AdapterRows, Linear
from .norm import RMSNorm
from .weights import RenamedSlot, WeightSlot

if TYPE_CHECKING:
    from ..parallel import ExpertsPart


class SideExpertLayers:
    """Router and experts of one layer."""

    def __init__(self, name: str, module: str, config: DecoderConfig, device: torch.device) -> None:
        """Create them without weights: `name` and `module` are those of the layer, here and in the checkpoint."""
        assert config.varied is not None, "the config has experts"
        assert config.varied.experts is not None, "the config has experts"
        self._experts = experts = config.varied.experts
        common: Any = {"dtype": config.dtype, "device": device, "batch_invariant": config.batch_invariant}
        hidden = config.hidden_size
        self._norm = RMSNorm([f"{module}.router.scale"], hidden, config.rms_norm_eps, **common)
        self._norm.factor = hidden**-0.5
        rows = [(f"{module}.router.proj", experts.num_experts)]
        self._router = Linear(f"{name}.router", rows, hidden, **common)
        self.num_experts = experts.num_experts
        form = ExpertForm(experts.num_experts, hidden, experts.intermediate_size, config.hidden_act)
        names = "gate_proj", "up_proj", "down_proj"
        self._module = module
        self._layers = ExpertLayers(f"{name}.experts", f"{module}.experts", form, names, **common)
        self._scales: Tensor | None = None
        self._part: ExpertsPart | None = None
        self._rounded = partial(torch.Tensor.to, device=device, dtype=config.dtype, copy=True)

    def forward(self, x: Tensor, normed: Tensor, batch: AdapterRows) -> Tensor:
        """Compute a new tensor [T, H] of the experts for `normed` [T, H], which x [T, H] chooses."""
        assert self._scales is not None, "the loader left no slot empty"
        logits = self._router.forward(self._norm(x), batch)
        routing = route(logits, self._experts.top_k, renormalised=True, rounded=False)
        routing = routing._replace(weights=routing.weights * self._scales[routing.experts])
        y = self._layers.forward(normed, routing, batch)
        return y if self._part is None else self._part.total(y)

    def divide(self, part: ExpertsPart, held: range) -> None:
        """Have the weights of experts `held` alone; before anything is loaded."""
        self._part = part
        self._layers.keep(held)

    def linears(self) -> list[Linear]:
        """Linear layers in the order of the computation."""
        return [self._router, *self._layers.linears()]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's tensor names; each expert has tensors of its own."""
        slots = self._norm.weight_slots()
        for linear in self.linears():
            slots |= linear.weight_slots()
        name = f"{self._module}.router.per_expert_scale"
        return slots | {name: WeightSlot((self._experts.num_experts,), self._load_scales)}

    def renamed_slots(self) -> dict[str, RenamedSlot]:
        """Slots of the tensors that hold all experts."""
        return self._layers.merged_slots(f"{self._module}.experts")

    def _load_scales(self, tensor: Tensor) -> None:
        self._scales = self._rounded(tensor).float()
