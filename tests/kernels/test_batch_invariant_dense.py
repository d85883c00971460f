"""Products, norms and activations: a row's bits are those that it gets alone, in any batch and at any place."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.act_and_mul import act_and_mul, act_and_mul_invariant
from outrider.kernels.linear import invariant as kernel
from outrider.kernels.linear import trial
from outrider.kernels.linear.invariant import BASE, TILED_BASE, pack_invariant, product, trial_operands, trusted_sizes
from outrider.kernels.linear.pieces import pieces
from outrider.kernels.linear.torch import pack
from outrider.kernels.lora import expand_invariant, shrink_expand, shrink_expand_invariant
from outrider.kernels.native.tiles import NOTHING
from outrider.kernels.rms_norm import prepare, rms_norm, rms_norm_invariant
from outrider.kernels.rope import apply_rope, apply_rope_invariant

DTYPES = [torch.bfloat16, torch.float32]
# (in, out): tails everywhere, the demo's, and sums so long that libraries divide them differently.
SHAPES = [(48, 33), (256, 512), (2048, 512), (4864, 96), (1000, 77), (7, 5), (1, 3)]


def rows_alone(op, *inputs: Tensor) -> Tensor:
    return torch.cat([op(*(x[i : i + 1].clone() for x in inputs)) for i in range(inputs[0].shape[0])])


def check_rows(op, *inputs: Tensor) -> None:
    """op's rows for batches of several sizes, in order and shuffled, against each row alone."""
    alone = rows_alone(op, *inputs)
    total = inputs[0].shape[0]
    generator = torch.Generator().manual_seed(0)
    for size in [*range(1, 10), 12, 13, *range(15, 18), 24, 31, 32, 33, 40, 63, 64, 65, 129, total]:
        order = torch.randperm(total, generator=generator)[:size]
        assert torch.equal(op(*(x[order] for x in inputs)), alone[order]), size
        assert torch.equal(op(*(x[:size] for x in inputs)), alone[:size]), size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_products(in_features: int, out_features: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    # Sums that cancel: what rounding to bfloat16 would hide of another order shows.
    x, weight = trial_operands((150, in_features), (out_features, in_features), generator)
    x, weight = x.to(dtype), weight.to(dtype)
    bias, residual = (torch.randn(n, generator=generator).to(dtype) for n in (out_features, 150 * out_features))
    residual = residual.view(150, out_features)
    check_rows(pack_invariant(weight), x)
    check_rows(pack_invariant(weight, bias), x, residual)
    check_rows(lambda x: product(x, weight), x)
    # and it is the product
    expected = x.double() @ weight.double().t()
    scale = (x.double().abs() @ weight.double().abs().t()).max()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(
        pack_invariant(weight)(x).double(), expected, atol=float(scale * tolerance), rtol=tolerance
    )


@given(num_rows=st.integers(0, 700), sizes=st.sets(st.integers(1, 300), min_size=1))
def test_pieces_cover_all_rows_in_sizes_that_are_allowed(num_rows: int, sizes: set[int]) -> None:
    cut = pieces(num_rows, tuple(sorted(sizes)))
    assert sum(count for count, _ in cut) == num_rows
    assert all(1 <= count <= size and size in sizes for count, size in cut)


class _Fickle:
    """A product whose every result depends on the number of rows, and optionally on the index."""

    def __init__(self, by_place: bool) -> None:
        self._by_place = by_place

    def __call__(self, weight: Tensor, bias: Tensor | None = None):
        packed = pack(weight, bias)

        class Packed:
            in_features, out_features, num_bytes = packed.in_features, packed.out_features, packed.num_bytes

            def __call__(_, x: Tensor, residual: Tensor | None = None) -> Tensor:
                y = packed(x, residual)
                if self._by_place:
                    return y * (1 + torch.arange(len(x))[:, None] / 8)
                return y * (1 + (len(x) > 1 and len(x) != 64 and len(x) != BASE) / 8)

        return Packed()


def test_sizes_that_differ_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    trusted_sizes.cache_clear()
    try:
        monkeypatch.setattr(kernel, "pack", _Fickle(by_place=False))
        assert set(trusted_sizes(32, 16, torch.float32, torch.device("cpu"), False, 1)) == {1, BASE, 64}
        x, weight = torch.randn(130, 32), torch.randn(16, 32)
        check_rows(pack_invariant(weight), x)
        trusted_sizes.cache_clear()
        monkeypatch.setattr(kernel, "pack", _Fickle(by_place=True))
        assert trusted_sizes(32, 16, torch.float32, torch.device("cpu"), False, 1) == (1,)
        check_rows(pack_invariant(weight), x)
    finally:
        trusted_sizes.cache_clear()


class _ByRows:
    """A product of a library with two kernels: one of few rows, and one of more, as oneDNN has for tiles.

    They differ in the order of the sum, or only in that the second rounds before it adds the residual.
    """

    def __init__(self, most: int, sums_pairs: bool) -> None:
        self._most, self._sums_pairs = most, sums_pairs

    def __call__(self, weight: Tensor, bias: Tensor | None = None):
        most, sums_pairs = self._most, self._sums_pairs

        class Packed:
            out_features, in_features = weight.shape
            num_bytes = weight.nbytes

            def __call__(_, x: Tensor, residual: Tensor | None = None) -> Tensor:
                terms = x.float()[:, None] * weight.float()
                if len(x) > most and sums_pairs:
                    terms = torch.cat([terms, terms.new_zeros(*terms.shape[:2], terms.shape[2] % 2)], 2)
                    terms = terms[..., ::2] + terms[..., 1::2]
                y = sum(terms.unbind(2), torch.zeros(terms.shape[:2]))
                y = y if bias is None else y + bias.float()
                if len(x) > most and not sums_pairs:
                    y = y.to(x.dtype).float()
                return (y if residual is None else y + residual.float()).to(x.dtype)

        return Packed()


@pytest.mark.parametrize("has_tiles", [False, True])
@pytest.mark.parametrize("sums_pairs", [False, True])
@pytest.mark.parametrize("most", [8, 13])
def test_a_library_with_other_kernels_for_more_rows(
    monkeypatch: pytest.MonkeyPatch, most: int, sums_pairs: bool, has_tiles: bool
) -> None:
    """As on a processor with tiles, on which no other sizes of 16-bit numbers are trusted than one."""
    monkeypatch.setattr(kernel, "pack", _ByRows(most, sums_pairs))
    monkeypatch.setattr(kernel, "has_tiles", lambda: has_tiles)
    trusted_sizes.cache_clear()
    try:
        generator = torch.Generator().manual_seed(most)
        x, weight, bias, residual = (
            torch.randn(shape, generator=generator) for shape in ((300, 7), (5, 7), 5, (300, 5))
        )
        residual[::2] = -bias
        x, weight, bias, residual = (t.bfloat16() for t in (x, weight, bias, residual))
        sizes = trusted_sizes(7, 5, torch.bfloat16, torch.device("cpu"), True, torch.get_num_threads())
        assert (sizes == (TILED_BASE,)) == has_tiles
        assert all(size <= most for size in sizes) or all(size > most for size in sizes)
        check_rows(pack_invariant(weight, bias), x, residual)
        check_rows(pack_invariant(weight), x)
    finally:
        trusted_sizes.cache_clear()


def test_native_product_works_without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives a row the same bits in any batch, which oneDNN does not promise."""
    monkeypatch.setattr(trial.tiles, "are_granted", lambda: True)
    monkeypatch.setattr(trial.tiles, "prepare", lambda: NOTHING)
    assert trial.prefers_native(64, 64, batch_invariant=True)
    assert not trial.prefers_native(64, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 100, 256, 777, 4096])
def test_norms(size: int, dtype: torch.dtype) -> None:
    x = (torch.randn(300, size) * torch.logspace(-3, 3, 300)[:, None]).to(dtype)
    weight = prepare(torch.rand(size), 1e-6)
    check_rows(lambda x: rms_norm_invariant(x, weight), x)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(rms_norm_invariant(x, weight), rms_norm(x, weight), atol=tolerance, rtol=tolerance)
    heads = x[:, : size // 4 * 4].view(300, 4, -1)[:, 1:3]  # as queries and keys come: a part of wider rows
    weight = prepare(torch.rand(2, size // 4), 1e-6)
    check_rows(lambda x: rms_norm_invariant(x, weight), heads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", [5, 96, 777, 1024, 5000, 40000])
def test_activations(size: int, threads: int, dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = (torch.randn(150, 2 * size) * 3).to(dtype)
        check_rows(act_and_mul_invariant, x)
        assert torch.allclose(act_and_mul_invariant(x).float(), act_and_mul(x).float(), rtol=1e-2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 6), (3, 32), (8, 80), (40, 128)])
def test_rotations(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(150, *shape).to(dtype)
    cos, sin = (torch.randn(150, 1, shape[1]).to(dtype) for _ in range(2))
    check_rows(apply_rope_invariant, x, cos, sin)
    # Sums may cancel: the tolerance is that of the terms.
    tolerance = 1e-5 if dtype == torch.float32 else 0.06
    torch.testing.assert_close(
        apply_rope_invariant(x, cos, sin), apply_rope(x, cos, sin), atol=tolerance, rtol=tolerance
    )


@settings(max_examples=20)
@example(rank=9, slices=1, dtype=torch.bfloat16, seed=1)  # once rounded differently in 10 rows
@given(rank=st.integers(1, 20), slices=st.integers(1, 3), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_adapters(rank: int, slices: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    outs = [40, 24, 56][:slices]
    x, a = (t.to(dtype) for t in trial_operands((150, 2048), (rank * slices, 2048), generator))
    a = a.view(rank, slices, 2048)
    b = [torch.randn(rank, out, generator=generator).to(dtype) for out in outs]
    base = torch.randn(150, sum(outs), generator=generator).to(dtype)

    def adapted(x: Tensor, y: Tensor) -> Tensor:
        y = y.clone()
        shrink_expand_invariant(y, x, a, b)
        return y

    check_rows(adapted, x, base)
    expected = base.float().clone()
    shrink_expand(expected, x.float(), a.float(), [part.float() for part in b], None)
    tolerance = 1e-3 if dtype == torch.float32 else 0.25
    torch.testing.assert_close(adapted(x, base).float(), expected, atol=tolerance * rank, rtol=0.05)
    columns = torch.randn(150, rank, generator=generator).to(dtype)

    def expanded(h: Tensor, y: Tensor) -> Tensor:
        y = y.clone()
        expand_invariant(y, h, b[0])
        return y

    check_rows(expanded, columns, base[:, : outs[0]])
