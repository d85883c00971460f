"""Short convolutions and gated delta nets in Triton against their definitions in float64; in the interpreter if there
is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from outrider.kernels import delta_net as net_package
from outrider.kernels import short_convolution as conv_package
from outrider.kernels.delta_net import triton as net_kernels
from outrider.kernels.state_plan import MAX_TOKENS

from ..pairwise import pairwise
from .state_cases import MORE_ROWS, ROWS, Rows, conv_definition, make_conv, make_net, net_definition

# Results are rounded once, to 2^-12 or 2^-9 of numbers up to about 8; sums of float32 are much nearer.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
PASSES = ROWS | MORE_ROWS


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in Triton all that a GPU would, in the interpreter if there is no GPU."""
    for module in (net_package, conv_package):
        monkeypatch.setattr(module, "use_triton", lambda x: True)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "is_kimi"), pairwise(PASSES, TOLERANCE, [(2, 4, 12, 10), (1, 2, 72, 40)], [False, True])
)
def test_delta_net(name, shape, dtype, is_kimi, device):
    check_net(PASSES[name], shape, dtype, device, is_kimi)


def check_net(
    rows: Rows, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, is_kimi: bool = False
) -> None:
    case = make_net(rows, shape, dtype, torch.device(device), is_kimi=is_kimi)
    is_long = max(rows.lens) > MAX_TOKENS
    assert net_kernels.serves(case.plan, is_kimi, case.states) == (not is_kimi or not is_long)
    expected, states = net_definition(case, rows)
    out = net_package.delta_net(*case)
    assert out.dtype == dtype
    torch.testing.assert_close(out.cpu().double(), expected.cpu(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(case.states.double(), states, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("key_dim", [130, 200])
def test_keys_of_several_pieces(key_dim, device):
    """A long row among decodes, whose state is carried in three or four pieces."""
    check_net(Rows([1, 66], [4, 0], [[(1, 5)], [(65, 1), (66, 2)]]), (1, 2, key_dim, 8), torch.float32, device)


def test_equal_keys_without_decays(device):
    """Powers of the triangular system would overflow."""
    rows = MORE_ROWS["mixed"]
    case = make_net(rows, (1, 2, 12, 10), torch.float32, torch.device(device))
    case.inputs.mixed[:, 12:24] = 1.0
    case.inputs.beta[:] = 20.0
    case.inputs.decay[:] = -40.0
    expected, states = net_definition(case, rows)
    torch.testing.assert_close(net_package.delta_net(*case).double(), expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(case.states.double(), states, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype", "filters"), pairwise(ROWS, TOLERANCE, [(7, 2, True, False), (300, 4, False, True)])
)
def test_convolution(name, filters, dtype, device):
    rows, (channels, kernel, bias, silu) = ROWS[name], filters
    case = make_conv(rows, channels, kernel, dtype, bias=bias, device=torch.device(device))
    expected, states = conv_definition(case, rows, silu=silu)
    out = conv_package.short_convolution(*case, silu=silu)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(case.states, states)  # copies
