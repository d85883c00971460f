"""Mamba-2's recurrence in Triton against its definition in float64; in the interpreter if there is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from outrider.kernels import mamba2 as package
from outrider.kernels.mamba2 import triton as kernels

from ..pairwise import pairwise
from .mamba_cases import NORMS, make_mixer, mixer_definition
from .state_cases import MORE_ROWS, ROWS, Rows

# Results are rounded once, to 2^-12 or 2^-9 of numbers up to about 8; sums of float32 are much nearer.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
PASSES = ROWS | MORE_ROWS


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in Triton all that a GPU would, in the interpreter if there is no GPU."""
    monkeypatch.setattr(package, "use_triton", lambda x: True)


def compare(rows: Rows, shape, dtype, norm, device) -> None:
    case = make_mixer(rows, shape, dtype, norm, torch.device(device))
    assert kernels.serves(case.states)
    expected, states = mixer_definition(case, rows)
    out = package.mamba2(*case)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(case.states.double(), states, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "dtype", "shape"), pairwise(PASSES, TOLERANCE, [(2, 4, 10, 12), (1, 2, 32, 40)]))
def test_mamba2(name, shape, dtype, device):
    compare(PASSES[name], shape, dtype, "after_gate", device)


@pytest.mark.parametrize("norm", NORMS)
def test_norms(norm, device):
    compare(PASSES["short"], (2, 4, 16, 24), torch.float32, norm, device)


def test_large_states_are_not_served():
    assert not kernels.serves(torch.empty(0, 1, 512, 16))
