"""Short convolutions and gated delta nets in Triton against their definitions in float64; in the interpreter if there
is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from outrider.kernels import delta_net as net_package
from outrider.kernels import short_convolution as conv_package
from outrider.kernels.delta_net import triton as net_kernels

from .state_cases import ROWS, Rows, conv_definition, make_conv, make_net, net_definition

DTYPES = [torch.float32, torch.bfloat16]
# Results are rounded once, to 2^-9 of numbers up to about 8; sums of float32 are much nearer.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}
# The last row starts at slot 0, writes a length to two slots and does not write its first ones.
SHORT = {name: ROWS[name] for name in ("decode", "decodes", "verification")} | {
    "chunk": Rows([2, 20], [4, 0], [[(2, 5)], [(17, 2), (20, 3), (20, 1)]])
}


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would do in Triton is done in Triton, in the interpreter if need be."""
    for module in (net_package, conv_package):
        monkeypatch.setattr(module, "use_triton", lambda x: True)


@pytest.mark.parametrize("is_kimi", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 4, 12, 10), (1, 2, 32, 40)])
@pytest.mark.parametrize("name", SHORT)
def test_delta_net(name, shape, dtype, is_kimi, device):
    rows = SHORT[name]
    case = make_net(rows, shape, dtype, torch.device(device), is_kimi=is_kimi)
    assert net_kernels.serves(case.plan, case.states)
    expected, states = net_definition(case, rows)
    out = net_package.delta_net(*case)
    assert out.dtype == dtype
    torch.testing.assert_close(out.cpu().double(), expected.cpu(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(case.states.double(), states, atol=1e-5, rtol=1e-5)


def test_long_rows_are_computed_in_chunks_by_torch(device):
    rows = ROWS["chunks"]
    case = make_net(rows, (2, 4, 12, 10), torch.float32, torch.device(device))
    assert not net_kernels.serves(case.plan, case.states)
    expected, states = net_definition(case, rows)
    torch.testing.assert_close(net_package.delta_net(*case).double(), expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(case.states.double(), states, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "kernel", "bias", "silu"), [(7, 2, True, False), (300, 4, False, True)])
@pytest.mark.parametrize("name", ROWS)
def test_convolution(name, channels, kernel, bias, silu, dtype, device):
    rows = ROWS[name]
    case = make_conv(rows, channels, kernel, dtype, bias=bias, device=torch.device(device))
    expected, states = conv_definition(case, rows, silu=silu)
    out = conv_package.short_convolution(*case, silu=silu)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(case.states, states)  # copies
