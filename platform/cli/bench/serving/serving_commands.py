"""`outrider bench latency | throughput | serve`: their options. Imports nothing heavy."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from ....core.errors import InvalidRequestError
from ...options.api_keys import API_KEY_VARIABLE, key
from ...options.engine_options import add_engine_options
from ...options.option_types import json_object, list_of, natural, not_negative, number, positive, positive_number
from ..bench_options import METRICS, Result, add_measurement, add_model_options

DATASETS = ("random", "prefix", "sharegpt", "jsonl")
_FROM_FILE = ("sharegpt", "jsonl")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDPOINTS = {"openai": COMPLETIONS, "vllm": COMPLETIONS, "openai-chat": CHAT}
RANDOM, ROUND_ROBIN, SKEWED = ASSIGNMENTS = ("random", "round-robin", "skewed")


def add_parsers(kinds: Any) -> None:
    """Add the three measurements."""
    _add_latency(kinds)
    _add_throughput(kinds)
    _add_serve(kinds)


def _add_latency(kinds: Any) -> None:
    def measure(options: argparse.Namespace) -> Result:
        _check(options)
        from .latency import measure_latency

        return measure_latency(options)

    description = "A batch of random prompts from its start to its end. Takes the engine's options of serve."
    parser = add_measurement(kinds, "latency", measure, description, "one batch, repeated; where a step's time goes")
    add = parser.add_argument
    _add_lengths(parser, 32)
    add("--batch-size", type=positive, default=8, metavar="N", help="requests (default: 8)")
    add("--num-iters", type=positive, default=30, metavar="N", help="(default: 30)")
    add("--num-iters-warmup", type=natural, default=10, metavar="N", help="before those that count (default: 10)")
    add(
        "--profile",
        type=Path,
        metavar="DIR",
        help="then run a few batches as a server does, in two processes, and write to DIR where a step's time goes: a "
        "timeline and torch's profile, both for chrome://tracing or Perfetto",
    )
    _add_engine(parser)
    _add_common(parser, [10.0, 25.0, 50.0, 75.0, 90.0, 99.0])
    parser.set_defaults(lora_assignment=ROUND_ROBIN, ignore_eos=True)


def _add_throughput(kinds: Any) -> None:
    def measure(options: argparse.Namespace) -> Result:
        _check(options)
        from .offline import measure_throughput

        return measure_throughput(options)

    description = "All requests at once through an engine in this process. Takes the engine's options of serve."
    parser = add_measurement(kinds, "throughput", measure, description, "many requests at once, without a server")
    _add_lengths(parser, 128)
    _add_dataset(parser)
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="have every answer be as long as it may (default: it is)",
    )
    _add_engine(parser)
    _add_common(parser, [50.0, 90.0, 99.0])


def _add_serve(kinds: Any) -> None:
    def measure(options: argparse.Namespace) -> Result:
        _check(options)
        from .over_http import measure_server

        return measure_server(options)

    description = "Requests to a server with an OpenAI-compatible API, Outrider or any other; the answers are streamed."
    parser = add_measurement(kinds, "serve", measure, description, "a running server, over HTTP")
    add = parser.add_argument
    add("--base-url", metavar="URL", help="(default: http://HOST:PORT)")
    add("--host", default="127.0.0.1", help="(default: %(default)s)")
    add("--port", type=positive, default=8000, metavar="N", help="(default: %(default)s)")
    backend = "which API it is; openai-chat asks for chats (default: %(default)s)"
    add("--backend", choices=tuple(ENDPOINTS), default="openai", help=backend)
    endpoint = "a path that ends in /completions or /chat/completions (default: the backend's)"
    add("--endpoint", type=_endpoint, metavar="PATH", help=endpoint)
    add("--model", metavar="NAME", help="the model's name in the API (default: the server's first)")
    add("--tokenizer", metavar="PATH", help="HF directory or hub id (default: the model's, if it is on this machine)")
    add("--api-key", type=key, metavar="KEY", help=f"(default: the variable {API_KEY_VARIABLE})")
    add("--lora-modules", nargs="+", metavar="NAME", help="the server's adapters that requests ask for")
    _add_lengths(parser, 128)
    _add_dataset(parser)
    add("--ignore-eos", action="store_true", help="have every answer be as long as it may")
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="more fields for every request")
    rate = number("greater than 0, or inf", lambda value: value > 0)
    add("--request-rate", type=rate, default=math.inf, metavar="R", help="requests a second (default: inf)")
    burstiness = "of arrivals: 1 is Poisson, less comes in bursts, more is more even (default: 1)"
    add("--burstiness", type=positive_number, default=1.0, metavar="B", help=burstiness)
    add("--max-concurrency", type=positive, metavar="N", help="most requests at once; others wait with the client")
    add("--num-warmups", type=natural, default=1, metavar="N", help="requests before the measurement (default: 1)")
    add("--seed", type=natural, default=0, metavar="N", help="of prompts, arrivals and assignment (default: 0)")
    goodput = "count requests that keep these limits, such as ttft:200 tpot:50"
    add("--goodput", type=_limit, nargs="+", metavar="METRIC:MS", help=goodput)
    _add_common(parser, [50.0, 90.0, 99.0])


# --- Groups of options ------------------------------------------------------------------------------------------


def _add_engine(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    add_engine_options(parser)


def _add_lengths(parser: argparse.ArgumentParser, input_len: int) -> None:
    add = parser.add_argument
    text = "prompt tokens of a request, for random and prefix (default: %(default)s)"
    add("--input-len", "--random-input-len", type=positive, default=input_len, metavar="N", help=text)
    text = "output tokens of a request (default: 128; for sharegpt, as many as its answer has)"
    add("--output-len", "--random-output-len", type=positive, metavar="N", help=text)


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("requests").add_argument
    add("--num-prompts", type=positive, default=100, metavar="N", help="requests (default: %(default)s)")
    add("--dataset-name", "--dataset", choices=DATASETS, default="random", help="(default: %(default)s)")
    text = "for sharegpt its JSON; for jsonl lines with prompt, messages or prompt_token_ids, and maybe adapter"
    add("--dataset-path", metavar="FILE", help=text)
    text = "lengths are uniform from (1 - R) to (1 + R) times the given ones (default: 0)"
    fraction = number("of at least 0 and less than 1", lambda value: 0 <= value < 1)
    add("--random-range-ratio", "--range-ratio", type=fraction, default=0.0, metavar="R", help=text)
    text = "tokens before the prompt that requests share (default: 0; for prefix 256)"
    add("--prefix-len", "--random-prefix-len", type=natural, metavar="N", help=text)
    add("--num-prefixes", type=positive, default=1, metavar="N", help="different ones, in turn (default: 1)")


def _add_common(parser: argparse.ArgumentParser, percentiles: list[float]) -> None:
    add = parser.add_argument
    add("--temperature", type=not_negative, default=0.0, metavar="T", help="(default: 0, greedy)")
    text = "of adapters to requests: each at random, in turn, or Zipf-distributed (default: %(default)s)"
    add("--lora-assignment", choices=ASSIGNMENTS, default=RANDOM, help=text)
    shown = f"(default: {','.join(f'{q:g}' for q in percentiles)})"
    percentile = list_of(number("between 0 and 100", lambda value: 0 <= value <= 100))
    add("--metric-percentiles", type=percentile, default=percentiles, metavar="Q,Q", help=shown)
    shown = f"of {','.join(METRICS)} (default: all)"
    add("--percentile-metrics", type=list_of(_metric), default=list(METRICS), metavar="M,M", help=shown)
    add("--save-detailed", action="store_true", help="also write every request's figures (needs --output-json)")
    add("--disable-tqdm", action="store_true", help="show no progress bar")


def _check(options: argparse.Namespace) -> None:
    """Check options against each other.

    Raises:
        InvalidRequestError: names the option.
    """
    if options.save_detailed and options.output_json is None:
        raise InvalidRequestError("has no file to write to without --output-json", param="save_detailed")
    dataset = getattr(options, "dataset_name", None)
    if dataset in _FROM_FILE and options.dataset_path is None:
        raise InvalidRequestError(f"is needed for the dataset {dataset}", param="dataset_path")
    unfit = {"prefix_len": dataset in _FROM_FILE, "dataset_path": dataset not in _FROM_FILE}
    for option, is_unfit in unfit.items():
        if is_unfit and getattr(options, option, None):
            raise InvalidRequestError(f"means nothing to the dataset {dataset}", param=option)


# --- Types of options -------------------------------------------------------------------------------------------


def _metric(text: str) -> str:
    if text not in METRICS:
        raise argparse.ArgumentTypeError(f"unknown metric {text!r}; known are {', '.join(METRICS)}")
    return text


def _limit(text: str) -> tuple[str, float]:
    """Parse METRIC:MILLISECONDS."""
    name, sign, value = text.partition(":")
    if not sign:
        raise argparse.ArgumentTypeError(f"must be METRIC:MILLISECONDS, such as ttft:200, got {text!r}")
    return _metric(name), positive_number(value)


def _endpoint(text: str) -> str:
    if not text.startswith("/") or not text.endswith("/completions"):
        raise argparse.ArgumentTypeError(f"must be a path that ends in /completions or /chat/completions, got {text!r}")
    return text


def arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Options of a measurement for its report, without secrets."""
    hidden = {"run", "parser", "output_json", "plot", "api_key", "disable_tqdm"}
    return {name: _plain(value) for name, value in sorted(vars(options).items()) if name not in hidden}


def _plain(value: Any) -> Any:
    """Value of an option for JSON."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return value if isinstance(value, str | int | float | bool | dict | None) else str(value)
