"""Mamba-2's recurrence, on a CPU and in PyTorch, against its definition in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from outrider.kernels.mamba2 import native
from outrider.kernels.mamba2 import torch as reference

from ..pairwise import pairwise
from .avx2_library import MACHINES, use_kernels
from .mamba_cases import NORMS, make_mixer, mixer_definition
from .state_cases import ROWS, Rows

# Results are rounded once, to 2^-9 of numbers up to about 8; sums of float32 are much nearer.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}
SHAPES = [(3, 6, 10, 12), (1, 1, 16, 16), (2, 4, 128, 64), (1, 3, 40, 72)]
SMALL = SHAPES[0]


@pytest.fixture(params=[*MACHINES, "torch"])
def mamba2(request: pytest.FixtureRequest, tmp_path) -> Iterator:
    """Recurrence of one kind."""
    if request.param == "torch":
        yield reference.mamba2
    else:
        with use_kernels(native, request.param, tmp_path):
            yield native.mamba2


def compare(mamba2, case, rows: Rows, dtype: torch.dtype) -> None:
    expected, states = mixer_definition(case, rows)
    out = mamba2(*case)
    assert out.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(case.states.double(), states, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "shape", "dtype"), pairwise(ROWS, SHAPES, TOLERANCE))
def test_mamba2(mamba2, name, shape, dtype):
    compare(mamba2, make_mixer(ROWS[name], shape, dtype), ROWS[name], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norm", NORMS)
def test_norms(mamba2, norm, dtype):
    compare(mamba2, make_mixer(ROWS["verification"], SMALL, dtype, norm), ROWS["verification"], dtype)


def test_states_that_no_row_writes_are_untouched(mamba2):
    rows = ROWS["verification"]
    case = make_mixer(rows, SMALL, torch.float32)
    before = case.states.clone()
    mamba2(*case)
    changed = {slot for slot in range(len(before)) if not torch.equal(before[slot], case.states[slot])}
    assert changed == {slot for writes in rows.writes for _, slot in writes}


def test_strong_decays_leave_no_nan(mamba2):
    rows = ROWS["chunks"]
    case = make_mixer(rows, SMALL, torch.float32)
    weights = case.weights._replace(rate=case.weights.rate - 500, limits=(0.0, float("inf")))
    case.inputs.step[::3] = 30.0  # softplus is the number itself
    case.inputs.step[1::3] = -90.0  # dt is 0: the state stays
    compare(mamba2, case._replace(weights=weights), rows, torch.float32)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_batch(team, threads):
    if native._functions() is None:
        pytest.skip("no kernels")
    torch.set_num_threads(threads)
    rows = ROWS["chunks"]
    case = make_mixer(rows, (2, 4, 40, 72), torch.bfloat16)
    before = case.states.clone()
    out, first = native.mamba2(*case), 0
    for count, source, writes in zip(*rows, strict=True):
        alone, tokens, states = Rows([count], [source], [writes]), slice(first, first + count), before.clone()
        inputs = type(case.inputs)(*(part[tokens] for part in case.inputs))
        assert torch.equal(native.mamba2(inputs, case.weights, alone.plan(3), states), out[tokens])
        for _, slot in writes:
            assert torch.equal(states[slot], case.states[slot])
        first += count
