"""`outrider bench serve`: requests over HTTP, as users send them."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ....core.errors import InvalidRequestError
from ....http.server import loop_factory
from ...options.api_keys import API_KEY_VARIABLE, given_keys
from ..bench_options import Result
from ..machine import describe_machine, has_random_weights, labels
from ..request_figures import RequestRecord, acceptance, figures
from .datasets import assign_adapters, make_samples
from .http_client import HttpClient
from .request_load import Load, arrival_times, offer
from .server_facts import find_model, find_tokenizer, since, speculation_counts
from .serving_commands import ENDPOINTS, arguments
from .serving_report import draw_latencies, format_table
from .streaming import Asker

_BUSY_SHARE, _LATE_MS = 0.7, 20.0
"""Limits of the client's share of a core and of its event loop's p99 delay; above them it may distort the figures."""


def measure_server(options: argparse.Namespace) -> Result:
    """Measure with the options of the command, in an event loop: uvloop's, if installed.

    Raises:
        OutriderError: the server cannot be measured.
    """
    host = f"[{options.host}]" if ":" in options.host else options.host
    options.base_url = options.base_url or f"http://{host}:{options.port}"
    options.endpoint = options.endpoint or ENDPOINTS[options.backend]
    keys = given_keys([options.api_key] if options.api_key else (), API_KEY_VARIABLE, "api_key")
    client = HttpClient(options.base_url, keys[0] if keys else None)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        report, records = runner.run(_measure(options, client))
    status = 0 if report["figures"]["completed"] else 1
    return Result(report, format_table(report), lambda file: draw_latencies(report, records, file), status)


async def _measure(options: argparse.Namespace, client: HttpClient) -> tuple[dict[str, Any], list[RequestRecord]]:
    try:
        model = await find_model(client, options.model)
        for name in options.lora_modules or ():
            await find_model(client, name, "lora_modules")
        tokenizer, folder = find_tokenizer(options.tokenizer, model)
        samples = make_samples(options, tokenizer, options.seed)
        assign_adapters(samples, options.lora_modules or (), options.lora_assignment, options.seed)
        common = {"temperature": options.temperature} | ({"ignore_eos": True} if options.ignore_eos else {})
        asker = Asker(client, options.endpoint, model.name, common | options.extra_body, tokenizer)
        for _ in range(options.num_warmups):
            record = RequestRecord(0)
            await asker.ask(samples[0], record)
            if record.error is not None:
                raise InvalidRequestError(f"the first request failed: {record.error}")
        before = await speculation_counts(client)
        times = arrival_times(len(samples), options.request_rate, options.burstiness, options.seed)
        with tqdm(total=len(samples), disable=options.disable_tqdm, dynamic_ncols=True) as bar:
            load = await offer(samples, times.tolist(), asker.ask, options.max_concurrency, lambda _: bar.update(1))
        speculation = since(before, await speculation_counts(client))
    finally:
        client.close()
    goodput = dict(options.goodput or ())
    found = figures(load.records, load.duration, options.metric_percentiles, options.percentile_metrics, goodput)
    report: dict[str, Any] = {
        "benchmark": "serve",
        "labels": _labels(folder, load, asker),
        "machine": describe_machine(),
        "model": {"name": model.name},
        "arguments": arguments(options),
        "figures": found | acceptance(speculation),
        "client": load.client,
        "errors": list(dict.fromkeys(r.error for r in load.records if r.error is not None))[:5],
    }
    if options.save_detailed:
        report["requests"] = [record.as_dict(load.started) for record in load.records]
    return report, load.records


def _labels(folder: Path | None, load: Load, asker: Asker) -> list[str]:
    found = labels(random_weights=folder is not None and has_random_weights(folder))
    if asker.counted_chunks:
        found.append("OUTPUT TOKENS ARE CHUNKS: the server sends no usage, and there is no --tokenizer to count with")
    if load.client["cpu_share"] > _BUSY_SHARE or load.client.get("p99_loop_delay_ms", 0.0) > _LATE_MS:
        found.append("THE CLIENT WAS BUSY: latencies contain its own delays (see client)")
    return found
