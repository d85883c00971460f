"""`outrider bench throughput`: many requests at once, without a server. Imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..bench_options import add_output_options, check_outputs, publish
from .load_options import (
    add_assignment,
    add_dataset,
    add_detail,
    add_lengths,
    add_model_options,
    add_percentiles,
    check_common,
    naming_options,
)


def add_parser(kinds: Any) -> None:
    """Add the measurement `throughput`."""
    parser = kinds.add_parser(
        "throughput",
        help="many requests at once, without a server",
        description="All requests at once through an engine in this process. Takes the engine's options of serve.",
        allow_abbrev=False,
    )
    add_lengths(parser, input_len=128, output_len=128)
    add_dataset(parser, num_prompts=100)
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="have every answer be as long as it may (default: it is)",
    )
    add_model_options(parser)
    add_assignment(parser)
    add_percentiles(parser, (50, 90, 99))
    add_detail(parser)
    add_output_options(parser)
    parser.set_defaults(run=naming_options(run))


def run(namespace: argparse.Namespace) -> int:
    """Measure, print the table and write the files."""
    check_common(namespace)
    check_outputs(namespace)
    import time

    from ....client.llm import LLM
    from ..request_figures import acceptance, figures
    from . import offline
    from .datasets import assign_adapters, make_samples
    from .latency_plot import draw_latencies
    from .vllm_tables import throughput_table

    args, loras = offline.engine_args(namespace), offline.adapters(namespace)
    with LLM.from_engine_args(args) as llm:
        tokenizer, info = llm.get_tokenizer(), llm.engine_info
        samples = make_samples(namespace, tokenizer, args.seed)
        assign_adapters(samples, list(loras), namespace.lora_assignment, args.seed)
        offline.check_lengths(samples, info.max_model_len)
        requests = [offline.lora_of(sample, loras) for sample in samples]
        prompts = [offline.prompt_of(sample, tokenizer) for sample in samples]
        for lora in loras.values():
            llm.load_lora_adapter(lora)
        params = offline.sampling_params(samples, namespace.temperature, namespace.ignore_eos, args.seed)
        llm.generate(prompts[:1], params[:1], requests[:1], use_tqdm=False)
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, requests, use_tqdm=not namespace.disable_tqdm)
        seconds = time.perf_counter() - started
    records = [offline.record_of(i, out, samples[i].adapter) for i, out in enumerate(outputs)]
    report = offline.describe("throughput", namespace, args, info)
    report["figures"] = figures(records, seconds, namespace.metric_percentiles, namespace.percentile_metrics)
    report["figures"] |= acceptance(offline.speculation_of(outputs))
    if namespace.save_detailed:
        origin = min(record.started for record in records)
        report["requests"] = [record.as_dict(origin) for record in records]

    def draw(report: dict[str, Any], file: Path) -> None:
        draw_latencies(report, records, file)

    publish(report, namespace, throughput_table, draw)
    return 0
