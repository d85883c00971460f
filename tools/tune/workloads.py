"""Work for kernels while they are tuned: random tensors of a model's sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.lora.device_rows import TritonRows
from ...kernels.lora.groups import RowGroups
from ...kernels.noise.triton import gumbel_argmax
from ...kernels.paged_attention import LayerKV, RowArrays, Shape
from ...kernels.paged_attention.device_step import DeviceStep
from ...kernels.paged_attention.schedule import Planner, gpu_of
from ...kernels.rms_norm.torch import prepare
from ...kernels.rms_norm.triton import rms_norm
from ...kernels.rope import Rotation
from ...kernels.sampling.triton import launch_filter
from ...kernels.sampling.triton_logprobs import row_stats, top_logprobs
from ...kernels.silu_mul.triton import silu_mul
from ...kernels.staging import upload
from ...kernels.tuning.configs import bucket
from ...kernels.tuning.store import configs_of
from ...kernels.verification import INVARIANT, REJECTION, pack
from ...kernels.verification.triton import verify
from .shapes import ModelShape, WorkSizes

BLOCK_SIZE = 16
Run = Callable[[], tuple[Tensor, ...]]


class Workload(NamedTuple):
    """Work of one kernel, or of one and its neighbours."""

    name: str
    make: Callable[[torch.device], Run]
    """Maker of the inputs, always equal numbers in new memory, and of the timed function. A run may change its inputs,
    so only first runs have equal results."""
    num_bytes: int
    """Estimate of the bytes that it reads and writes."""


class _Inputs:
    """Maker of random tensors, equal each time."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(size, generator=self._generator, device=self._device, dtype=torch.float32)
        return x.to(dtype or self._dtype)


def _rows(num_rows: int, num_queries: int, context: int) -> RowArrays:
    """Rows of `context` tokens, the last `num_queries` of which are computed, in scattered blocks."""
    count = -(-context // BLOCK_SIZE)
    blocks = np.random.default_rng(0).permutation(num_rows * count).astype(np.int64)
    starts = np.full(num_rows, context - num_queries, dtype=np.int64)
    position = starts[:, None] + np.arange(num_queries)
    table = blocks.reshape(num_rows, count)
    slots = np.take_along_axis(table, position // BLOCK_SIZE, 1) * BLOCK_SIZE + position % BLOCK_SIZE
    each = np.arange(num_rows, dtype=np.int64)
    lens = np.full(num_rows, num_queries, dtype=np.int64)
    return RowArrays(slots.ravel(), lens, starts, each * num_queries, each * count, blocks)


def _step(model: ModelShape, rows: RowArrays, device: torch.device) -> DeviceStep:
    shape = Shape(model.heads, model.kv_heads, model.head_dim)
    planner = Planner(shape, model.dtype.itemsize, gpu_of(device), configs=configs_of(device))
    return DeviceStep(planner, model.dtype, BLOCK_SIZE, rows, device)


def _cache(model: ModelShape, rows: RowArrays, make: _Inputs) -> LayerKV:
    return LayerKV(*(make(model.kv_heads, len(rows.blocks), BLOCK_SIZE, model.head_dim) for _ in range(2)))


def _projection(model: ModelShape, inputs: _Inputs, num_tokens: int) -> tuple[Tensor, Rotation]:
    """Queries, keys and values side by side, and a rotation."""
    qkv = inputs(num_tokens, (model.heads + 2 * model.kv_heads) * model.head_dim)
    angles = inputs(num_tokens, 1, model.head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    return qkv, Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def attention(model: ModelShape, num_rows: int, num_queries: int, context: int) -> Workload:
    """Paged attention of `num_queries` tokens at the end of each context."""

    def make(device: torch.device) -> Run:
        inputs, rows = _Inputs(device, model.dtype), _rows(num_rows, num_queries, context)
        step, kv = _step(model, rows, device), _cache(model, rows, inputs)
        qkv, rotation = _projection(model, inputs, num_rows * num_queries)
        return lambda: (step.attend_qkv(qkv, rotation, None, kv, None),)

    num_bytes = 2 * num_rows * context * model.kv_heads * model.head_dim * model.dtype.itemsize
    return Workload(f"{num_rows} x {context}, {num_queries} queries", make, num_bytes)


def kv_write(model: ModelShape, num_rows: int) -> Workload:
    """Rotation of queries and keys, and the write of keys and values."""

    def make(device: torch.device) -> Run:
        inputs, rows = _Inputs(device, model.dtype), _rows(num_rows, 1, 1)
        step, kv = _step(model, rows, device), _cache(model, rows, inputs)
        qkv, rotation = _projection(model, inputs, num_rows)
        return lambda: (step.write_qkv(qkv, rotation, None, kv), kv.k, kv.v)

    size = 2 * num_rows * (model.heads + 2 * model.kv_heads) * model.head_dim * model.dtype.itemsize
    return Workload(f"{num_rows} rows", make, size)


def norm(model: ModelShape, num_rows: int) -> Workload:
    """RMSNorm of hidden states."""

    def make(device: torch.device) -> Run:
        inputs = _Inputs(device, model.dtype)
        x, weight = inputs(num_rows, model.hidden), prepare(inputs(model.hidden, dtype=torch.float32), 1e-5)
        return lambda: (rms_norm(x, weight),)

    return Workload(f"{num_rows} rows", make, 2 * num_rows * model.hidden * model.dtype.itemsize)


def activation(model: ModelShape, num_rows: int) -> Workload:
    """Activation of the gate and up projections' outputs."""

    def make(device: torch.device) -> Run:
        x = _Inputs(device, model.dtype)(num_rows, 2 * model.inner)
        return lambda: (silu_mul(x),)

    return Workload(f"{num_rows} rows", make, 3 * num_rows * model.inner * model.dtype.itemsize)


def adapters(
    model: ModelShape, site: tuple[int, tuple[int, ...]], num_tokens: int, num_adapters: int, rank: int
) -> Workload:
    """Shrink and expand of one projection; the tokens are divided among the adapters, run by run."""
    (inputs_of_site, slices), count = site, num_adapters
    outputs, width = sum(slices), len(slices) * inputs_of_site

    def make(device: torch.device) -> Run:
        inputs = _Inputs(device, model.dtype)
        pool = inputs(count * rank, width + outputs).mul_(inputs_of_site**-0.5)
        live = torch.ones(count * rank, len(slices), dtype=torch.uint8, device=device)
        rows = TritonRows(pool[:, :width].unflatten(1, (len(slices), inputs_of_site)), pool[:, width:], slices, live)
        cuts = [num_tokens * i // count for i in range(count + 1)]
        runs = [(cuts[i], cuts[i + 1], range(i * rank, (i + 1) * rank)) for i in range(count)]
        groups = RowGroups(runs, num_tokens, device)
        x, y = inputs(num_tokens, inputs_of_site), inputs(num_tokens, outputs)

        def run() -> tuple[Tensor, ...]:
            rows.add(y, x, groups)
            return (y,)

        return run

    elements = count * rank * (width + outputs) + num_tokens * (inputs_of_site + 2 * outputs)
    sizes = "+".join(map(str, slices))
    name = f"{inputs_of_site} to {sizes}, {num_tokens} tokens of {count} adapters"
    return Workload(name, make, elements * model.dtype.itemsize)


def _logits(model: ModelShape, num_rows: int, device: torch.device) -> Tensor:
    return _Inputs(device, torch.float32)(num_rows, model.vocab).mul_(3)


def filtering(model: ModelShape, num_rows: int) -> Workload:
    """Filtering of logits: half of the rows with top-k, the others with top-p."""

    def make(device: torch.device) -> Run:
        logits = _logits(model, num_rows, device)
        out = torch.empty_like(logits)
        even = np.arange(num_rows) % 2 == 0
        k, p = np.where(even, 50, 0).astype(np.int64), np.where(even, 1.0, 0.9)
        parameters = upload(device, np.full(num_rows, 0.8), k, p, np.full(num_rows, -np.inf))

        def run() -> tuple[Tensor, ...]:
            launch_filter(logits, out, parameters)
            return (out,)

        return run

    return Workload(f"{num_rows} rows", make, 8 * num_rows * model.vocab)


def stats(model: ModelShape, num_rows: int) -> Workload:
    """Maxima and sums of exponentials of logits."""

    def make(device: torch.device) -> Run:
        return partial(row_stats, _logits(model, num_rows, device))

    return Workload(f"{num_rows} rows", make, 4 * num_rows * model.vocab)


def logprobs(model: ModelShape, num_rows: int) -> Workload:
    """Log-probabilities of the five most likely tokens."""

    def make(device: torch.device) -> Run:
        logits, chosen = _logits(model, num_rows, device), torch.zeros(num_rows, dtype=torch.int64, device=device)
        return lambda: top_logprobs(logits, chosen, 5)

    return Workload(f"{num_rows} rows", make, 4 * num_rows * model.vocab)


def draws(model: ModelShape, num_rows: int) -> Workload:
    """Draws: argmax of logits plus noise."""

    def make(device: torch.device) -> Run:
        logits, keys = _logits(model, num_rows, device), torch.arange(num_rows, device=device)
        return lambda: (gumbel_argmax(logits, keys),)

    return Workload(f"{num_rows} rows", make, 4 * num_rows * model.vocab)


def verifications(model: ModelShape, num_requests: int, num_drafts: int) -> Iterator[Workload]:
    """Verification by each of the two rules that draw."""

    def make(rule: int, device: torch.device) -> Run:
        logits = _logits(model, num_requests * (1 + num_drafts), device)
        probs = None
        if rule == REJECTION:
            probs = _logits(model, num_requests * num_drafts, device).softmax(-1)
        ids = [[7 % model.vocab] * num_drafts] * num_requests
        count = num_requests
        requests = pack(ids, [probs is None] * count, [rule] * count, range(count), [9] * count, device)
        found = row_stats(logits)
        return lambda: verify(logits, probs, requests, found)

    size = 4 * num_requests * model.vocab
    for rule, name, rows in ((INVARIANT, "invariant", 1 + num_drafts), (REJECTION, "rejection", 1 + 2 * num_drafts)):
        yield Workload(f"{num_requests} x {num_drafts} drafts, {name}", partial(make, rule), size * rows)


def every_work(kernel: str, model: ModelShape, sizes: WorkSizes) -> Iterator[tuple[tuple[int, ...], Workload]]:
    """(shape, work) of all work of `kernel` for `model`."""
    item = model.dtype.itemsize
    if kernel == "attention":
        yield from _attention_work(model, sizes)
    elif kernel in ("lora_shrink", "lora_expand"):
        for tile, steps in ((16, sizes.decode_adapters), (64, sizes.prompt_adapters)):
            for site in model.projections:
                width = site[0] if kernel == "lora_shrink" else sum(site[1])
                for tokens, count in steps:
                    yield (tile, bucket(width), item), adapters(model, site, tokens, count, sizes.rank)
    elif kernel == "verification":
        for rows in sizes.logits:
            for work in verifications(model, rows, sizes.drafts):
                yield (bucket(model.vocab),), work
    elif kernel in _DENSE:
        width_of, of_rows = _DENSE[kernel]
        for rows in sizes.rows:
            yield (bucket(width_of(model)), item), of_rows(model, rows)
    else:
        for rows in sizes.logits:
            yield (bucket(model.vocab),), _OF_LOGITS[kernel](model, rows)


def _attention_work(model: ModelShape, sizes: WorkSizes) -> Iterator[tuple[tuple[int, ...], Workload]]:
    shape = Shape(model.heads, model.kv_heads, model.head_dim)
    planner = Planner(shape, model.dtype.itemsize, gpu_of(torch.device("cpu")))
    work = [(rows, queries, context) for queries in sizes.queries for rows, context in sizes.decodes]
    work += [(rows, min(length, sizes.chunk), length) for rows, length in sizes.prompts]
    for num_rows, num_queries, context in work:
        layout = planner.layout(_rows(num_rows, num_queries, context))
        (group,) = layout.groups
        shape_of = planner.tuned_shape(group.block_m, is_long=layout.long is not None)
        yield shape_of, attention(model, num_rows, num_queries, context)


_DENSE: dict[str, tuple[Callable[[ModelShape], int], Callable[[ModelShape, int], Workload]]] = {
    "kv_write": (lambda model: model.head_dim, kv_write),
    "rms_norm": (lambda model: model.hidden, norm),
    "silu_mul": (lambda model: model.inner, activation),
}
_OF_LOGITS: dict[str, Callable[[ModelShape, int], Workload]] = {
    "sampling_filter": filtering,
    "sampling_stats": stats,
    "sampling_logprobs": logprobs,
    "noise_argmax": draws,
}
