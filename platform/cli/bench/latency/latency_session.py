"""`outrider bench latency`: the time of one batch, measured repeatedly."""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from ....client.llm import LLM
from ....core.config import EngineArgs
from ....core.errors import InvalidRequestError, PromptTooLongError
from ....core.lora_request import LoRARequest
from ....core.outputs import RequestOutput
from ....core.sampling_params import SamplingParams
from ....core.speculative_config import parse_speculative
from ...options.engine_options import given_options, resolve_engine
from ..bench_options import Result, given_adapters
from ..machine import describe_machine, describe_model, has_random_weights, labels
from ..prompts import random_ids
from ..request_figures import RequestRecord, figures
from .latency_command import arguments
from .latency_report import draw_latencies, format_table

_PERCENTILES = (99,)
"""Percentiles of single requests' latencies. The user's option is for whole batches."""


def measure_latency(options: argparse.Namespace) -> Result:
    """Measure with the options of the command.

    Raises:
        OutriderError: whatever is wrong with options, model or adapters.
    """
    if options.profile is not None:
        _make_folder(options.profile)
    adapters = [LoRARequest(name, path=path) for name, path in given_adapters(options).items()]
    args = _engine_args(options)
    with LLM.from_engine_args(args) as llm:
        info = llm.engine_info
        length = options.input_len + options.output_len
        if length > info.max_model_len:
            raise PromptTooLongError(
                f"{length} tokens of prompt and output exceed the model's limit of {info.max_model_len}",
                param="input_len",
            )
        for adapter in adapters:
            llm.load_lora_adapter(adapter)
        requests = Requests(options, adapters, args.seed)
        batches = prompt_batches(options, llm.get_tokenizer(), args.seed)
        seconds, records = _iterate(llm, options, requests, batches)
    found = {
        "avg_latency": round(float(np.mean(seconds)), 6),
        "percentiles": {f"{q:g}": round(float(np.percentile(seconds, q)), 6) for q in options.metric_percentiles},
        **figures(records, sum(seconds), _PERCENTILES, options.percentile_metrics),
    }
    report = _head(options, args, info) | {"figures": found, "latencies": [round(value, 6) for value in seconds]}
    if options.profile is not None:
        from .profile import profile

        report["profile"] = profile(args, adapters, requests, batches, options.profile)
    if options.save_detailed:
        report["requests"] = [record.as_dict(records[0].started) for record in records]
    title = f"latency: {report['model']['name']}; {found['output_throughput']:.1f} output tokens/s"
    return Result(report, format_table(report), lambda file: draw_latencies(report, title, {"": records}, file))


class Requests:
    """Sampling parameters and adapters of a batch, as arguments of `LLM.generate`."""

    def __init__(self, options: argparse.Namespace, adapters: Sequence[LoRARequest], seed: int) -> None:
        """Each request has a seed of its own; adapters take turns."""
        self.loras = list(islice(cycle(adapters or [None]), options.batch_size))
        self.params = [
            SamplingParams(
                max_tokens=options.output_len, temperature=options.temperature, ignore_eos=True, seed=seed + index
            )
            for index in range(options.batch_size)
        ]

    def records(self, outputs: Sequence[RequestOutput], first: int = 0) -> list[RequestRecord]:
        """A record of each output, numbered from `first` on."""
        pairs = enumerate(zip(outputs, self.loras, strict=True), first)
        return [_record(index, output, None if lora is None else lora.name) for index, (output, lora) in pairs]


def prompt_batches(options: argparse.Namespace, tokenizer: Any, seed: int) -> Iterator[list[Any]]:
    """Endless iterator over the prompts of batches: always new ones, because drafters remember the answers to old
    ones."""
    generator, special = random.Random(seed), set(tokenizer.all_special_ids)
    while True:
        drawn = [random_ids(generator, options.input_len, len(tokenizer), special) for _ in range(options.batch_size)]
        yield [{"prompt_token_ids": ids} for ids in drawn]


def _engine_args(options: argparse.Namespace) -> EngineArgs:
    """Options of the engine. The prompts are random, so a prefix cache would find nothing.

    Raises:
        InvalidRequestError: an option is wrong whatever the model; `param` names it.
    """
    given = {"enable_prefix_caching": False} | given_options(options)
    if options.lora and given.setdefault("enable_lora", True) is False:
        raise InvalidRequestError("needs LoRA, which --no-enable-lora switches off", param="lora")
    return resolve_engine(options, options.model, given)[0]


def _head(options: argparse.Namespace, args: EngineArgs, info: Any) -> dict[str, Any]:
    """Head of the report."""
    speculative = parse_speculative(args.speculative_config)
    rates = speculative.synthetic_acceptance_rates if speculative is not None else None
    random_weights = args.load_format == "dummy" or has_random_weights(Path(info.model))
    return {
        "benchmark": "latency",
        "labels": labels(random_weights=random_weights, synthetic=rates),
        "machine": describe_machine(),
        "model": {**describe_model(options.model, info), "speculation": info.speculation},
        "arguments": arguments(options),
    }


def _record(index: int, output: RequestOutput, adapter: str | None) -> RequestRecord:
    """Record of a request. Offline only the times of the first and the last token are known."""
    metrics, completion = output.metrics, output.outputs[0]
    assert metrics is not None
    assert metrics.finished_time is not None
    first = metrics.first_token_time
    return RequestRecord(
        index=index,
        started=metrics.arrival_time,
        arrivals=[] if first is None else [first, metrics.finished_time],
        ended=metrics.finished_time,
        num_prompt_tokens=len(output.prompt_token_ids),
        num_output_tokens=len(completion.token_ids),
        adapter=adapter,
        finish_reason=completion.finish_reason,
        streamed=False,
        speculation=metrics,
    )


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
