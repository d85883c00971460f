"""Experts against their definition in float64: the torch path, the C++ kernel and Triton's."""

import pytest
import torch

from outrider.kernels import experts, quantized_linear
from outrider.kernels.experts import Routing
from outrider.kernels.experts import torch as reference
from outrider.kernels.experts.native import NativeExperts
from outrider.kernels.linear import pack
from outrider.kernels.quantized_linear import QuantizedWeight

# Roundings of the inner product, its activation and the output, as shares of values near 1.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}
SHAPES = [(1, 6, 48, 26, 3), (5, 4, 16, 8, 4), (37, 7, 50, 30, 2), (130, 3, 34, 70, 1)]


def draw(num_experts: int, hidden: int, inner: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [E, 2I, H] and [E, H, I]."""
    gate_up = torch.randn(num_experts, 2 * inner, hidden) * hidden**-0.5
    return gate_up.to(dtype), (torch.randn(num_experts, hidden, inner) * inner**-0.5).to(dtype)


def draw_routing(rows: int, num_experts: int, top_k: int, dtype: torch.dtype) -> Routing:
    logits = torch.randn(rows, num_experts).to(dtype)
    return reference.route(logits, top_k, renormalised=True, rounded=True)


def define(x, routing, gate_up, down, residual, biases=None) -> torch.Tensor:
    """The sum over a token's experts, one by one, in float64; with `biases` and the activation of gpt-oss."""
    y = torch.zeros(x.shape, dtype=torch.float64) if residual is None else residual.double()
    for t in range(len(x)):
        for expert, weight in zip(routing.experts[t].tolist(), routing.weights[t].double(), strict=True):
            inner = gate_up[expert].double() @ x[t].double()
            if biases is None:
                gate, up = inner.chunk(2)
                y[t] += weight * (down[expert].double() @ (gate * gate.sigmoid() * up))
                continue
            gate, up = (inner + biases[0][expert].double()).view(-1, 2).clamp(max=7).unbind(1)
            inner = gate * torch.sigmoid(1.702 * gate) * (1 + up.clamp(min=-7))
            y[t] += weight * (down[expert].double() @ inner + biases[1][expert].double())
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "num_experts", "hidden", "inner", "top_k"), SHAPES)
def test_experts(rows: int, num_experts: int, hidden: int, inner: int, top_k: int, dtype: torch.dtype) -> None:
    weights = draw(num_experts, hidden, inner, dtype)
    packed = experts.pack(*([pack(weight) for weight in part] for part in weights))
    x, residual = (torch.randn(rows, hidden).to(dtype) for _ in range(2))
    routing = draw_routing(rows, num_experts, top_k, dtype)
    for added in (None, residual):
        error = (packed(x, routing, added) - define(x, routing, *weights, added)).abs().max()
        assert error < TOLERANCE[dtype]


def draw_biases(weights: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """Biases [E, 2I], some beyond the limits of the activation, and [E, H]."""
    scales = (4.0, 1.0)
    return [scale * torch.randn(part.shape[:2]).to(part.dtype) for scale, part in zip(scales, weights, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "num_experts", "hidden", "inner", "top_k"), SHAPES)
def test_experts_of_gpt_oss(rows, num_experts, hidden, inner, top_k, dtype) -> None:
    weights = draw(num_experts, hidden, inner, dtype)
    biases = draw_biases(weights)
    linears = [[pack(*one) for one in zip(*part, strict=True)] for part in zip(weights, biases, strict=True)]
    x, routing = torch.randn(rows, hidden).to(dtype), draw_routing(rows, num_experts, top_k, dtype)
    expected = define(x, routing, *weights, None, biases)
    for invariant in (False, True):
        packed = experts.pack(*linears, activation="clamped_swiglu", batch_invariant=invariant)
        assert (packed(x, routing) - expected).abs().max() < 6 * TOLERANCE[dtype]
    torch_path = reference.TorchExperts(*linears, activation="clamped_swiglu")
    assert (torch_path(x, routing) - expected).abs().max() < 6 * TOLERANCE[dtype]


@pytest.mark.usefixtures("team")
def test_native_experts_are_batch_invariant() -> None:
    weights = draw(6, 64, 24, torch.bfloat16)
    linears = [[pack(weight) for weight in part] for part in weights]
    packed = experts.pack(*linears)
    if not isinstance(packed, NativeExperts):
        pytest.skip("this processor has no native product")
    torch.set_num_threads(3)
    x, residual = (torch.randn(1100, 64).bfloat16() for _ in range(2))  # more than one call's tokens
    routing = draw_routing(1100, 6, 2, torch.bfloat16)
    y = packed(x, routing, residual)
    gate_up, down = (lambda e, rows, _, part=part: part[e](rows) for part in linears)
    products = experts.Products(gate_up, reference.act_and_mul, down, 6)
    assert torch.equal(experts.run_products(x, routing, residual, products=products), y)
    for rows in (slice(1099, 1100), slice(3, 17)):
        part = Routing(routing.experts[rows], routing.weights[rows])
        assert torch.equal(packed(x[rows], part, residual[rows]), y[rows])
    with pytest.raises(ValueError, match="bfloat16"):
        packed(x.float(), routing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("both", [True, False])
def test_native_routing(dtype: torch.dtype, both: bool) -> None:
    options = {"renormalised": both, "rounded": both}
    logits = (torch.randperm(60 * 33).view(60, 33) / 200).to(dtype)
    logits[0] = 1e4 * logits[0]
    ours, theirs = experts.route(logits, 5, **options), reference.route(logits, 5, **options)
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-2 if both else 1e-5, atol=1e-12)
    chosen = [logits.gather(1, routing.experts)[1:] for routing in (ours, theirs)]
    assert torch.equal(*chosen)  # if weights are equal either expert may come first, as zeros in the first row
    assert all(len(set(row)) == 5 for row in ours.experts.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "num_experts", "hidden", "inner", "top_k"), SHAPES)
def test_triton(
    rows: int, num_experts: int, hidden: int, inner: int, top_k: int, dtype: torch.dtype, device: str
) -> None:
    pytest.importorskip("triton")
    from outrider.kernels.experts.triton import TritonExperts

    weights = draw(num_experts, hidden, inner, dtype)
    packed = TritonExperts(*([weight.contiguous().to(device) for weight in part] for part in weights))
    x, residual = (torch.randn(rows, hidden).to(dtype) for _ in range(2))
    routing = draw_routing(rows, num_experts, top_k, dtype)
    y = packed(x.to(device), Routing(*(part.to(device) for part in routing)), residual.to(device)).cpu()
    assert (y - define(x, routing, *weights, residual)).abs().max() < TOLERANCE[dtype]
    biases = draw_biases(weights)
    on_device = {"biases": [bias.to(device) for bias in biases], "activation": "clamped_swiglu"}
    packed = TritonExperts(*([weight.contiguous().to(device) for weight in part] for part in weights), **on_device)
    y = packed(x.to(device), Routing(*(part.to(device) for part in routing))).cpu()
    assert (y - define(x, routing, *weights, None, biases)).abs().max() < 6 * TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("kind", "dtype"), [("any", torch.float32), ("any", torch.bfloat16), ("triton", torch.float32)]
)
@pytest.mark.parametrize(("rows", "num_experts", "hidden", "inner", "top_k"), SHAPES)
def test_pairs_of_other_processes_add_nothing(rows, num_experts, hidden, inner, top_k, kind, dtype, device) -> None:
    weights, x = draw(num_experts, hidden, inner, dtype), torch.randn(rows, hidden).to(dtype)
    routing = draw_routing(rows, num_experts, top_k, dtype)
    total = torch.zeros(rows, hidden)
    for held in (range(1), range(1, num_experts)):
        count = len(held)
        parts = [part[held.start : held.stop].contiguous() for part in weights]
        numbers = routing.experts - held.start
        numbers = numbers.masked_fill((numbers < 0) | (numbers >= count), count)
        if kind == "triton":
            pytest.importorskip("triton")
            from outrider.kernels.experts.triton import TritonExperts

            packed = TritonExperts(*([weight.to(device) for weight in part] for part in parts), partial=True)
            total += packed(x.to(device), Routing(numbers.to(device), routing.weights.to(device))).cpu()
            continue
        packed = experts.pack(*([pack(weight) for weight in part] for part in parts), partial=True)
        total += packed(x, Routing(numbers, routing.weights)).float()
    assert (total - define(x, routing, *weights, None)).abs().max() < 2 * TOLERANCE[dtype]


def test_mixed_expert_formats_do_not_use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels take experts of one form: the others would be left out."""
    monkeypatch.setattr(experts, "use_triton", lambda weight: True)
    weights = draw(3, 16, 8, torch.float64)  # which oneDNN does not pack
    linears = [[pack(weight) for weight in part] for part in weights]
    codes = torch.randint(-128, 128, (16, 16), dtype=torch.int8)
    stored = QuantizedWeight(bits=8, codes=codes, scales=torch.full((16, 1), 2.0**-9), group=16)
    linears[0][1] = quantized_linear.pack([stored], None, torch.float64)
    weights[0][1] = stored.dequantized()
    x, routing = torch.randn(7, 16).double(), draw_routing(7, 3, 2, torch.float32)
    error = (experts.pack(*linears)(x, routing) - define(x, routing, *weights, None)).abs().max()
    assert error < 1e-5


@pytest.mark.parametrize("kind", ["int8", "w8a8", "int4", "coarse", "levels"])
@pytest.mark.parametrize(("rows", "num_experts", "hidden", "inner", "top_k"), [(1, 6, 96, 70, 3), (41, 5, 200, 72, 2)])
def test_quantised_experts_have_the_bits_of_their_products(
    rows: int, num_experts: int, hidden: int, inner: int, top_k: int, kind: str
) -> None:
    def quantize(outputs: int, inputs: int) -> QuantizedWeight:
        bits, group = (8, inputs) if kind in ("int8", "w8a8") else (4, 32)
        codes = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8)
        scales = (0.5 + torch.rand(outputs, -(-inputs // group))) * inputs**-0.5 / (1 << bits - 2)
        if kind == "levels":
            return QuantizedWeight(bits=4, codes=codes, scales=scales, group=group, levels=torch.randn(16))
        if bits == 8:
            signed = (codes ^ 128).view(torch.int8)
            return QuantizedWeight(
                bits=8, codes=signed, scales=scales, group=group, input_bits=8 if kind == "w8a8" else None
            )
        offsets = -torch.randint(6, 10, scales.shape) * scales
        return QuantizedWeight(
            bits=4, codes=codes, scales=scales, group=group, offsets=offsets, coarse_inputs=kind == "coarse"
        )

    # Gate and up are blocks of one weight.
    shapes = [(inner, hidden), (inner, hidden)], [(hidden, inner)]
    blocks = [[[quantize(*shape) for shape in part] for _ in range(num_experts)] for part in shapes]
    linears = [[quantized_linear.pack(weight, None, torch.bfloat16) for weight in part] for part in blocks]
    packed = experts.pack(*linears)
    if not isinstance(linears[0][0], quantized_linear.NativeQuantizedLinear):
        pytest.skip("no kernels")
    assert isinstance(packed, NativeExperts)
    x, residual = (torch.randn(rows, hidden).bfloat16() for _ in range(2))
    routing = draw_routing(rows, num_experts, top_k, torch.bfloat16)
    alone = reference.TorchExperts(*linears)
    for added in (None, residual):
        y = packed(x, routing, added)
        assert torch.equal(y, alone(x, routing, added))
        last = None if added is None else added[-1:]
        assert torch.equal(packed(x[-1:], Routing(*(part[-1:] for part in routing)), last), y[-1:])
    if kind not in ("w8a8", "coarse"):  # they round inputs
        dense = [torch.stack([torch.cat([b.dequantized() for b in weight]) for weight in part]) for part in blocks]
        assert (y - define(x, routing, *dense, residual)).abs().max() < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "num_experts", "hidden", "inner", "top_k"), SHAPES)
def test_quantized_on_triton(
    rows: int, num_experts: int, hidden: int, inner: int, top_k: int, bits: int, device: str
) -> None:
    """With a shorter last group, zero points, and a scale for each output."""
    pytest.importorskip("triton")
    from outrider.kernels.experts.triton import TritonExperts
    from outrider.kernels.quantized_linear.device_linear import TritonQuantizedLinear

    def quantize(outputs: int, inputs: int) -> QuantizedWeight:
        codes = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8)
        group = 32 if bits == 4 else inputs
        scales = (0.5 + torch.rand(outputs, -(-inputs // group))) * inputs**-0.5 / (1 << bits - 2)
        centre = torch.randint(6, 10, scales.shape) if bits == 4 else 128
        return QuantizedWeight(bits=bits, codes=codes, scales=scales, group=group, offsets=-centre * scales)

    forms = [[quantize(*shape) for _ in range(num_experts)] for shape in ((2 * inner, hidden), (hidden, inner))]
    linears = [
        [
            TritonQuantizedLinear([form.to(torch.device(device))], None, torch.float32, batch_invariant=False)
            for form in part
        ]
        for part in forms
    ]
    packed = experts.pack(*linears)
    assert isinstance(packed, TritonExperts)
    x, residual = torch.randn(rows, hidden), torch.randn(rows, hidden)
    routing = draw_routing(rows, num_experts, top_k, torch.float32)
    y = packed(x.to(device), Routing(*(part.to(device) for part in routing)), residual.to(device)).cpu()
    dense = [torch.stack([form.dequantized() for form in part]) for part in forms]
    assert (y - define(x, routing, *dense, residual)).abs().max() < TOLERANCE[torch.float32]
