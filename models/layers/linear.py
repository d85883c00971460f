"""Linear layers: several projections of one input merged, prepacked once loaded, with a site for adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ...kernels import quantized_linear
from ...kernels.linear import Packed, few_rows, pack, row_squares
from ...kernels.quantized_linear import QuantizedWeight
from .weights import Weight, WeightSlot, whole_weight

if TYPE_CHECKING:
    from ...kernels.linear.device_few import FewRowsLinear
    from ...kernels.rms_norm import NormWeight
    from ..parallel import LinearPart


class AdapterRows(Protocol):
    """Holder of the tokens' adapters, such as a `ForwardBatch`."""

    @property
    def adapters(self) -> Any:
        """Input of `LoraSite.add` for these T tokens; None when none of them has an adapter."""
        ...


class LoraSite(Protocol):
    """Rank rows of the adapters for one linear layer."""

    def start(self, x: Tensor, adapters: Any) -> Any:
        """Start what `add` needs of x [T, in] alone, alongside what is launched until then; None when nothing can."""

    def add(self, y: Tensor, x: Tensor, adapters: Any, started: Any = None) -> None:
        """y [T, out] += each token's adapter applied to x [T, in]; y is mutated. `started` is the result of `start`."""

    def expands(self, adapters: Any) -> bool:
        """True if `expansion` serves these tokens."""

    def expansion(self, x: Tensor, adapters: Any, norm: NormWeight | None) -> Any:
        """Shrink x [T, in], and return the arguments with which a product of few tokens does the rest of `add`; with a
        `norm` the product normalises x too."""

    def fused(self, adapters: Any) -> tuple[int, Any] | None:
        """Arguments with which a packed weight that fuses adapters does `add` in its own call; None when it cannot."""

    def weights_of_runs(self, adapters: Any) -> Sequence[tuple[int, int, Tensor, Tensor]]:
        """Tokens [start, stop) of each adapter with weights here, and its A [r, in] and B [r, out]."""
        ...


class GainSite(Protocol):
    """Gains of adapters with trained magnitudes (DoRA), and adapters' biases, at one layer."""

    @property
    def written(self) -> int:
        """Not 0 when an adapter has a gain or a bias here."""
        ...

    def scale(
        self,
        y: Tensor,
        adapters: Any,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        biased: bool = True,
    ) -> None:
        """y [T, out] = (y - bias - residual) · each token's gains + bias + residual + its adapter's bias, the last if
        `biased`; other tokens do not change; y is mutated."""


class Linear:
    """y = x Wᵀ + b (+ adapters) (+ residual); W holds the rows of one or several projections of the checkpoint."""

    def __init__(
        self,
        name: str,
        slices: Sequence[tuple[str, int]],
        in_features: int,
        *,
        bias: bool = False,
        expert: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool = False,
    ) -> None:
        self.name = name
        """Name such as "layers.3.qkv"."""
        self.slices = list(slices)
        """(module name in the checkpoint, rows) of each merged projection, in order."""
        self.in_features = in_features
        self.out_features = sum(rows for _, rows in slices)
        self.expert = expert
        """True for a layer of an expert, which some tokens pass."""
        self.lora: LoraSite | None = None
        """Site of adapters, set by the adapter manager, as is `gains`."""
        self.gains: GainSite | None = None
        self.expert_lora: Any = None
        """Site of adapters of all experts of the layer, on a GPU, in place of `lora`."""
        self.part: LinearPart | None = None
        """Share of this process in the layer, set before it is loaded; None: the whole."""
        self.whole: dict[str, Callable[[], Tensor]] = {}
        """Functions that read the whole tensors of a divided layer again, on the CPU, by the checkpoint's names."""
        self.is_elsewhere = False
        """True for an expert's layer that another process computes: it has no weights here."""
        self.bias: Tensor | None = None
        """[out], once loaded."""
        self.row_squares: Tensor | None = None
        """[out] float32, once loaded: squared norm of each row of W, which cannot be read any more."""
        self.quantize: Callable[[Tensor], QuantizedWeight] | None = None
        """Function that quantises each projection when it is loaded, set before loading."""
        self._bias = bias
        self._dtype = dtype
        self._device = device
        self._batch_invariant = batch_invariant
        # Tensors of the slices while loading, maybe the file's own memory; released when packed.
        self._parts: dict[tuple[str, int], Weight] = {}
        self._packed: Packed | None = None
        # The packed weight, if its call does the work of adapters too.
        self._fusing: Any = None
        # A GPU's product of few tokens, if there is one.
        self._few: FewRowsLinear | None = None

    def forward(self, x: Tensor, batch: AdapterRows, residual: Tensor | None = None) -> Tensor:
        """Compute a new tensor [T, out] from x [T, in]; `residual` [T, out] is added."""
        if self.part is None:
            return self._compute(x, batch, residual)
        return self.part.total(self._compute(self.part.inputs(x), batch, self.part.residual(residual)))

    def _compute(self, x: Tensor, batch: AdapterRows, residual: Tensor | None) -> Tensor:
        packed, adapters = self._packed, batch.adapters
        if self._few is not None and self.fuses(len(x), adapters):
            return self.forward_fused(x, batch, residual=residual)
        if self.lora is None or adapters is None:
            return packed(x, residual)  # type: ignore[misc]  # the loader left no slot empty
        has_gains = self.gains is not None and self.gains.written
        if self._fusing is not None and not has_gains and (fused := self.lora.fused(adapters)) is not None:
            return self._fusing(x, residual, *fused)
        started = self.lora.start(x, adapters)
        y = packed(x, residual)  # type: ignore[misc]
        if self.gains is not None and has_gains:
            self.gains.scale(y, adapters, self.bias, residual)
        self.lora.add(y, x, adapters, started)
        return y

    def fuses(self, num_tokens: int, adapters: Any) -> bool:
        """True if `forward_fused` serves `num_tokens` tokens with these adapters."""
        if self._few is None or not 0 < num_tokens <= self._few.most_rows:
            return False
        if self.lora is None or adapters is None:
            return True
        return self.lora.expands(adapters) and not (self.gains is not None and self.gains.written)

    def forward_fused(
        self,
        x: Tensor,
        batch: AdapterRows,
        *,
        norm: NormWeight | None = None,
        activation: str = "",
        residual: Tensor | None = None,
    ) -> Tensor:
        """Compute `forward` of the norm of x [T, in], and the gated activation of its result, in one launch and, with
        adapters, another before it. `fuses` must be True."""
        assert self._few is not None
        adapters = batch.adapters
        expansion = None if self.lora is None or adapters is None else self.lora.expansion(x, adapters, norm)
        return self._few(x, norm=norm, activation=activation, residual=residual, expansion=expansion)

    @property
    def packed(self) -> Packed:
        """Packed weight, for kernels that compute several layers at once."""
        assert self._packed is not None, "the loader left no slot empty"
        return self._packed

    def project(self, x: Tensor) -> Tensor:
        """Product x Wᵀ [T, out] of the base weights alone, without the bias; callable from any thread."""
        return self._packed.without_bias(x)  # type: ignore[union-attr]  # as in `forward`

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's tensor names."""
        slots = {}
        whole = self if self.part is None else self.part
        for index, (module, rows) in enumerate(whole.slices):
            slots[f"{module}.weight"] = self._slot("weight", index, (rows, whole.in_features))
            if self._bias:
                slots[f"{module}.bias"] = self._slot("bias", index, (rows,))
        return slots

    def _slot(self, kind: str, index: int, shape: tuple[int, ...]) -> WeightSlot:
        def load(tensor: Tensor) -> None:
            if self.quantize is not None and kind == "weight":  # before it is divided: all ranks have the same scales
                load_quantized(self.quantize(tensor.to(self._device)))
                return
            if self.part is not None:
                share: Any = self.part.weight if kind == "weight" else self.part.bias
                tensor = share(self.slices[index][0], tensor)
            self._add_part(kind, index, tensor.to(self._device, self._dtype))

        def load_quantized(weight: QuantizedWeight) -> None:
            part: Weight = weight if self.part is None else self.part.weight(self.slices[index][0], weight)
            self._add_part(kind, index, part.to(self._device))

        scale = (self if self.part is None else self.part).in_features ** -0.5
        slot = WeightSlot(shape, load, scale, load_quantized if kind == "weight" else None, self.is_elsewhere)
        quantize = self.quantize if kind == "weight" else None
        return self._remembering(slot, f"{self.slices[index][0]}.{kind}", quantize)

    def _remembering(
        self, slot: WeightSlot, name: str, quantize: Callable[[Tensor], QuantizedWeight] | None = None
    ) -> WeightSlot:
        """Return `slot`, which adds the tensor `name` to `whole` if the layer is divided. `quantize` is what the slot
        does to full-precision weights, too."""
        if self.part is None:
            return slot

        def remember(read: Callable[[], Weight]) -> None:
            self.whole[name] = partial(whole_weight, read, quantize, self._dtype)

        return replace(slot, remember=remember)

    def _add_part(self, kind: str, index: int, part: Weight) -> None:
        """Keep a part; pack all of them when they are complete."""
        self._parts[kind, index] = part
        places = range(len(self.slices))
        if len(self._parts) < len(self.slices) * (1 + self._bias):
            return
        if self._bias:
            self.bias = torch.cat([self._parts["bias", i] for i in places])  # type: ignore[misc]  # plain tensors
        blocks = [self._parts["weight", i] for i in places]
        self._parts = {}
        self._packed, self.row_squares = pack_weights(blocks, self.bias, self._dtype, self._batch_invariant)
        if self._packed.fuses_adapters:
            self._fusing = self._packed
        if self.part is None and not self.expert:
            self._few = few_rows(self._packed, [rows for _, rows in self.slices])


def pack_weights(
    blocks: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype, batch_invariant: bool
) -> tuple[Packed, Tensor]:
    """Pack rows of a weight [out, in], some of which may be quantised and others not; the second result has the squared
    norm of each row, [out] float32."""
    quantized = [block for block in blocks if isinstance(block, QuantizedWeight)]
    if len(quantized) == len(blocks) and len({block.input_bits for block in quantized}) == 1:
        squares = torch.cat([quantized_linear.row_squares(block) for block in quantized])
        return quantized_linear.pack(quantized, bias, dtype, batch_invariant=batch_invariant), squares
    plain = [block if isinstance(block, Tensor) else block.dequantized().to(dtype) for block in blocks]
    squares = torch.cat([row_squares(block) for block in plain])
    return pack(plain, bias, batch_invariant=batch_invariant), squares
