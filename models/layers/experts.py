"""MLP of experts (Shazeer et al. 2017): a router sends each token to a few of them.

T tokens, k experts of a token, E experts, H hidden size, I inner size of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.act_and_mul import act_and_mul, act_and_mul_invariant
from ...kernels.experts import PackedExperts, Product, Products, Routing, Scoring, pack, route, run_products, sigmoid
from ..config import DecoderConfig
from ..expert_config import ExpertConfig
from .linear import AdapterRows, Linear
from .mlp import GatedMlp, Mlp, PlainMlp
from .weights import RenamedSlot, WeightSlot

if TYPE_CHECKING:
    from ..parallel import ExpertsPart


def make_mlp(config: DecoderConfig, index: int, device: torch.device) -> Mlp:
    """MLP of layer `index`."""
    name, module = f"layers.{index}", f"model.layers.{index}"
    common: dict[str, Any] = {"dtype": config.dtype, "device": device, "batch_invariant": config.batch_invariant}
    if config.experts is None or index not in config.experts.layers:
        first = ["gate_up_proj"] if config.merged_gate_up else ["gate_proj", "up_proj"]
        if config.plain_mlp:
            first = ["up_proj"]
        projections = [config.names.get(part, part) for part in (*first, "down_proj")]
        form = {"bias": config.mlp_bias, "activation": config.hidden_act, **common}
        sizes = config.hidden_size, config.intermediate_size
        module = f"{module}.{config.names.get('mlp', 'mlp')}"
        return make_dense(
            name,
            module,
            projections,
            sizes,
            scales=(config.gate_scale, config.mlp_scale),
            sparsity=config.varied.sparsities[index] if config.varied and config.varied.sparsities else 0.0,
            gated=not config.plain_mlp,
            **form,
        )
    return SparseMlp(name, module, config.hidden_size, config.experts, **common)


def make_dense(
    name: str, module: str, projections: Sequence[str], sizes: tuple[int, int], *, gated: bool = True, **form: Any
) -> GatedMlp | PlainMlp:
    """MLP with or without a gate; see `GatedMlp`."""
    if gated:
        return GatedMlp(name, module, sizes, projections=projections, **form)
    up, down = (f"{module}.{projection}" for projection in projections)
    form = {name: value for name, value in form.items() if name not in ("scales", "sparsity")}
    return PlainMlp(name, (up, down), sizes, **{"bias": False, **form})


class SparseMlp:
    """Router, experts, and the shared expert if there is one."""

    def __init__(self, name: str, module: str, hidden_size: int, config: ExpertConfig, **common: Any) -> None:
        """Make an MLP without weights: see `GatedMlp`; `module` is the whole layer's."""
        self._config = config
        self._module = module
        self._block = block = f"{module}.{config.traits.block}"
        traits = config.traits
        router = [(f"{block}.{traits.router}", config.num_experts)]
        router_options = {**common, "dtype": torch.float32} if traits.float_router else common
        self._router = Linear(f"{name}.router", router, hidden_size, bias=traits.bias, **router_options)
        form = ExpertForm(
            config.num_experts, hidden_size, config.intermediate_size, config.activation, traits.bias, traits.gated
        )
        self._experts = ExpertLayers(f"{name}.experts", f"{block}.experts", form, traits.projections, **common)
        self._shared: GatedMlp | PlainMlp | None = None
        if config.shared_size is not None:
            sizes = hidden_size, config.shared_size
            shared = f"{block}.{traits.ungated_name}" if traits.ungated else f"{block}.shared_expert"
            shared = f"{module}.{traits.shared_module}" if traits.shared_module else shared
            options = {"activation": config.activation, "gated": traits.gated, **common}
            self._shared = make_dense(f"{name}.shared", shared, traits.shared_projections, sizes, **options)
        self._shared_gate: Linear | None = None
        if traits.shared:
            gate = [(f"{block}.shared_expert_gate", 1)]
            self._shared_gate = Linear(f"{name}.shared_gate", gate, hidden_size, **common)
        self._scoring: Scoring | None = None
        if traits.sigmoid or config.corrected or config.num_groups > 1 or config.scale != 1.0:
            self._scoring = Scoring(config.num_groups, config.top_groups, traits.sigmoid, config.scale)
        self._device = common["device"]
        self._part: ExpertsPart | None = None

    def divide(self, part: ExpertsPart, held: range) -> None:
        """Have the weights of experts `held` alone, and a share of the shared expert; before anything is loaded."""
        self._part = part
        self._experts.keep(held)

    def forward(self, x: Tensor, batch: AdapterRows, residual: Tensor | None = None) -> Tensor:
        """See `Mlp`."""
        if self._part is None:
            return self._compute(x, batch, residual)
        return self._part.total(self._compute(x, batch, self._part.residual(residual)))

    def _compute(self, x: Tensor, batch: AdapterRows, residual: Tensor | None) -> Tensor:
        if self._shared is not None:
            shared = self._shared.forward(x, batch)
            if self._shared_gate is not None:
                shared = shared.mul_(sigmoid(self._shared_gate.forward(x, batch)))
            residual = shared if residual is None else residual + shared
        config = self._config
        if config.traits.scaled_inputs:
            return self._visit_scaled(x, batch, residual)
        weights = {"renormalised": config.renormalised, "rounded": config.traits.rounded}
        routing = route(self._logits(x, batch), config.top_k, **weights, scoring=self._scoring)
        return self._experts.forward(x, routing, batch, residual)

    def _visit_scaled(self, x: Tensor, batch: AdapterRows, residual: Tensor | None) -> Tensor:
        """Compute the experts for `scaled_inputs`, one of each token after another."""
        logits, experts = self._logits(x, batch).topk(self._config.top_k, -1)
        scales = sigmoid(logits.float()).to(x.dtype)
        ones = torch.ones(len(x), 1, dtype=torch.float32, device=x.device)
        for index in range(self._config.top_k):
            own = slice(index, index + 1)
            routing = Routing(experts[:, own].contiguous(), ones)
            residual = self._experts.forward(x * scales[:, own], routing, batch, residual)
        assert residual is not None, "a token visits at least one expert"
        return residual

    def _logits(self, x: Tensor, batch: AdapterRows) -> Tensor:
        """Outputs [T, E] of the router, in its own dtype."""
        router, adapters = self._router, batch.adapters
        if not self._config.traits.float_router:
            return router.forward(x, batch)
        logits = router.packed(x.float())
        if router.lora is not None and adapters is not None:
            if router.gains is not None and router.gains.written:
                router.gains.scale(logits, adapters)
            delta = x.new_zeros(logits.shape)
            router.lora.add(delta, x, adapters)
            logits += delta
        return logits

    def linears(self) -> list[Linear]:
        """See `Mlp`."""
        shared = [] if self._shared is None else self._shared.linears()
        gate = [] if self._shared_gate is None else [self._shared_gate]
        return [self._router, *shared, *gate, *self._experts.linears()]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See `Mlp`; each expert has tensors of its own."""
        slots: dict[str, WeightSlot] = {}
        for linear in self.linears():
            slots |= linear.weight_slots()
        if self._config.corrected:
            size = self._config.num_experts
            shape = (1, size) if self._config.traits.correction_row else (size,)
            slots[f"{self._block}.{self._config.traits.correction}"] = WeightSlot(shape, self._load_correction, 0.1)
        return slots

    def _load_correction(self, tensor: Tensor) -> None:
        assert self._scoring is not None, "there are scores"
        self._scoring = self._scoring._replace(bias=tensor.to(self._device, torch.float32, copy=True).flatten())

    def renamed_slots(self) -> dict[str, RenamedSlot]:
        """See `Mlp`; one tensor [E, 2I, H] holds gate and up of all experts, and one [E, H, I] down."""
        traits, block = self._config.traits, f"{self._module}.{self._config.traits.merged_block}"
        slots: dict[str, RenamedSlot] = {}
        for name in dict.fromkeys((block, self._block)):
            slots |= self._experts.merged_slots(f"{name}.experts", transposed=traits.transposed)
        for stored, usual in traits.merged_names.items():
            name = f"{self._block}.{usual}"
            other = slots.get(name) or RenamedSlot(self._router.weight_slots()[name], (name,))
            slots[f"{self._block}.{stored}"] = other
        if block != self._block:
            for name, slot in self._router.weight_slots().items():
                slots[name.replace(self._block, block, 1)] = RenamedSlot(slot, (name,))
        return slots


class _Adapters(NamedTuple):
    """Implements `AdapterRows`."""

    adapters: Any


class ExpertForm(NamedTuple):
    """Sizes of the experts of a layer, and what they compute."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: str = "silu"
    """See `act_and_mul`."""
    bias: bool = False
    gated: bool = True


class ExpertLayers:
    """Experts of one layer, with adapters."""

    def __init__(self, ours: str, theirs: str, form: ExpertForm, projections: Sequence[str], **common: Any) -> None:
        """Make experts without weights.

        Args:
            ours: Name that ends with "experts".
            theirs: Name of the module in the checkpoint; the experts' numbers follow it.
            form: Sizes.
            projections: Names of gate and up, or of both merged, and of down.
            common: dtype, device and batch_invariant, as in `Linear`.
        """
        self._form = form
        self._invariant: bool = common["batch_invariant"]
        self._gate_up, self._down = [], []
        *merged, down = projections
        hidden, inner = form.hidden_size, form.intermediate_size
        rows = 2 * inner if form.gated else inner
        options = {"bias": form.bias, "expert": True, **common}
        for index in range(form.num_experts):
            name, module = f"{ours}.{index}", f"{theirs}.{index}"
            slices = [(f"{module}.{projection}", rows // len(merged)) for projection in merged]
            self._gate_up.append(Linear(f"{name}.gate_up", slices, hidden, **options))
            self._down.append(Linear(f"{name}.down", [(f"{module}.{down}", hidden)], inner, **options))
        self._held = range(form.num_experts)
        self._packed: PackedExperts | None = None

    def keep(self, held: range) -> None:
        """Have the weights of experts `held` alone; before anything is loaded."""
        self._held = held
        for index, linears in enumerate(zip(self._gate_up, self._down, strict=True)):
            for linear in linears:
                linear.is_elsewhere = index not in held

    @property
    def _is_partial(self) -> bool:
        return len(self._held) < self._form.num_experts

    def forward(self, x: Tensor, routing: Routing, batch: AdapterRows, residual: Tensor | None = None) -> Tensor:
        """Compute a new tensor [T, H] from x [T, H], of the experts that are here; `residual` [T, H] is added."""
        first, stop = self._held.start, self._held.stop
        gate_up, down = self._gate_up[first:stop], self._down[first:stop]
        if self._packed is None:  # all are loaded now
            self._packed = pack(
                [linear.packed for linear in gate_up],
                [linear.packed for linear in down],
                activation=self._form.activation,
                batch_invariant=self._invariant,
                partial=self._is_partial,
            )
        if self._is_partial:
            numbers = routing.experts - first
            numbers = numbers.masked_fill((numbers < 0) | (numbers >= stop - first), stop - first)
            routing = routing._replace(experts=numbers)
        if batch.adapters is not None and batch.adapters.targets_experts:
            sites = gate_up[0].expert_lora, down[0].expert_lora
            if sites[0] is not None:
                add = tuple(partial(site.add, adapters=batch.adapters) for site in sites)
                return self._packed(x, routing, residual, add)  # it is Triton's
            return self._adapted(x, routing, batch.adapters, residual)
        return self._packed(x, routing, residual)

    def _adapted(self, x: Tensor, routing: Routing, adapters: Any, residual: Tensor | None) -> Tensor:
        """Compute tokens with adapters by a product for each expert, and all others at once. If one of 8 requests
        has an adapter, a Qwen3-MoE of 0.5 billion active parameters is decoded 1.5 times as fast as with products for
        all tokens (two cores of an AMD EPYC with AVX512-BF16)."""
        assert self._packed is not None
        numbers = adapters.tokens()
        tokens = torch.tensor(numbers, device=x.device)
        others = torch.ones(len(x), dtype=torch.bool, device=x.device).index_fill_(0, tokens, False).nonzero().flatten()
        own = partial(run_products, products=self._products(adapters.of(numbers)))
        ways: list[tuple[Tensor, Callable[..., Tensor]]] = [(tokens, own), (others, self._packed)]
        y = torch.empty_like(x)
        for some, compute in ways:
            if len(some):
                part = Routing(*(of_all[some] for of_all in routing))
                y[some] = compute(x[some], part, residual=None if residual is None else residual[some])
        return y

    def _products(self, adapters: Any) -> Products:
        """Products with the deltas of the tokens' adapters."""
        rows: dict[int, _Adapters] = {}  # of each expert's tokens

        def product(linears: Sequence[Linear]) -> Product:
            def compute(expert: int, x: Tensor, tokens: Tensor) -> Tensor:
                if expert not in rows:
                    rows[expert] = _Adapters(adapters.of(tokens.tolist()))
                return linears[expert].forward(x, rows[expert])

            return compute

        activation = act_and_mul_invariant if self._invariant else act_and_mul
        activate = partial(activation, activation=self._form.activation)
        gate_up, down = (part[self._held.start : self._held.stop] for part in (self._gate_up, self._down))
        return Products(product(gate_up), activate, product(down), len(down))

    def linears(self) -> list[Linear]:
        """Linear layers of all experts."""
        return [*self._gate_up, *self._down]

    def merged_slots(self, module: str, *, transposed: bool = False) -> dict[str, RenamedSlot]:
        """Slots of tensors that hold all experts: gate_up_proj [E, 2I, H] and down_proj [E, H, I] of `module`, or with
        the last two sizes swapped, and their biases."""
        slots: dict[str, RenamedSlot] = {}
        first = "gate_up_proj" if self._form.gated else "up_proj"
        for name, linears in ((first, self._gate_up), ("down_proj", self._down)):
            slots[f"{module}.{name}"] = _merged(linears, "weight", transposed=transposed)
            if self._form.bias:
                slots[f"{module}.{name}_bias"] = _merged(linears, "bias")
        return slots


def _merged(linears: list[Linear], kind: str, *, transposed: bool = False) -> RenamedSlot:
    """Slot of the tensor that holds the weights or the biases (`kind`) of all experts' layers: [E, out, in], or [E, in,
    out] if `transposed`; and [E, out]."""
    by_expert = [
        {name: slot for name, slot in linear.weight_slots().items() if name.endswith(f".{kind}")} for linear in linears
    ]
    first = linears[0]
    shape = (first.out_features, first.in_features) if kind == "weight" else (first.out_features,)

    def load(tensor: Tensor) -> None:
        for expert, slots in zip(tensor.mT if transposed else tensor, by_expert, strict=True):
            parts = expert.split([slot.shape[0] for slot in slots.values()])
            for slot, part in zip(slots.values(), parts, strict=True):
                if not slot.is_elsewhere:
                    slot.load(part.contiguous())

    stored = (len(linears), *(shape[::-1] if transposed else shape))
    names = tuple(name for slots in by_expert for name in slots)
    return RenamedSlot(WeightSlot(stored, load, first.in_features**-0.5), names)
