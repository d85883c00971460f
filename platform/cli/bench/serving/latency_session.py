"""One measurement of latencies from options to a report."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from ....client.llm import LLM
from ....core.lora_request import LoRARequest
from ....core.outputs import RequestOutput
from ....core.sampling_params import SamplingParams
from ..request_figures import RequestRecord, acceptance, figures
from . import offline
from .datasets import Sample, assign_adapters, random_prompt

_PERCENTILES = (99,)
"""Percentiles of single requests' latencies. The user's option is for whole batches."""


class Batch(NamedTuple):
    """Requests that are sent at once."""

    prompts: list[Any]
    params: list[SamplingParams]
    loras: list[LoRARequest | None]
    adapters: list[str | None]


def measure_latency(options: argparse.Namespace) -> tuple[dict[str, Any], list[RequestRecord]]:
    """Measure with the options of the command; returns the report and a record of each request.

    Raises:
        OutriderError: whatever is wrong with options, model or adapters.
    """
    # The prompts are random, so a prefix cache would find nothing.
    args, loras = offline.engine_args(options, enable_prefix_caching=False), offline.adapters(options)
    with LLM.from_engine_args(args) as llm:
        info, tokenizer = llm.engine_info, llm.get_tokenizer()
        batches = make_batches(options, tokenizer, loras, info.max_model_len, args.seed)
        for lora in loras.values():
            llm.load_lora_adapter(lora)
        seconds, records, outputs = _iterate(llm, options, batches)
    report = offline.describe("latency", options, args, info)
    report["figures"] = {
        "avg_latency": round(float(np.mean(seconds)), 6),
        "percentiles": {f"{q:g}": round(float(np.percentile(seconds, q)), 6) for q in options.metric_percentiles},
        **figures(records, sum(seconds), _PERCENTILES, options.percentile_metrics),
        **acceptance(offline.speculation_of(outputs)),
    }
    report["latencies"] = [round(value, 6) for value in seconds]
    if options.save_detailed:
        report["requests"] = [record.as_dict(records[0].started) for record in records]
    if options.profile is not None:
        from .profiling.profile import profile

        report["profile"] = profile(args, list(loras.values()), batches, options.profile)
    return report, records


def make_batches(
    options: argparse.Namespace, tokenizer: Any, loras: dict[str, LoRARequest], limit: int, seed: int
) -> Iterator[Batch]:
    """Endless iterator over batches. Each has new prompts, because drafters remember the answers to old ones."""
    generator = random.Random(seed)
    length = options.output_len or options.default_output_len
    first = [Sample([], options.input_len, length) for _ in range(options.batch_size)]
    offline.check_lengths(first, limit)
    assign_adapters(first, list(loras), options.lora_assignment, seed)
    adapters = [sample.adapter for sample in first]
    params = offline.sampling_params(first, options.temperature, True, seed)

    def batches() -> Iterator[Batch]:
        requests = [offline.lora_of(sample, loras) for sample in first]
        while True:
            prompts = [random_prompt(tokenizer, options.input_len, generator) for _ in first]
            yield Batch([{"prompt_token_ids": ids} for ids in prompts], params, requests, adapters)

    return batches()


def _iterate(
    llm: LLM, options: argparse.Namespace, batches: Iterator[Batch]
) -> tuple[list[float], list[RequestRecord], list[RequestOutput]]:
    seconds: list[float] = []
    records: list[RequestRecord] = []
    outputs: list[RequestOutput] = []
    count = options.num_iters_warmup + options.num_iters
    quiet = options.disable_tqdm
    for number, batch in enumerate(tqdm(islice(batches, count), total=count, disable=quiet, dynamic_ncols=True)):
        started = time.perf_counter()
        found = llm.generate(batch.prompts, batch.params, batch.loras, use_tqdm=False)
        ended = time.perf_counter()
        if number >= options.num_iters_warmup:
            seconds.append(ended - started)
            outputs += found
            records += [
                offline.record_of(len(records) + index, output, batch.adapters[index])
                for index, output in enumerate(found)
            ]
    return seconds, records, outputs
