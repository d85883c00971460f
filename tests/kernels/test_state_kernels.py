"""Short convolutions and gated delta nets, on a CPU and in PyTorch, against their definitions in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from outrider.kernels.delta_net import native as net_native
from outrider.kernels.delta_net import torch as net_torch
from outrider.kernels.short_convolution import native as conv_native
from outrider.kernels.short_convolution import torch as conv_torch

from ..pairwise import pairwise
from .avx2_library import MACHINES, use_kernels
from .state_cases import ROWS, Rows, conv_definition, make_conv, make_net, net_definition

DTYPES = [torch.float32, torch.bfloat16]
# Results are rounded once, to 2^-9 of numbers up to about 8; sums of float32 are much nearer.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}
SHAPES = [(2, 4, 12, 10), (1, 1, 16, 16), (2, 2, 128, 128), (1, 3, 40, 72)]


@pytest.fixture(params=[*MACHINES, "torch"])
def net(request: pytest.FixtureRequest, tmp_path) -> Iterator:
    """Delta net of one kind."""
    if request.param == "torch":
        yield net_torch.delta_net
    else:
        with use_kernels(net_native, request.param, tmp_path):
            yield net_native.delta_net


@pytest.fixture(params=[*MACHINES, "torch"])
def convolution(request: pytest.FixtureRequest, tmp_path) -> Iterator:
    """Short convolution of one kind."""
    if request.param == "torch":
        yield conv_torch.short_convolution
    else:
        with use_kernels(conv_native, request.param, tmp_path):
            yield conv_native.short_convolution


@pytest.mark.parametrize(("name", "shape", "dtype", "is_kimi"), pairwise(ROWS, SHAPES, DTYPES, [False, True]))
def test_delta_net(net, name, shape, dtype, is_kimi):
    rows = ROWS[name]
    case = make_net(rows, shape, dtype, is_kimi=is_kimi)
    expected, states = net_definition(case, rows)
    out = net(*case)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(case.states.double(), states, atol=1e-5, rtol=1e-5)


def test_states_that_no_row_writes_are_untouched(net):
    rows = ROWS["verification"]
    case = make_net(rows, (2, 4, 12, 10), torch.float32)
    before = case.states.clone()
    net(*case)
    changed = {slot for slot in range(len(before)) if not torch.equal(before[slot], case.states[slot])}
    assert changed == {slot for writes in rows.writes for _, slot in writes}


@pytest.mark.parametrize("is_kimi", [False, True])
def test_strong_decays_leave_no_nan(net, is_kimi):
    rows = ROWS["chunks"]
    case = make_net(rows, (1, 2, 16, 16), torch.float32, is_kimi=is_kimi)
    case = case._replace(weights=case.weights._replace(rate=case.weights.rate + 500))
    case.inputs.decay[::3] = 30.0  # softplus is the number itself
    case.inputs.decay[1::3] = -100.0  # and 0
    expected, states = net_definition(case, rows)
    torch.testing.assert_close(net(*case).double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(case.states.double(), states, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "filters", "dtype", "silu"),
    pairwise(ROWS, [(7, 2, True), (300, 3, False), (600, 4, True)], DTYPES, [False, True]),
)
def test_convolution(convolution, name, filters, dtype, silu):
    rows, (channels, kernel, bias) = ROWS[name], filters
    case = make_conv(rows, channels, kernel, dtype, bias=bias)
    expected, states = conv_definition(case, rows, silu=silu)
    out = convolution(*case, silu=silu)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(case.states, states)  # copies


@pytest.mark.parametrize("is_kimi", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_batch(team, threads, is_kimi):
    if net_native._functions() is None:
        pytest.skip("no kernels")
    torch.set_num_threads(threads)
    rows = ROWS["chunks"]
    case = make_net(rows, (2, 4, 40, 72), torch.bfloat16, is_kimi=is_kimi)
    filters = make_conv(rows, 600, 4, torch.bfloat16, bias=True)
    before, history = case.states.clone(), filters.states.clone()
    out, y = net_native.delta_net(*case), conv_native.short_convolution(*filters, silu=True)
    first = 0
    for count, source, writes in zip(*rows, strict=True):
        alone, tokens = Rows([count], [source], [writes]), slice(first, first + count)
        inputs = type(case.inputs)(*(part[tokens] for part in case.inputs))
        states, kept = before.clone(), history.clone()
        assert torch.equal(net_native.delta_net(inputs, case.weights, alone.plan(3), states), out[tokens])
        x = filters.x[tokens]
        found = conv_native.short_convolution(x, filters.filters, alone.plan(3), kept, silu=True)
        assert torch.equal(found, y[tokens])
        for _, slot in writes:
            assert torch.equal(states[slot], case.states[slot])
            assert torch.equal(kept[slot], filters.states[slot])
        first += count
