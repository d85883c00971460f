"""The kernel table: each kernel at shapes of real models, compared with the device's limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from outrider.kernels.paged_attention import CACHE_FLOAT8
from outrider.kernels.penalties import COUNT_BITS, Penalised, penalise
from outrider.kernels.verification import INVARIANT, REJECTION
from outrider.tools.tune import workloads
from outrider.tools.tune.workloads import Inputs, ModelShape, Workload, make_work

from .report import Context
from .timing import seconds_of

TINY = ModelShape(hidden=64, inner=96, heads=4, kv_heads=2, head_dim=16, vocab=512)
LLAMA_8B = ModelShape(hidden=4096, inner=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256)
LLAMA_70B_HEADS = LLAMA_8B._replace(heads=64)


class Case(NamedTuple):
    """One row of the table."""

    work: Workload
    num_bytes: int
    """Bytes that must move, each read once and each written once."""
    flops: int = 0
    """Floating-point operations of a kernel that arithmetic limits; 0 for others."""


def attention(model: ModelShape, rows: int, queries: int, context: int, cache: torch.dtype = torch.bfloat16) -> Case:
    """Attention of rows of `queries` at the end of their contexts."""
    heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
    kind = "attention" if cache == torch.bfloat16 else "attention fp8"
    what = f"{kind} {rows} x {context}, {queries} queries, {heads}/{kv_heads} heads"
    num_bytes = rows * dim * (2 * cache.itemsize * context * kv_heads + 4 * queries * (heads + kv_heads))
    flops = 4 * heads * dim * rows * queries * (context - (queries - 1) // 2)
    work = make_work(model, what, workloads.attention, rows, queries, context, cache)
    return Case(work, num_bytes, flops if queries > 64 else 0)


def adapters(model: ModelShape, num_tokens: int, rank: int, count: int) -> Iterator[Case]:
    """Shrink and expand of each projection; the tokens are divided among `count` adapters."""
    for inputs, slices in model.projections:
        what = f"lora {inputs} to {list(slices)}, {num_tokens} x rank {rank}, {count} adapters"
        weights, states = len(slices) * inputs + sum(slices), inputs + 2 * sum(slices)
        work = make_work(model, what, workloads.adapters, (inputs, slices), rank, num_tokens, count)
        yield Case(work, 2 * (count * rank * weights + num_tokens * states))


def dense(model: ModelShape, num_tokens: int) -> Iterator[Case]:
    """The norm and the activation."""
    for name, maker, width, parts in (
        ("rms_norm", workloads.norm, model.hidden, 2),
        ("act_and_mul", workloads.activation, model.inner, 3),
    ):
        yield Case(
            make_work(model, f"{name} {num_tokens} x {width}", maker, num_tokens), 2 * num_tokens * width * parts
        )


def quantized(model: ModelShape, num_tokens: int) -> Iterator[Case]:
    """Products of a layer's projections with quantised weights, and in the model's dtype for comparison."""
    for inputs, slices in model.projections:
        outputs = sum(slices)
        for kind, bits in (("bf16", 16.0), ("fp8", 8.125), ("int8", 8.0), ("int4", 4.25)):
            what = f"linear {kind} {inputs} to {outputs}, {num_tokens} tokens"
            if kind == "bf16":
                work = make_work(model, what, workloads.plain_product, (outputs, inputs), num_tokens)
            else:
                work = make_work(model, what, workloads.quantized_product, kind, (outputs, inputs), num_tokens)
            yield Case(work, int(inputs * outputs * bits / 8) + 2 * num_tokens * (inputs + outputs))


def penalties(inputs: Inputs, num_rows: int) -> Callable[[], object]:
    """Penalties of rows whose texts have up to 1000 different tokens."""
    logits, entries = inputs.logits(num_rows), (np.arange(min(inputs.model.vocab, 1000)) << COUNT_BITS) + 1
    every = [Penalised([i], [1], entries, [[5]], 1.1, 0.5, 0.5) for i in range(num_rows)]
    return lambda: penalise(logits, every)


def sampling(model: ModelShape, num_rows: int) -> Iterator[Case]:
    """Filters, penalties, statistics and log-probabilities of rows of logits, and verifications of 4 drafts each."""
    what, row = f"{num_rows} x {model.vocab}", 4 * model.vocab
    yield Case(make_work(model, f"sampling {what}, top-k 50", workloads.filtering, num_rows, True), 2 * num_rows * row)
    yield Case(
        make_work(model, f"sampling {what}, top-p 0.9", workloads.filtering, num_rows, False), 2 * num_rows * row
    )
    changed = 16 * num_rows * min(model.vocab, 1000)
    yield Case(make_work(model, f"penalties {what}, 1000 tokens", penalties, num_rows), changed)
    yield Case(make_work(model, f"row_stats {what}", workloads.stats, num_rows), num_rows * row)
    yield Case(make_work(model, f"top_logprobs {what}, 5", workloads.logprobs, num_rows), num_rows * row)
    for name, rule, rows in (("invariant", INVARIANT, 5), ("rejection", REJECTION, 5 + 4)):
        work = make_work(model, f"verification {what}, 4 drafts, {name}", workloads.verification, rule, 4, num_rows)
        yield Case(work, num_rows * rows * row)


def cases(quick: bool) -> list[Case]:
    """Rows of the table; small shapes for a quick run."""
    if quick:
        return [attention(TINY, 2, 1, 64), *adapters(TINY, 4, 8, 4), *dense(TINY, 4), *sampling(TINY, 3)]
    return [
        attention(LLAMA_70B_HEADS, 64, 1, 4096),
        attention(LLAMA_70B_HEADS, 1, 1, 32768),
        attention(LLAMA_8B, 64, 1, 4096),
        attention(LLAMA_8B, 256, 1, 1024),
        attention(LLAMA_8B, 32, 5, 4096),
        attention(LLAMA_8B, 64, 1, 4096, CACHE_FLOAT8),
        attention(LLAMA_8B, 1, 1, 32768, CACHE_FLOAT8),
        attention(LLAMA_8B, 4, 2048, 2048),
        *adapters(LLAMA_8B, 64, 16, 64),
        *adapters(LLAMA_8B, 64, 16, 1),
        *adapters(LLAMA_8B, 1, 16, 1),
        *adapters(LLAMA_8B, 8, 64, 8),
        *dense(LLAMA_8B, 64),
        *dense(LLAMA_8B, 8192),
        *sampling(LLAMA_8B, 64),
    ]


def quantized_cases(quick: bool) -> list[Case]:
    """Rows of the table of quantised products: few tokens, as in decoding, and a prompt."""
    model, steps = (TINY, (1, 20)) if quick else (LLAMA_8B, (1, 16, 64, 256, 2048))
    return [case for num_tokens in steps for case in quantized(model, num_tokens)]


def measure_kernels(context: Context) -> None:
    """Measure the time, and the share of the measured copy bandwidth or matrix rate."""
    _measure(context, "kernels", cases(context.quick))


def measure_quantized(context: Context) -> None:
    """Measure products with quantised weights, and the same products in bfloat16."""
    _measure(context, "quantised products", quantized_cases(context.quick))


@torch.inference_mode()
def _measure(context: Context, what: str, table: list[Case]) -> None:
    if context.device != "cuda":
        context.skip(what, "kernels of GPUs alone")
        return
    ceilings = context.ceilings
    for case in table:
        if not context.has_time(case.work.name):
            continue
        seconds = seconds_of(case.work.make(torch.device(context.device)), context.device)
        values = {
            "microseconds": seconds * 1e6,
            "megabytes": case.num_bytes / 1e6,
            "percent_of_copy": 100 * case.num_bytes / seconds / ceilings["copy_bytes"],
        }
        if case.flops:
            values["percent_of_matmul"] = 100 * case.flops / seconds / ceilings["matmul_flops"]
        context.row(case.work.name, **values)
