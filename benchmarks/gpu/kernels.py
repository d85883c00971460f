"""The kernel table: each kernel at shapes of real models, beside the device's limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.kernels import rms_norm as norms
from outrider.kernels.act_and_mul import act_and_mul
from outrider.kernels.paged_attention import CACHE_FLOAT8
from outrider.kernels.penalties import COUNT_BITS, Penalised, penalise
from outrider.kernels.rope import Rotation
from outrider.kernels.sampling import filter_logits, row_stats, top_logprobs
from outrider.kernels.verification import INVARIANT, REJECTION, pack, verify
from outrider.models.attention import AttentionSpec
from outrider.models.batch import LayerKV, SequenceRows

from .report import Context
from .timing import seconds_of

BLOCK = 16
BF16 = torch.bfloat16


class Case(NamedTuple):
    """One row of the table."""

    name: str
    make: Callable[[str], Callable[[], object]]
    """Maker of the inputs on a device, and of the timed function."""
    num_bytes: int
    """Bytes that must move, each read once and each written once."""
    flops: int = 0
    """Floating-point operations of a kernel that arithmetic limits; 0 for others."""
    triton_only: bool = False


def attention(
    queries: int, contexts: list[int], heads: int, kv_heads: int, dim: int = 128, *, cache: torch.dtype = BF16
) -> Case:
    """Attention of rows of `queries` at the end of their contexts."""
    total, num_tokens = sum(contexts), queries * len(contexts)

    def make(device: str) -> Callable[[], object]:
        from outrider.models.attention.triton import TritonAttention

        backend = TritonAttention(AttentionSpec(heads, kv_heads, dim, frozenset({None}), BF16, torch.device(device)))
        counts = [-(-context // BLOCK) for context in contexts]
        blocks = iter(torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist())
        tables = [[next(blocks) for _ in range(count)] for count in counts]
        starts = [context - queries for context in contexts]
        rows = SequenceRows([0] * num_tokens, [queries] * len(contexts), starts, tables)
        positions = torch.cat([torch.arange(start, start + queries) for start in starts]).numpy()
        plan = backend.plan(rows, positions, BLOCK)
        shape = (kv_heads, sum(counts), BLOCK, dim)
        kv = LayerKV(*(torch.randn(shape, dtype=BF16, device=device).to(cache) for _ in range(2)))
        qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * dim, dtype=BF16, device=device)
        angles = torch.ones(num_tokens, 1, dim, dtype=BF16, device=device)
        rotation = Rotation(angles, torch.zeros_like(angles))
        return lambda: backend.forward_qkv(qkv, rotation, None, kv, plan, None)

    num_bytes = 2 * cache.itemsize * total * kv_heads * dim + 4 * num_tokens * (heads + kv_heads) * dim
    flops = 4 * heads * dim * sum(queries * (context - (queries - 1) // 2) for context in contexts)
    what = f"{len(contexts)} x {contexts[0]}, {queries} queries, {heads}/{kv_heads} heads"
    kind = "attention" if cache == BF16 else "attention fp8"
    return Case(f"{kind} {what}", make, num_bytes, flops if queries > 64 else 0, triton_only=True)


def adapters(num_tokens: int, rank: int, inputs: int, slices: list[int], *, distinct: bool) -> Case:
    """Shrink and expand of one projection; each token has another adapter, or all have one."""
    count, outputs = num_tokens if distinct else 1, sum(slices)

    def make(device: str) -> Callable[[], object]:
        from outrider.kernels.lora.device_rows import TritonRows
        from outrider.kernels.lora.groups import RowGroups

        width = len(slices) * inputs
        arena = torch.randn(count * rank, width + outputs, dtype=BF16, device=device)
        live = torch.ones(count * rank, len(slices), dtype=torch.uint8, device=device)
        rows = TritonRows(arena[:, :width].unflatten(1, (len(slices), inputs)), arena[:, width:], slices, live)
        runs = [(t, t + 1, range((t % count) * rank, (t % count + 1) * rank)) for t in range(num_tokens)]
        groups = RowGroups(runs, num_tokens, torch.device(device))
        x = torch.randn(num_tokens, inputs, dtype=BF16, device=device)
        y = torch.zeros(num_tokens, outputs, dtype=BF16, device=device)
        return lambda: rows.add(y, x, groups)

    num_bytes = 2 * (count * rank * (len(slices) * inputs + outputs) + num_tokens * (inputs + 2 * outputs))
    kind = "distinct" if distinct else "the same"
    return Case(f"lora {inputs} to {slices}, {num_tokens} x rank {rank}, {kind}", make, num_bytes, triton_only=True)


def dense(num_tokens: int, hidden: int, inner: int) -> Iterator[Case]:
    """The norm and the activation."""

    def norm(device: str) -> Callable[[], object]:
        x = torch.randn(num_tokens, hidden, dtype=BF16, device=device)
        weight = norms.prepare(torch.rand(hidden, device=device), 1e-5)
        return lambda: norms.rms_norm(x, weight)

    def silu(device: str) -> Callable[[], object]:
        x = torch.randn(num_tokens, 2 * inner, dtype=BF16, device=device)
        return lambda: act_and_mul(x)

    yield Case(f"rms_norm {num_tokens} x {hidden}", norm, 2 * num_tokens * hidden * 2)
    yield Case(f"act_and_mul {num_tokens} x {inner}", silu, 2 * num_tokens * inner * 3)


def sampling(num_rows: int, vocab: int) -> Iterator[Case]:
    """Filters, statistics and log-probabilities of rows of logits."""

    def logits(device: str) -> Tensor:
        return torch.randn(num_rows, vocab, device=device) * 3

    def filtering(top_k: int, top_p: float) -> Callable[[str], Callable[[], object]]:
        def make(device: str) -> Callable[[], object]:
            x = logits(device)
            return lambda: filter_logits(x, [0.8] * num_rows, [top_k] * num_rows, [top_p] * num_rows)

        return make

    def stats(device: str) -> Callable[[], object]:
        x = logits(device)
        return lambda: row_stats(x)

    def logprobs(device: str) -> Callable[[], object]:
        x, chosen = logits(device), torch.zeros(num_rows, dtype=torch.int64, device=device)
        return lambda: top_logprobs(x, chosen, 5)

    def penalties(device: str) -> Callable[[], object]:
        x, entries = logits(device), (np.arange(min(vocab, 1000)) << COUNT_BITS) + 1
        every = [Penalised([i], [1], entries, [[5]], 1.1, 0.5, 0.5) for i in range(num_rows)]
        return lambda: penalise(x, every)

    size = 4 * num_rows * vocab
    what = f"{num_rows} x {vocab}"
    yield Case(f"sampling {what}, top-k 50", filtering(50, 1.0), 2 * size)
    yield Case(f"sampling {what}, top-p 0.9", filtering(0, 0.9), 2 * size)
    yield Case(f"penalties {what}, 1000 tokens", penalties, 16 * num_rows * min(vocab, 1000))
    yield Case(f"row_stats {what}", stats, size)
    yield Case(f"top_logprobs {what}, 5", logprobs, size)


def verification(num_rows: int, num_drafts: int, vocab: int, rule: int, name: str) -> Case:
    """Verification of `num_rows` requests with `num_drafts` drafts each."""
    total = num_rows * (1 + num_drafts)

    def make(device: str) -> Callable[[], object]:
        x = torch.randn(total, vocab, device=device) * 3
        probs = None
        if rule == REJECTION:
            probs = torch.randn(num_rows * num_drafts, vocab, device=device).softmax(-1)
        ids = [[7] * num_drafts] * num_rows
        requests = pack(ids, [probs is None] * num_rows, [rule] * num_rows, range(num_rows), [9] * num_rows, x.device)
        stats = row_stats(x)
        return lambda: verify(x, probs, requests, stats)

    rows = total + (num_rows * num_drafts if rule == REJECTION else 0)
    return Case(f"verification {num_rows} x {num_drafts} drafts x {vocab}, {name}", make, 4 * rows * vocab)


def cases(quick: bool) -> list[Case]:
    """Rows of the table; small shapes for a quick run."""
    if quick:
        return [
            attention(1, [64] * 2, 4, 2, 16),
            adapters(4, 8, 64, [64, 32], distinct=True),
            *dense(4, 64, 96),
            *sampling(3, 512),
            verification(3, 2, 512, INVARIANT, "invariant"),
            verification(3, 2, 512, REJECTION, "rejection"),
        ]
    qkv, gate_up = [4096, 1024, 1024], [14336, 14336]
    return [
        attention(1, [4096] * 64, 64, 8),
        attention(1, [32768], 64, 8),
        attention(1, [4096] * 64, 32, 8),
        attention(1, [1024] * 256, 32, 8),
        attention(5, [4096] * 32, 32, 8),
        attention(1, [4096] * 64, 32, 8, cache=CACHE_FLOAT8),
        attention(1, [32768], 64, 8, cache=CACHE_FLOAT8),
        attention(2048, [2048] * 4, 32, 8),
        *(adapters(64, 16, 4096, slices, distinct=True) for slices in (qkv, [4096], gate_up)),
        adapters(64, 16, 14336, [4096], distinct=True),
        adapters(64, 16, 4096, qkv, distinct=False),
        adapters(1, 16, 4096, qkv, distinct=True),
        adapters(8, 64, 4096, qkv, distinct=True),
        *dense(64, 4096, 14336),
        *dense(8192, 4096, 14336),
        *sampling(64, 128256),
        verification(64, 4, 128256, INVARIANT, "invariant"),
        verification(64, 4, 128256, REJECTION, "rejection"),
    ]


@torch.inference_mode()
def measure_kernels(context: Context) -> None:
    """Measure the time, and the share of the measured copy bandwidth or matrix rate."""
    ceilings = context.ceilings
    for case in cases(context.quick):
        if not context.has_time(case.name):
            continue
        if case.triton_only and context.device != "cuda":
            context.skip(case.name, "a kernel of GPUs alone")
            continue
        seconds = seconds_of(case.make(context.device), context.device)
        values = {"microseconds": seconds * 1e6, "megabytes": case.num_bytes / 1e6}
        if case.num_bytes:
            values["percent_of_copy"] = 100 * case.num_bytes / seconds / ceilings["copy_bytes"]
        if case.flops:
            values["percent_of_matmul"] = 100 * case.flops / seconds / ceilings["matmul_flops"]
        context.row(case.name, **values)
