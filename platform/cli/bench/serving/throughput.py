"""`outrider bench throughput`: many requests at once, without a server."""

from __future__ import annotations

import argparse
import time

from ....client.llm import LLM
from ..bench_options import Result
from ..request_figures import figures
from .datasets import assign_adapters, make_samples
from .offline import Requests, adapters, engine_args, offline_result


def measure_throughput(options: argparse.Namespace) -> Result:
    """Measure with the options of the command.

    Raises:
        OutriderError: whatever is wrong with options, model or adapters.
    """
    args, loras = engine_args(options), adapters(options)
    with LLM.from_engine_args(args) as llm:
        info = llm.engine_info
        samples = make_samples(options, llm.get_tokenizer(), args.seed)
        assign_adapters(samples, list(loras), options.lora_assignment, args.seed)
        requests = Requests(llm, samples, loras, options, args.seed)
        llm.generate(requests.prompts[:1], requests.params[:1], requests.loras[:1], use_tqdm=False)
        started = time.perf_counter()
        use_tqdm = not options.disable_tqdm
        outputs = llm.generate(requests.prompts, requests.params, requests.loras, use_tqdm=use_tqdm)
        seconds = time.perf_counter() - started
    records = requests.records(outputs)
    found = figures(records, seconds, options.metric_percentiles, options.percentile_metrics)
    return offline_result("throughput", options, args, info, found, records)
