"""Batches of any size launch the same compiled kernels: a GPU would compile others in the step that needs them."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from outrider.kernels.act_and_mul.triton import act_and_mul
from outrider.kernels.lora.device_rows import TritonRows, apply_gains
from outrider.kernels.lora.groups import GroupBuffer, RowGroups
from outrider.kernels.noise.triton import gumbel_argmax
from outrider.kernels.paged_attention.device_step import DeviceStep
from outrider.kernels.paged_attention.native import RowArrays, Shape
from outrider.kernels.paged_attention.schedule import Gpu, Planner
from outrider.kernels.paged_attention.torch import LayerKV
from outrider.kernels.penalties import Penalised
from outrider.kernels.penalties.triton import penalise
from outrider.kernels.quantized_linear import QuantizedWeight
from outrider.kernels.quantized_linear.device_linear import TritonQuantizedLinear
from outrider.kernels.rms_norm import triton as rms_norm
from outrider.kernels.rms_norm.torch import prepare
from outrider.kernels.rope import Rotation
from outrider.kernels.sampling.torch import Limits
from outrider.kernels.sampling.triton import filter_logits
from outrider.kernels.sampling.triton_logprobs import row_stats, top_logprobs
from outrider.kernels.verification import INVARIANT, pack
from outrider.kernels.verification.triton import verify

from .compile_keys import Keys, recorded_keys

HIDDEN, VOCAB, HEADS, KV_HEADS, DIM = 512, 2000, 4, 2, 32
SIZES = (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 24, 31, 32, 48, 64, 96, 127, 128, 256)
CPU = torch.device("cpu")


def adapters(sites: list[tuple[int, TritonRows]], embedding: TritonRows, buffer: GroupBuffer, size: int) -> None:
    """Every site of a step with one adapter, with two of odd ranks, and at a captured graph's address."""
    for ranks, of_buffer in (((8,), None), ((5, 3), None), ((8,), buffer)):
        bounds = [size * number // len(ranks) for number in range(len(ranks) + 1)]
        rows = [range(16 * number, 16 * number + rank) for number, rank in enumerate(ranks)]
        groups = RowGroups(list(zip(bounds, bounds[1:], rows, strict=False)), size, CPU, of_buffer)
        for width, site in sites:
            site.add(torch.empty(size, width), torch.empty(size, HIDDEN), groups)
        embedding.add_embeddings(torch.empty(size, HIDDEN), torch.zeros(size, dtype=torch.int64), groups)
    y, excess = torch.empty(size, HIDDEN), torch.empty(4, HIDDEN)
    apply_gains(y, excess, torch.zeros(size, dtype=torch.int32), torch.empty(HIDDEN), torch.empty_like(y))


def dense(size: int) -> None:
    """Norms of hidden states, with and without a residual, and activation."""
    x, weight = torch.empty(size, HIDDEN), prepare(torch.ones(HIDDEN), 1e-5)
    rms_norm.rms_norm(x, weight)
    rms_norm.add_rms_norm(x, torch.empty_like(x), weight)
    act_and_mul(torch.empty(size, 2 * HIDDEN))


def quantized(weights: list[TritonQuantizedLinear], size: int) -> None:
    """Products with quantised weights, of the whole step and of few tokens of it."""
    for tokens in (size, min(size, 16)):
        for weight in weights:
            weight(torch.empty(tokens, HIDDEN), torch.empty(tokens, 64))


def quantized_weights() -> list[TritonQuantizedLinear]:
    """Weights of 4 bits, and of 8 bits with rounded inputs."""
    codes, bias = torch.zeros(64, HIDDEN, dtype=torch.uint8), torch.zeros(64)
    narrow = QuantizedWeight(bits=4, codes=codes, scales=torch.ones(64, 4), group=128)
    whole = QuantizedWeight(bits=8, codes=codes.view(torch.int8), scales=torch.ones(64, 1), group=HIDDEN, input_bits=8)
    return [TritonQuantizedLinear([form], bias, torch.float32, batch_invariant=False) for form in (narrow, whole)]


def attention(size: int) -> None:
    """A step of `size` decodes, and another that also has a prompt."""
    planner = Planner(Shape(HEADS, KV_HEADS, DIM), 4, Gpu(132, 90), num_splits=4)
    for lengths in ([1] * size, [1, 2, 100 + size]):
        lens = np.array(lengths, dtype=np.int64)
        blocks = -(-lens // 16)
        rows = RowArrays(
            np.arange(lens.sum()), lens, 0 * lens, np.cumsum(lens) - lens, np.cumsum(blocks) - blocks,
            np.arange(blocks.sum()),
        )  # fmt: skip
        step = DeviceStep(planner, torch.float32, 16, rows, CPU)
        step.settle(torch.zeros(len(lens), dtype=torch.int64), torch.zeros(int(lens.sum()), dtype=torch.int64))
        kv = LayerKV(*(torch.empty(KV_HEADS, int(blocks.sum()), 16, DIM) for _ in range(2)))
        qkv = torch.empty(int(lens.sum()), (HEADS + 2 * KV_HEADS) * DIM)
        rotation = Rotation(torch.empty(len(qkv), 1, DIM), torch.empty(len(qkv), 1, DIM))
        step.attend_qkv(qkv, rotation, None, kv, None)


def sampling(size: int) -> None:
    """Every kernel that a row of logits may meet; drafts, and numbers of log-probabilities, as requests like."""
    logits = torch.empty(size, VOCAB)
    gumbel_argmax(logits, torch.zeros(size, dtype=torch.int64))
    stats = row_stats(logits)
    for k in (0, 1, size % 20, 16):
        top_logprobs(logits, torch.zeros(size, dtype=torch.int64), k)
    ones = np.ones(size)
    filter_logits(logits, ones, Limits(np.full(size, 4), 0.9 * ones, 0.1 * ones))
    entries = np.arange(size, dtype=np.int64)
    penalise(logits, [Penalised(range(size), [0] * size, entries, [[1] * (size % 8)], 1.1, 0.5, 0.2)])
    drafts = [[1] * (size - 1)] if size < 8 else [[]] * size
    count = len(drafts)
    requests = pack(drafts, [True] * count, [INVARIANT] * count, range(count), [0] * count, CPU)
    verify(logits, None, requests, stats)


@pytest.fixture(scope="module")
def keys() -> list[Keys]:
    """Keys of all kernels, for every size of a step."""
    live = torch.ones(64, 7, dtype=torch.uint8)
    sites = [
        (sum(slices), TritonRows(*_pools(HIDDEN, slices), slices, live[:, place : place + len(slices)]))
        for place, slices in enumerate(((128, 64), (256,), (16 * 256,), (16 * 300,)))
    ]
    embedding = TritonRows(*_pools(VOCAB, (HIDDEN,)), (HIDDEN,), live[:, :1].contiguous())
    buffer, weights = GroupBuffer(64, 8, CPU), quantized_weights()
    every = []
    for size in SIZES:
        with recorded_keys() as found:
            adapters(sites, embedding, buffer, size)
            dense(size)
            quantized(weights, size)
            attention(size)
            sampling(size)
        every.append(found)
    return every


def _pools(width: int, slices: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    split = len(slices) * width
    rows = torch.empty(64, split + sum(slices))
    return rows[:, :split].view(64, len(slices), width), rows[:, split:]


def test_batch_sizes_do_not_specialise_kernels(keys: list[Keys]) -> None:
    """Integers that happen to be 1 or a multiple of 16, and pointers into the middle of a tensor."""
    assert len(keys[0]) >= 16
    for name in keys[0]:
        kinds = [{key.arguments for key in of_size[name]} for of_size in keys]
        assert all(found == kinds[0] for found in kinds), (name, set.union(*kinds))
        together = set.union(*(of_size[name] for of_size in keys))
        assert len(together) <= 8, (name, together)


def test_arguments_equal_to_1_are_in_the_compile_cases(repo_root: Path, keys: list[Keys]) -> None:
    """Triton makes it a constant of the kernel, which is another kernel to the compiler."""
    compiled = set()
    for path in (repo_root / "kernels").glob("*/triton.py"):
        module = importlib.import_module(f"outrider.kernels.{path.parent.name}.triton")
        compiled |= {(case.kernel.fn.__name__, frozenset(case.ones)) for case in module.compile_cases()}
    for of_size in keys:
        for name, found in of_size.items():
            launched = {
                (name, frozenset(argument for argument, kind, _ in key.arguments if kind == "constexpr"))
                for key in found
            }
            assert launched <= compiled, launched - compiled
