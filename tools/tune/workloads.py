"""Work for kernels while they are tuned: random tensors of a model's sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.act_and_mul.triton import act_and_mul
from ...kernels.linear import pack as pack_linear
from ...kernels.lora.device_rows import TritonRows
from ...kernels.lora.groups import RowGroups
from ...kernels.noise.triton import gumbel_argmax
from ...kernels.paged_attention import LayerKV, RowArrays, Shape
from ...kernels.paged_attention.device_step import DeviceStep
from ...kernels.paged_attention.schedule import Planner, describe_gpu
from ...kernels.quantized_linear import QuantizedWeight
from ...kernels.quantized_linear.device_linear import TritonQuantizedLinear
from ...kernels.rms_norm.torch import prepare
from ...kernels.rms_norm.triton import rms_norm
from ...kernels.rope import Rotation
from ...kernels.sampling.triton import launch_filter
from ...kernels.sampling.triton_logprobs import row_stats, top_logprobs
from ...kernels.staging import upload
from ...kernels.tuning.configs import bucket
from ...kernels.tuning.store import configs_of
from ...kernels.verification import INVARIANT, REJECTION, pack
from ...kernels.verification.triton import verify

BLOCK_SIZE = 16
Run = Callable[[], tuple[Tensor, ...]]


class ModelShape(NamedTuple):
    """Sizes of a decoder that kernels depend on."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def projections(self) -> list[tuple[int, tuple[int, ...]]]:
        """(inputs, outputs of each slice) of a layer's projections, as adapters see them."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            (self.hidden, (queries, keys, keys)),
            (queries, (self.hidden,)),
            (self.hidden, (self.inner, self.inner)),
            (self.inner, (self.hidden,)),
        ]


class WorkSizes(NamedTuple):
    """Amounts of work for each kernel."""

    decodes: tuple[tuple[int, int], ...] = ((1, 32768), (16, 4096), (64, 2048))
    """(rows, tokens of context) of decodes and verifications."""
    prompts: tuple[tuple[int, int], ...] = ((1, 8192), (4, 2048))
    """(rows, tokens): prompts whose last chunk is computed."""
    chunk: int = 2048
    """Most tokens of a prompt that are computed in a step."""
    queries: tuple[int, ...] = (1, 4, 8)
    """Query tokens of a row: 1 of decodes, more of verifications."""
    rows: tuple[int, ...] = (1, 64, 2048)
    """Rows of norms, activations, rotations and writes."""
    logits: tuple[int, ...] = (1, 64)
    """Rows of logits."""
    decode_adapters: tuple[tuple[int, int], ...] = ((1, 1), (64, 64), (64, 4))
    """(tokens, adapters) of small steps."""
    prompt_adapters: tuple[tuple[int, int], ...] = ((2048, 1), (4096, 4))
    """(tokens, adapters) of large steps."""
    rank: int = 16
    drafts: int = 4
    products: tuple[tuple[int, int], ...] = ((8, 1), (16, 16), (32, 32), (64, 64), (128, 256))
    """(tokens of a tile, tokens) of products with quantised weights."""


class Workload(NamedTuple):
    """Work of one kernel, or of one and its neighbours."""

    name: str
    make: Callable[[torch.device], Run]
    """Maker of the inputs, always equal numbers in new memory, and of the timed function. A run may change its inputs,
    so only first runs have equal results."""


class Inputs:
    """Maker of random tensors for a model, equal each time."""

    def __init__(self, device: torch.device, model: ModelShape) -> None:
        self.device, self.model = device, model
        self._generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(size, generator=self._generator, device=self.device, dtype=torch.float32)
        return x.to(dtype or self.model.dtype)

    def logits(self, num_rows: int) -> Tensor:
        """Logits `[num_rows, vocab]`."""
        return self(num_rows, self.model.vocab, dtype=torch.float32).mul_(3)

    def projection(self, num_tokens: int) -> tuple[Tensor, Rotation]:
        """Queries, keys and values side by side, and a rotation."""
        model = self.model
        qkv = self(num_tokens, (model.heads + 2 * model.kv_heads) * model.head_dim)
        angles = self(num_tokens, 1, model.head_dim // 2)
        cos, sin = angles.cos(), angles.sin()
        return qkv, Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))

    def step(
        self, num_rows: int, num_queries: int, context: int, cache: torch.dtype | None = None
    ) -> tuple[DeviceStep, LayerKV]:
        """A step of `num_queries` tokens at the end of each context, and its cache (default: of the model's dtype)."""
        model, rows = self.model, _rows(num_rows, num_queries, context)
        shape = Shape(model.heads, model.kv_heads, model.head_dim)
        planner = Planner(shape, model.dtype.itemsize, describe_gpu(self.device), configs=configs_of(self.device))
        size = (model.kv_heads, len(rows.blocks), BLOCK_SIZE, model.head_dim)
        kv = LayerKV(*(self(*size, dtype=cache) for _ in range(2)))
        return DeviceStep(planner, model.dtype, BLOCK_SIZE, rows, self.device), kv


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


# --- Makers of runs: inputs of a model and sizes of the work -> the timed function --------------------------


def attention(inputs: Inputs, num_rows: int, num_queries: int, context: int, cache: torch.dtype | None = None) -> Run:
    """Rotation, write and attention of rows of `num_queries` at the end of their contexts."""
    step, kv = inputs.step(num_rows, num_queries, context, cache)
    qkv, rotation = inputs.projection(num_rows * num_queries)
    return lambda: (step.attend_qkv(qkv, rotation, None, kv, None),)


def kv_write(inputs: Inputs, num_rows: int) -> Run:
    """Rotation of keys, and the write of keys and values, as before attention of prompts."""
    step, kv = inputs.step(num_rows, 1, 1)
    qkv, rotation = inputs.projection(num_rows)
    return lambda: (step.write_qkv(qkv, rotation, None, kv, queries=False), kv.k, kv.v)


def norm(inputs: Inputs, num_rows: int) -> Run:
    """RMSNorm of the hidden states."""
    hidden = inputs.model.hidden
    x, weight = inputs(num_rows, hidden), prepare(inputs(hidden, dtype=torch.float32), 1e-5)
    return lambda: (rms_norm(x, weight),)


def activation(inputs: Inputs, num_rows: int) -> Run:
    """Activation of the MLP."""
    x = inputs(num_rows, 2 * inputs.model.inner)
    return lambda: (act_and_mul(x),)


def quantized_weight(inputs: Inputs, kind: str, shape: tuple[int, int]) -> QuantizedWeight:
    """Weight [out, in]: "int4" with groups of 128 and zero points, "int8" with a scale for each output, or "fp8" with
    one for each block of 128 x 128."""
    outputs, width = shape
    numbers = inputs(outputs, width, dtype=torch.float32)
    group = width if kind == "int8" else 128
    scales = torch.full((outputs, -(-width // group)), width**-0.5, device=inputs.device)
    if kind == "fp8":
        return QuantizedWeight(bits=8, codes=numbers.to(torch.float8_e4m3fn), scales=scales, group=group)
    if kind == "int8":
        codes = numbers.mul_(40).clamp_(-127, 127).to(torch.int8)
        return QuantizedWeight(bits=8, codes=codes, scales=scales / 40, group=group)
    codes = numbers.mul_(3).add_(8).clamp_(0, 15).to(torch.uint8)
    return QuantizedWeight(bits=4, codes=codes, scales=scales / 3, group=group, offsets=-2.5 * scales)


def plain_product(inputs: Inputs, shape: tuple[int, int], num_tokens: int) -> Run:
    """Product with a weight [out, in] of the model's dtype."""
    x, packed = inputs(num_tokens, shape[1]), pack_linear(inputs(*shape))
    return lambda: (packed(x),)


def quantized_product(inputs: Inputs, kind: str, shape: tuple[int, int], num_tokens: int) -> Run:
    """Product with a quantised weight [out, in]."""
    x, weight = inputs(num_tokens, shape[1]), quantized_weight(inputs, kind, shape)
    packed = TritonQuantizedLinear([weight], None, inputs.model.dtype, batch_invariant=False)
    return lambda: (packed(x),)


def adapters(inputs: Inputs, site: tuple[int, tuple[int, ...]], rank: int, num_tokens: int, num_adapters: int) -> Run:
    """Shrink and expand of one projection; the tokens are divided among the adapters, run by run."""
    (num_inputs, slices), count = site, num_adapters
    outputs, width = sum(slices), len(slices) * num_inputs
    pool = inputs(count * rank, width + outputs).mul_(num_inputs**-0.5)
    live = torch.ones(count * rank, len(slices), dtype=torch.uint8, device=inputs.device)
    rows = TritonRows(pool[:, :width].unflatten(1, (len(slices), num_inputs)), pool[:, width:], slices, live)
    cuts = [num_tokens * i // count for i in range(count + 1)]
    runs = [(cuts[i], cuts[i + 1], range(i * rank, (i + 1) * rank)) for i in range(count)]
    groups = RowGroups(runs, num_tokens, inputs.device)
    x, y = inputs(num_tokens, num_inputs), inputs(num_tokens, outputs)

    def run() -> tuple[Tensor, ...]:
        rows.add(y, x, groups)
        return (y,)

    return run


def filtering(inputs: Inputs, num_rows: int, top_k: bool | None = None) -> Run:
    """Half of the rows with top-k, the others with top-p; or all of them with one of both."""
    logits = inputs.logits(num_rows)
    out = torch.empty_like(logits)
    has_k = np.arange(num_rows) % 2 == 0 if top_k is None else np.full(num_rows, top_k)
    k, p = np.where(has_k, 50, 0).astype(np.int64), np.where(has_k, 1.0, 0.9)
    parameters = upload(inputs.device, np.full(num_rows, 0.8), k, p, np.full(num_rows, -np.inf))

    def run() -> tuple[Tensor, ...]:
        launch_filter(logits, out, parameters)
        return (out,)

    return run


def stats(inputs: Inputs, num_rows: int) -> Run:
    """Statistics of rows of logits."""
    return partial(row_stats, inputs.logits(num_rows))


def logprobs(inputs: Inputs, num_rows: int) -> Run:
    """Log-probabilities of the chosen token and of the five likeliest."""
    chosen = torch.zeros(num_rows, dtype=torch.int64, device=inputs.device)
    return partial(top_logprobs, inputs.logits(num_rows), chosen, 5)


def draws(inputs: Inputs, num_rows: int) -> Run:
    """Draws of one token for each row of logits."""
    logits, keys = inputs.logits(num_rows), torch.arange(num_rows, device=inputs.device)
    return lambda: (gumbel_argmax(logits, keys),)


def verification(inputs: Inputs, rule: int, num_drafts: int, num_requests: int) -> Run:
    """Verification of `num_requests` requests with `num_drafts` drafts each."""
    logits, count = inputs.logits(num_requests * (1 + num_drafts)), num_requests
    probs = inputs.logits(count * num_drafts).softmax(-1) if rule == REJECTION else None
    ids = [[7 % inputs.model.vocab] * num_drafts] * count
    requests = pack(ids, [probs is None] * count, [rule] * count, range(count), [9] * count, inputs.device)
    found = row_stats(logits)
    return lambda: verify(logits, probs, requests, found)


# --- All work of a kernel -----------------------------------------------------------------------------------

_OF_ROWS: dict[str, tuple[str, Callable[..., Run]]] = {
    "kv_write": ("head_dim", kv_write),
    "rms_norm": ("hidden", norm),
    "act_and_mul": ("inner", activation),
}
"""The size of the model that decides the shape, and the maker."""
_OF_LOGITS: dict[str, Callable[..., Run]] = {
    "sampling_filter": filtering,
    "sampling_stats": stats,
    "sampling_logprobs": logprobs,
    "noise_argmax": draws,
    "verification": verification,
}


def make_work(model: ModelShape, what: str, maker: Callable[..., Run], *sizes: object) -> Workload:
    """Work of one maker; `sizes` are its arguments after the inputs."""
    return Workload(what, lambda device: maker(Inputs(device, model), *sizes))


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
                    what = f"{site[0]} to {'+'.join(map(str, site[1]))}, {tokens} tokens of {count} adapters"
                    work = make_work(model, what, adapters, site, sizes.rank, tokens, count)
                    yield (tile, bucket(width), item), work
    elif kernel == "quantized_linear":
        yield from _quantized_work(model, sizes)
    elif kernel in _OF_ROWS:
        size, maker = _OF_ROWS[kernel]
        for rows in sizes.rows:
            yield (bucket(getattr(model, size)), item), make_work(model, f"{rows} rows", maker, rows)
    else:
        rules = {"invariant": INVARIANT, "rejection": REJECTION} if kernel == "verification" else {"": 0}
        for rows in sizes.logits:
            for name, rule in rules.items():
                more = (rule, sizes.drafts) if name else ()
                what = f"{rows} x {sizes.drafts} drafts, {name}" if name else f"{rows} rows"
                yield (bucket(model.vocab),), make_work(model, what, _OF_LOGITS[kernel], *more, rows)


def _quantized_work(model: ModelShape, sizes: WorkSizes) -> Iterator[tuple[tuple[int, ...], Workload]]:
    for tile, tokens in sizes.products:
        for width, slices in model.projections:
            shape = sum(slices), width
            for kind, bits in (("int4", 4), ("int8", 8)):
                what = f"{kind}, {width} to {shape[0]}, {tokens} tokens"
                work = make_work(model, what, quantized_product, kind, shape, tokens)
                yield (tile, bucket(width), bucket(shape[0]), bits, model.dtype.itemsize), work


def _attention_work(model: ModelShape, sizes: WorkSizes) -> Iterator[tuple[tuple[int, ...], Workload]]:
    shape = Shape(model.heads, model.kv_heads, model.head_dim)
    planner = Planner(shape, model.dtype.itemsize, describe_gpu(torch.device("cpu")))
    work = [(rows, queries, context) for queries in sizes.queries for rows, context in sizes.decodes]
    work += [(rows, min(length, sizes.chunk), length) for rows, length in sizes.prompts]
    for rows, queries, context in work:
        layout = planner.layout(_rows(rows, queries, context))
        (group,) = layout.groups
        shape_of = planner.tuned_shape(group.block_m, is_long=layout.long is not None)
        yield shape_of, make_work(model, f"{rows} x {context}, {queries} queries", attention, rows, queries, context)
