"""`outrider bench serve`: requests over HTTP, as users send them. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....core.errors import InvalidRequestError
from ...options.api_keys import API_KEY_VARIABLE, given_keys, key
from ...options.engine import json_object
from ..bench_options import add_output_options, check_outputs, natural, positive, positive_number, publish
from .load_options import (
    CHAT,
    COMPLETIONS,
    add_assignment,
    add_dataset,
    add_detail,
    add_goodput,
    add_lengths,
    add_percentiles,
    arguments,
    check_common,
    naming_options,
    rate,
)

if TYPE_CHECKING:
    from .load import Load

_DESCRIPTION = """\
Sends requests to a server, Outrider or any other with an OpenAI-compatible API, and measures the streamed answers.
"""
_ENDPOINTS = {"openai": COMPLETIONS, "vllm": COMPLETIONS, "openai-chat": CHAT}
_BUSY_SHARE, _LATE_MS = 0.7, 20.0
"""Limits of the client's share of a core and of its event loop's p99 delay; above them it may distort the figures."""


def add_parser(kinds: Any) -> None:
    """Add the measurement `serve`."""
    parser = kinds.add_parser("serve", help="a running server, over HTTP", description=_DESCRIPTION, allow_abbrev=False)
    add = parser.add_argument
    add("--base-url", metavar="URL", help="(default: http://HOST:PORT)")
    add("--host", default="127.0.0.1", help="(default: %(default)s)")
    add("--port", type=positive, default=8000, metavar="N", help="(default: %(default)s)")
    add(
        "--backend",
        choices=tuple(_ENDPOINTS),
        default="openai",
        help="which API it is; openai-chat asks for chats (default: %(default)s)",
    )
    add(
        "--endpoint",
        metavar="PATH",
        help="a path that ends in /completions or /chat/completions (default: the backend's)",
    )
    add("--model", metavar="NAME", help="the model's name in the API (default: the server's first)")
    add("--tokenizer", metavar="PATH", help="HF directory or hub id (default: the model's, if it is on this machine)")
    add("--api-key", type=key, metavar="KEY", help=f"(default: the variable {API_KEY_VARIABLE})")
    add("--lora-modules", nargs="+", metavar="NAME", help="the server's adapters that requests ask for")
    add_assignment(parser)
    add_lengths(parser, input_len=128, output_len=128)
    add_dataset(parser, num_prompts=100)
    add("--ignore-eos", action="store_true", help="have every answer be as long as it may")
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="more fields for every request")
    add("--request-rate", type=rate, default=float("inf"), metavar="R", help="requests a second (default: inf)")
    add(
        "--burstiness",
        type=positive_number,
        default=1.0,
        metavar="B",
        help="of arrivals: 1 is Poisson, less comes in bursts, more is more even (default: 1)",
    )
    add("--max-concurrency", type=positive, metavar="N", help="most requests at once; others wait with the client")
    add("--num-warmups", type=natural, default=1, metavar="N", help="requests before the measurement (default: 1)")
    add("--seed", type=natural, default=0, metavar="N", help="of prompts, arrivals and assignment (default: 0)")
    add_goodput(parser)
    add_percentiles(parser, (50, 90, 99))
    add_detail(parser)
    add_output_options(parser)
    parser.set_defaults(run=naming_options(run))


def run(namespace: argparse.Namespace) -> int:
    """Measure, print the table and write the files."""
    check_common(namespace)
    host = f"[{namespace.host}]" if ":" in namespace.host else namespace.host
    namespace.base_url = namespace.base_url or f"http://{host}:{namespace.port}"
    namespace.endpoint = namespace.endpoint or _ENDPOINTS[namespace.backend]
    if not namespace.endpoint.startswith("/") or not namespace.endpoint.endswith("/completions"):
        raise InvalidRequestError(
            f"must be a path that ends in /completions or /chat/completions, got {namespace.endpoint!r}",
            param="endpoint",
        )
    check_outputs(namespace)
    keys = given_keys([namespace.api_key] if namespace.api_key else None, API_KEY_VARIABLE, "api_key")

    from .latency_plot import draw_latencies
    from .vllm_tables import serving_table

    report, load = _run_loop(namespace, keys[0] if keys else None)

    def draw(report: dict[str, Any], file: Path) -> None:
        draw_latencies(report, load.records, file)

    publish(report, namespace, serving_table, draw)
    return 0 if report["figures"]["completed"] else 1


def _run_loop(namespace: argparse.Namespace, api_key: str | None) -> tuple[dict[str, Any], Load]:
    """Run the measurement in an event loop: uvloop's, if installed."""
    import asyncio

    try:
        import uvloop
    except ImportError:  # Windows has no uvloop
        factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_measure(namespace, api_key))


async def _measure(options: argparse.Namespace, api_key: str | None) -> tuple[dict[str, Any], Load]:
    from tqdm.auto import tqdm

    from ..request_figures import acceptance, figures
    from .arrivals import arrival_times
    from .datasets import assign_adapters, make_samples
    from .http_client import HttpClient
    from .load import offer
    from .server_facts import find_model, find_tokenizer, since, speculation_counts
    from .streaming import Asker

    client = HttpClient(options.base_url, api_key)
    try:
        model = await find_model(client, options.model)
        for name in options.lora_modules or ():
            await find_model(client, name, "lora_modules")
        tokenizer, folder = find_tokenizer(options.tokenizer, model)
        samples = make_samples(options, tokenizer, options.seed)
        assign_adapters(samples, options.lora_modules or (), options.lora_assignment, options.seed)
        common = {"temperature": options.temperature} | ({"ignore_eos": True} if options.ignore_eos else {})
        asker = Asker(client, options.endpoint, model.name, common | options.extra_body, tokenizer)
        await _warm_up(asker, samples[0], options.num_warmups)
        before = await speculation_counts(client)
        times = arrival_times(len(samples), options.request_rate, options.burstiness, options.seed)
        with tqdm(total=len(samples), disable=options.disable_tqdm, dynamic_ncols=True) as bar:
            load = await offer(samples, times.tolist(), asker.ask, options.max_concurrency, lambda _: bar.update(1))
        speculation = since(before, await speculation_counts(client))
    finally:
        client.close()
    goodput = dict(options.goodput or ())
    found = figures(load.records, load.duration, options.metric_percentiles, options.percentile_metrics, goodput)
    return _report(options, model.name, folder, load, found | acceptance(speculation), asker.counted_chunks), load


async def _warm_up(asker: Any, sample: Any, number: int) -> None:
    from ..request_figures import RequestRecord

    for _ in range(number):
        record = RequestRecord(0)
        await asker.ask(sample, record)
        if record.error is not None:
            raise InvalidRequestError(f"the first request failed: {record.error}")


def _report(
    options: argparse.Namespace,
    model: str,
    folder: Path | None,
    load: Load,
    found: dict[str, Any],
    counted_chunks: bool,
) -> dict[str, Any]:
    from ..machine import describe_machine
    from .vllm_tables import has_random_weights, weight_labels

    labels = weight_labels(folder is not None and has_random_weights(folder))
    if counted_chunks:
        labels.append("OUTPUT TOKENS ARE CHUNKS: the server sends no usage, and there is no --tokenizer to count with")
    if load.client["cpu_share"] > _BUSY_SHARE or load.client.get("p99_loop_delay_ms", 0.0) > _LATE_MS:
        labels.append("THE CLIENT WAS BUSY: latencies contain its own delays (see client)")
    report: dict[str, Any] = {
        "benchmark": "serve",
        "labels": labels,
        "machine": describe_machine(),
        "model": {"name": model},
        "arguments": arguments(options),
        "figures": found,
        "client": load.client,
        "errors": list(dict.fromkeys(r.error for r in load.records if r.error is not None))[:5],
    }
    if options.save_detailed:
        report["requests"] = [record.as_dict(load.started) for record in load.records]
    return report
