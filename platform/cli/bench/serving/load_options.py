"""Options that `latency`, `throughput` and `serve` share. Imports nothing heavy."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

from ....core.errors import InvalidRequestError, OutriderError
from ...options.engine import add_engine_options
from ..bench_options import list_of, positive

METRICS = ("ttft", "tpot", "itl", "e2el")
"""Time to first token; time per output token, the first one excluded; inter-token latency; end-to-end latency."""
DATASETS = ("random", "prefix", "sharegpt", "jsonl")
FROM_FILE = ("sharegpt", "jsonl")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RANDOM, ROUND_ROBIN, SKEWED = ASSIGNMENTS = ("random", "round-robin", "skewed")


def fraction(text: str) -> float:
    """A number from 0 to less than 1."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and less than 1, got {text}")
    return value


def not_negative(text: str) -> float:
    """A number of at least 0."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text}")
    return value


def percentile(text: str) -> float:
    """A number from 0 to 100."""
    value = float(text)
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"a percentile must be between 0 and 100, got {text}")
    return value


def rate(text: str) -> float:
    """Requests a second, more than 0; "inf" sends all at once."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be greater than 0, or inf, got {text}")
    return value


def metric(text: str) -> str:
    """One of METRICS."""
    if text not in METRICS:
        raise argparse.ArgumentTypeError(f"unknown metric {text!r}; known are {', '.join(METRICS)}")
    return text


def limit(text: str) -> tuple[str, float]:
    """METRIC:MILLISECONDS."""
    name, sign, value = text.partition(":")
    if not sign:
        raise argparse.ArgumentTypeError(f"must be METRIC:MILLISECONDS, such as ttft:200, got {text!r}")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be METRIC:MILLISECONDS with a number greater than 0, got {text!r}")
    return metric(name), number


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add options for the model, its adapters and the engine."""
    parser.add_argument("--model", metavar="PATH", help="HF directory or hub id (default: the embedded demo)")
    parser.add_argument(
        "--lora",
        type=adapter,
        action="append",
        metavar="NAME=PATH",
        help="an adapter that requests ask for, of the demo its name alone; may be repeated; implies --enable-lora",
    )
    groups = add_engine_options(parser)
    groups["speculative decoding"].add_argument(
        "--no-speculation", action="store_true", help='the same as --speculative-config \'{"method": "off"}\''
    )


def adapter(text: str) -> tuple[str, str | None]:
    """NAME=PATH, or NAME."""
    name, sign, path = text.partition("=")
    if not name or (sign and not path):
        raise argparse.ArgumentTypeError(f"must be NAME=PATH, got {text!r}")
    return name, path or None


def add_lengths(parser: argparse.ArgumentParser, *, input_len: int, output_len: int) -> None:
    """Add options for prompt and output lengths."""
    add = parser.add_argument
    add(
        *("--input-len", "--random-input-len"),
        type=positive,
        default=input_len,
        metavar="N",
        help="prompt tokens of a request, for random and prefix (default: %(default)s)",
    )
    add(
        *("--output-len", "--random-output-len"),
        type=positive,
        metavar="N",
        help=f"output tokens of a request (default: {output_len}; for sharegpt, as many as its answer has)",
    )
    parser.set_defaults(default_output_len=output_len)


def add_dataset(parser: argparse.ArgumentParser, num_prompts: int) -> None:
    """Add options for the data set."""
    add = parser.add_argument_group("requests").add_argument
    add("--num-prompts", type=positive, default=num_prompts, metavar="N", help="requests (default: %(default)s)")
    add("--dataset-name", "--dataset", choices=DATASETS, default="random", help="(default: %(default)s)")
    add(
        "--dataset-path",
        metavar="FILE",
        help="for sharegpt its JSON; for jsonl lines with prompt, messages or prompt_token_ids, and maybe adapter",
    )
    add(
        *("--random-range-ratio", "--range-ratio"),
        type=fraction,
        default=0.0,
        metavar="R",
        help="lengths are uniform from (1 - R) to (1 + R) times the given ones (default: 0)",
    )
    add(
        *("--prefix-len", "--random-prefix-len"),
        type=int,
        metavar="N",
        help="tokens before the prompt that requests share (default: 0; for prefix 256)",
    )
    add("--num-prefixes", type=positive, default=1, metavar="N", help="different ones, in turn (default: 1)")
    add("--temperature", type=not_negative, default=0.0, metavar="T", help="(default: 0, greedy)")


def add_assignment(parser: argparse.ArgumentParser) -> None:
    """Add options for the assignment of adapters to requests."""
    parser.add_argument(
        "--lora-assignment",
        choices=ASSIGNMENTS,
        default=RANDOM,
        help="of adapters to requests: each at random, in turn, or Zipf-distributed (default: %(default)s)",
    )


def add_percentiles(parser: argparse.ArgumentParser, percentiles: Sequence[float]) -> None:
    """Add options for the shown figures."""
    shown = ",".join(f"{q:g}" for q in percentiles)
    parser.add_argument(
        "--metric-percentiles",
        type=list_of(percentile),
        default=list(percentiles),
        metavar="Q,Q",
        help=f"(default: {shown})",
    )
    parser.add_argument(
        "--percentile-metrics",
        type=list_of(metric),
        default=list(METRICS),
        metavar="M,M",
        help=f"of {','.join(METRICS)} (default: all)",
    )


def add_goodput(parser: argparse.ArgumentParser) -> None:
    """Add options for the limits of goodput."""
    parser.add_argument(
        "--goodput",
        type=limit,
        nargs="+",
        metavar="METRIC:MS",
        help="count requests that keep these limits, such as ttft:200 tpot:50",
    )


def add_detail(parser: argparse.ArgumentParser) -> None:
    """Add options for raw figures."""
    parser.add_argument(
        "--save-detailed", action="store_true", help="also write every request's figures (needs --output-json)"
    )
    parser.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")


def check_common(namespace: argparse.Namespace) -> None:
    """Check options against each other.

    Raises:
        InvalidRequestError: names the option.
    """
    if namespace.save_detailed and namespace.output_json is None:
        raise InvalidRequestError("has no file to write to without --output-json", param="save_detailed")
    name = getattr(namespace, "dataset_name", None)
    if name is None:
        return
    if name in FROM_FILE and namespace.dataset_path is None:
        raise InvalidRequestError(f"is needed for the dataset {name}", param="dataset_path")
    if name not in FROM_FILE and namespace.dataset_path is not None:
        raise InvalidRequestError(f"means nothing to the dataset {name}, which is made up", param="dataset_path")
    if namespace.prefix_len is not None and namespace.prefix_len < 0:
        raise InvalidRequestError(f"must be at least 0, got {namespace.prefix_len}", param="prefix_len")
    if name in FROM_FILE and namespace.prefix_len:
        raise InvalidRequestError(f"means nothing to the dataset {name}", param="prefix_len")


def naming_options(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Put the option's name into errors of `run` about a field."""

    def runner(namespace: argparse.Namespace) -> int:
        try:
            return run(namespace)
        except OutriderError as error:
            param = (error.param or "").partition(".")[0]
            if not param or not hasattr(namespace, param) or error.message.startswith("--"):
                raise
            raise type(error)(f"--{param.replace('_', '-')}: {error.message}", param=error.param) from error

    return runner


def plain(value: Any) -> Any:
    """Value of an option for JSON."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return value if isinstance(value, str | int | float | bool | dict | None) else str(value)


_NOT_ARGUMENTS = {"run", "parser", "output_json", "plot", "api_key", "default_output_len", "disable_tqdm"}


def arguments(namespace: argparse.Namespace) -> dict[str, Any]:
    """Options of a measurement for its report, without secrets."""
    return {name: plain(value) for name, value in sorted(vars(namespace).items()) if name not in _NOT_ARGUMENTS}
