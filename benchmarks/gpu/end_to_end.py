"""Whole engines on models of real shapes: decoding, prompts, adapters and graphs, compared with the device's limits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import load
from .models import ModelShape, running, write_adapters
from .report import Context

PROMPT = 128


def _prompts(shape: ModelShape, count: int, length: int = PROMPT) -> list[list[int]]:
    return [load.random_prompt(length, shape.vocab, seed) for seed in range(count)]


def _floor_seconds(context: Context, shape: ModelShape, rows: int, length: int) -> float:
    """Least seconds of a decode step: weights and KV at the copy's bandwidth, products at the matrix rate."""
    ceilings = context.ceilings
    streamed = 2 * shape.num_streamed + rows * length * shape.kv_bytes
    return max(streamed / ceilings["copy_bytes"], 2 * shape.num_streamed * rows / ceilings["matmul_flops"])


def _sizes(context: Context, full: Sequence[int]) -> list[int]:
    return [1, 2] if context.quick else list(full)


def _options(context: Context, sizes: Sequence[int], **more: Any) -> dict[str, Any]:
    """Options of an engine for the largest of `sizes` short requests and for prompts of 2048 tokens."""
    most, length = max(sizes), 256 if context.quick else 4096
    blocks = max(most * 20, 5 * length // 16)
    pacing = {"prompt_pacing": False}  # or the first requests are at their end before the last have begun
    return {"max_model_len": length, "max_num_seqs": most, "num_gpu_blocks_override": blocks} | pacing | more


def measure_model(context: Context, root: Path, shape: ModelShape) -> None:
    """Measure decoding by batch size, prompts, and the host's share of a step."""
    sizes = _sizes(context, (1, 8, 64, 256))
    steps = 3 if context.quick else 40
    started = time.perf_counter()
    with running(shape.write(root), context.device, **_options(context, sizes)) as engine:
        context.row(f"{shape.name} ready", seconds=time.perf_counter() - started, captured=load.captured(engine))
        for rows in sizes:
            if not context.has_time(f"{shape.name} decode x {rows}", 3):
                continue
            got = load.decode(engine, _prompts(shape, rows), steps)
            floor = _floor_seconds(context, shape, rows, PROMPT + steps // 2)
            context.row(
                f"{shape.name} decode x {rows}",
                tokens_per_second=rows / got,
                milliseconds=got * 1e3,
                percent_of_limit=100 * floor / got,
            )
        _measure_prompts(context, shape, engine)
        if context.device == "cuda" and context.has_time(f"{shape.name} host gap", 5):
            for rows in (1, 64):
                seconds, busy = load.device_seconds(engine, _prompts(shape, rows), 20)
                context.row(
                    f"{shape.name} host gap x {rows}", microseconds=(seconds - busy) * 1e6, step_ms=seconds * 1e3
                )


def _measure_prompts(context: Context, shape: ModelShape, engine: Any) -> None:
    length, count = (64, 1) if context.quick else (2048, 4)
    if not context.has_time(f"{shape.name} prompts", 3):
        return
    best = float("inf")
    for round_number in range(3):
        prompts = [load.random_prompt(length, shape.vocab, 100 * round_number + i) for i in range(count)]
        load.synchronize()
        started = time.perf_counter()
        load.generate(engine, prompts[: engine.scheduler.config.max_num_seqs], load.greedy(1))
        best = min(best, time.perf_counter() - started)
    tokens = length * count
    attention = 2 * shape.layers * shape.heads * shape.head_dim * length * tokens  # half of the square
    floor = (2 * shape.num_linear * tokens + attention) / context.ceilings["matmul_flops"]
    context.row(
        f"{shape.name} prompts {count} x {length}",
        tokens_per_second=tokens / best,
        percent_of_matmul=100 * floor / best,
    )


def measure_adapters(context: Context, root: Path, shape: ModelShape) -> None:
    """Measure a step with distinct adapters of mixed ranks over one without, and over the time of their bytes."""
    counts = [1, 2] if context.quick else [1, 8, 32, 64]
    steps, rows = (3, 2) if context.quick else (30, 64)
    ranks = [(8, 16)[index % 2] for index in range(max(counts))]
    loras = write_adapters(root, shape, ranks)
    options = _options(context, [rows], enable_lora=True, max_loras=len(loras), max_lora_rank=16)
    bandwidth = context.ceilings["copy_bytes"]
    with running(shape.write(root), context.device, **options) as engine:
        for request in loras:
            if not context.has_time("loading more adapters", 20):
                return
            engine.adapters.load(request)
        for count in counts:
            name = f"{shape.name} adapters {count} x {count} requests"
            if not context.has_time(name, 6):
                continue
            prompts = _prompts(shape, count)
            base = load.decode(engine, prompts, steps)
            got = load.decode(engine, prompts, steps, loras[:count])
            floor = sum(ranks[:count]) * shape.rank_row_bytes / bandwidth
            context.row(
                name,
                percent_slower=100 * (got / base - 1),
                over_byte_floor=got / (base + floor),
                milliseconds=got * 1e3,
                base_milliseconds=base * 1e3,
            )


def measure_graphs(context: Context, root: Path, shape: ModelShape) -> None:
    """Check for equal text with and without graphs in float32, in which rounding decides nothing; speed in bfloat16."""
    if context.device != "cuda":
        context.skip("graphs", "they are a GPU's")
        return
    tokens, prompts = 24, _prompts(shape, 5, 40)
    # Products of other numbers of rows round differently; without tf32 this is far below the gaps between logits.
    torch.backends.cuda.matmul.allow_tf32 = False
    texts: dict[str, list[list[int]]] = {}
    speculative = {"method": "ngram", "num_speculative_tokens": 3}
    for name, options in {
        "eager": {"enforce_eager": True},
        "graphs": {},
        "graphs and drafts": {"speculative_config": speculative},
    }.items():
        if not context.has_time(f"text of {name}", 10):
            return
        options = _options(context, [8], dtype="float32", **options)
        with running(shape.write(root), context.device, **options) as engine:
            texts[name] = load.generate(engine, prompts, load.greedy(tokens))
            context.row(f"{shape.name} {name}", captured=load.captured(engine), passed=texts[name] == texts["eager"])
    for rows in (1, 8, 64):
        if not context.has_time(f"{shape.name} eager x {rows}", 15):
            return
        times = {}
        for name, eager in (("graphs", False), ("eager", True)):
            with running(shape.write(root), context.device, **_options(context, [rows], enforce_eager=eager)) as engine:
                times[name] = load.decode(engine, _prompts(shape, rows), 30)
        context.row(
            f"{shape.name} graphs x {rows}",
            step_ms=times["graphs"] * 1e3,
            eager_ms=times["eager"] * 1e3,
            times_faster=times["eager"] / times["graphs"],
        )
