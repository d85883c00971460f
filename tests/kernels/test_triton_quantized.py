"""Triton's products with quantised weights against float64: forms, tails, parts, and bits whatever the other rows."""

from __future__ import annotations

import importlib
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from outrider.kernels.quantized_linear import QuantizedWeight, device_linear
from outrider.kernels.quantized_linear.device_linear import (
    DENSE_TOKENS,
    TritonQuantizedLinear,
    is_served,
    num_parts,
    shape_of,
)
from outrider.kernels.quantized_linear.device_weight import join
from outrider.kernels.quantized_linear.triton import default_config
from outrider.kernels.tuning import Configs, using

# Share of the largest result: sums in another order; scales, and results, of 11 or 8 bits.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
KINDS = ("int4", "centred", "channel4", "nf4", "ordered", "int8", "grouped8", "unsigned8", "levels8", "fp8", "block8")


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request: pytest.FixtureRequest, device: str) -> torch.dtype:
    if request.param == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter's products of bfloat16 are wrong")
    return request.param


def make(kind: str, outputs: int, inputs: int) -> QuantizedWeight:
    """Weight of a format's form, whose numbers are about 1."""
    bits = 8 if kind in ("int8", "grouped8", "unsigned8", "levels8", "fp8", "block8") else 4
    whole = kind in ("int8", "fp8", "channel4")
    group = inputs if whole else random.choice((16, 32, 48, 64, 128))
    shape = outputs, -(-inputs // group)
    scales = (0.1 + torch.rand(shape)) * 10.0 ** random.randint(-1, 0) / (1 << bits)
    codes = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8)
    weight = QuantizedWeight(bits=bits, codes=codes, scales=scales, group=group)
    if kind in ("int8", "grouped8"):
        return replace(weight, codes=codes.view(torch.int8))
    if kind in ("fp8", "block8"):  # with subnormals
        codes = (torch.randn(outputs, inputs) * 10.0 ** torch.randint(-3, 3, (outputs, inputs))).clamp(-448, 448)
        return replace(weight, codes=codes.to(torch.float8_e4m3fn))
    if kind == "centred":
        return replace(weight, offsets=-8 * scales)
    if kind in ("nf4", "levels8"):
        return replace(weight, levels=torch.linspace(-1, 1, 1 << bits) ** 3)
    weight = replace(weight, offsets=-torch.randint(0, 1 << bits, shape) * scales)
    return replace(weight, order=torch.randperm(inputs)) if kind == "ordered" else weight


def packed_on(
    device: str, dtype: torch.dtype, *blocks: QuantizedWeight, bias: Tensor | None = None, batch_invariant: bool = False
) -> TritonQuantizedLinear:
    assert is_served(blocks, dtype)
    moved = [
        replace(
            block,
            **{name: value.to(device) for name in block.__slots__ if isinstance(value := getattr(block, name), Tensor)},
        )
        for block in blocks
    ]
    bias = None if bias is None else bias.to(device)
    return TritonQuantizedLinear(moved, bias, dtype, batch_invariant=batch_invariant)


class Launches:
    """Kernel that writes down the programs of its launches."""

    def __init__(self, kernel: Any, grids: list[int]) -> None:
        self._kernel, self._grids = kernel, grids

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._grids.append(grid[0])
        return self._kernel[grid]


def check(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert (actual.double().cpu() - expected).abs().max() <= tolerance * expected.abs().max()


def with_programs(weight: QuantizedWeight, tile: int, dtype: torch.dtype, programs: int) -> Configs:
    """Configs that split the inputs until there is this number of programs."""
    (stored,) = join([weight], dtype)
    shape = shape_of(stored, tile, dtype.itemsize)
    return Configs({("quantized_linear", shape): replace(default_config(tile, *shape[3:]), programs=programs)})


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_every_form(kind: str, dtype: torch.dtype, device: str) -> None:
    """Rows, outputs and inputs with tails; groups longer and shorter than a block, and a shorter last one."""
    for rows, outputs, inputs in (
        (1, 70, 300),
        (random.randint(2, 16), random.randint(1, 60), random.randint(17, 500)),
    ):
        weight, bias = make(kind, outputs, inputs), torch.randn(outputs).to(dtype)
        packed = packed_on(device, dtype, weight, bias=bias)
        assert (packed.in_features, packed.out_features) == (inputs, outputs)
        x = torch.randn(rows, inputs).to(dtype)
        expected = x.double() @ weight.dequantized().double().t()
        check(packed.without_bias(x.to(device)), expected, TOLERANCE[dtype])
        residual = (torch.randn(rows, outputs) * expected.std()).to(dtype)
        check(packed(x.to(device), residual.to(device)), expected + bias.double() + residual, TOLERANCE[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_every_form(kind: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tokens, with the weight in the dtype of the product, a part of its rows at a time."""
    monkeypatch.setattr(device_linear, "_DENSE_NUMBERS", 40 * 300)
    rows, outputs, inputs = DENSE_TOKENS + 3, 50, 300
    weights = [make(kind, outputs, inputs) for _ in range(1 if kind == "ordered" else 2)]
    bias = torch.randn(outputs * len(weights)).to(dtype)
    packed = packed_on(device, dtype, *weights, bias=bias)
    x = torch.randn(rows, inputs).to(dtype)
    expected = x.double() @ torch.cat([weight.dequantized() for weight in weights]).double().t()
    check(packed.without_bias(x.to(device)), expected, TOLERANCE[dtype])
    check(packed(x.to(device)), expected + bias.double(), TOLERANCE[dtype])
    residual = (torch.randn(rows, outputs * len(weights)) * expected.std()).to(dtype)
    check(packed(x.to(device), residual.to(device)), expected + bias.double() + residual, TOLERANCE[dtype])


@pytest.mark.parametrize("kind", [*KINDS, "w8a8"])
def test_rows_of_the_weight(kind: str, device: str) -> None:
    if kind == "w8a8":
        weight = replace(make("int8", 20, 130), input_bits=8, offsets=torch.randn(20, 1))
    else:
        weight = make(kind, 20, 130)
    ids = torch.tensor([3, 19, 3])
    expected = weight.dequantized()[ids].double()
    check(packed_on(device, torch.float32, weight).rows(ids.to(device)), expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("rows", [17, 64, 65, 200])
def test_steps_of_more_rows(rows: int, device: str) -> None:
    weight = make("int4", 50, 130)
    packed = packed_on(device, torch.float16, weight)
    x = torch.randn(rows, 130).half()
    wide = torch.zeros(rows, 200).half()
    wide[:, 50:180] = x
    expected = x.double() @ weight.dequantized().double().t()
    check(packed(wide.to(device)[:, 50:180]), expected, TOLERANCE[torch.float16])


@pytest.mark.parametrize("kind", ["int4", "int8", "w8a8"])
def test_parts_of_the_inputs_are_added_in_order(kind: str, device: str) -> None:
    weight = replace(make("int8", 40, 1100), input_bits=8) if kind == "w8a8" else make(kind, 40, 1100)
    bias, x, residual = torch.randn(40), torch.randn(5, 1100).to(device), torch.randn(5, 40).to(device)
    packed = packed_on(device, torch.float32, weight, bias=bias)
    whole, split = (with_programs(weight, 8, torch.float32, programs) for programs in (1, 1024))
    with using(whole):
        expected = packed(x, residual)
    with using(split):
        y = packed(x, residual)
        assert torch.equal(packed(x, residual), y)
    check(y, expected.double().cpu(), TOLERANCE[torch.float32])
    assert not torch.equal(y, expected) or kind == "w8a8"  # otherwise nothing was split


@pytest.mark.parametrize(("rows", "tile"), [(1, 8), (30, 32), (130, 128)])
def test_parts_are_one_launch_and_leave_no_trace(
    rows: int, tile: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last program of a block and a tile adds the parts; the next launch counts from zero again."""
    weight, bias = make("int4", 150, 1100), torch.randn(150).half()
    packed = packed_on(device, torch.float16, weight, bias=bias)
    x, grids, kernel = torch.randn(rows, 1100).half(), [], device_linear.product_kernel
    with monkeypatch.context() as patch:
        patch.setattr(device_linear, "product_kernel", Launches(kernel, grids))
        with using(with_programs(weight, tile, torch.float16, 4096)):
            y = packed(x.to(device))
            assert torch.equal(packed(x.to(device)), y)
    check(y, x.double() @ weight.dequantized().double().t() + bias.double(), TOLERANCE[torch.float16])
    blocks = -(-150 // default_config(tile, 4, 2).block_o) * -(-rows // tile)
    assert grids == [grids[0]] * 2
    assert grids[0] >= 2 * blocks  # otherwise nothing was split
    assert not packed.device_weights[0].arrivals.any()


@pytest.mark.parametrize(
    ("outputs", "inputs", "tile", "expected"),
    [
        (28672, 4096, 64, 1),  # the sums of 7 parts, which would fill each round, are 103 MB; the codes 59
        (28672, 4096, 8, 2),  # 896 programs alone leave more than half of the device idle
        (4096, 4096, 8, 8),
        (4096, 4096, 64, 5),  # 8 fill the device better, and have 17 MB of sums, twice the codes
        (4096, 14336, 64, 7),
    ],
)
def test_parts_are_worth_their_sums(outputs: int, inputs: int, tile: int, expected: int) -> None:
    (small,) = join([make("int4", 16, 256)], torch.bfloat16)
    stored = replace(small, codes=torch.empty(outputs, inputs // 2, dtype=torch.uint8, device="meta"), inputs=inputs)
    assert num_parts(stored, default_config(tile, 4, 2), tile) == expected


@pytest.mark.parametrize(("kind", "inputs"), [("int4", 8512), ("block8", 4256)])
def test_parts_without_inputs_read_no_scales(
    kind: str, inputs: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """34 blocks of a row are divided among 16 parts, of which the last are empty."""
    if device != "cpu":
        pytest.skip("only the interpreter shows the addresses that are read")
    interpreter = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    weight = replace(make("int8" if kind == "block8" else kind, 40, inputs), group=128)
    weight = replace(weight, scales=torch.rand(40, -(-inputs // 128)), offsets=None)
    packed = packed_on(device, torch.float16, weight)
    (stored,) = packed.device_weights
    assert stored.scales is not None
    wider = torch.cat([stored.scales, torch.zeros(100, 40).half()])
    packed.device_weights = [replace(stored, scales=wider[: len(stored.scales)])]
    ends = [wider.data_ptr() + 80 * rows for rows in (len(stored.scales), len(wider))]
    load, read = interpreter.create_masked_load, []

    def watched(ptrs: Any, mask: Any, *rest: Any) -> Any:
        read.append(((ptrs.data >= ends[0]) & (ptrs.data < ends[1]) & mask.data).any())
        return load(ptrs, mask, *rest)

    monkeypatch.setattr(interpreter, "create_masked_load", watched)
    with using(with_programs(weight, 8, torch.float16, 1024)):
        packed(torch.ones(1, inputs).half())
    assert read
    assert not any(read)


@pytest.mark.parametrize("kind", ["int4", "nf4", "block8", "w8a8"])
def test_a_row_does_not_depend_on_others(kind: str, device: str) -> None:
    weight = replace(make("int8", 40, 900), input_bits=8) if kind == "w8a8" else make(kind, 40, 900)
    packed = packed_on(device, torch.float16, weight, bias=torch.randn(40), batch_invariant=True)
    x, residual = torch.randn(150, 900).half().to(device), torch.randn(150, 40).half().to(device)
    y = packed(x, residual)
    # The interpreter's sums depend on a token's place in its tile, those of a GPU do not.
    tile, anywhere = 32, [slice(149, 150), slice(3, 20), slice(60, 130)]
    for rows in anywhere if device == "cuda" else [slice(0, 1), slice(0, 20), slice(tile, tile + 7), slice(tile, 150)]:
        assert torch.equal(packed(x[rows], residual[rows]), y[rows])


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # a NaN, of the interpreter
def test_rounded_inputs(device: str) -> None:
    """W8A8: exact integer products; a row of zeros is zeros, and one with a NaN is NaN."""
    weight = replace(make("int8", 30, 700), input_bits=8, offsets=torch.randn(30, 1))
    x = torch.randn(4, 700)
    x[1] = 0
    x[2] *= 1e-20
    scales = x.abs().amax(1, keepdim=True) / 127
    codes = torch.where(scales > 0, x / scales, 0.0).round().double()
    product = codes @ weight.codes.double().t() * weight.scales[:, 0].double()
    expected = (product + codes.sum(1, keepdim=True) * weight.offsets[:, 0].double()) * scales.double()
    y = packed_on(device, torch.float32, weight)(x.to(device))
    for row in range(4):
        check(y[row], expected[row], TOLERANCE[torch.float32])
    x[3, 5] = torch.nan
    assert packed_on(device, torch.float32, weight)(x.to(device))[3].isnan().all()


def test_blocks_of_one_form_are_one_weight(device: str) -> None:
    a, b = make("centred", 20, 128), make("centred", 12, 128)
    b = replace(b, group=a.group, scales=torch.rand(12, a.scales.shape[1]))
    b = replace(b, offsets=-8 * b.scales)
    other = make("fp8", 7, 128)
    packed = packed_on(device, torch.float16, a, b, other, bias=torch.ones(39))
    assert [weight.outputs for weight in packed.device_weights] == [32, 7]
    x = torch.randn(3, 128).half()
    for part, columns in ((a, slice(0, 20)), (b, slice(20, 32)), (other, slice(32, 39))):
        expected = x.double() @ part.dequantized().double().t() + 1
        check(packed(x.to(device))[:, columns], expected, TOLERANCE[torch.float16])
    ordered = replace(a, order=torch.randperm(128))
    assert len(packed_on(device, torch.float16, ordered, replace(b, order=ordered.order)).device_weights) == 1
    assert len(packed_on(device, torch.float16, ordered, replace(b, order=torch.randperm(128))).device_weights) == 2


def test_ends_of_the_range(device: str) -> None:
    """Rows of zeros, of one number, and of numbers that float16 does not hold."""
    weight = make("int4", 5, 64)
    scales = torch.full_like(weight.scales, 1e-12)
    scales[1], scales[2], scales[3] = 0, 1e-9, 1e4
    offsets = -3 * scales
    offsets[2] = 7.0
    weight = replace(weight, scales=scales, offsets=offsets)
    packed, x = packed_on(device, torch.float16, weight), torch.rand(2, 64).half() * 1e-3
    expected, y = x.double() @ weight.dequantized().double().t(), packed(x.to(device))
    assert not y[:, 1].any()
    for row in (2, 3):
        check(y[:, row], expected[:, row], TOLERANCE[torch.float16])


def test_packed_bytes_and_unsupported_shapes(device: str) -> None:
    weight = make("centred", 256, 1024)
    weight = replace(weight, group=128, scales=torch.rand(256, 8))
    weight = replace(weight, offsets=-8 * weight.scales)
    packed = packed_on(device, torch.float16, weight)
    assert packed.num_bytes == 256 * 1024 // 2 + 2 * 256 * 8 + 4 * 256 + 4 * 16
    assert packed(torch.empty(0, 1024, device=device).half()).shape == (0, 256)
    narrow = replace(weight, group=24, scales=torch.rand(256, 43), offsets=None)
    assert not is_served([weight, narrow], torch.float16)
    assert not is_served([weight], torch.float64)


def test_a_captured_graph_gives_the_same_bits(device: str) -> None:
    if device != "cuda":
        pytest.skip("graphs are of GPUs")
    packed = packed_on(device, torch.bfloat16, make("int4", 64, 2048), make("int8", 64, 2048), bias=torch.ones(128))
    x = torch.randn(8, 2048, device=device).bfloat16()
    expected = packed(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = packed(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, packed(x))
    assert not torch.equal(y, expected)
