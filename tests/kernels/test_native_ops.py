"""The C++ kernels against the definitions and against the torch paths, and that rows do not depend on their company."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.kernels import act_and_mul as silu_op
from outrider.kernels import rms_norm as norm_op
from outrider.kernels.act_and_mul.native import act_and_mul
from outrider.kernels.dispatch import has_triton
from outrider.kernels.native import library
from outrider.kernels.paged_attention import DEFAULT_OPTIONS, AttentionOptions
from outrider.kernels.rms_norm import NormWeight, prepare
from outrider.kernels.rms_norm.native import rms_norm
from outrider.kernels.rope import Rotation
from outrider.models.attention import AttentionSpec, make_attention
from outrider.models.attention.native import NativeAttention
from outrider.models.batch import KVLayerSpec, SequenceRows, allocate_kv
from outrider.models.layers.norm import RMSNorm
from outrider.models.layers.rope import RotaryEmbedding
from outrider.models.rope_config import RopeConfig

from .attention_backends import make_backend

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler, or switched off")

DTYPES = [torch.float32, torch.bfloat16]
# One rounding of the result; in attention queries and keys are rounded before too, by the reference at other places.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


def close(actual: Tensor, expected: Tensor, factor: float = 1.0) -> None:
    tolerance = TOLERANCE[actual.dtype] * factor
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 6, 15, 16, 17, 64, 80, 896, 1000])
@pytest.mark.parametrize("rows", [0, 1, 3, 200])
def test_rms_norm(rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, size).to(dtype), torch.rand(size).to(dtype)
    y = rms_norm(x, prepare(weight, 1e-5))
    assert y is not None
    close(y, x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())
    for row in range(0, rows, 7):
        assert torch.equal(rms_norm(x[row : row + 1], prepare(weight, 1e-5)), y[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_with_their_own_weights(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 7, 3, 40).to(dtype), torch.rand(3, 40).to(dtype)
    y = rms_norm(x[:, 1:5], prepare(weight, 1e-6))  # a slice: not contiguous
    assert y is not None
    x = x[:, 1:5].double()
    close(y, x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double())


def test_unsupported_inputs_use_torch() -> None:
    assert rms_norm(torch.ones(2, 8, dtype=torch.float16), prepare(torch.ones(8), 1e-6)) is None
    assert rms_norm(torch.ones(2, 8), prepare(torch.ones(1, 8), 1e-6)) is not None
    assert norm_op.rms_norm(torch.ones(2, 8).half(), prepare(torch.ones(8).half(), 1e-6)).shape == (2, 8)
    assert act_and_mul(torch.ones(2, 8, dtype=torch.float16)) is None
    assert silu_op.act_and_mul(torch.ones(2, 8).half()).shape == (2, 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [1, 7, 16, 33, 1536])
@pytest.mark.parametrize("rows", [0, 1, 5, 64])
def test_act_and_mul(rows: int, half: int, dtype: torch.dtype) -> None:
    x = (torch.randn(rows, 2 * half) * 5).to(dtype)
    y = act_and_mul(x)
    assert y is not None
    gate, up = x.double().chunk(2, -1)
    close(y, gate * gate.sigmoid() * up)
    for row in range(0, rows, 3):
        assert torch.equal(act_and_mul(x[row : row + 1]), y[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_act_and_mul_of_extreme_gates(dtype: torch.dtype) -> None:
    gates = torch.tensor([-1e30, -100.0, -88.5, -87.0, -20.0, -0.0, 0.0, 20.0, 88.5, 1e30, math.inf, math.nan]).to(
        dtype
    )
    y = act_and_mul(torch.cat([gates, torch.ones_like(gates)])[None])
    assert y is not None
    expected = torch.nn.functional.silu(gates.double())
    torch.testing.assert_close(y[0].double(), expected, atol=1e-30, rtol=TOLERANCE[dtype], equal_nan=True)


class Layer:
    """A cache and some rows' projections, for both backends."""

    def __init__(
        self, rows: list[tuple[int, int]], shape: tuple[int, int, int], block_size: int, dtype: torch.dtype
    ) -> None:
        """`rows`: (start, query_len)."""
        self.heads, self.kv_heads, self.dim = shape
        self.dtype, self.block_size = dtype, block_size
        generator = torch.Generator().manual_seed(0)
        needed = [-(-(start + count) // block_size) for start, count in rows]
        order = torch.randperm(sum(needed) + 2, generator=generator).tolist()
        tables = [[order.pop() for _ in range(count)] for count in needed]
        self.kv = allocate_kv([KVLayerSpec(self.kv_heads, self.dim)], sum(needed) + 2, block_size, dtype)[0]
        for cache in self.kv:
            cache.normal_(generator=generator)
        counts = [count for _, count in rows]
        self.rows = SequenceRows([0] * sum(counts), counts, [start for start, _ in rows], tables)
        self.positions = np.concatenate([np.arange(start, start + count) for start, count in rows])
        width = (self.heads + 2 * self.kv_heads) * self.dim
        self.qkv = torch.randn(sum(counts), width, generator=generator).to(dtype)
        angles = torch.rand(sum(counts), 1, self.dim // 2, generator=generator) * 6
        cos, sin = angles.cos(), angles.sin()
        both = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(dtype)
        self.rotation = Rotation(both[:, 0], both[:, 1])

    def run(
        self,
        name: str,
        *,
        window: int | None = None,
        norm: RMSNorm | None = None,
        options: AttentionOptions = DEFAULT_OPTIONS,
    ) -> tuple[Tensor, Tensor]:
        """(attention, keys and values written) by the backend called `name`."""
        shape = self.heads, self.kv_heads, self.dim
        spec = AttentionSpec(*shape, frozenset({window}), self.dtype, torch.device("cpu"), options)
        backend = make_backend(name, spec)
        kv = type(self.kv)(self.kv.k.clone(), self.kv.v.clone())
        plan = backend.plan(self.rows, self.positions, self.block_size)
        out = backend.forward_qkv(self.qkv.clone(), self.rotation, norm, kv, plan, window)
        return out, torch.stack((kv.k, kv.v))


def head_norm(shape: tuple[int, int, int], dtype: torch.dtype) -> RMSNorm:
    """As Qwen3's, with weights."""
    heads, kv_heads, dim = shape
    norm = RMSNorm(["q", "k"], dim, 1e-6, repeats=[heads, kv_heads], dtype=dtype, device=torch.device("cpu"))
    for index, slot in enumerate(norm.weight_slots().values()):
        slot.load(torch.rand(dim, generator=torch.Generator().manual_seed(index)) + 0.5)
    return norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    ("shape", "block_size"),
    [((8, 4, 64), 16), ((14, 2, 64), 16), ((4, 4, 32), 128), ((6, 1, 80), 24), ((2, 2, 256), 64), ((40, 1, 6), 16)],
)
def test_attention_of_a_projection_is_that_of_torch(shape, block_size, window, qk_norm, dtype) -> None:
    rows = [(0, 1), (63, 1), (64, 5), (300, 1), (0, 70), (1500, 3), (17, 33)]
    layer = Layer(rows, shape, block_size, dtype)
    norm = head_norm(shape, dtype) if qk_norm else None
    got, written = layer.run("native", window=window, norm=norm)
    expected, reference = layer.run("torch", window=window, norm=norm)
    close(written, reference, 2.0)
    close(got, expected, 5.0)


OPTIONS = {
    "scale": AttentionOptions(scale=0.5),
    "cap": AttentionOptions(soft_cap=1.5),
    "part": AttentionOptions(rotary_dim=20),
    "neighbours": AttentionOptions(interleaved=True),
    "all": AttentionOptions(scale=0.3, soft_cap=2.0, rotary_dim=16, interleaved=True),
}


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_are_those_of_torch_in_every_backend(options: AttentionOptions, window: int | None) -> None:
    layer = Layer([(5, 2), (40, 1), (0, 30), (17, 5), (0, 1)], (4, 2, 32), 16, torch.float32)
    norm = head_norm((4, 2, 32), torch.float32)
    plain = layer.run("torch", window=window, norm=norm)[0]
    half = (options.rotary_dim or 32) // 2
    parts = [torch.cat((x[..., :half], x[..., 16 : 16 + half]), -1) for x in layer.rotation[:2]]
    layer.rotation = Rotation(*parts)
    expected = layer.run("torch", window=window, norm=norm, options=options)
    assert not torch.allclose(expected[0], plain, atol=1e-2)
    for name in ("native", "invariant", *(["triton"] if has_triton() else [])):
        for got, wanted in zip(layer.run(name, window=window, norm=norm, options=options), expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5, msg=name)


def test_scores_are_scaled_and_capped() -> None:
    """A query against two keys, by hand."""
    layer = Layer([(1, 1)], (1, 1, 4), 4, torch.float32)
    layer.rotation = Rotation(torch.ones(1, 1, 4), torch.zeros(1, 1, 4))
    q, key, value = layer.qkv.view(3, 4)
    out, kv = layer.run("torch", options=AttentionOptions(scale=2.0, soft_cap=0.7))
    block = layer.rows.block_tables[0][0]
    keys, values = torch.stack((kv[0, 0, block, 0], key)), torch.stack((kv[1, 0, block, 0], value))
    weights = torch.softmax(0.7 * torch.tanh(2.0 * (keys @ q) / 0.7), 0)
    torch.testing.assert_close(out[0], weights @ values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_angles_are_looked_up_in_tables(dtype: torch.dtype) -> None:
    """The same bits as with each token's own angles; both grow when a longer sequence comes."""
    layer = Layer([(5, 2), (40, 1), (2040, 12)], (4, 2, 32), 16, dtype)
    for rope_type in ("default", "linear"):
        config = RopeConfig(rope_type=rope_type, theta=1e4, factor=2.0)
        rope = RotaryEmbedding([config], 32, dtype=dtype, device=torch.device("cpu"))
        tables = [rope.rotations(torch.from_numpy(layer.positions), end, gathers=False)[0] for end in (2048, 2052)]
        assert [len(rotation.cos) for rotation in tables] == [2048, 4096]
        layer.rotation = rope.rotations(torch.from_numpy(layer.positions), 2052)[0]
        assert layer.rotation.cos.shape == (15, 1, 32)
        expected = layer.run("native")
        layer.rotation = tables[1]
        for got, wanted in zip(layer.run("native"), expected, strict=True):
            assert torch.equal(got, wanted)


def test_positions_before_the_first_key_are_not_seen() -> None:
    layer = Layer([(9, 1), (100, 2), (3, 60)], (4, 2, 32), 16, torch.float32)
    layer.rows.first_key = 3
    for cache in layer.kv:
        cache[:, [table[0] for table in layer.rows.block_tables], :3] = 1e4
    close(layer.run("native")[0], layer.run("torch")[0])


def test_non_finite_inputs_stay_in_their_row() -> None:
    layer = Layer([(9, 1), (20, 2), (5, 1)], (4, 2, 32), 16, torch.float32)
    expected, _ = layer.run("native")
    layer.qkv[1, : 4 * 32] = math.nan  # queries of the first of the two tokens
    layer.qkv[0, 4 * 32 :] = math.inf  # key and value of the first row
    got, written = layer.run("native")
    assert written.isfinite().all()
    assert got[1].isnan().all()
    assert torch.equal(got[2:], expected[2:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("team")
def test_threads_do_not_change_a_bit(dtype: torch.dtype) -> None:
    layer = Layer([(1200, 1), (900, 5), (0, 200), (64, 1)], (14, 2, 64), 16, dtype)
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(layer.run("native")[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_native_kernel_is_the_default_if_supported() -> None:
    spec = AttentionSpec(4, 2, 32, frozenset({None}), torch.bfloat16, torch.device("cpu"))
    assert isinstance(make_attention(spec), NativeAttention)
    assert isinstance(make_attention(spec, batch_invariant=True), NativeAttention)
    for other in (
        AttentionSpec(4, 2, 32, frozenset({None}), torch.float16, torch.device("cpu")),
        AttentionSpec(4, 2, 640, frozenset({None}), torch.bfloat16, torch.device("cpu")),
    ):
        assert not isinstance(make_attention(other), NativeAttention)
        assert not isinstance(make_attention(other, batch_invariant=True), NativeAttention)


def test_wrong_tensors_are_refused() -> None:
    layer = Layer([(9, 1)], (4, 2, 32), 16, torch.float32)
    spec = AttentionSpec(4, 2, 32, frozenset({None}), torch.float32, torch.device("cpu"))
    backend = make_attention(spec)
    plan = backend.plan(layer.rows, layer.positions, 16)
    for qkv in (layer.qkv.half(), layer.qkv[:, :-1], torch.cat([layer.qkv] * 2)):
        with pytest.raises(ValueError, match="qkv"):
            backend.forward_qkv(qkv, layer.rotation, None, layer.kv, plan, None)


def test_norm_weight_knows_its_shape() -> None:
    weight = prepare(torch.ones(3, 40), 1e-6)
    assert isinstance(weight, NormWeight)
    assert (weight.size, weight.repeats) == (40, 3)
    assert weight.root_value == pytest.approx(math.sqrt(40e-6))
