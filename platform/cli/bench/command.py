"""`outrider bench speculation`: what every way of drafting is worth, side by side. Imports nothing heavy."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ....models.demo import DEMO_MODEL_NAME, demo_adapters, demo_draft_path, demo_model_path
from ...core.config import DTYPES
from ...core.errors import InvalidRequestError
from .modes import MODES, available_modes, make_modes
from .workload import check_adapter_names

_MODEL_OPTIONS = ("draft_model", "eagle3", "eagle", "medusa")
_DESCRIPTION = """\
The same requests through each mode in one process; rounds of the modes are interleaved, so that a noisy machine
disturbs all alike. Without a model: the embedded demo with its adapters, its drafters and prompts for each.
"""


def add_parser(commands: Any) -> None:
    """Add `bench` with its measurements."""
    bench = commands.add_parser("bench", help="measure", description="Measurements that you can repeat.")
    kinds = bench.add_subparsers(title="measurements", required=True, metavar="WHAT")
    parser = kinds.add_parser("speculation", help="what every way of drafting is worth", description=_DESCRIPTION)
    _add_options(parser)
    parser.set_defaults(run=run)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="PATH", help="HF directory or hub id (default: the embedded demo)")
    add("--modes", type=_list_of(str), help=f"of {','.join(MODES)} (default: all whose weights are there)")
    for method in _MODEL_OPTIONS:
        add("--" + method.replace("_", "-"), metavar="PATH", help=f"weights of the {method} drafter")
    add("--lora", metavar="NAME=PATH", type=_adapter, action="append", help="an adapter; may be repeated")
    add("--tasks", type=_list_of(str), help='of "base" and the adapters\' names (default: all)')
    add(
        "--prompts",
        metavar="FILE.jsonl",
        type=Path,
        help="lines with prompt, messages or prompt_token_ids, and adapter",
    )
    add("--random-text", action="store_true", help="also random tokens at temperature 1, where no drafter can be right")
    add("--batch-sizes", type=_list_of(_positive), default=[1, 4, 16, 32], metavar="N,N", help="(default: 1,4,16,32)")
    add("--num-speculative-tokens", type=_positive, default=4, metavar="K", help="drafts a step (default: 4)")
    add("--max-tokens", type=_positive, default=96, metavar="N", help="output tokens a request (default: 96)")
    add("--rounds", type=_positive, default=5, metavar="N", help="after one to warm up (default: 5)")
    add("--dtype", choices=DTYPES, default="auto", help="(default: the checkpoint's)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--load-format", choices=("auto", "dummy"), default="auto", help='"dummy": random weights, labelled as such')
    add(
        "--synthetic-acceptance",
        type=_list_of(float),
        metavar="R,R",
        help="accept drafts at these rates, whatever they are; labelled as such",
    )
    add("--output-json", type=Path, metavar="FILE", help="write the result as JSON")
    add("--plot", type=Path, metavar="FILE.png", help="draw the result (needs matplotlib)")


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def split(text: str) -> list[Any]:
        try:
            values = [parse(part.strip()) for part in text.split(",") if part.strip()]
        except ValueError:
            raise argparse.ArgumentTypeError(f"not a list of values: {text!r}") from None
        if not values:
            raise argparse.ArgumentTypeError(f"there is no value in {text!r}")
        return values

    return split


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _adapter(text: str) -> tuple[str, str]:
    name, sign, path = text.partition("=")
    if not (name and sign and path):
        raise argparse.ArgumentTypeError(f"must be NAME=PATH, got {text!r}")
    return name, path


def run(namespace: argparse.Namespace) -> int:
    """Measure, print the table, write what was asked for."""
    check_adapter_names([name for name, _ in namespace.lora or []])
    is_demo = namespace.model in (None, DEMO_MODEL_NAME)
    adapters = dict(namespace.lora or [])
    if is_demo and not adapters:
        adapters = {name: str(path) for name, path in demo_adapters().items()}
    models = _draft_models(namespace, is_demo)
    rates, k = namespace.synthetic_acceptance, namespace.num_speculative_tokens
    if rates is not None:
        k = len(rates)
    modes = make_modes(namespace.modes or available_modes(models), models, k, rates)
    for option in ("output_json", "plot"):
        _check_writable(option, getattr(namespace, option))
    if namespace.plot is not None:
        from .plot import check_can_plot

        check_can_plot()

    from .session import measure_speculation

    with tempfile.TemporaryDirectory() as scratch:
        model = str(demo_model_path()) if is_demo else namespace.model
        name = DEMO_MODEL_NAME if is_demo else "/".join(Path(namespace.model).parts[-2:])
        report = measure_speculation(namespace, modes, model, adapters, Path(scratch))
    report["model"] = {"name": name, **report["model"]}
    _publish(report, namespace)
    return 0


def _check_writable(option: str, file: Path | None) -> None:
    """Better before the measurement than an hour later."""
    if file is None:
        return
    folder = file.absolute().parent
    if not os.path.isdir(folder):
        raise InvalidRequestError(f"there is no folder {folder}", param=option)
    if os.path.isdir(file) or not os.access(file if os.path.exists(file) else folder, os.W_OK):
        raise InvalidRequestError(f"--{option.replace('_', '-')}: {file} cannot be written as a file", param=option)


def _draft_models(namespace: argparse.Namespace, is_demo: bool) -> dict[str, str]:
    """method -> path, as given; the demo's own where nothing is."""
    given = {method: getattr(namespace, method) for method in _MODEL_OPTIONS}
    if is_demo:
        shipped = {"draft_model": demo_draft_path(), "eagle3": demo_model_path().parent / "eagle3"}
        given |= {method: str(path) for method, path in shipped.items() if not given[method] and path.is_dir()}
    return {method: path for method, path in given.items() if path}


def _publish(report: dict[str, Any], namespace: argparse.Namespace) -> None:
    from .report import format_table

    print(format_table(report))
    try:
        if namespace.output_json is not None:
            namespace.output_json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if namespace.plot is not None:
            from .plot import draw

            draw(report, namespace.plot)
    except OSError as error:
        raise InvalidRequestError(f"the result cannot be written: {error}") from error
