"""Triton's product of up to 16 tokens with norm, bias, adapters, activation and residual: against float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from outrider.kernels.linear import device_few
from outrider.kernels.linear.device_few import FewRowsLinear
from outrider.kernels.lora.groups import FEW_TOKENS, GroupBuffer, RowGroups, Segment
from outrider.kernels.rms_norm import prepare

from ..pairwise import pairwise
from .compile_keys import recorded_keys
from .test_triton_lora import Pool

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}
"""Largest error as a part of the largest result."""
EPS = 1e-5
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh")}


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request: pytest.FixtureRequest, device: str) -> torch.dtype:
    if request.param == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter's products of bfloat16 are wrong")
    return request.param


class Case(NamedTuple):
    """A weight of some slices, and what is around its product."""

    sizes: Sequence[int]
    inputs: int
    has_norm: bool = False
    activation: str = ""
    has_bias: bool = True
    has_residual: bool = True


CASES = {
    "one": Case([1], 1),
    "plain": Case([64], 256, has_bias=False, has_residual=False),
    "odd": Case([33], 70, has_norm=True),
    "slices": Case([40, 7, 33], 300, has_norm=True, has_residual=False),
    "parts": Case([70, 20], 1100, has_norm=True),
    "even parts": Case([96], 2048, has_bias=False),
    "silu": Case([32, 32], 256, has_norm=True, activation="silu", has_bias=False, has_residual=False),
    "gelu in parts": Case([50, 50], 1100, has_norm=True, activation="gelu"),
    "tanh of one slice": Case([70], 130, activation="gelu_pytorch_tanh"),
}


class Product:
    """A case with numbers."""

    def __init__(self, case: Case, dtype: torch.dtype, device: str) -> None:
        torch.manual_seed(len(case.sizes) + case.inputs)
        outputs = sum(case.sizes)
        self.case, self.dtype, self.device = case, dtype, device
        self.weight = torch.randn(outputs, case.inputs).mul(case.inputs**-0.5).to(device, dtype)
        self.bias = torch.randn(outputs).to(device, dtype) if case.has_bias else None
        self.factors = torch.rand(case.inputs).add(0.5)
        self.norm = prepare(self.factors.to(device), EPS) if case.has_norm else None
        self.linear = FewRowsLinear(self.weight, self.bias, case.sizes)

    def inputs(self, rows: int) -> tuple[Tensor, Tensor | None]:
        """x and a residual, of rows that lie apart."""
        width = sum(self.case.sizes) // (2 if self.case.activation else 1)
        x = torch.randn(rows, self.case.inputs + 3).mul(3).to(self.device, self.dtype)[:, : self.case.inputs]
        residual = torch.randn(rows, width + 5).to(self.device, self.dtype)[:, :width]
        return x, residual if self.case.has_residual else None

    def expected(self, x: Tensor, residual: Tensor | None, pool: Pool | None, segments: Sequence[Segment]) -> Tensor:
        """In float64."""
        wide = x.double().cpu()
        if self.case.has_norm:
            wide = wide / (wide.square().mean(1, keepdim=True) + EPS).sqrt() * self.factors.double()
        y = wide @ self.weight.double().cpu().t()
        y += 0 if self.bias is None else self.bias.double().cpu()
        for start, stop, rows in segments:
            assert pool is not None
            begin = 0
            for part, size in enumerate(pool.sizes):
                own = [row for row in rows if pool.live[row, part]]
                a, b = pool.a[own, part].double().cpu(), pool.b[own, begin : begin + size].double().cpu()
                y[start:stop, begin : begin + size] += wide[start:stop] @ a.t() @ b
                begin += size
        if self.case.activation:
            gate, up = y.chunk(2, 1)
            y = ACTIVATIONS[self.case.activation](gate) * up
        return y if residual is None else y + residual.double().cpu()

    def check(
        self, rows: int, pool: Pool | None = None, segments: Sequence[Segment] = (), groups: RowGroups | None = None
    ) -> None:
        """Compare the product of `rows` tokens with float64; `groups` of a captured graph are of its buffer."""
        x, residual = self.inputs(rows)
        expansion = None
        if pool is not None:
            groups = groups or RowGroups(segments, rows, pool.device)
            assert groups.is_few
            expansion = pool.kernel().expansion(x, groups, self.norm)
            assert (expansion is None) == (not segments and not groups.replayable)
        y = self.linear(x, norm=self.norm, activation=self.case.activation, residual=residual, expansion=expansion)
        assert y.dtype == self.dtype
        expected = self.expected(x, residual, pool, segments)
        torch.testing.assert_close(
            y.double().cpu(), expected, rtol=0, atol=TOLERANCE[self.dtype] * float(expected.abs().amax())
        )


@pytest.mark.parametrize("name", CASES)
def test_products_of_every_number_of_tokens(name: str, dtype: torch.dtype, device: str) -> None:
    product = Product(CASES[name], dtype, device)
    for rows in range(1, FEW_TOKENS + 1) if name in ("odd", "parts") else (1, 3, 16):
        product.check(rows)


def make_pool(product: Product, num_rows: int) -> Pool:
    """Rank rows, some of which have no weights in a slice: what is stored there must not be read."""
    pool = Pool(num_rows, product.case.inputs, product.case.sizes, product.dtype, product.device)
    pool.live[torch.rand(pool.live.shape) < 0.25] = 0
    begin = 0
    for part, size in enumerate(pool.sizes):
        dead = pool.live[:, part] == 0
        pool.a[dead, part] = torch.nan
        pool.b[dead, begin : begin + size] = torch.nan
        begin += size
    return pool


MIXES: dict[str, tuple[int, list[Segment]]] = {
    "one token": (1, [(0, 1, range(3, 11))]),
    "one adapter": (16, [(0, 16, range(64))]),
    "one each": (16, [(token, token + 1, range(16 * token, 16 * token + 8 + token // 2)) for token in range(16)]),
    "ragged": (
        13,
        [
            (0, 1, range(40, 104)),
            (2, 5, [1, 4, 6, 30]),
            (5, 6, range(110, 127)),
            (7, 8, range(40, 104)),
            (9, 12, [200]),
        ],
    ),
    "none": (5, []),
}


ADAPTED = ["plain", "slices", "parts", "silu", "gelu in parts", "tanh of one slice"]


@pytest.mark.parametrize(
    ("name", "mix", "dtype"),
    [
        *pairwise(ADAPTED, MIXES, [torch.float32, torch.float16]),
        *((name, "ragged", torch.bfloat16) for name in ADAPTED),
    ],
    indirect=["dtype"],
)
def test_adapters(name: str, mix: str, dtype: torch.dtype, device: str) -> None:
    """Several adapters among the tokens, tokens without one, an adapter in two runs, ranks 1 to 64."""
    product = Product(CASES[name], dtype, device)
    rows, segments = MIXES[mix]
    product.check(rows, make_pool(product, 260), segments)


def test_values_that_no_shrink_has_written_are_not_read(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without weights in a slice have none."""
    product = Product(CASES["slices"], torch.float32, device)
    pool = make_pool(product, 40)
    pool.live[3:30, 1] = 0
    empty = torch.empty

    def unwritten(*shape: int, **options: torch.dtype) -> Tensor:
        made = empty(*shape, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", unwritten)
    product.check(4, pool, [(1, 2, range(3, 30)), (3, 4, [35])])


@pytest.mark.parametrize("name", ["slices", "silu"])
def test_a_graph_of_more_tokens_serves_a_step(name: str, device: str) -> None:
    """Tokens beyond the step's have no adapter, whatever an earlier step has left in the buffer."""
    product = Product(CASES[name], torch.float32, device)
    pool = make_pool(product, 260)
    buffer = GroupBuffer(260, 64, pool.device)
    for mix in ("one each", "ragged", "none", "one token"):
        num_tokens, segments = MIXES[mix]
        groups = RowGroups(segments, num_tokens, pool.device, buffer)
        assert groups.replayable
        product.check(num_tokens, pool, segments, groups)
        larger = RowGroups(segments, FEW_TOKENS, pool.device, buffer)  # as captured; the array is the same
        assert torch.equal(larger.data, groups.data)
        product.check(FEW_TOKENS, pool, segments, larger)


def test_steps_that_are_not_listed(device: str) -> None:
    """Too many tokens, and steps whose results must not depend on others."""
    place = torch.device(device)
    assert RowGroups([(0, 1, [2])], FEW_TOKENS, place).is_few
    assert not RowGroups([(0, 1, [2])], FEW_TOKENS + 1, place).is_few
    assert not RowGroups([(0, 1, [2])], FEW_TOKENS, place, invariant=True).is_few


@pytest.mark.parametrize("has_adapters", [False, True])
def test_products_with_large_norms_do_not_overflow(has_adapters: bool, device: str) -> None:
    """Inputs near the largest float16, times weights of 100: only what a norm divides may be large."""
    product = Product(Case([40], 96, has_norm=True), torch.float16, device)
    product.factors = torch.linspace(0.1, 100, 96)
    product.norm = prepare(product.factors.to(device), EPS)
    plain = product.inputs
    product.inputs = lambda rows: (plain(rows)[0] * 4000, plain(rows)[1])  # type: ignore[method-assign]
    assert product.inputs(9)[0].isfinite().all()
    product.check(9, *((make_pool(product, 130), [(1, 4, range(20)), (5, 6, range(30, 39))]) if has_adapters else ()))


@pytest.mark.parametrize("peak", [1e-4, 1.0, 1.5, 300.0])
def test_the_unit_of_a_norm(peak: float) -> None:
    weight = prepare(torch.tensor([0.0, -peak, peak / 3]), EPS)
    assert 0.5 <= float(weight.scale.abs().max()) * weight.unit <= 1
    assert prepare(torch.tensor([torch.inf, 1.0]), EPS).unit == 1.0


def test_numbers_of_tokens_and_adapters_do_not_specialise_kernels(device: str) -> None:
    """A GPU would compile another kernel in the step that needs it."""
    product = Product(CASES["parts"], torch.float32, device)
    pool = make_pool(product, 260)
    kinds = []
    for rows in range(1, FEW_TOKENS + 1):
        segments = [(token, token + 1, range(16 * token, 16 * token + rows)) for token in range(rows)]
        with recorded_keys() as keys:
            expansion = pool.kernel().expansion(product.inputs(rows)[0], RowGroups(segments, rows, pool.device), None)
            product.linear(product.inputs(rows)[0], expansion=expansion)
            product.linear(product.inputs(rows)[0], norm=product.norm)
        kinds.append(keys)
    assert kinds[0].keys() == {"shrink_kernel", "few_rows_kernel"}
    assert all(keys == kinds[0] for keys in kinds)


def test_calls_leave_the_counts_of_programs_at_zero(device: str) -> None:
    product = Product(CASES["parts"], torch.float32, device)
    for _ in range(2):
        product.check(4)
        assert not product.linear._arrivals.any()


class Trial:
    """Times that a test decides, by the number of tokens and whose product it is."""

    def __init__(self, slower_from: int) -> None:
        self._slower_from = slower_from
        self.calls = 0

    def __call__(self, work) -> float:  # type: ignore[no-untyped-def]
        self.calls += 1
        rows = len(work())
        is_ours = isinstance(work.func, FewRowsLinear)
        return 2.0 if is_ours and rows >= self._slower_from else 1.0 if not is_ours else 0.9


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_few, "_tried", {})


@pytest.mark.parametrize(("slower_from", "most"), [(1, 0), (2, 1), (9, 8), (17, 16)])
def test_a_trial_of_a_shape(slower_from: int, most: int, device: str, untried: None) -> None:
    weight, trial = torch.randn(40, 64, device=device), Trial(slower_from)
    assert device_few.tried_rows(weight, trial) == most
    calls = trial.calls
    assert device_few.tried_rows(weight + 1, trial) == most
    assert trial.calls == calls  # kept
    device_few.tried_rows(weight[:8].contiguous(), trial)
    assert trial.calls > calls


def test_a_wrong_product_is_not_used(
    device: str, untried: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    product = FewRowsLinear.__call__
    monkeypatch.setattr(FewRowsLinear, "__call__", lambda self, x, **options: product(self, x, **options) * 1.01)
    assert device_few.tried_rows(torch.randn(40, 64, device=device), Trial(17)) == 0
    assert "wrong for 40x64" in caplog.text


def test_a_product_that_fails_is_not_used(
    device: str, untried: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: FewRowsLinear, x: Tensor, **options: object) -> Tensor:
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(FewRowsLinear, "__call__", fail)
    assert device_few.tried_rows(torch.randn(40, 64, device=device), Trial(17)) == 0
    assert "out of shared memory" in caplog.text
