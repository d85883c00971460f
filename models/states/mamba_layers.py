"""Layers with Mamba-2 mixers: in place of attention, alongside it, or alone; and layers of one mixer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...kernels.mamba2 import GroupNorm, MixerWeights, Projected, mamba2
from ..batch import ForwardBatch
from ..config import DecoderConfig
from ..decoder_layer import GeneralLayer, entering
from ..families.state_layers import Mamba2
from ..layers.linear import AdapterRows, Linear
from ..layers.mlp import Mlp
from ..layers.norm import RMSNorm
from ..layers.weights import RenamedSlot, WeightSlot
from ..ranges import Rows
from .convolution import Convolution
from .memory import LayerStates
from .shares import StateShare


class MambaMixer:
    """out(norm(y · silu(z))), with y of the recurrence over conv(x, B, C), and z, x, B, C and dt of one projection."""

    def __init__(
        self,
        layer: str,
        module: str,
        states: Mamba2,
        linear: Callable[..., Linear],
        sizes: tuple[int, float],
        **common: Any,
    ) -> None:
        """Make a mixer without weights.

        Args:
            layer: Name of the layer in the checkpoint.
            module: Name of the mixer in the layer.
            states: Sizes and factors.
            linear: Function that makes a projection of the layer.
            sizes: Hidden size, and the epsilon of the norm.
            common: dtype, device and batch_invariant, as in `Linear`.
        """
        hidden, self._eps = sizes
        self._states, self._module, self._common = states, f"{layer}.{module}", common
        size, parts = states.size, states.groups * states.state_dim
        self._widths = [size, states.channels, states.heads]
        self.inputs = linear("mamba_in", {f"{module}.in_proj": sum(self._widths)}, hidden, bias=states.in_bias)
        self.out = linear("mamba_out", {f"{module}.out_proj": hidden}, size, bias=states.out_bias)
        filters = {f"{self._module}.conv1d": states.channels}
        self._convolution = Convolution(filters, states.kernel, bias=states.conv_bias, **common)
        self._vectors: dict[str, Tensor] = {}
        self._rows = {name: Rows.whole(states.heads) for name in ("A_log", "D", "dt_bias")}
        self._rows["norm.weight"] = Rows.whole(size)
        self._group_sum: Callable[[Tensor], Tensor] | None = None
        self._group_size = size // states.groups
        self._factors: Tensor | None = None
        if set(states.part_factors) != {1.0}:
            counts = torch.tensor([size, size, parts, parts, states.heads])
            factors = torch.tensor(states.part_factors).repeat_interleave(counts)
            self._factors = factors.to(common["device"], common["dtype"])

    def divide(self, share: StateShare) -> None:
        """See SharedStates."""
        self._convolution.divide(share.channels)
        self._rows = {name: part.alone for name, part in share.vectors.items()}
        self._group_sum = share.group_sum
        self._group_size = self._rows["norm.weight"].total // share.num_groups

    def forward(self, normed: Tensor, batch: ForwardBatch, memory: LayerStates) -> Tensor:
        """Compute the result [T, hidden] for x [T, hidden], and write the states."""
        assert batch.states is not None, "the batch has states"
        assert memory.recurrent is not None, "mixers have a recurrent state"
        states, vectors = self._states, self._vectors
        scale_in, scale_out = states.factors
        projected = self.inputs.forward(times(normed, scale_in), batch)
        if self._factors is not None:
            projected = projected * self._factors
        gate, mixed, step = projected.split(self._widths, 1)
        mixed = self._convolution.forward(mixed, batch.states, memory, silu=True)
        norm = None
        if states.norm != "none":
            scale, is_before = vectors["norm.weight"], states.norm == "before_gate"
            norm = GroupNorm(scale, self._eps, is_before, self._group_size, self._group_sum)
        weights = MixerWeights(
            vectors["A_log"], vectors["dt_bias"], vectors["D"], norm, states.groups, states.time_step_limit
        )
        y = mamba2(Projected(mixed, gate, step), weights, batch.states, memory.recurrent)
        return times(self.out.forward(y, batch), scale_out)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's tensor names, but for the projections'."""
        rows = {name: rows for name, rows in self._rows.items() if (name, self._states.norm) != ("norm.weight", "none")}
        slots = {f"{self._module}.{name}": self._slot(name, of_name) for name, of_name in rows.items()}
        return slots | self._convolution.weight_slots()

    def _slot(self, name: str, rows: Rows) -> WeightSlot:
        def load(tensor: Tensor) -> None:
            # Rounded to the model's dtype first, as in a model that holds its weights in it.
            vector = rows.of(tensor).to(self._common["device"], self._common["dtype"], copy=True).float()
            self._vectors[name] = -vector.exp() if name == "A_log" else vector

        return WeightSlot((rows.total,), load)


class MambaLayer(GeneralLayer):
    """Layer with a mixer in place of attention."""

    def _make_projections(self) -> None:
        self._mixer = self._make_mixer()
        self.qkv, self.o = self._mixer.inputs, self._mixer.out

    def divide(self, share: StateShare) -> None:
        """See SharedStates."""
        self._mixer.divide(share)

    def _make_mixer(self) -> MambaMixer:
        config, states = self._config, self._config.states
        assert isinstance(states, Mamba2), "the config has mixers"
        module, sizes = config.names.get("mamba", "mamba"), (config.hidden_size, config.rms_norm_eps)
        return MambaMixer(self._theirs, module, states, self._linear, sizes, **self._common)

    def _mix(self, normed: Tensor, batch: ForwardBatch, kv: Any) -> Tensor:
        return self._mixer.forward(normed, batch, kv)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See DecoderLayer."""
        return super().weight_slots() | self._mixer.weight_slots()


class ParallelMambaLayer(MambaLayer):
    """Layer of Falcon-H1: the results of a mixer and of attention are added."""

    def _make_projections(self) -> None:
        GeneralLayer._make_projections(self)
        self._mixer = self._make_mixer()

    def _mix(self, normed: Tensor, batch: ForwardBatch, kv: Any) -> Tensor:
        states, memory = self._config.states, kv
        assert isinstance(states, Mamba2), "the config has mixers"
        assert states.attention_factors is not None, "layers have attention too"
        before, after = states.attention_factors
        mixed = self._mixer.forward(normed, batch, memory[0])
        return mixed + times(GeneralLayer._mix(self, times(normed, before), batch, memory[1]), after)

    def linears(self) -> list[Linear]:
        """See DecoderLayer."""
        return [self._mixer.inputs, self._mixer.out, *super().linears()]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See DecoderLayer."""
        return super().weight_slots() | self._mixer.inputs.weight_slots() | self._mixer.out.weight_slots()


class NoMlp:
    """Second half of a layer that has none. Implements Mlp."""

    def forward(self, x: Tensor, batch: AdapterRows, residual: Tensor | None = None) -> Tensor:
        """See `Mlp`; it is never called."""
        raise NotImplementedError

    def linears(self) -> list[Linear]:
        """See `Mlp`."""
        return []

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See `Mlp`."""
        return {}

    def renamed_slots(self) -> dict[str, RenamedSlot]:
        """See `Mlp`."""
        return {}


class SingleLayer(GeneralLayer):
    """Layer with attention alone."""

    def _make_mlp(self, device: torch.device) -> Mlp:
        return NoMlp()

    def forward_deferred(self, hidden: Tensor, delta: Tensor | None, batch: ForwardBatch, kv: Any) -> Any:
        """See DecoderLayer."""
        if hidden.dtype == self._config.dtype:
            normed, hidden = entering(self._before_attention, hidden, delta)
        else:  # see FloatResidual
            normed, _ = entering(self._before_attention, hidden.to(self._config.dtype), delta)
        return hidden, self._mix(normed, batch, kv)


class FloatResidual:
    """Start and end of a residual stream in float32, to which layers in the model's dtype add."""

    def __init__(self, norm: RMSNorm, dtype: torch.dtype) -> None:
        """`norm`: that of the last layer's result."""
        self._norm, self._dtype = norm, dtype

    def enter(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Residual stream [T, H] that the first layer reads, from embeddings."""
        return hidden.float()

    def leave(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Normed result [T, H] in the model's dtype."""
        return self._norm(hidden).to(self._dtype)

    def linears(self) -> list[Linear]:
        """None."""
        return []

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots of the norm."""
        return self._norm.weight_slots()


def has_float_residual(config: DecoderConfig) -> bool:
    """True when layers add their results in float32, and compute in another dtype."""
    return isinstance(config.states, Mamba2) and config.states.float_residual and config.dtype != torch.float32


class SingleMamba(SingleLayer, MambaLayer):
    """Layer with a mixer alone."""


class SingleMlp(SingleLayer):
    """Layer with an MLP, or experts, alone."""

    def _make_projections(self) -> None:
        pass

    def _make_mlp(self, device: torch.device) -> Mlp:
        return GeneralLayer._make_mlp(self, device)

    def _mix(self, normed: Tensor, batch: ForwardBatch, kv: Any) -> Tensor:
        return self.mlp.forward(normed, batch)

    def linears(self) -> list[Linear]:
        """See DecoderLayer."""
        return self.mlp.linears()

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See DecoderLayer."""
        slots = self.mlp.weight_slots()
        for norm in self._norms:
            slots |= norm.weight_slots()
        return slots


SINGLE_LAYERS: dict[str, type[GeneralLayer]] = {
    "mamba": SingleMamba,
    "attention": SingleLayer,
    "mlp": SingleMlp,
    "experts": SingleMlp,
}
"""Class of a layer by its kind in `DecoderConfig.mixers`."""


def times(x: Tensor, factor: float) -> Tensor:
    """Product of x and a factor."""
    return x if factor == 1.0 else x * factor
