"""`outrider bench latency`: the time of one batch, measured repeatedly."""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from ....client.llm import LLM
from ....core.errors import InvalidRequestError
from ..bench_options import Result
from ..request_figures import RequestRecord, figures
from .datasets import OUTPUT_LEN, Sample, assign_adapters, random_prompt
from .offline import Requests, adapters, engine_args, offline_result

_PERCENTILES = (99,)
"""Percentiles of single requests' latencies. The user's option is for whole batches."""


def measure_latency(options: argparse.Namespace) -> Result:
    """Measure with the options of the command.

    Raises:
        OutriderError: whatever is wrong with options, model or adapters.
    """
    if options.profile is not None:
        _make_folder(options.profile)
    # The prompts are random, so a prefix cache would find nothing.
    args, loras = engine_args(options, enable_prefix_caching=False), adapters(options)
    with LLM.from_engine_args(args) as llm:
        info = llm.engine_info
        length = options.output_len or OUTPUT_LEN
        samples = [Sample([], options.input_len, length) for _ in range(options.batch_size)]
        assign_adapters(samples, list(loras), options.lora_assignment, args.seed)
        requests = Requests(llm, samples, loras, options, args.seed)
        batches = prompt_batches(options, llm.get_tokenizer(), args.seed)
        seconds, records = _iterate(llm, options, requests, batches)
    found = {
        "avg_latency": round(float(np.mean(seconds)), 6),
        "percentiles": {f"{q:g}": round(float(np.percentile(seconds, q)), 6) for q in options.metric_percentiles},
        **figures(records, sum(seconds), _PERCENTILES, options.percentile_metrics),
    }
    more: dict[str, Any] = {"latencies": [round(value, 6) for value in seconds]}
    if options.profile is not None:
        from .profiling.profile import profile

        more["profile"] = profile(args, list(loras.values()), requests, batches, options.profile)
    return offline_result("latency", options, args, info, found, records, **more)


def prompt_batches(options: argparse.Namespace, tokenizer: Any, seed: int) -> Iterator[list[Any]]:
    """Endless iterator over the prompts of batches: always new ones, because drafters remember the answers to old
    ones."""
    generator = random.Random(seed)
    while True:
        prompts = [random_prompt(tokenizer, options.input_len, generator) for _ in range(options.batch_size)]
        yield [{"prompt_token_ids": ids} for ids in prompts]


def _iterate(
    llm: LLM, options: argparse.Namespace, requests: Requests, batches: Iterator[list[Any]]
) -> tuple[list[float], list[RequestRecord]]:
    seconds: list[float] = []
    records: list[RequestRecord] = []
    count = options.num_iters_warmup + options.num_iters
    shown = tqdm(islice(batches, count), total=count, disable=options.disable_tqdm, dynamic_ncols=True)
    for number, prompts in enumerate(shown):
        started = time.perf_counter()
        outputs = llm.generate(prompts, requests.params, requests.loras, use_tqdm=False)
        ended = time.perf_counter()
        if number >= options.num_iters_warmup:
            seconds.append(ended - started)
            records += requests.records(outputs, first=len(records))
    return seconds, records


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequestError(f"{folder} cannot be made a folder: {error.strerror}", param="profile") from None
    if not os.access(folder, os.W_OK):
        raise InvalidRequestError(f"{folder} cannot be written to", param="profile")
